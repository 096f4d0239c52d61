"""Say in words what a measurement means."""

from __future__ import annotations

FEW, MOST, ALL = "few", "most", "all"
WORDS = {
    FEW: "uses few of its directions",
    MOST: "uses most of its directions",
    ALL: "uses all of them: the head size may bind",
}
LIMIT = (
    "A cut shows what this model uses. It cannot show what a model that was trained under a cap would do without it, nor what "
    "this model would gain from larger heads."
)


def judge(need: int, size: int) -> str:
    """Return few (at most half of the directions), all (more than seven eighths), or most."""
    if 2 * need <= size:
        return FEW
    return ALL if 8 * need > 7 * size else MOST


def verdicts(result: dict) -> list[dict]:
    """Return a verdict for the whole model and for each site: ``where``, ``kind``, ``verdict``, and ``text``."""
    scores = result["cuts"]["scores"]
    found = {"all heads": scores["all"], **(scores["sites"] if len(scores["sites"]) > 1 else {})}
    entries = [("scores", where, curve) for where, curve in found.items()]
    entries.append(("values", "all heads", result["cuts"]["values"]["all"]))
    return [_verdict(kind, where, curve, result) for kind, where, curve in entries]


def _verdict(kind: str, where: str, curve: dict, result: dict) -> dict:
    need, size, (low, high) = curve["need"], curve["size"], curve["interval"]
    verdict = judge(need, size)
    costs = {entry["rank"]: entry["cost"] for entry in curve["ranks"]}
    below = max((rank for rank in costs if rank < need), default=None)
    subject = "the scores" if kind == "scores" else "the values"
    text = f"{where}, {subject}: {WORDS[verdict]}. Rank {need} of {size} (95 % interval {low} to {high}) costs "
    text += f"{100 * max(0.0, costs[need]):.2g} % of the {result['metric']}"
    if below is not None:
        text += f", and rank {below} costs {100 * costs[below]:.2g} %"
    return {"where": where, "kind": kind, "verdict": verdict, "need": need, "size": size, "text": f"{text}."}
