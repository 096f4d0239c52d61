"""One JSON line for each finished run: read fairseq's logs, score, append.

`python -m fairseq_lowrank.data.results bleu|perplexity|finished --help`
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from fairseq_lowrank import __version__
from fairseq_lowrank.data.text import read_lines, write_lines

FIELDS = ["paper", "table", "row", "architecture", "flags", "seed", "updates", "parameters", "metric", "value"]
FIELDS += ["split", "tokens_per_second", "versions", "smoke", "date"]


def read_results(path: Path) -> list[dict]:
    """The lines of a results file; none if it is not there. Raises ValueError naming a line that lacks a field."""
    lines = []
    for number, text in enumerate(read_lines(path) if path.exists() else [], start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number}: {text[:40]} is no result, which is a JSON object")
        if missing := [field for field in FIELDS if field not in line]:
            raise ValueError(f"{path}, line {number}: lacks {', '.join(missing)}")
        for field in ("value", "updates", "parameters"):
            if not isinstance(line[field], (int, float)):
                raise ValueError(f"{path}, line {number}: {field} is {json.dumps(line[field])}, expected a number")
        lines.append(line)
    return lines


def append_result(path: Path, line: dict) -> None:
    """Append one line; several processes may do so at once."""
    if missing := [field for field in FIELDS if field not in line]:
        raise ValueError(f"a result needs {', '.join(missing)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_training_log(path: Path) -> dict:
    """What a fairseq-train log (`--log-format simple`) says of a run, resumed or not.

    Returns `parameters`, `updates`, `tokens_per_second` (target tokens over the time spent in training steps, so
    validation and saving do not count), `valid_perplexity`, the best of all validations, within epochs too (None where
    there was none), and `epochs`, one dict for each finished epoch with `updates`, `train_loss` and `valid_loss` (both in
    base 2), in order.
    """
    parameters, epochs, perplexities = None, {}, []
    for text in read_lines(path):
        if match := re.search(r"num\. shared model params: ([\d,]+)", text):
            parameters = int(match[1].replace(",", ""))
        if match := re.search(r"\| (train|valid) \| epoch (\d+) \| (.*)", text):
            fields = re.findall(r"(\w+) (-?[\d.]+(?:e[-+]?\d+)?|inf|nan)(?= \||$)", match[3])
            epochs.setdefault(int(match[2]), {})[match[1]] = {name: float(value) for name, value in fields}
            perplexities += [float(value) for name, value in fields if (match[1], name) == ("valid", "ppl")]
    finished = [epoch for _, epoch in sorted(epochs.items()) if "train" in epoch]
    if parameters is None or not finished:
        raise ValueError(f"{path} holds no finished epoch of fairseq-train")
    before, tokens, seconds, curve = 0, 0.0, 0.0, []
    for epoch in finished:
        train, valid = epoch["train"], epoch.get("valid", {})
        updates = int(train["num_updates"])
        tokens += train["wpb"] * (updates - before)
        seconds += train["train_wall"]
        before = updates
        curve.append({"updates": updates, "train_loss": train["loss"], "valid_loss": valid.get("loss")})
    return {
        "parameters": parameters,
        "updates": before,
        "tokens_per_second": round(tokens / max(seconds, 1.0)),
        "valid_perplexity": min(perplexities, default=None),
        "epochs": curve,
    }


def read_hypotheses(path: Path) -> list[str]:
    """The best hypotheses in a fairseq-generate output (pieces already joined), in the corpus's order."""
    found = {}
    for text in read_lines(path):
        if match := re.match(r"H-(\d+)\t[^\t]*\t(.*)", text):
            found[int(match[1])] = match[2]
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"{path} holds {len(found)} hypotheses but not those numbered 0 to {len(found) - 1}")
    return [found[index] for index in range(len(found))]


def bleu(hypotheses: list[str], references: list[str], raw: list[str] | None = None, language: str = "en") -> dict:
    """BLEU of tokenised hypotheses, by sacrebleu (`value`, with its signature) and on the tokens as they are.

    sacrebleu tokenises by itself (13a, its default). It is given detokenised hypotheses and the publisher's text
    where that is known (`raw`), without case where the hypotheses have none, and else both sides tokenised.
    `tokenised_bleu` takes the tokens as they are, as multi-bleu.perl and most papers of the time did.
    """
    from sacrebleu.metrics import BLEU
    from sacremoses import MosesDetokenizer

    given, lowercase = hypotheses, False
    if raw is not None:
        detokenise = MosesDetokenizer(language).detokenize
        given = [detokenise(line.split()) for line in hypotheses]
        lowercase = not any(line != line.lower() for line in hypotheses)
    for text in (references, raw):
        if text is not None and len(text) != len(hypotheses):
            raise ValueError(f"{len(hypotheses)} hypotheses for {len(text)} references")
    # Where both sides are tokenised, that is on purpose: force keeps sacrebleu from warning of it.
    standard, tokens = BLEU(lowercase=lowercase, force=True), BLEU(tokenize="none", force=True)
    return {
        "metric": "sacrebleu",
        "value": round(standard.corpus_score(given, [raw or references]).score, 2),
        "signature": str(standard.get_signature()),
        "text": "tokenised" if raw is None else "detokenised",
        "tokenised_bleu": round(tokens.corpus_score(hypotheses, [references]).score, 2),
        "tokenised_signature": str(tokens.get_signature()),
    }


