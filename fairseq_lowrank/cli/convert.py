"""Turn a checkpoint's way of mixing heads into another that computes the same.

Whatever a way of mixing can express, a richer one can, with the same outputs:

  mha → gain, mixhead-a, mixhead-b             mixing starts at the identity
  gain, avghead, mixhead-random → mixhead-a    the matrix becomes a parameter
  … → mixhead-b                                and what depends on the query starts at 0

and back where nothing is lost, M going into the output projection:

  gain → mha, any mixing whose M is diagonal → mha or gain
  any M → no mixing, where heads read one value: mqa, sha, mhe-mul
  mixhead-b → mixhead-a, where what depends on the query is 0

What is inexact is refused with the reason. A stock fairseq checkpoint keeps its architecture.

  fairseq-lowrank convert checkpoint_best.pt --attention mixhead-b --output mixhead-b.pt
  fairseq-lowrank convert mqa-mixed.pt --head-mixing none --output mqa.pt
"""

from pathlib import Path

from fairseq_lowrank.cli import _output

NAME = "convert"
HELP = "change a checkpoint's head mixing into another that gives the same outputs"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint of fairseq-train, ours or stock")
    parser.add_argument("--attention", metavar="NAME", help="the new --attention (default: the checkpoint's)")
    parser.add_argument("--head-mixing", metavar="NAME", help="the new --head-mixing, over the preset's mixing")
    _output.add_checkpoint_argument(parser, "where to write the new checkpoint")


def run(args) -> None:
    if args.attention is None and args.head_mixing is None:
        raise ValueError("into what? Give --attention or --head-mixing")
    from fairseq_lowrank.tools import checkpoints
    from fairseq_lowrank.tools.conversion import convert

    state = checkpoints.load_state(args.checkpoint)
    state, notes = convert(state, attention=args.attention, mixing=args.head_mixing)
    _output.save_checkpoint(state, args.output)
    print(f"{args.output}: {args.checkpoint} with {' '.join(flags(args))}")
    print(*notes, sep="\n")


def flags(args) -> list[str]:
    given = {"--attention": args.attention, "--head-mixing": args.head_mixing}
    return [f"{flag} {value}" for flag, value in given.items() if value is not None]
