"""Train a small model of one or two attention layers on a task with a known answer, to find limits of its heads.

  matrices        average with known random row-stochastic matrices: error against number and size of heads, for methods
                  that mix, widen or share heads, with a control of the same number of parameters
  nearest-point   for points on a sphere, find the point nearest to the opposite of each: needs scores of full rank
                  (Amsel, Yehudai and Bruna 2024), so it separates wider queries and keys from wider values
  recall          find the value that followed a key (zoology's MQAR): sparse attention, for which small heads are enough
                  in theory
  regression      predict ⟨w, x⟩ from a prompt of such pairs (Kuang et al. 2025): needs scores whose rank over all heads
                  is that of the inputs

Each finished run is a line of the results file. Runs that have a line are not repeated, so an interrupted grid resumes.
Code with uncommitted changes is refused without DIRTY=1, except for trials.
The table shows the entire file.

  python -m experiments controlled matrices --quick --results matrices.jsonl              in minutes
  python -m experiments controlled matrices --results matrices.jsonl                      the entire grid
  python -m experiments controlled matrices --results matrices.jsonl --no-runs            only the table of finished runs
  python -m experiments controlled matrices --rows 'n16-own-.*-mixhead-b' --results matrices.jsonl
"""

import functools
import re
import sys
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "controlled"
HELP = "train one or two attention layers on tasks with a known answer"
TASK_NAMES = ("matrices", "nearest-point", "recall", "regression")


def add_arguments(parser) -> None:
    parser.add_argument("task", choices=TASK_NAMES, help="task to train on")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the .jsonl file of finished runs")
    parser.add_argument(
        "--log", type=Path, metavar="FILE.gz", help="file to which the runs' logs are appended, compressed"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run the part of the grid that takes minutes, with fewer seeds"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="S", help="seeds (default: the task's)")
    parser.add_argument(
        "--rows", metavar="PATTERN", help="use only rows whose entire name matches this regular expression"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of updates (default: the task's). Another number makes separate rows; fewer updates are trials",
    )
    parser.add_argument("--no-runs", action="store_true", help="train nothing; show the finished runs in the file")


def run(args) -> None:
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: expected a number >= 1.")
    try:
        wanted = re.compile(args.rows or ".*")
    except re.error as error:
        raise UserError(
            f"--rows {args.rows!r}: not a regular expression ({error}). Escape special characters."
        ) from error

    import torch
    from tqdm import tqdm

    from experiments.controlled import TASKS
    from experiments.controlled.runs import TaskEngine, lines_of, table

    task = TASKS[args.task]
    if not args.no_runs:
        runs = task.runs(args.seeds, quick=args.quick, steps=args.steps)
        runs = [run for run in runs if wanted.fullmatch(run.setting_name)]
        if not runs:
            raise UserError(f"--rows {args.rows!r}: no row of {args.task} matches. Change the expression.")
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # more threads are slower for such small problems
        try:
            with tqdm(bar_format="{desc}", disable=None, leave=False) as status:
                say = functools.partial(status.write, file=sys.stderr)
                TaskEngine(task, runs, args.results, args.log, say, status.set_description_str).run_rows()
        finally:
            torch.set_num_threads(before)
    lines = lines_of(task, args.results, args.steps)
    suffix = "" if args.steps in (None, task.STEPS) else f"-{args.steps}-updates"
    lines = [line for line in lines if wanted.fullmatch(line["row"].removesuffix(suffix))]
    if not lines:
        raise UserError(f"--results {args.results}: has no finished run of {args.task}. Remove --no-runs to train.")
    _output.say(_output.table(*table(lines)))
