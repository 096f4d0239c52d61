"""Score a run with its best checkpoint, and read what fairseq's commands print of a score."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from experiments.corpora.catalogue import parse
from experiments.recipes.logs import read_validation
from experiments.recipes.recipe import Run, last_value
from experiments.recipes.settings import Settings
from experiments.recipes.training import Execute
from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.messages import UserError


def score(kind: str, run: Run, settings: Settings, execute: Execute) -> dict:
    """Run what scores a run: the fields of its line that say how good it is; none in a dry run."""
    return SCORES[kind](run, settings, execute)


def scoring_flags(kind: str, settings: Settings) -> tuple[str, ...]:
    """The flags of a recipe's scoring that can be chosen: others make another score of the same checkpoint."""
    return {"translation": settings.generate, "language-model": settings.evaluate}.get(kind, ())


def score_translation(run: Run, settings: Settings, execute: Execute) -> dict:
    """BLEU on the test set, and with VALID on the validation set too."""
    target = last_value(run.flags, "--target-lang", "en")
    splits = ("valid", "test") if settings.valid else ("test",)
    corpus, values = parse(run.corpus)
    pieces = corpus.undo(values)
    for split in splits:
        words = ["fairseq-generate", str(run.bin), "--user-dir", str(run.plugin)]
        words += ["--gen-subset", split, "--seed", str(settings.seed), "--path", str(run.best)]
        words += [*(["--remove-bpe", pieces] if pieces else []), "--max-tokens", "4096", *settings.generate]
        if settings.smoke:  # a model that has hardly begun does not know when to stop
            words += ["--max-len-a", "0", "--max-len-b", "10"]
        execute_from_scratch(execute, words, run.folder / f"generate-{split}.out", settings)
    if settings.dry_run:
        return {}
    found = {}
    for split in splits:
        output = run.folder / f"generate-{split}.out"
        hypotheses = read_hypotheses(output)
        write_lines(output.with_suffix(".txt"), hypotheses)
        text = run.data / "tok" / f"{split}.{target}"
        # of data that somebody else binarised there is no text
        references = list(read_lines(text)) if text.exists() else read_references(output)
        # The publisher's own references, where the corpus keeps them: sacrebleu then sees detokenised text.
        raw = run.data / "raw" / f"test.{target}"
        raw = list(read_lines(raw)) if split == "test" and raw.exists() else None
        found[split] = bleu(hypotheses, references, raw, target)
    valid = {"valid_tokenised_bleu": found["valid"]["tokenised_bleu"]} if settings.valid else {}
    return found["test"] | valid


