"""Move the logs of a folder of results to one archive.

A recipe writes the log of a run to the folder `logs`. After new runs, this command moves the logs into `logs.tar.xz`.

  python -m experiments pack                 the folder results of the repository
  python -m experiments pack FOLDER
"""

from pathlib import Path

from fairseq_lowrank.messages import UserError

NAME = "pack"
HELP = "move the logs of a folder of results into one archive"
RESULTS = Path(__file__).parents[2] / "results"


def add_arguments(parser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS, help="folder of results (default: results)")


def run(args) -> None:
    from experiments.packing import ARCHIVE, pack_logs

    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: is not a folder. Give a folder of results.")
    if logs := pack_logs(args.folder):
        print(f"{args.folder / ARCHIVE}: {len(logs)} logs added")
