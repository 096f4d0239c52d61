"""Draw the pictures of the documents, from the lines in `results/` and `benchmarks/results/`.

  python -m experiments pictures --output docs/pictures                    all except `mixing`
  python -m experiments pictures leads --output docs/pictures              one
  python -m experiments pictures mixing --checkpoint CKPT --output DIR     what M does in the first encoder layer of a translation model

docs/gallery.md shows them.
"""

from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "pictures"
HELP = "draw the pictures of the documents"


def add_arguments(parser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of pictures (default: all except mixing)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="CKPT", help="for mixing: a translation model with mixhead-a"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the pictures, as .png")
    parser.set_defaults(check_output=_output.check_folder)


def run(args) -> None:
    import fairseq_lowrank.plugin  # noqa: F401
    from experiments.evidence import patterns
    from experiments.evidence.figures import FIGURES

    if unknown := [name for name in args.names if name not in {*FIGURES, "mixing"}]:
        raise UserError(f"NAME {unknown[0]!r}: unknown. Use one of {', '.join(FIGURES)}, mixing.")
    if ("mixing" in args.names) != (args.checkpoint is not None):
        raise UserError("the picture mixing and --checkpoint go together. Give both, or none.")
    drawn = {
        name: patterns.mixing_figure(args.checkpoint) if name == "mixing" else FIGURES[name]()
        for name in args.names or FIGURES
    }

    def save(folder: Path) -> None:
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png", dpi=110)

    _output.write_together(args, save)
