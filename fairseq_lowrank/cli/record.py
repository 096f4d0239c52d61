"""Make a line of results from the logs of a training without a recipe, for `compare`.

The line has the row, the seed, a metric and its value (docs/results-format.md). With `--train-log` it also has the updates,
the speed and the learning curve. The score is one of these:

- `--generate-log`: BLEU of sacrebleu, from the output of fairseq-generate. Subwords must be joined (`--remove-bpe`). If the text
  is tokenised, the score is BLEU of its tokens, `tokenised_bleu`, which is not comparable with sacrebleu of plain text.
- `--eval-log`: the perplexity in the output of fairseq-eval-lm.
- `--score`: a JSON file with `metric` and `value`, and with `sentence_values` for tests over sentences.
- none of them: the best validation perplexity of the training log, of the subset `--split`.

  fairseq-lowrank record --row mha --seed 1 --train-log mha.log --generate-log mha.out --results mine.jsonl
  fairseq-lowrank record --row mixhead-a --seed 1 --score mixhead-a.json --results mine.jsonl
  fairseq-lowrank compare mine.jsonl --pair mixhead-a mha
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import FlagError, UserError

NAME = "record"
HELP = "make a line of results from fairseq's own logs"


def add_arguments(parser) -> None:
    parser.add_argument("--row", required=True, help="name of the setting, such as mixhead-a")
    parser.add_argument("--seed", type=int, required=True, help="seed of the training, by which rows are paired")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="the .jsonl file to append to")
    parser.add_argument("--train-log", type=Path, metavar="LOG", help="output of fairseq-train")
    score = parser.add_mutually_exclusive_group()
    score.add_argument("--generate-log", type=Path, metavar="LOG", help="output of fairseq-generate")
    parser.add_argument(
        "--language",
        metavar="CODE",
        help="with --generate-log: language of the translations, such as zh, for BLEU's tokeniser",
    )
    score.add_argument("--eval-log", type=Path, metavar="LOG", help="output of fairseq-eval-lm")
    score.add_argument("--score", type=Path, metavar="FILE", help="a JSON file with metric and value")
    parser.add_argument(
        "--split",
        help="data that was scored (default: test); without a score, the validation set of --train-log (default: valid)",
    )
    parser.add_argument("--corpus", metavar="NAME", help="name of the data that was scored, for headings")
    parser.add_argument("--table", help="name of a group of rows, for compare --table")


def run(args) -> None:
    from fairseq_lowrank.records import provenance, results
    from fairseq_lowrank.records.scores import code_of

    if not (args.train_log or args.generate_log or args.eval_log or args.score):
        raise UserError("nothing to record. Give --train-log, --generate-log, --eval-log or --score.")
    if args.language and not args.generate_log:
        raise FlagError("--language", args.language, "works only with --generate-log", "Add it, or remove --language.")
    if args.language and code_of(args.language) is None:
        remedy = "Give a code such as de or zh."
        raise FlagError("--language", args.language, "no tokeniser of BLEU is known for this language", remedy)
    results.check_writable(args.results)
    if not args.row.strip():
        raise FlagError("--row", repr(args.row), "expected a name", "Give the name of the setting, such as mixhead-a.")
    line = {"row": args.row, "seed": args.seed}
    line |= {name: value for name in ("table", "corpus") if (value := getattr(args, name))}
    scored = args.generate_log or args.eval_log or args.score
    split = args.split or ("test" if scored else "valid")
    subset = "valid" if scored else split
    training = (
        _read("--train-log", args.train_log, functools.partial(_training, subset=subset)) if args.train_log else {}
    )
    perplexity = training.get("valid_perplexity")
    if args.generate_log:
        line |= _read("--generate-log", args.generate_log, functools.partial(_bleu, language=args.language))
    elif args.eval_log:
        line |= _read("--eval-log", args.eval_log, _perplexity)
    elif args.score:
        line |= _read("--score", args.score, _score)
    elif perplexity is None:
        raise UserError(
            f"--train-log {args.train_log}: has no perplexity of the validation set {subset!r}. Give its name with --split, or add "
            "--generate-log, --eval-log or --score."
        )
    else:
        line |= {"metric": "perplexity", "value": perplexity}
    line |= {"split": split, **training}
    plugin = [args.user_dir] if args.user_dir else []
    line |= provenance.origin(provenance.PACKAGE, *plugin)
    results.append_score(args.results, line)
    _output.say(f"{args.results}: {args.row}, seed {args.seed}: {line['metric']} {line['value']} ({line['split']})")


def _read(flag: str, path: Path, read: Callable[[Path], dict]) -> dict:
    """Return the result of `read` for a file; its errors name the flag."""
    try:
        return read(path)
    except UserError as error:
        raise UserError(f"{flag} {path}: {error}") from error
    except (OSError, ValueError) as error:
        wrong = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag} {path}: {wrong}. Give the file that the command wrote.") from error


def _training(path: Path, subset: str) -> dict:
    from fairseq_lowrank.records.logs import read_training_log

    found = read_training_log(path, subset)
    return {"curve": found.pop("epochs"), "log": str(path), **found}


def _bleu(path: Path, language: str | None) -> dict:
    from fairseq_lowrank.records import scores

    hypotheses, references, decoded = scores.read_run(path)
    if not hypotheses:
        raise UserError("has no hypotheses. Give the log of fairseq-generate.")
    if hypotheses == references and not decoded:
        raise UserError(scores.REFERENCES_SCORED)
    if scores.are_tokenised(references):
        return scores.tokenised_bleu(hypotheses, references)
    return scores.bleu(hypotheses, references, language=language)


def _perplexity(path: Path) -> dict:
    from fairseq_lowrank.records.scores import read_perplexity

    return read_perplexity(path)


def _score(path: Path) -> dict:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not {"metric", "value"} <= found.keys():
        raise UserError('expected an object such as {"metric": "accuracy", "value": 71.3}')
    return {name: found[name] for name in ("metric", "value", "sentence_values", "sentence_counts") if name in found}
