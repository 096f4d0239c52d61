"""Convert a checkpoint's attention to another one with the same outputs, or report the difference.

The attention gets parts that it lacks. This works from any projection with any part that starts as the identity:

  mha → gated, xsa, dcmha, talking-heads, score-gain, mea, …   the outputs are the same at first
  mha → gain, mixhead-a, mixhead-b             mixing is the identity at first
  gain, avghead, mixhead-random → mixhead-a    the matrix becomes a parameter
  … → mixhead-b                                the part that depends on the query is 0 at first

It loses parts if the outputs stay the same. A part that is still the identity is left out, and others are folded:

  gain → mha, any mixing whose M is diagonal → mha or gain
  any M → no mixing, if heads share one value: mqa, sha, mhe-mul
  mixhead-b → mixhead-a, if the part that depends on the query is 0
  score-gain, knocking-linear, mea, headmix → mha

Sizes of heads, for standard attention:

  mha → fixedhead --head-dim N       exact: queries get zeros and the scale √(N/d_k)
  gqa → mha, or more --key-value-heads   exact: heads of keys and values are repeated
  mha → gqa --key-value-heads N      not exact: each new head is a mean of old heads
  --head-dim N, smaller than before  not exact: queries and keys keep N directions, and values stay as they were. The cache of
                                     keys shrinks to N/d_k. One half of --data gives the best directions, and the other half
                                     measures the difference. Without --data the weights alone give them.

Projections:

  mqa, sha, skv, el, mhe-add, mhe-mul, lrkv, collaborative, mfa → mha   exact
  mha → lrkv --rank R, collaborative --shared-dim N    by singular values, exact at full rank, which is the default
  mha → mla --latent-dim N                             by singular values, not exact because of the norm of the latent

Other conversions are refused with the reason. --data DIR measures the difference of the outputs. A stock fairseq checkpoint
keeps its architecture. The other attention flags of fairseq-train go after the checkpoint, such as --head-dim or
--attention-sites; so do those of your own method, with --user-dir DIR.

  fairseq-lowrank convert checkpoint_best.pt --attention mixhead-b --output mixhead-b.pt
  fairseq-lowrank convert mqa-mixed.pt --head-mixing none --output mqa.pt
  fairseq-lowrank convert checkpoint_best.pt --attention gqa --key-value-heads 2 --data DATA --output gqa.pt
  fairseq-lowrank convert checkpoint_best.pt --head-dim 16 --data DATA --sequences 200 --output narrow.pt
  fairseq-lowrank convert checkpoint_best.pt --attention xsa --attention-sites encoder,decoder --output xsa.pt
"""

import argparse
from pathlib import Path

from fairseq_lowrank.cli import _data, _output
from fairseq_lowrank.messages import FlagError, UserError, flag_name

NAME = "convert"
HELP = "change a checkpoint's attention, with the same outputs if that is possible"
TAKES_FLAGS = True


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint of fairseq-train, ours or stock")
    parser.add_argument("--attention", metavar="NAME", help="the new --attention (default: the checkpoint's)")
    parser.add_argument("--head-mixing", metavar="NAME", help="the new --head-mixing, instead of the method's")
    _data.add_data_arguments(parser, default_data="to measure the difference of outputs; default: not measured")
    _output.add_checkpoint_argument(parser, "file of the new checkpoint")


def run(args) -> None:
    changes = changes_of(args)
    if not changes:
        raise UserError(
            "no target given. Add --attention NAME, --head-mixing NAME, --head-dim N or --key-value-heads N."
        )
    _data.check_data_arguments(args, without_data=False)
    from fairseq_lowrank.tools.fairseq import checkpoints
    from fairseq_lowrank.tools.fairseq.conversion import convert

    # data that cannot be read is refused before a file is written
    before = samples_of(args) if args.data else None
    state = checkpoints.load_state(args.checkpoint)
    maps, before = (None, None) if before is None else maps_of(changes.get("head_dim"), *before)
    state, notes = convert(state, maps=maps, **changes)
    _output.save_checkpoint(state, args.output)
    flags = " ".join(f"{flag_name(name)} {value}" for name, value in changes.items())
    _output.say("\n".join([f"{args.output}: {args.checkpoint} with {flags}", *notes]))
    if before is not None:
        _output.say(error_text(args, *before))


