"""The complexity table of the MHE poster: parameters of one attention sublayer, by formula and counted on built layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.parts import evaluate
from fairseq_lowrank.records import formats

FORMULAS = {
    "mha": ("O(n²)", "3·d²·n²"),
    "sha": ("O(n)", "3·d²·n"),
    "mqa": ("O(n²)", "d²·n² + 2·d²·n"),
    "skv": ("O(n²)", "2·d²·n²"),
    "el": ("O(n²)", "d²·n²"),
    "mhe-add": ("O(n)", "3·d²·n + 3·d·n"),
    "mhe-mul": ("O(n)", "3·d²·n + 3·d·n"),
}
"""By method, growth with the number of heads n, and parameters of the projections in n and the head size d."""


def rows(heads: int, head_dim: int) -> list[dict]:
    """Return the table for one attention sublayer without its output projection, smallest first."""
    sizes, found = {"n": heads, "d": head_dim}, []
    for preset, (growth, formula) in FORMULAS.items():
        with torch.device("meta"):
            layer = build_attention(preset, heads * head_dim, heads, self_attention=True, bias=False)
        built = sum(parameter.numel() for parameter in layer.parameters()) - layer.out_proj.weight.numel()
        numbers = {"parameters": evaluate(formula, sizes), "built": built}
        found.append({"attention": preset, "growth": growth, "formula": formula.replace("·", ""), **numbers})
    found.sort(key=lambda row: row["parameters"])
    return [row | {"over_sha": row["parameters"] - found[0]["parameters"]} for row in found]


def section(heads: int = 12, head_dim: int = 64) -> Iterator[str]:
    """Yield the table as Markdown, for the poster's encoder."""
    header = ["", "growth", "formula", f"n {heads}, d {head_dim}", "built layer", "over sha"]
    cells = [
        [str(value) if isinstance(value, str) else f"{value:,}" for value in row.values()]
        for row in rows(heads, head_dim)
    ]
    yield "One attention sublayer without its output projection; n heads of size d, width n·d."
    yield formats.markdown(header, cells)
