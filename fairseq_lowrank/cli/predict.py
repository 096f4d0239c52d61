"""Predict with a fine-tuned model, and score where the right answers are known.

    fairseq-lowrank predict checkpoints/checkpoint_best.pt --data data/glue-rte/bin --subset valid test --output predictions

The data are a corpus of sentences or of questions as scripts/prepare.sh makes it (glue, superglue, rte, sentence-polarity,
squad, xquad); its own measures are printed: accuracy, F1, the correlations of Matthews, Pearson and Spearman, exact match.
--output gets the predictions of each subset, the files that the servers of GLUE and SuperGLUE take for their test parts, the
answers in the form that SQuAD's evaluation script reads, and scores.json.
"""

import json
from pathlib import Path

from fairseq_lowrank.cli import _output

NAME = "predict"
HELP = "predictions and scores of a model fine-tuned on sentences or questions"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint of a fine-tuned model")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder bin of a prepared corpus")
    parser.add_argument("--subset", nargs="+", default=["valid"], metavar="NAME", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="N", help="of a batch (default: %(default)s)")
    _output.add_output_arguments(parser, "predictions, test-server files, scores.json")


def run(args) -> None:
    from fairseq_lowrank.tools.predictions import predict

    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: expected a number >= 1")
    found = predict(args.checkpoint, args.data, args.subset, args.max_tokens)
    scores = {split: {"name": one.name, "score": one.score, "measures": one.measures} for split, one in found.items()}
    if args.output:
        files = {file: text for one in found.values() for file, text in one.files.items()}
        files["scores.json"] = json.dumps(scores, indent=1) + "\n"

        def fill(folder: Path) -> None:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")

        _output.write_together(args.output, fill)
    rows = [
        [f"{split} {one.name}", measure, f"{value:.2f}"]
        for split, one in found.items()
        for measure, value in (one.measures or {"no labels": float("nan")}).items()
    ]
    _output.show(args, scores, _output.table(["", "measure", "%"], rows))