def changes_of(args) -> dict[str, int | str]:
    """Return the new values of attention flags, by their names in the configuration.

    Raises:
        UserError: a flag that is not one of a model's attention, or a wrong value.
    """
    from fairseq_lowrank.parts import AXES
    from fairseq_lowrank.plugin.flags import add_attention_args, read_registry

    parser = argparse.ArgumentParser(prog=f"fairseq-lowrank {NAME}", add_help=False, allow_abbrev=False)

    def refuse(message: str) -> None:
        raise UserError(f"{message.removeprefix('argument ').rstrip('.')}. Use attention flags of fairseq-train.")

    parser.error = refuse  # type: ignore[assignment]
    read_registry()  # a plugin may have registered methods
    add_attention_args(parser)
    named = {flag: value for flag in ("attention", "head_mixing") if (value := getattr(args, flag)) is not None}
    words = [word for flag, value in named.items() for word in (flag_name(flag), value)]
    changes = vars(parser.parse_args([*words, *args.flags]))
    if other := changes.keys() - {"attention", "attention_sites", *(axis.flag for axis in AXES.values())}:
        raise UserError(f"{flag_name(min(other))}: a conversion does not change this. Remove the flag.")
    for name, value in changes.items():
        if isinstance(value, int) and value < 1:
            raise FlagError(flag_name(name), value, "expected a number >= 1", "Give a positive number.")
    return changes


def samples_of(args) -> tuple:
    """Return the model of the old checkpoint, its task, and the chosen sequences of the data.

    Raises:
        UserError: the model predicts no words, which are what is compared.
    """
    from fairseq_lowrank.tools.fairseq import checkpoints, subject

    model, task = checkpoints.load_model(args.checkpoint, data=args.data, tokens_per_sample=args.length)
    samples = _data.sequences(args, model, task)
    if subject.head_of(model, task) is not None:
        reason = f"the difference is that of words, and {args.checkpoint} predicts labels or numbers"
        raise FlagError("--data", args.data, reason, "Remove the flag.")
    subject.scoring(model, samples[0], task)
    return model, task, samples


def maps_of(head_dim, model, task, samples: list[dict]) -> tuple:
    """Return the maps to smaller heads, if the head size shrinks, and the model, task and samples that measure the difference.

    Raises:
        UserError: there are too few tokens for the directions of a head.
    """
    from fairseq_lowrank.tools.fairseq.architecture import attention_layers
    from fairseq_lowrank.tools.fairseq.subject import subject_of
    from fairseq_lowrank.tools.measuring.verdict import TOKENS_OF_A_DIRECTION
    from fairseq_lowrank.tools.narrowing import check_narrow, maps_of_data

    subject = subject_of(model, samples[: len(samples) // 2], task) if head_dim and len(samples) > 1 else None
    size = max((layer.head_size for layer in subject.layers), default=0) if subject else 0
    if head_dim is None or subject is None or size <= head_dim:
        return None, (model, task, samples)
    for *_, module in attention_layers(model):
        check_narrow(module, head_dim)
    tokens = sum(sample["ntokens"] for sample in subject.samples)
    if tokens < TOKENS_OF_A_DIRECTION * size:
        reason = f"one half has {tokens} tokens, and heads of {size} need {TOKENS_OF_A_DIRECTION * size}"
        raise FlagError("--sequences", len(samples), reason, "Give more.")
    return maps_of_data(subject, head_dim), (model, task, samples[len(samples) // 2 :])


def error_text(args, first, task, samples: list[dict]) -> str:
    """Measure the difference of the outputs on data, and return it as a sentence."""
    from fairseq_lowrank.tools.fairseq import checkpoints
    from fairseq_lowrank.tools.fairseq.conversion import output_error

    second, _ = checkpoints.load_model(args.output, data=args.data, tokens_per_sample=args.length)
    found = output_error(first, second, samples, task.target_dictionary.pad())
    return (
        f"{len(samples)} sequences of {args.subset!r}: {found['bits_before']:.4f} bits per token before, "
        f"{found['bits_after']:.4f} after; log₂ probabilities differ by {found['mean']:.2g} for targets on average, by "
        f"{found['largest']:.2g} at most"
    )
