"""Time of an update of each row of examples/evidence/documents.sh, so that its losses can be compared at equal time.

    python benchmarks/documents.py --threads 1 --output benchmarks/results/documents.json

One measurement is one update on 2,048 random bytes: forward, loss, backward, gradient clipping, Adam. The rows take turns in every
round; the ratio is the median of the ratios to the first row within a round. Without ``--clock elapsed`` it counts the processor's
own seconds, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys

import measure
import models
import torch
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import import_user_module
from training import Training, dictionary

from fairseq_lowrank.records.provenance import PACKAGE

REPOSITORY = PACKAGE.parent
sys.path.insert(0, str(REPOSITORY))

from experiments.evidence.documents import FIRST_RATES, GROUPS  # noqa: E402  (it is not installed)

RECIPE = REPOSITORY / "examples/evidence/documents.sh"
TYPES, LENGTH, SEQUENCES = 264, 256, 8


def flags(rows: list[str]) -> dict[str, list[str]]:
    """Return by row the flags of fairseq-train, as the recipe prints them."""
    environment = os.environ | {
        "DRY_RUN": "1",
        "SEEDS": "1",
        "RESULTS": str(REPOSITORY / "none.jsonl"),
        "ROWS": " ".join(f"{row}-{FIRST_RATES[1]}" for row in rows),
    }
    printed = subprocess.run(
        [RECIPE], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout
    commands = [shlex.split(line[2:]) for line in printed.splitlines() if line.startswith("+ fairseq-train")]
    return {row: command[command.index("--arch") :] for row, command in zip(rows, commands, strict=True)}


class Row(Training):
    """A model of the recipe, its criterion and its optimiser."""

    def __init__(self, arguments: list[str]) -> None:
        cfg = models.configuration(["unused", *arguments])
        words = dictionary(TYPES)
        task = LanguageModelingTask(cfg.task, words, words)
        self.model = models.build(task, cfg, "cpu", 1).train()
        self.criterion = task.build_criterion(cfg.criterion)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)


def main() -> None:
    every = [f"{group.split()[0]}-{name}" for group, names in GROUPS.items() for name in names]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=every, metavar="ROW", help="default: all; ratios are to the first")
    measure.add_common_arguments(parser, rounds=15)
    parser.set_defaults(clock="processor", threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import_user_module(argparse.Namespace(user_dir=str(REPOSITORY / "examples/evidence/controls")))

    rows = {row: Row(arguments) for row, arguments in flags(options.rows).items()}
    tokens = torch.randint(4, TYPES, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    sample = {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((SEQUENCES,), LENGTH)},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": SEQUENCES * LENGTH,
    }
    taken = measure.alternate(
        {row: lambda t=training: t.update(sample) for row, training in rows.items()},
        options.rounds,
        clock=options.clock,
    )
    base = taken[options.rows[0]]
    results = {}
    for row, seconds in taken.items():
        low, median, high = measure.quartiles(measure.ratios(seconds, base))
        results[row] = {"ratio": round(median, 3), "quartiles": [round(low, 3), round(high, 3)]}
    shown = ((row, one["ratio"], "{} to {}".format(*one["quartiles"])) for row, one in results.items())
    print(measure.table(shown, ("row", f"time ÷ {options.rows[0]}", "quartiles")))
    settings = {"rounds": options.rounds, "clock": options.clock}
    measure.write(options.output, {"machine": measure.machine("cpu"), "settings": settings, "results": results})


if __name__ == "__main__":
    main()
