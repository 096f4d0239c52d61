"""Lines of results: their scores, how a score came about, and which direction is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

# Metrics that are compared with one value of a paper: the papers do not name their BLEU scorer.
FAMILIES = {"sacrebleu": "bleu", "tokenised_bleu": "bleu"}
# Further scores of a line: their metric and split; None means the line's split.
ADDED_SCORES = {
    "tokenised_bleu": None,
    "valid_tokenised_bleu": ("tokenised_bleu", "valid"),
    "valid_perplexity": ("perplexity", "valid"),
    "valid_loss": ("bits", "valid"),
}
# A metric with one of these words is better if it is lower.
LOWER_IS_BETTER = {"perplexity", "ppl", "loss", "nll", "bpc", "error", "wer", "cer", "ter", "mse", "rmse", "mae"}


def scores_of(line: dict) -> dict[tuple[str, str], float]:
    """Return every score of a line, by metric and split."""
    scores = {(line["metric"], line["split"]): line["value"]}
    for name, where in ADDED_SCORES.items():
        if line.get(name) is not None:
            scores[where or ("tokenised_bleu", line["split"])] = line[name]
    scores |= {("bits", split): found["bits"] for split, found in line.get("losses", {}).items()}
    return scores | {(metric, line["split"]): value for metric, value in line.get("scores", {}).items()}


def listed(names: Iterable[object], most: int = 20) -> str:
    """Return different names, separated by commas; of a long list the number of those that are left out."""
    found = list(dict.fromkeys(map(str, names)))
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "none") + rest


def way_of(line: dict) -> dict[str, str]:
    """Return how a line's score came about, by field; a field that the line does not have is left out.

    Scores of the same metric are comparable if they agree in every field that both have. A signature is without sacrebleu's version.
    """
    metric = line["metric"]
    signature = line.get({"sacrebleu": "signature", "tokenised_bleu": "tokenised_signature"}.get(metric, ""))
    way = {"scoring": line["scoring"] or "no flags"} if "scoring" in line else {}
    if signature is not None:
        way["signature"] = "|".join(part for part in str(signature).split("|") if not part.startswith("version:"))
    names = ["corpus"] + ["text"] * (metric == "sacrebleu")
    names += ["tokens"] * (metric in ("perplexity", "loss") and not line.get("further"))
    return way | {name: str(line[name]) for name in names if line.get(name) is not None}


def changed_data(lines: Iterable[dict]) -> list[str]:
    """Return a note for each corpus whose lines have different data, such as another test set under the same name."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if "corpus" in line and "data" in line:
            found.setdefault(line["corpus"], set()).add(line["data"])
    return [
        f"Corpus {name} was prepared again with other sentences or dictionaries, so its scores may not be comparable"
        for name, hashes in found.items()
        if len(hashes) > 1
    ]


def untrained(lines: Iterable[dict]) -> list[str]:
    """Return a note for each reason why scores do not compare methods yet: models in warm-up, or below 1 BLEU."""
    warm: dict[str, None] = {}
    poor: dict[str, None] = {}
    for line in lines:
        flags = line.get("flags", "")
        words = flags if isinstance(flags, str) else " ".join(map(str, flags))
        rises = re.findall(r"--warmup-updates[ =](\d+)", words)
        if rises and (line.get("updates") or math.inf) <= int(rises[-1]):
            warm[line["row"]] = None
        if family(line["metric"]) == "bleu" and line["value"] < 1:
            poor[line["row"]] = None
    found = ("still in warm-up", warm), ("less than 1 BLEU", poor)
    return [f"{what}, so nothing is compared: {listed(rows)}. Train for more epochs." for what, rows in found if rows]


def family(metric: str) -> str:
    return FAMILIES.get(metric, metric)


def lower_is_better(metric: str) -> bool:
    """Return True for losses, perplexities and errors; all other metrics are scores."""
    words = re.split(r"[\s_-]+", metric.lower())
    return words == ["bits"] or words[:2] == ["bits", "per"] or not LOWER_IS_BETTER.isdisjoint(words)
