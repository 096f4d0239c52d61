"""Say in words what a measurement means."""

from __future__ import annotations

FEW, MOST, ALL, NOT_MEASURED = "few", "most", "all", "not measured"
WORDS = {
    FEW: "uses few of its directions",
    MOST: "uses most of its directions",
    ALL: "uses all of its directions: the {size} size may bind",
}
TOKENS_OF_A_DIRECTION = 20
"""With fewer tokens for each direction of a head, the basis does not hold for other sequences."""
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
    """Return a verdict for the whole model, for each site, for values, and for each layer that is not measured.

    Each has ``where``, ``kind``, ``verdict`` and ``text``, and unless not measured also ``need`` and ``size``.
    """
    scores = result["cuts"]["scores"]
    found = {"all heads": scores["all"], **(scores["sites"] if len(scores["sites"]) > 1 else {})}
    entries = [("scores", where, curve) for where, curve in found.items()]
    entries.append(("values", "all heads", result["cuts"]["values"]["all"]))
    judged = [_verdict(kind, where, curve, result) for kind, where, curve in entries]
    never = "it never ran on these sequences"
    return judged + [
        {"where": name, "kind": "scores", "verdict": NOT_MEASURED, "text": f"{name}: {NOT_MEASURED}, because {never}."}
        for name in result["never_ran"]
    ]


def _verdict(kind: str, where: str, curve: dict, result: dict) -> dict:
    need, size, (low, high) = curve["need"], curve["size"], curve["interval"]
    verdict = judge(need, size)
    costs = {entry["rank"]: entry["cost"] for entry in curve["ranks"]}
    below = max((rank for rank in costs if rank < need), default=None)
    subject, name = ("the scores", "head") if kind == "scores" else ("the values", "value")
    text = f"{where}, {subject}: {WORDS[verdict].format(size=name)}. Rank {need} of {size} (95 % interval {low} to {high}) costs "
    text += f"{100 * max(0.0, costs[need]):.2g} % of the {result['metric']}"
    if below is not None:
        text += f", and rank {below} costs {100 * costs[below]:.2g} %"
    largest = max(layer["head_size"] for layer in result["layers"])
    if kind == "scores" and size > largest:
        text += f". The head size is {largest}; mixing of scores gives a head more directions"
    if result["tokens_of_basis"] < TOKENS_OF_A_DIRECTION * size:
        text += f". The basis has only {result['tokens_of_basis']} tokens, so a cut looks dearer than it is; give more --sequences"
    return {"where": where, "kind": kind, "verdict": verdict, "need": need, "size": size, "text": f"{text}."}
