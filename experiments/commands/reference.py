"""Write docs/attention.md and docs/fairseq.md from the code.

python -m experiments reference                 write both pages
python -m experiments reference --check         check if they are up to date, and write nothing
"""

NAME = "reference"
HELP = "write the pages of docs/ that come from the code"


def add_arguments(parser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 if a page differs from the code")


def run(args) -> int:
    import fairseq_lowrank.plugin  # noqa: F401
    from experiments.reference import DOCS, pages

    differ = [name for name, text in pages().items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
    for name in differ:
        if not args.check:
            (DOCS / name).write_text(pages()[name], encoding="utf-8")
        print(f"docs/{name}: {'differs from the code' if args.check else 'written'}")
    return int(bool(args.check and differ))