def read_perplexity(path: Path) -> dict:
    """Perplexity and number of scored tokens in a fairseq-eval-lm log."""
    text = "\n".join(read_lines(path))
    perplexity = re.findall(r"Perplexity: ([\d.]+)", text)
    tokens = re.findall(r"Evaluated ([\d,]+) tokens", text)
    if not perplexity or not tokens:
        raise ValueError(f"{path} holds no perplexity of fairseq-eval-lm")
    return {"metric": "perplexity", "value": float(perplexity[-1]), "tokens": int(tokens[-1].replace(",", ""))}


def versions() -> dict:
    """Versions of what a result depends on; None where something is not installed."""
    found = {"python": platform.python_version(), "fairseq_lowrank": __version__}
    for name, package in {"torch": "torch", "fairseq": "fairseq-fixed"}.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def attention_parameters(checkpoint: Path) -> int:
    """Attention parameters in a checkpoint, output projections included, without biases."""
    import torch

    from fairseq_lowrank.plugin.loading import CHECKPOINT_CLASSES

    # the model's arguments lie beside it, as classes that have to be let in
    with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
        model = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
    attention = re.compile(r"\b(self_attn|encoder_attn)\.(\w_proj|out_proj|head_embeddings|mixing)\.(?!bias)")
    return sum(tensor.numel() for name, tensor in model.items() if attention.search(name))


def record(args: argparse.Namespace) -> None:
    """Append the line of a finished run."""
    run = read_training_log(args.log)
    curve, valid_perplexity = run.pop("epochs"), run.pop("valid_perplexity")
    if args.command == "bleu":
        hypotheses = read_hypotheses(args.generated)
        raw = list(read_lines(args.raw_references)) if args.raw_references else None
        score = bleu(hypotheses, list(read_lines(args.references)), raw, args.language)
        if args.valid:
            valid = bleu(read_hypotheses(args.valid), list(read_lines(args.valid_references)))
            score |= {"valid_tokenised_bleu": valid["tokenised_bleu"]}
        write_lines(args.generated.with_suffix(".txt"), hypotheses)
    else:
        score = read_perplexity(args.evaluated)
        score |= {"valid_perplexity": valid_perplexity}
    flags = args.flags.split()
    line = {
        "paper": args.paper,
        "table": args.table,
        "row": args.row,
        "architecture": flags[flags.index("--arch") + 1],
        "flags": args.flags,
        "seed": args.seed,
        **run,
        **score,
        "split": args.split,
        "versions": versions(),
        "smoke": args.smoke,
        "date": datetime.date.today().isoformat(),
        "curve": curve,
    }
    if args.checkpoint:
        line["attention_parameters"] = attention_parameters(args.checkpoint)
    append_result(args.file, line)
    print(f"{args.row}: {line['metric']} {line['value']} ({run['parameters']:,} parameters)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="results", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--file", type=Path, required=True, help="the .jsonl file")
    common.add_argument("--paper", required=True)
    common.add_argument("--table", required=True)
    common.add_argument("--seed", type=int, required=True)
    common.add_argument("--smoke", action="store_true", help="a trial at another scale")
    run = argparse.ArgumentParser(add_help=False, parents=[common])
    run.add_argument("--row", required=True)
    run.add_argument("--flags", required=True, help="fairseq-train's flags, in one string")
    run.add_argument("--log", type=Path, required=True, help="what fairseq-train printed")
    run.add_argument("--split", required=True, help="what the score was measured on")
    run.add_argument("--checkpoint", type=Path, help="whose attention parameters are counted")
    one = subparsers.add_parser("bleu", parents=[run], help="score a translation run and append its line")
    one.add_argument("--generated", type=Path, required=True, help="what fairseq-generate printed")
    one.add_argument("--references", type=Path, required=True, help="tokenised references, in corpus order")
    one.add_argument("--raw-references", type=Path, help="the publisher's references, for detokenised hypotheses")
    one.add_argument("--language", default="en", help="of the hypotheses, for detokenising (%(default)s)")
    one.add_argument("--valid", type=Path, help="what fairseq-generate printed for the validation set")
    one.add_argument("--valid-references", type=Path, help="its tokenised references")
    one = subparsers.add_parser("perplexity", parents=[run], help="append the line of a language model run")
    one.add_argument("--evaluated", type=Path, required=True, help="what fairseq-eval-lm printed")
    subparsers.add_parser(
        "finished", parents=[common], help="print the rows that have a line, trials (--smoke) or others"
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "finished":
            keys = ("paper", "table", "seed", "smoke")
            lines = (line for line in read_results(args.file) if all(line[k] == getattr(args, k) for k in keys))
            print(*(line["row"] for line in lines), sep="\n")
        else:
            record(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
