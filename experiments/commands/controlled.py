"""Train a small model, of one attention layer or two, on a task whose answer is known, and see what its heads lack.

  matrices        average with known random row-stochastic matrices: error against number and size of heads, for methods
                  that mix heads, widen them, or share them, with a control of as many parameters
  nearest-point   for points on a sphere, say which is nearest to the opposite of each: needs scores of full rank
                  (Amsel, Yehudai and Bruna 2024), so it tells what widens queries and keys from what widens values
  recall          find the value that stood behind a key (zoology's MQAR): sparse attention, for which theory
                  asks for small heads alone

Each finished run is a line of the results file. Runs that have a line are not repeated, so an interrupted grid continues
where it was. A run of recall can take ten minutes; it resumes after its last test (kept next to the results as .pt).
The table and the picture are made from the whole file.

  python -m experiments controlled matrices --quick --results matrices.jsonl              in minutes
  python -m experiments controlled matrices --results matrices.jsonl --output pictures/   the whole grid
  python -m experiments controlled matrices --results matrices.jsonl --no-runs            only the table of what is there
  python -m experiments controlled matrices --rows 'n16-own-.*-mixhead-b' --results matrices.jsonl
"""

import functools
import re
import sys
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "controlled"
HELP = "train one or two attention layers on tasks whose answer is known"
TASK_NAMES = ("matrices", "nearest-point", "recall")


def add_arguments(parser) -> None:
    parser.add_argument("task", choices=TASK_NAMES, help="see above")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the .jsonl file of finished runs")
    parser.add_argument("--log", type=Path, metavar="FILE.gz", help="append the runs' logs, compressed")
    parser.add_argument(
        "--quick", action="store_true", help="the part of the grid that takes minutes, with fewer seeds"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="S", help="instead of the task's seeds")
    parser.add_argument("--rows", metavar="PATTERN", help="only rows whose whole name matches this regular expression")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of updates (default: the task's). Another number makes separate rows; fewer updates are trials",
    )
    parser.add_argument("--no-runs", action="store_true", help="train nothing: show what the file holds")
    _output.add_output_arguments(parser, "the picture as .png and .pdf, the lines as .csv and .json")


def run(args) -> None:
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: expected a positive integer")
    try:
        wanted = re.compile(args.rows or ".*")
    except re.error as error:
        raise UserError(f"--rows {args.rows!r}: not a regular expression ({error})") from error

    import torch
    from tqdm import tqdm

    from experiments.controlled import TASKS
    from experiments.controlled.runs import complete, lines_of

    torch.set_num_threads(1)  # problems this small only lose by more
    task = TASKS[args.task]
    if not args.no_runs:
        runs = task.runs(args.seeds, quick=args.quick, steps=args.steps)
        runs = [run for run in runs if wanted.fullmatch(run.setting_name)]
        if not runs:
            raise UserError(f"--rows {args.rows!r}: no row of {args.task} matches")
        with tqdm(bar_format="{desc}", disable=None, leave=False) as status:
            say = functools.partial(status.write, file=sys.stderr)
            complete(task, runs, args.results, args.log, say, status.set_description_str)
    lines = lines_of(task, args.results, args.steps)
    suffix = "" if args.steps in (None, task.STEPS) else f"-{args.steps}-updates"
    lines = [line for line in lines if wanted.fullmatch(line["row"].removesuffix(suffix))]
    if not lines:
        raise UserError(f"--results {args.results}: holds no finished run of {args.task}")
    tables = [f"{table.title}\n{_output.table(table.header, table.rows)}" for table in task.tables(lines)]
    _output.show(args, lines, "\n\n".join(tables))
    figures = {task.TABLE: task.draw(lines)} if args.output else {}
    _output.write(args, task.TABLE, lines, lines, figures)
