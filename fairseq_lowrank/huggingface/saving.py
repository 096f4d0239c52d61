"""Save the mixing of a model alone, and load it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from fairseq_lowrank.attention.sharding import is_sharded, whole
from fairseq_lowrank.files import whole_files
from fairseq_lowrank.huggingface.added import mixing_tensors, parts_of, renamed_tensors
from fairseq_lowrank.huggingface.apply import carry_out, planned
from fairseq_lowrank.huggingface.choice import chosen_axes
from fairseq_lowrank.huggingface.models import attention_modules, head_sizes, model_of_transformers
from fairseq_lowrank.huggingface.recorded import CONFIG, WEIGHTS, record_in, recorded_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.parts.parameters import NoDecayModule

CHOICE = "lowrank_attention"
"""The field of the metadata of the weights that holds the choice."""


def save_attention(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write the mixing alone to a folder: its tensors as safetensors, its choice as JSON.

    ``model.save_pretrained`` needs no help: it writes the mixing with the other weights. If the model is sharded, every worker
    calls this function, and the first one writes.

    Raises:
        UserError: no attention was applied to the model, the folder cannot take it, or the disk is full.
    """
    model, folder = model_of_transformers(model), Path(folder)
    if (record := getattr(model.config, "lowrank_attention", None)) is None:
        raise UserError(f"{type(model).__name__} has no chosen attention. Call apply_attention(model, preset) first.")
    added = [part for module in model.modules() for part in parts_of(module).values()]
    if wrapped := [type(part).__name__ for part in added if not isinstance(part, NoDecayModule)]:
        raise UserError(
            f"the mixing is wrapped in {wrapped[0]}. Save the adapter with its own save_pretrained, or call "
            "merge_and_unload() and give save_attention the model that it returns."
        )
    if renamed := [f"{name}.{key}" for name, module in model.named_modules() for key in renamed_tensors(module)]:
        raise UserError(
            f"{renamed[0]} is the tensor of a parametrisation or of pruning, which load_attention does not know. Make it permanent "
            "first, with torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove."
        )
    if record_in(folder / "config.json") is not None:
        raise UserError(
            f"{folder} holds a whole model with its mixing, and would hold two. Give another folder, or call "
            "model.save_pretrained to replace both."
        )
    state = _values(model)
    names = {module: name for name, module in model.named_modules()}
    sizes = [
        {"name": names[module], "site": site, "layer": layer, "num_heads": sizes.num_heads, "head_dim": sizes.head_dim}
        for module, site, layer in attention_modules(model)
        if mixing_tensors(module)
        for sizes in [head_sizes(module)]
    ]
    sharded = is_sharded(model)
    try:
        if not sharded or torch.distributed.get_rank() == 0:
            metadata = {
                "format": "pt",
                CHOICE: json.dumps(record),
            }  # an interrupted save may leave files of two choices
            with whole_files(folder / WEIGHTS, folder / CONFIG, mode="wb") as (weights, choice):
                weights.write(save(state, metadata=metadata))
                choice.write((json.dumps(record | {"modules": sizes}, indent=1) + "\n").encode())
    finally:
        if sharded:
            torch.distributed.barrier()  # the others may read the folder next


def _values(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return copies of the tensors of :func:`~.added.mixing_state` on the CPU, those of other workers and offloaded ones too."""
    state = {}
    for name, module in model.named_modules():
        for axis, part in parts_of(module).items():
            for prefix, child in part.named_modules(prefix=f"{name}.{axis}"):
                with _onloaded(child):
                    for key, tensor in (*child.named_parameters(prefix, False), *child.named_buffers(prefix, False)):
                        # layers may share a part; safetensors refuses tensors that share memory
                        state[key] = whole(tensor).detach().cpu().contiguous().clone()
    return state


def _onloaded(module: nn.Module) -> contextlib.AbstractContextManager:
    """Return a context in which the own tensors of a module have values, if accelerate has offloaded them."""
    if not hasattr(module, "_hf_hook"):
        return contextlib.nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def load_attention(model: PreTrainedModel, folder: str | os.PathLike, *, train: str = "all") -> PreTrainedModel:
    """Apply the attention that a folder holds, with its weights, and return the model.

    Args:
        model: a model of the same architecture and sizes, with or without the head of a task.
        folder: what :func:`save_attention` wrote, or what ``save_pretrained`` wrote for a model with chosen attention.
        train: as in :func:`apply_attention`.

    Raises:
        UserError: the folder holds no mixing, one of other sizes, or two that differ.
    """
    folder = Path(folder)
    record = recorded_attention(folder)
    files = [path for path in (folder / WEIGHTS, *sorted(folder.glob("model*.safetensors"))) if path.is_file()]
    if not record or not files:
        raise UserError(f"{folder}: no mixing here. Give a folder that save_attention or save_pretrained wrote.")
    plan = planned(model, PLAIN, train=train, **record)
    if files[0].name == WEIGHTS:
        _refuse_weights_of_another_choice(files[0], record)
    wanted = plan.tensors()
    loaded = _saved_tensors(files, plan.model, wanted)
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise UserError(
                f"{name} would be on the meta device, where it has no values. Load the model's weights first."
            )
        if (saved := loaded.get(name)) is None or saved.shape != tensor.shape:
            there = "nothing" if saved is None else f"a tensor {list(saved.shape)}"
            raise UserError(f"{folder}: expected {name} {list(tensor.shape)}, and found {there}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(loaded[name])
    carry_out(plan)
    return model


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}. Save it again, or give another folder.") from error


def _refuse_weights_of_another_choice(weights: Path, record: dict) -> None:
    """Raise UserError if the weights were saved with another choice than the one that their folder records."""
    with _opened(weights) as tensors:
        text = (tensors.metadata() or {}).get(CHOICE)  # 0.2.0 wrote none
    saved = record if text is None else json.loads(text)
    own, other = (chosen_axes(one) | {name: one.get(name) for name in ("sites", "layers")} for one in (record, saved))
    if differing := [name for name in own if own[name] != other[name]]:
        name = differing[0]
        raise UserError(
            f"{weights} was saved with {name}={other[name]!r}, and {CONFIG} has {own[name]!r}. A save was interrupted, or a file "
            "was changed. Save it again, or give another folder."
        )


def _saved_tensors(files: list[Path], model: PreTrainedModel, names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of these names; a model with the head of a task has the base model's prefix in front of them.

    ``save_pretrained`` may write other names than those of the model, such as the older ones of ViT.

    Raises:
        UserError: two files hold different tensors of one name.
    """
    found: dict[str, tuple[Path, Tensor]] = {}
    prefix, ends = model.base_model_prefix, {name.rpartition(".")[2] for name in names}
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    for file in files:
        with _opened(file) as tensors:
            stored = tensors.keys()
            keys = [key for key in stored if key.rpartition(".")[2] in ends]
            places = {apply_renamings(key, renamings): key for key in keys} | {key: key for key in keys}
            for name in names:
                candidates = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
                if (key := next((places[key] for key in candidates if key in places), None)) is None:
                    continue
                tensor = tensors.get_tensor(key)
                if name in found and not torch.equal(found[name][1], tensor):
                    raise UserError(
                        f"{file.parent} holds two mixings that differ: {key} in {found[name][0].name} and in {file.name}. "
                        f"Delete {WEIGHTS} and {CONFIG} if save_pretrained is the newer, else save into another folder."
                    )
                found.setdefault(name, (file, tensor))
    return {name: tensor for name, (_, tensor) in found.items()}
