"""Predict with a fine-tuned model, and score the predictions if the correct answers are known.

    python -m experiments bert predict checkpoints/checkpoint_best.pt --data data/glue-rte/bin --subset valid test --output predictions
    python -m experiments bert predict checkpoints/checkpoint_best.pt --text reviews.txt --pieces bert-base/wordpieces.json

--data takes a corpus of sentences or questions from scripts/prepare.sh (glue, superglue, rte, sentence-polarity, squad, xquad).
The command prints the measures of the corpus: accuracy, F1, the correlations of Matthews, Pearson and Spearman, or exact match.
It writes to --output the predictions of each subset, the files for the test servers of GLUE and SuperGLUE, the answers for
SQuAD's evaluation script, and scores.json.

--text takes any text, or - for standard input, and prints a prediction for each line. A line is a sentence, or two sentences
with a tab between them. For a model of questions it is the question, a tab, and the paragraph. Give the dictionary, labels and
subwords of the model with --dict, --labels and --pieces. The first two default to those of the model's training data.
"""

import json
from pathlib import Path

from fairseq_lowrank.cli import _output, import_plugin
from fairseq_lowrank.files import first_folder
from fairseq_lowrank.messages import FlagError, UserError

NAME = "predict"
HELP = "predict with a model fine-tuned on sentences or questions, and score the predictions"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint of a fine-tuned model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=first_folder, metavar="DIR", help="the folder bin of a prepared corpus")
    source.add_argument(
        "--text", type=Path, metavar="FILE", help="a text with a line for each prediction; - for standard input"
    )
    parser.add_argument("--dict", type=Path, metavar="FILE", help="with --text: the model's dict.txt")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="with --text: names of the classes in their order")
    parser.add_argument(
        "--pieces",
        type=Path,
        metavar="FILE",
        help="with --text: wordpieces.json or a sentencepiece model (default: whole words)",
    )
    parser.add_argument("--unanswerable", action="store_true", help="with --text: questions may have no answer")
    parser.add_argument("--subset", nargs="+", metavar="NAME", help="with --data: parts of the data (default: valid)")
    parser.add_argument(
        "--max-tokens", type=int, default=8192, metavar="N", help="tokens of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--user-dir", type=Path, metavar="DIR", help="your own plugin of fairseq, with its models and methods"
    )
    _output.add_output_arguments(parser, "predictions, test-server files, scores.json")


def run(args) -> None:
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens {args.max_tokens}: expected a number >= 1.")
    given = [f"--{name}" for name in ("dict", "labels", "pieces", "unanswerable") if getattr(args, name)]
    if args.text is None and given:
        raise UserError(f"{' '.join(given)} works only with --text. Add it, or remove these flags.")
    if args.text is not None and args.subset is not None:
        raise FlagError("--subset", " ".join(args.subset), "works only with --data", "Remove the flag.")
    if args.user_dir is not None:
        import_plugin(args.user_dir)
    predict_lines(args) if args.text else predict_corpus(args)


def predict_lines(args) -> None:
    """Print a prediction for each line of a text."""
    from experiments.bert.text_predictions import predict_text
    from fairseq_lowrank.files import read_input, read_lines

    for flag, path in (("--text", args.text), ("--dict", args.dict), ("--pieces", args.pieces)):
        if path is not None and str(path) != "-" and not path.is_file():
            raise UserError(f"{flag} {path}: there is no such file. Give the name of a file.")
    lines = list(read_input() if str(args.text) == "-" else read_lines(args.text))
    try:
        found = predict_text(
            args.checkpoint,
            lines,
            dictionary=args.dict,
            pieces=args.pieces,
            labels=args.labels,
            unanswerable=args.unanswerable,
            max_tokens=args.max_tokens,
        )
    except FlagError as error:
        if error.flag == "--subset":  # the text is a part of a temporary corpus
            error.flag, error.value = "--text", args.text
        raise
    text = "\n".join(found)
    rows = [{"text": line, "prediction": one} for line, one in zip(lines, found, strict=True)]
    if args.output:
        files = {
            "predictions.txt": f"{text}\n",
            "predictions.json": json.dumps(rows, ensure_ascii=False, indent=1) + "\n",
        }
        write_files(args, files)
    _output.show(args, rows, text) if args.json else _output.say_data(text)


def write_files(args, files: dict[str, str]) -> None:
    def fill(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    _output.write_together(args, fill)


def predict_corpus(args) -> None:
    """Print the scores of a prepared corpus."""
    from experiments.bert.predictions import predict

    found = predict(args.checkpoint, args.data, args.subset or ["valid"], args.max_tokens)
    scores = {split: {"name": one.name, "score": one.score, "measures": one.measures} for split, one in found.items()}
    if args.output:
        files = {file: text for one in found.values() for file, text in one.files.items()}
        files["scores.json"] = json.dumps(scores, indent=1) + "\n"
        write_files(args, files)
    rows = [
        [f"{split} {one.name}", measure, f"{value:.2f}"]
        for split, one in found.items()
        for measure, value in (one.measures or {"no labels": float("nan")}).items()
    ]
    _output.show(args, scores, _output.table(["", "measure", "%"], rows))
