"""Write docs/attention.md, and tables in docs/fairseq.md, docs/transformers.md and docs/leaving-fairseq.md, from the code.
Fill the tables of docs/evidence with the numbers of `results/`.

python -m experiments reference                 write them
python -m experiments reference --check         check if they are up to date, and write nothing
"""

NAME = "reference"
HELP = "write the documents, or their tables, that come from the code and from results"


def add_arguments(parser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 if a document is out of date")


def run(args) -> int:
    import fairseq_lowrank.plugin  # noqa: F401
    from experiments.reference import PAGES, ROOT, text_of

    texts = {name: text_of(name) for name in PAGES}
    differ = [name for name in texts if not (ROOT / name).exists() or (ROOT / name).read_text("utf-8") != texts[name]]
    for name in differ:
        if not args.check:
            (ROOT / name).write_text(texts[name], encoding="utf-8")
        print(f"{name}: {'out of date' if args.check else 'written'}")
    return int(bool(args.check and differ))
