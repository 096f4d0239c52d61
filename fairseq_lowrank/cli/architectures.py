"""List fairseq's architectures, or models of transformers, and the sites where their attention can be chosen.

The command builds each architecture without memory and with one layer in each stack. It takes a minute for all of them.

  fairseq-lowrank architectures
  fairseq-lowrank architectures bart_base s2t_conformer
  fairseq-lowrank architectures --json
  fairseq-lowrank architectures --transformers

If an architecture builds its own attention at a site, the class of this attention is shown; choose the other sites with
`--attention-sites`. An architecture that needs a missing package or a checkpoint of another model is listed as not built.
"""

import logging

from fairseq_lowrank.cli import _output

NAME = "architectures"
HELP = "list architectures of fairseq or models of transformers, and the sites where attention can be chosen"


def add_arguments(parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="ARCH", help="architectures, or classes such as BertModel (default: all)"
    )
    parser.add_argument("--transformers", action="store_true", help="models of the installed transformers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args) -> None:
    if args.transformers:
        from fairseq_lowrank.huggingface.models import table_of_classes

        logging.getLogger("transformers").setLevel(logging.ERROR)
        classes = table_of_classes(args.names)
        lines = [
            ["model", "sites", "why not"],
            *([name, ", ".join(sites) or "–", reason] for name, sites, reason in classes),
        ]
        chosen = sum(bool(sites) for _, sites, _ in classes)
        data = {
            "models": [dict(zip(("model", "sites", "reason"), row, strict=True)) for row in classes],
            "covered": chosen,
        }
        _output.show(args, data, f"{_columns(lines)}\n{chosen} of {len(classes)} take apply_attention")
        return
    import fairseq_lowrank.plugin  # noqa: F401
    from fairseq_lowrank.plugin import architectures

    rows = architectures.table(args.names)
    chosen = sum(bool(row.sites) for row in rows)
    lines = [[row.architecture, ", ".join(row.sites) or "–", row.reason] for row in rows]
    text = _columns([["architecture", "sites", "other sites, or reason"], *lines])
    data = {"architectures": [row._asdict() for row in rows], "covered": chosen, "all": len(rows)}
    _output.show(args, data, f"{text}\n{chosen} of {len(rows)} take --attention")


def _columns(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
