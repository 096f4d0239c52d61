"""Scores of runs by their best checkpoints, from the output of fairseq's commands."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.corpora.catalogue import parse_corpus_name
from experiments.recipes.recipe import Run, last_value
from experiments.recipes.settings import Settings
from experiments.recipes.training import Execute
from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records.logs import START, progress
from fairseq_lowrank.records.scores import bleu, read_perplexity, read_run

EACH_BATCH = ("--log-format", "simple", "--log-interval", "1")
"""Flags of fairseq for a line of its log after each batch, which tells how far it is."""


def score(kind: str, run: Run, settings: Settings, execute: Execute) -> dict:
    """Score a run, and return the fields of its line with the scores; empty in a dry run."""
    return SCORE_FUNCTIONS[kind](run, settings, execute)


def scoring_flags(kind: str, settings: Settings) -> tuple[str, ...]:
    """Return the user's flags of scoring; other flags give another score of the same checkpoint."""
    return {"translation": settings.generate, "language-model": settings.evaluate}.get(kind, ())


def score_translation(run: Run, settings: Settings, execute: Execute) -> dict:
    """Return BLEU on the test set, and with VALID also on the validation set."""
    target = last_value(run.flags, "--target-lang", "en")
    splits = ("valid", "test") if settings.valid else ("test",)
    corpus, values = parse_corpus_name(run.corpus)
    pieces = corpus.bpe_to_remove(values)
    for split in splits:
        words = ["fairseq-generate", str(run.bin), "--user-dir", str(run.plugin)]
        words += ["--gen-subset", split, "--seed", str(run.seed), "--path", str(run.best), *EACH_BATCH]
        words += [*(["--remove-bpe", pieces] if pieces else []), "--max-tokens", "4096", *settings.generate]
        if settings.smoke:  # a model that is hardly trained does not end its sentences
            words += ["--max-len-a", "0", "--max-len-b", "10"]
        execute_from_scratch(execute, words, run.folder / f"generate-{split}.out", settings)
    if settings.dry_run:
        return {}
    found = {}
    for split in splits:
        output = run.folder / f"generate-{split}.out"
        hypotheses = read_run(output).hypotheses
        write_lines(output.with_suffix(".txt"), hypotheses)
        text = run.data / "tok" / f"{split}.{target}"
        # binarised data of others has no text
        references = list(read_lines(text)) if text.exists() else read_run(output).references
        # If the corpus has the publisher's references, sacrebleu gets detokenised text.
        raw = run.data / "raw" / f"test.{target}"
        raw = list(read_lines(raw)) if split == "test" and raw.exists() else None
        found[split] = bleu(hypotheses, references, raw, target)
    valid = {"valid_tokenised_bleu": found["valid"]["tokenised_bleu"]} if settings.valid else {}
    return found["test"] | valid


