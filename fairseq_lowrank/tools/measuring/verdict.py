"""Say in words what a measurement means."""

from __future__ import annotations

import math

FEW, MOST, ALL, NONE, NOT_MEASURED = "few", "most", "all", "no verdict", "not measured"
WORDS = {
    FEW: "uses few of its directions",
    MOST: "uses most of its directions",
    ALL: "uses all of its directions: the {size} size may bind",
}
TOLERANCE = 0.002
"""The share of what attention is worth that a cut may cost. At 0.2 % the needs of all known answers are right, at 1 % 16 of 19.

docs/evidence/measure.md has the models, and the rule that was written before they were measured.
"""
WORTH = 0.01
"""If attention patterns are worth less than this share of the loss, there is no verdict."""
TOKENS_OF_A_DIRECTION = 10
"""With fewer tokens for each direction of a head, the basis does not hold for other sequences, and there is no verdict."""
LIMIT = "A cut shows what this model uses now, and not what a model that was trained under a cap would do without it."


def bounds(size: int) -> tuple[int, int]:
    """Return the greatest needs that are few, and that are most, of a number of directions."""
    return size // 2, 7 * size // 8


def judge(need: int, size: int) -> str:
    """Return few (at most half of the directions), all (more than seven eighths), or most."""
    few, most = bounds(size)
    if need <= few:
        return FEW
    return MOST if need <= most else ALL


def sequences_needed(need: int, interval: tuple[int, int], size: int, held_out: int) -> int:
    """Return with about how many held-out sequences the interval of the need would lie within one verdict.

    The interval shrinks with the square root of their number. A need at the bound counts as half a rank away from it.
    """
    low, high = interval
    edges = [bound + 0.5 for bound in bounds(size) if low <= bound < high]
    factor = max((high - need if edge > need else need - low) / max(0.5, abs(edge - need)) for edge in edges)
    return math.ceil(held_out * max(2.0, factor**2))


def verdicts(result: dict) -> list[dict]:
    """Return a verdict for the whole model, for each site, for values, and for each layer that is not measured.

    Each has ``where``, ``kind``, ``verdict`` and ``text``, and unless not measured also ``need`` and ``size``.
    """
    cuts = result["cuts"]
    sites = cuts["scores"]["sites"]
    found = {"all heads": cuts["scores"]["all"], **(sites if len(sites) > 1 else {})}
    entries = [("scores", where, curve) for where, curve in found.items()]
    if "values" in cuts:
        entries.append(("values", "all heads", cuts["values"]["all"]))
    judged = [_verdict(kind, where, curve, result) for kind, where, curve in entries]
    never = "it never ran on these sequences"
    return judged + [
        {"where": name, "kind": "scores", "verdict": NOT_MEASURED, "text": f"{name}: {NOT_MEASURED}, because {never}."}
        for name in result["never_ran"]
    ]


def _verdict(kind: str, where: str, curve: dict, result: dict) -> dict:
    need, size, (low, high) = curve["need"], curve["size"], curve["interval"]
    begin = f"{where}, the {kind}: "
    found = {"where": where, "kind": kind, "need": need, "size": size, "interval": [low, high]}
    part = "attention patterns" if kind == "scores" else "the values that attention reads"
    if curve["worth_share"] < WORTH:
        rest = "make all keys alike" if kind == "scores" else "replace all values by their mean"
        text = f"{part} hardly matter here: no verdict. To {rest} costs {_percent(curve['worth_share'])} of the "
        text += f"{result['metric']}, from {result['value']:.4g} to {curve['ranks'][0]['value']:.4g}."
        return found | {"verdict": NONE, "text": begin + text}
    least = TOKENS_OF_A_DIRECTION * size
    if (tokens := result["tokens_of_basis"]) < least:
        text = f"no verdict. The basis has {tokens} tokens, and {size} directions need {least}. Give more --sequences."
        return found | {"verdict": NONE, "text": begin + text}
    ends = judge(low, size), judge(high, size)
    if ends[0] == ends[1]:
        verdict = ends[0]
        text = f"{WORDS[verdict].format(size='head' if kind == 'scores' else 'value')}. "
    else:
        verdict = f"between {ends[0]} and {ends[1]}"
        count = sequences_needed(need, (low, high), size, result["sequences_held_out"])
        more = result["sequences_of_basis"] + result["sequences_held_out"]
        more = max(more, math.ceil(more * count / result["sequences_held_out"]))
        text = f"{verdict} of its directions are used: measure more sequences, about {more} in all. "
    text += f"At most {need} of {size} are needed (95 % interval {low} to {high})"
    costs = {entry["rank"]: entry["cost"] for entry in curve["ranks"]}
    text += f": rank {need} costs {_percent(max(0.0, costs[need]))} of what {part} are worth"
    if (below := max((rank for rank in costs if rank < need), default=None)) is not None:
        text += f", and rank {below} costs {_percent(costs[below])}"
    if kind == "scores" and where == "all heads":
        own = result["cuts"]["own"]["all"]["need"]
        found["bracket"] = [own, need]
        text += f". The need is between {own} and {need} of {size}: {own} if each sequence may choose its directions"
    text += ". By tolerance it is at most " + ", ".join(f"{rank} ({_percent(share)})" for share, rank in curve["needs"])
    largest = max(layer["head_size"] for layer in result["layers"])
    if kind == "scores" and size > largest:
        text += f". The head size is {largest}; mixing of scores gives a head more directions"
    return found | {"verdict": verdict, "text": f"{begin}{text}. The basis has {tokens} tokens."}


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
