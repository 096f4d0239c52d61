"""Convert a checkpoint's attention to another one with the same outputs, or report the difference.

Head mixing: the mixing can become more general, with the same outputs:

  mha → gain, mixhead-a, mixhead-b             mixing is the identity at first
  gain, avghead, mixhead-random → mixhead-a    the matrix becomes a parameter
  … → mixhead-b                                the part that depends on the query is 0 at first

It can become less general if the outputs stay the same. M becomes part of the output projection:

  gain → mha, any mixing whose M is diagonal → mha or gain
  any M → no mixing, if heads share one value: mqa, sha, mhe-mul
  mixhead-b → mixhead-a, if the part that depends on the query is 0

Sizes of heads, for standard attention:

  mha → fixedhead --head-dim N       exact: queries get zeros and the scale √(N/d_k)
  gqa → mha, or more --key-value-heads   exact: heads of keys and values are repeated
  mha → gqa --key-value-heads N      not exact: each new head is a mean of old heads

Between methods:

  mqa, sha, skv, el, mhe-add, mhe-mul, lrkv, collaborative, mfa, knocking-linear, mea → mha   exact
  mha → lrkv --rank R, collaborative --shared-dim N    by singular values, exact at full rank, which is the default
  mha → mla --latent-dim N                             by singular values, not exact because of the norm of the latent

Other conversions are refused with the reason. --data DIR measures the difference of the outputs. A stock fairseq checkpoint
keeps its architecture.

  fairseq-lowrank convert checkpoint_best.pt --attention mixhead-b --output mixhead-b.pt
  fairseq-lowrank convert mqa-mixed.pt --head-mixing none --output mqa.pt
  fairseq-lowrank convert checkpoint_best.pt --attention gqa --key-value-heads 2 --data DATA --output gqa.pt
"""

from pathlib import Path

from fairseq_lowrank.cli import _output, spectrum
from fairseq_lowrank.messages import IMPORT_PLUGIN, FlagError, UserError, did_you_mean, flag_name

NAME = "convert"
HELP = "change a checkpoint's attention, with the same outputs if that is possible"
SIZES = {
    "head_dim": "--head-dim",
    "value_dim": "--value-dim",
    "key_value_heads": "--key-value-heads",
    "latent_dim": "--latent-dim",
    "shared_dim": "--shared-dim",
    "factor_rank": "--rank",
}


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint of fairseq-train, ours or stock")
    parser.add_argument("--attention", metavar="NAME", help="the new --attention (default: the checkpoint's)")
    parser.add_argument("--head-mixing", metavar="NAME", help="the new --head-mixing, instead of the preset's")
    parser.add_argument("--head-dim", type=int, metavar="N", help="the new size of heads")
    parser.add_argument("--value-dim", type=int, metavar="N", help="the new size of values")
    parser.add_argument("--key-value-heads", type=int, metavar="N", help="the new number of key and value heads")
    parser.add_argument("--latent-dim", type=int, metavar="N", help="size of the latent of mla (default: full rank)")
    parser.add_argument("--shared-dim", type=int, metavar="N", help="features of collaborative (default: full rank)")
    parser.add_argument("--rank", type=int, metavar="N", dest="factor_rank", help="rank of lrkv (default: full rank)")
    spectrum.add_data_arguments(parser, default_data="to measure the difference of outputs; default: not measured")
    _output.add_checkpoint_argument(parser, "file of the new checkpoint")


def run(args) -> None:
    from fairseq_lowrank.parts import PARTS, PRESETS

    changes = {name: getattr(args, name) for name in ("attention", "head_mixing", *SIZES)}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        raise UserError(
            "no target given. Add --attention NAME, --head-mixing NAME, --head-dim N or --key-value-heads N."
        )
    for name, names in (("attention", PRESETS), ("head_mixing", PARTS["mixing"])):
        if name in changes and changes[name] not in names:
            remedy = f"Choose from {', '.join(names)}.{did_you_mean(changes[name], names)} {IMPORT_PLUGIN}"
            raise FlagError(flag_name(name), changes[name], "there is no such attention", remedy)
    for name in SIZES:
        if changes.get(name, 1) < 1:
            raise UserError(f"{SIZES[name]} {changes[name]}: expected a number >= 1.")
    spectrum.check_data_arguments(args)
    if not args.data and (given := spectrum.given_for_data(args)):
        raise UserError(f"{' '.join(given)} works only with --data DIR. Add it, or remove these flags.")
    from fairseq_lowrank.tools.fairseq import checkpoints
    from fairseq_lowrank.tools.fairseq.conversion import convert

    state = checkpoints.load_state(args.checkpoint)
    sizes = {name: changes.get(name) for name in SIZES}
    state, notes = convert(state, attention=args.attention, mixing=args.head_mixing, **sizes)
    _output.save_checkpoint(state, args.output)
    flags = " ".join(f"{SIZES.get(name, '--' + name.replace('_', '-'))} {value}" for name, value in changes.items())
    _output.say("\n".join([f"{args.output}: {args.checkpoint} with {flags}", *notes]))
    if args.data:
        _output.say(error_text(args))


def error_text(args) -> str:
    """Measure the difference of the outputs on data, and return it as a sentence."""
    from fairseq_lowrank.tools.fairseq import checkpoints
    from fairseq_lowrank.tools.fairseq.conversion import output_error

    first, task = checkpoints.load_model(args.checkpoint, data=args.data, tokens_per_sample=args.length)
    second, _ = checkpoints.load_model(args.output, data=args.data, tokens_per_sample=args.length)
    found = output_error(first, second, samples := spectrum.sequences(args, task), task.target_dictionary.pad())
    return (
        f"{len(samples)} sequences of {args.subset!r}: {found['bits_before']:.4f} bits per token before, "
        f"{found['bits_after']:.4f} after; log₂ probabilities differ by {found['mean']:.2g} for targets on average, by "
        f"{found['largest']:.2g} at most"
    )
