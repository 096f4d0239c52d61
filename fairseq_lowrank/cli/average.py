"""Average the parameters of several checkpoints of one model, usually the last few of a training.

    fairseq-lowrank average checkpoints/checkpoint{8,9,10}.pt --output checkpoints/average.pt

The mean is computed in float32 and stored in the parameters' own type. Moving averages (--store-ema) are averaged too if every
checkpoint has them. Everything else comes from the first checkpoint, without the state of its optimizer. Use the result to
generate, evaluate and fine-tune; a training cannot resume from it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "average"
HELP = "average the parameters of several checkpoints"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="checkpoints of one model")
    _output.add_checkpoint_argument(parser, "file of the averaged checkpoint")


def run(args) -> None:
    state = average(args.checkpoints)
    _output.save_checkpoint(state, args.output)
    _output.say(f"{args.output}: the mean of {len(args.checkpoints)} checkpoints, {len(state['model'])} tensors")


def average(paths: Sequence[str]) -> dict:
    """Return a checkpoint whose parameters are the mean over the checkpoints at ``paths``.

    Raises:
        UserError: a checkpoint does not load safely. Or it differs from the first one in the model's configuration, in names,
            shapes or types of parameters, or in integers, which have no mean.
    """
    import torch
    from omegaconf import OmegaConf

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.repairs import dictionaries
    from fairseq_lowrank.tools.fairseq.checkpoints import load_state

    for index, path in enumerate(tracked(paths, "averaging", "checkpoints")):
        state = load_state(Path(path))
        if index == 0:
            result, kind = state, model_kind(state)
            # copies: tied parameters share their storage, and each name needs a separate sum
            totals = {
                part: {name: tensor.to(mean_type(tensor), copy=True) for name, tensor in tensors.items()}
                for part, tensors in parts(state).items()
            }
            continue
        dictionaries.check_checkpoints(paths[0], result, path, state)
        other = model_kind(state)
        for name in [*kind, *(name for name in other if name not in kind)]:
            if kind.get(name, "missing") != other.get(name, "missing"):
                raise UserError(
                    f"{paths[0]} and {path} are of different models: {name} is {kind.get(name, 'missing')} "
                    f"in the first and {other.get(name, 'missing')} in the second. Use checkpoints of one training."
                )
        theirs = parts(state)
        totals = {part: total for part, total in totals.items() if part in theirs}
        for part, total in totals.items():
            for name, tensor in theirs[part].items():
                if tensor.is_floating_point():
                    total[name] += tensor
                elif not torch.equal(total[name], tensor):
                    raise UserError(
                        f"{paths[0]} and {path} differ in {name}, whose integers have no mean. Use checkpoints of one training."
                    )

    for part, tensors in parts(result).items():
        if part not in totals:
            del result["extra_state"][part]
            continue
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = (totals[part][name] / len(paths)).to(tensor.dtype)
    result["args"] = None  # its contents are in the configuration
    result["cfg"] = OmegaConf.to_container(result["cfg"], resolve=False, enum_to_str=True)
    result.pop("last_optimizer_state", None)
    return result


def parts(state: dict) -> dict[str, dict]:
    """Return the parameters of a checkpoint, and their moving averages in the model's type and in float32, if any."""
    extra = state.get("extra_state") or {}
    return {"model": state["model"], **{name: extra[name] for name in ("ema", "ema_fp32_params") if name in extra}}


def mean_type(tensor):
    """Return the type for sums: float32, or float64 for float64; integers keep their type."""
    import torch

    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def model_kind(state: dict) -> dict:
    """Return the properties that averaged checkpoints must share: the model's configuration, shapes and types.

    The configuration of a model without a dataclass has every argument of the training. Only arguments that no other section
    (optimization, dataset …) has are compared.
    """
    from omegaconf import OmegaConf

    sections: Any = OmegaConf.to_container(state["cfg"], resolve=False, enum_to_str=True)
    model = sections.pop("model")
    model = vars(model) if isinstance(model, argparse.Namespace) else model
    foreign = {"model", *sections}.union(*(section for section in sections.values() if isinstance(section, dict)))
    own = {name: value for name, value in model.items() if name not in foreign}
    return own | {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state["model"].items()}