def score_language_model(run: Run, settings: Settings, execute: Execute) -> dict:
    """Perplexity or loss on the test set, with a context window in proportion to fairseq's 400 of 512, or with memory where
    segments follow each other.

    EVALUATE holds further flags of fairseq-eval-lm: another window, sentences instead of blocks.
    """
    length = int(last_value(run.flags, "--tokens-per-sample", "512"))
    output = run.folder / "evaluate-test.out"
    words = ["fairseq-eval-lm", str(run.bin), "--user-dir", str(run.plugin)]
    words += ["--gen-subset", "test", "--tokens-per-sample", str(length)]
    task = last_value(run.flags, "--task", "language_modeling")
    words += ["--task", task] if task == "segment_lm" else ["--context-window", str(length * 25 // 32)]
    words += ["--max-tokens", str(max(length, 2048)), "--path", str(run.best), *settings.evaluate]
    execute_from_scratch(execute, words, output, settings)
    return {} if settings.dry_run else read_perplexity(output, settings.metric)


def score_masked_language_model(run: Run, settings: Settings, execute: Execute) -> dict:
    """Perplexity of masked words on the test set, and where they are predicted the share of next sentences told right."""
    output = run.folder / "validate-test.out"
    words = ["fairseq-validate", str(run.bin), "--user-dir", str(run.plugin)]
    words += ["--task", last_value(run.flags, "--task", ""), "--path", str(run.best), "--valid-subset", "test"]
    words += ["--max-tokens", last_value(run.flags, "--max-tokens", "4096")]
    words += ["--no-progress-bar", "--log-format", "json"]
    execute_from_scratch(execute, words, output, settings)
    return {} if settings.dry_run else read_validation(output)


def score_fine_tuning(run: Run, settings: Settings, execute: Execute) -> dict:
    """The task's measures on all splits but training's, and predictions of those without labels, for a benchmark's server."""
    data, output = run.bin, run.folder / "predictions"
    splits = [split for split in ("valid", "valid1", "test", "test1") if any(data.glob(f"*/{split}.*"))] or ["valid"]
    words = ["fairseq-lowrank", "predict", str(run.best), "--data", str(data), "--subset", *splits]
    execute_from_scratch(execute, [*words, "--output", str(output)], run.folder / "predict.out", settings)
    return {} if settings.dry_run else read_scores(output / "scores.json")


SCORES = {
    "translation": score_translation,
    "language-model": score_language_model,
    "masked-language-model": score_masked_language_model,
    "fine-tuning": score_fine_tuning,
}


def execute_from_scratch(execute: Execute, words: list[str], output: Path, settings: Settings) -> None:
    """Run a command whose output is all of a file."""
    if not settings.dry_run:
        output.unlink(missing_ok=True)
    execute(words, output)


def read_hypotheses(path: Path) -> list[str]:
    """Return the best hypotheses in a fairseq-generate output (subwords already joined), in the corpus's order."""
    return read_sentences(path, r"H-(\d+)\t[^\t]*\t(.*)")


def read_references(path: Path) -> list[str]:
    """Return the target sentences in a fairseq-generate output (subwords already joined), in the corpus's order."""
    return read_sentences(path, r"T-(\d+)\t(.*)")


def read_sentences(path: Path, pattern: str) -> list[str]:
    """Return the texts of the lines that match a pattern, in the order of their numbers."""
    found = {}
    for text in read_lines(path):
        if match := re.match(pattern, text):
            found.setdefault(int(match[1]), match[2])  # of several (--nbest) the best comes first
    if sorted(found) != list(range(len(found))):
        raise UserError(f"{path} holds {len(found)} sentences but not those numbered 0 to {len(found) - 1}")
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
            raise UserError(f"{len(hypotheses)} hypotheses for {len(text)} references")
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


def read_perplexity(path: Path, metric: str = "perplexity") -> dict:
    """The score in a fairseq-eval-lm log, and the number of scored tokens.

    Args:
        metric: `perplexity`, or `loss`, its natural logarithm: nats a token, which fairseq logs in base 2.
    """
    text = "\n".join(read_lines(path))
    scores = re.findall(r"Loss \(base 2\): ([\d.]+|nan|inf), Perplexity: ([\d.]+|nan|inf)", text)
    tokens = re.findall(r"Evaluated ([\d,]+) tokens", text)
    if not scores or not tokens:
        raise UserError(f"{path} holds no perplexity of fairseq-eval-lm")
    loss, perplexity = map(float, scores[-1])
    value = perplexity if metric == "perplexity" else round(loss * math.log(2), 4)
    return {"metric": metric, "value": value, "tokens": int(tokens[-1].replace(",", ""))}


FIT_SEED = 1  # of the training pairs on which fit is told: the same ones for all runs
SMOKE_FIT = 100


def losses(run: Run, fit: int) -> dict[str, dict]:
    """By subset, `fit` being that many training pairs: the loss in `bits` a token, and each sentence's part in it.

    A sentence's value is its bits over the mean tokens of a sentence, so that the mean of the values is the loss. This is the
    best checkpoint at evaluation, without label smoothing.
    """
    from experiments.recipes.losses import sentence_losses
    from fairseq_lowrank.tools.checkpoints import load_model

    model, task = load_model(run.best, data=run.bin)
    found = {}
    for name, subset, count in (("fit", "train", fit), ("valid", "valid", None), ("test", "test", None)):
        bits, tokens = sentence_losses(model, task, subset, count=count, seed=FIT_SEED)
        values = bits / tokens.double().mean()
        found[name] = {
            "bits": round(values.mean().item(), 5),
            "sentence_values": [round(value, 3) for value in values.tolist()],
        }
    return found


def read_scores(path: Path) -> dict:
    """The scores that `fairseq-lowrank predict` wrote: `value` on the test part, or on validation where that has no labels.

    `scores` has those of its other parts, exact match next to the F1 of answers, and the parts of a mean (`mrpc-f1`, as papers
    print it); `measures` all that was measured.
    """
    found = {split: one for split, one in json.loads(path.read_text(encoding="utf-8")).items() if one["measures"]}
    if not found:
        raise UserError(f"{path} holds no scores")
    kind = "test" if "test" in found else "valid"
    main, further = found[kind], found.get(f"{kind}1")
    scores = {further["name"]: further["score"]} if further else {}
    if "em" in main["measures"]:
        scores[f"{main['name']}-em"] = main["measures"]["em"]
    elif len(main["measures"]) > 1:
        scores |= {f"{main['name']}-{name}": value for name, value in main["measures"].items()}
    rounded = {name: round(value, 2) for name, value in scores.items()}
    measures = {
        split: {name: round(value, 2) for name, value in one["measures"].items()} for split, one in found.items()
    }
    return {
        "metric": main["name"],
        "value": round(main["score"], 2),
        "split": kind,
        "scores": rounded,
        "measures": measures,
    }


def parameters(checkpoint: Path, data: Path) -> dict[str, int]:
    """Count the parameters of a checkpoint's model, and those of its attention.

    Attention has its output projections, and neither biases nor fixed mixing.
    """
    from fairseq_lowrank.tools.checkpoints import load_model
    from fairseq_lowrank.tools.parameters import count

    counts = count(load_model(checkpoint, data=data)[0])
    return {"parameters": counts["total"], "attention_parameters": counts["attention_without_biases"]}
