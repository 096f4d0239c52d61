"""Say in words what a measurement means."""

from __future__ import annotations

import math

FEW, MOST, ALL, NONE, NOT_MEASURED = "few", "most", "all", "no verdict", "not measured"
WORDS = {FEW: "few are used", MOST: "most are used", ALL: "the {size} size may bind"}
TOLERANCE = 0.002
"""The share of what attention is worth that a cut may cost. At 0.2 % the needs of all known answers are right, at 1 % 16 of 19.

docs/evidence/measure.md has the models, and the rule that was written before they were measured.
"""
WORTH = 0.01
"""If attention patterns are worth less than this share of the loss, there is no verdict."""
TRAINED = 0.05
"""If a model's loss is not this share below that of the best constant prediction, it is hardly trained, and there is no verdict."""
TOKENS_OF_A_DIRECTION = 10
"""With fewer tokens for each direction of a head, the basis does not hold for other sequences, and there is no verdict."""
UNSETTLED = "this data cannot settle it"


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

    Each has ``where``, ``kind``, ``verdict`` and ``text``, and unless not measured also ``need``, ``size`` and ``interval``.
    """
    cuts = result["cuts"]
    sites = cuts["scores"]["sites"]
    found = {"all heads": cuts["scores"]["all"], **(sites if len(sites) > 1 else {})}
    entries = [("scores", where, curve) for where, curve in found.items()]
    if "values" in cuts:
        entries.append(("values", "all heads", cuts["values"]["all"]))
    judged = [_verdict(kind, where, curve, result) for kind, where, curve in entries]
    return judged + [
        {"where": name, "kind": "scores", "verdict": NOT_MEASURED, "text": f"{name}: it never ran on these sequences"}
        for name in result["never_ran"]
    ]


def _verdict(kind: str, where: str, curve: dict, result: dict) -> dict:
    need, size, (low, high) = curve["need"], curve["size"], curve["interval"]
    found = {"where": where, "kind": kind, "need": need, "size": size, "interval": [low, high]}
    begin = "" if where == "all heads" else f"{where}: "
    if reason := hardly_trained(result) or _too_little(kind, curve, result):
        return found | {"verdict": NONE, "text": f"{begin}no verdict: {reason}"}
    ends = judge(low, size), judge(high, size)
    heads = sum(layer["heads"] for layer in result["layers"] if where in ("all heads", layer["site"]))
    who = f"some head of the {heads}" if heads > 1 else "the head"
    what = "directions" if kind == "scores" else "directions of its values"
    if ends[0] == ends[1]:
        words = WORDS[ends[0]].format(size="head" if kind == "scores" else "value")
        return found | {"verdict": ends[0], "text": f"{begin}{who} needs {need} of {size} {what}: {words}"}
    count = sequences_needed(need, (low, high), size, result["sequences_held_out"])
    more = result["sequences_of_basis"] + result["sequences_held_out"]
    more = max(more, math.ceil(more * count / result["sequences_held_out"]))
    text = f"{begin}{who} needs {low} to {high} of {size} {what}: {_remedy(more, result)}"
    return found | {"verdict": f"between {ends[0]} and {ends[1]}", "text": text}


def hardly_trained(result: dict) -> str:
    """Return why a model is hardly trained; empty if it is trained, or if no constant prediction is known."""
    value, constant = result["value"], result["constant"]
    if constant is None or not result["less_is_better"] or value <= (1 - TRAINED) * constant:
        return ""
    return f"hardly trained, {result['ignorance']} alone is about as good"


def _too_little(kind: str, curve: dict, result: dict) -> str:
    """Return why attention matters too little, or the basis is too small; empty if neither is so."""
    if curve["worth_share"] < WORTH:
        what = (
            "patterns hardly matter here: to make all keys alike"
            if kind == "scores"
            else "values hardly matter: their mean"
        )
        return f"{what} costs {percent(curve['worth_share'])} of the loss"
    least = TOKENS_OF_A_DIRECTION * curve["size"]
    if (tokens := result["tokens_of_basis"]) >= least:
        return ""
    sequences = result["sequences_of_basis"] + result["sequences_held_out"]
    remedy = _remedy(math.ceil(sequences * least / tokens), result)
    return f"the basis has {tokens} tokens and needs {least}; {remedy}"


def _remedy(sequences: int, result: dict) -> str:
    """Return what to do about too few sequences: nothing if the data has no more."""
    available = result["sequences_available"]
    if available is not None and sequences > available:
        return UNSETTLED
    return f"measure about {sequences:,} sequences"


def answer(result: dict) -> list[str]:
    """Return how good the model is, the verdict, and at most six short lines: need, costs, from below, heads and basis.

    No line has more than 100 letters, and the label is shortened for this.
    """
    verdict, curve = result["verdicts"][0], result["cuts"]["scores"]["all"]
    about = f": {result['metric']} {result['value']:.3g}"
    if result["constant"] is not None:
        about += f"; {result['ignorance']} alone: {result['constant']:.3g}"
    lines = [result["label"][: 100 - len(about)] + about, sentence(verdict["text"])]
    if verdict["verdict"] != NONE:
        need, size, (low, high) = curve["need"], curve["size"], curve["interval"]
        largest = max(layer["head_size"] for layer in result["layers"])
        mixed = f"; heads of {largest}, mixing gives them more" if size > largest else ""
        lines.append(f"need: at most {need} of {size}, 95 % interval {low} to {high}{mixed}")
        below = max((row["rank"] for row in curve["ranks"] if row["rank"] < need), default=need)
        lines += [cost_line(row, result) for row in curve["ranks"] if row["rank"] in (need, below)][::-1]
        own = result["cuts"]["own"]["all"]["need"]
        lines.append(f"from below: {own} of {size}, if each sequence may choose its directions")
    if "heads" in result["cuts"]["scores"] and not hardly_trained(result):
        lines.append(sentence(heads_text(result["cuts"]["scores"]["heads"])))
    basis = f"basis: {result['sequences_of_basis']} sequences, {result['tokens_of_basis']:,} tokens"
    return [*lines, f"{basis}; {result['sequences_held_out']} others are held out"]


def cost_line(row: dict, result: dict) -> str:
    """Return the cost at a rank in the metric's unit, as a share of the model's loss, and as one of the worth."""
    shares = f"{percent(row['of_loss'])} of the loss, {percent(row['cost'])} of the worth"
    return f"rank {row['rank']} costs {row['added']:.2g} {result['unit']}: {shares}"


def heads_text(heads: list[dict]) -> str:
    """Return how many heads need more than half of their directions, if each is cut alone."""
    many = sum(head["need"] > bounds(head["size"])[0] for head in heads)
    idle = sum(head["need"] == 0 for head in heads)
    verb, whose = ("needs", "its") if many == 1 else ("need", "their")
    text = f"{many} of {len(heads)} heads {verb} more than half of {whose} directions"
    return text + (f"; {idle} do nothing alone" if idle else "")


def sentence(text: str) -> str:
    """Return a text with a capital letter at the start."""
    return text[:1].upper() + text[1:]


def percent(share: float) -> str:
    """Return a share in percent with two significant digits, and 0 if it is below 0."""
    value = 100 * max(0.0, share)
    return f"{value:,.0f} %" if value >= 100 else f"{value:.2g} %"
