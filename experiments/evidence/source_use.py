"""Measure the use of the source in translation models: the extra bits per token with the source of the next sentence.

Near 0 the decoder is a language model. A model that uses its source is also misled by a wrong one, so this is not the value of
the source. The program uses all test sentences and the best checkpoint of each run, without dropout and label smoothing. Rows
and seeds that have a line are skipped.

    python -m experiments.evidence.source_use --results results/evidence-source-use.jsonl --table fast-start "$LOWRANK_WORK"/runs/evidence-fast-start/h4-*-4e-3-seed*
"""

import argparse
import re
from pathlib import Path

import torch

from experiments.controlled.runs import PAPER, checked_out_commit, origin_here
from experiments.engine import finished, refuse_dirty
from experiments.recipes.losses import sentence_losses
from fairseq_lowrank.cli import import_plugin
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.records.results import append_measurement
from fairseq_lowrank.tools.fairseq.checkpoints import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a recipe's run: ROW-seedN-…/checkpoints")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the .jsonl file to append to")
    parser.add_argument("--table", required=True, metavar="NAME", help="the recipe's table, such as fast-start")
    args = parser.parse_args()
    refuse_dirty(checked_out_commit())
    named = [re.fullmatch(r"(.+)-seed(\d+)-\w+", run.name) for run in args.runs]
    for run, name in zip(args.runs, named, strict=True):
        if name is None or not (run / "checkpoints/checkpoint_best.pt").is_file():
            parser.error(f"{run}: not a run. Give a folder ROW-seedN-… with checkpoints/checkpoint_best.pt.")
    import_plugin(Path(__file__).parents[2] / "examples" / "evidence" / "controls")
    torch.set_num_threads(1)
    table = f"{args.table}-source-use"
    for run, name in zip(tracked(args.runs, "scoring", "runs"), named, strict=True):
        if (name[1], int(name[2]), False) in finished(args.results, PAPER, table):
            continue
        model, task = load_model(run / "checkpoints/checkpoint_best.pt")
        own, tokens = sentence_losses(model, task, "test")
        other, _ = sentence_losses(model, task, "test", own_source=False)
        lost = (other - own) / tokens.double().mean()
        line = {"paper": "evidence", "table": table, "row": name[1], "seed": int(name[2])}
        line |= {
            "metric": "bits a token that a wrong source costs",
            "value": round(lost.mean().item(), 4),
            "split": "test",
        }
        append_measurement(args.results, line | {**origin_here(), "smoke": False})
        print(f"{name[1]} seed {name[2]}: {line['value']:.3f}")


if __name__ == "__main__":
    main()