def score_language_model(run: Run, settings: Settings, execute: Execute) -> dict:
    """Return perplexity or loss on the test set, with a context window in proportion to fairseq's 400 of 512.

    With consecutive segments, memory replaces the window. EVALUATE has further flags of fairseq-eval-lm, such as another window,
    or sentences instead of blocks.
    """
    length = int(last_value(run.flags, "--tokens-per-sample", "512"))
    output = run.folder / "evaluate-test.out"
    words = ["fairseq-eval-lm", str(run.bin), "--user-dir", str(run.plugin)]
    words += ["--gen-subset", "test", "--tokens-per-sample", str(length), *EACH_BATCH]
    task = last_value(run.flags, "--task", "language_modeling")
    words += ["--task", task] if task == "segment_lm" else ["--context-window", str(length * 25 // 32)]
    words += ["--max-tokens", str(max(length, 2048)), "--path", str(run.best), *settings.evaluate]
    execute_from_scratch(execute, words, output, settings)
    return {} if settings.dry_run else read_perplexity(output, settings.metric)


def score_masked_language_model(run: Run, settings: Settings, execute: Execute) -> dict:
    """Return the perplexity of masked words on the test set, and the accuracy of next sentences if they are predicted."""
    output = run.folder / "validate-test.out"
    words = ["fairseq-validate", str(run.bin), "--user-dir", str(run.plugin)]
    words += ["--task", last_value(run.flags, "--task", ""), "--path", str(run.best), "--valid-subset", "test"]
    words += ["--max-tokens", last_value(run.flags, "--max-tokens", "4096")]
    words += ["--no-progress-bar", "--log-format", "json"]
    execute_from_scratch(execute, words, output, settings)
    return {} if settings.dry_run else read_validation(output)


def score_fine_tuning(run: Run, settings: Settings, execute: Execute) -> dict:
    """Return the task's measures on all splits except training, and write predictions for a benchmark's server."""
    data, output = run.bin, run.folder / "predictions"
    splits = [split for split in ("valid", "valid1", "test", "test1") if any(data.glob(f"*/{split}.*"))] or ["valid"]
    words = ["python", "-m", "experiments", "bert", "predict", str(run.best), "--user-dir", str(run.plugin)]
    words += ["--data", str(data), "--subset", *splits, "--output", str(output)]
    execute_from_scratch(execute, words, run.folder / "predict.out", settings)
    return {} if settings.dry_run else read_scores(output / "scores.json")


SCORE_FUNCTIONS = {
    "translation": score_translation,
    "language-model": score_language_model,
    "masked-language-model": score_masked_language_model,
    "fine-tuning": score_fine_tuning,
}


def execute_from_scratch(execute: Execute, words: list[str], output: Path, settings: Settings) -> None:
    """Delete the output file, and run a command that writes it."""
    if not settings.dry_run:
        output.unlink(missing_ok=True)
    execute(words, output)


FIT_SEED = 1  # the seed for the training pairs of `fit`, which are the same for all runs
SMOKE_FIT = 100


def losses(run: Run, fit: int) -> dict[str, dict]:
    """Return for `fit` training pairs, valid and test the loss in `bits` per token.

    The model is the best checkpoint in evaluation mode; there is no label smoothing.
    """
    import torch

    from experiments.recipes.losses import sentence_losses
    from fairseq_lowrank.tools.fairseq.checkpoints import load_model

    model, task = load_model(run.best, data=run.bin)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name, subset, count in (("fit", "train", fit), ("valid", "valid", None), ("test", "test", None)):
        bits, tokens = sentence_losses(model, task, subset, count=count, seed=FIT_SEED)
        found[name] = {"bits": round((bits.sum() / tokens.sum()).item(), 5)}
    return found


def read_scores(path: Path) -> dict:
    """Return the scores of `python -m experiments bert predict`: `value` is on the test part, or on validation if test has no labels.

    `scores` has the scores of further parts, the exact match of answers, and the parts of a mean (such as `mrpc-f1`, which papers
    print). `measures` has all measures.
    """
    found = {split: one for split, one in json.loads(path.read_text(encoding="utf-8")).items() if one["measures"]}
    if not found:
        raise UserError(f"{path} has no scores. Delete it, and run the recipe again.")
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
    from fairseq_lowrank.tools.fairseq.checkpoints import load_model
    from fairseq_lowrank.tools.fairseq.parameters import count

    counts = count(load_model(checkpoint, data=data)[0])
    return {"parameters": counts["total"], "attention_parameters": counts["attention_without_biases"]}


def read_validation(path: Path) -> dict:
    """Read the scores of the test set in a fairseq-validate log.

    Raises:
        UserError: the log has no perplexity.
    """
    fields: dict[str, str] = {}
    for line in read_lines(path, errors="replace"):
        if START in line:  # another run
            fields = {}
        elif (found := progress(line)) and found[0] == "test":
            fields = found[1]
    if "ppl" not in fields:
        raise UserError(f"{path} has no perplexity. Give the log of fairseq-validate.")
    accuracy = {"next_sentence_accuracy": float(fields["nsp_accuracy"])} if "nsp_accuracy" in fields else {}
    return {"metric": "perplexity", "value": float(fields["ppl"]), **accuracy}
