"""Move values of sentences to compressed files, and logs to one archive, in a folder of results.

A recipe writes the log of a run to the folder `logs`. After new runs, this command moves the logs into `logs.tar.xz`. If lines have
`sentence_values` or `sentence_counts`, it moves them to FILE.sentences.gz next to FILE.jsonl.

  python -m experiments pack                 the folder results of the repository
  python -m experiments pack FOLDER
"""

from pathlib import Path

from fairseq_lowrank.messages import UserError

NAME = "pack"
HELP = "move logs and values of sentences of a folder of results into compressed files"
RESULTS = Path(__file__).parents[2] / "results"


def add_arguments(parser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="folder of results (default: results)")


def run(args) -> None:
    from experiments.packing import ARCHIVE, pack_logs, pack_sentences

    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: is not a folder. Give a folder of results.")
    for path in sorted(args.folder.rglob("*.jsonl")):
        if lines := pack_sentences(path):
            print(f"{path}: values of sentences of {lines} lines moved to a compressed file")
    if logs := pack_logs(args.folder):
        print(f"{args.folder / ARCHIVE}: {len(logs)} logs added")
