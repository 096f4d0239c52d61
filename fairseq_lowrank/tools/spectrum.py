"""How far from low rank an attention matrix is, read from its singular values.

The measures follow the Mixhead paper's section 4.4.1: after the softmax hardly any singular value is exactly zero, so a
matrix counts as of low rank when a few singular values hold most of their sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CURVE_POINTS = 101
LARGEST_CONDITION = 1e5
"""Of an M whose mixing is undone: matrices come in float32, so that the patterns keep two digits."""


def singular_values(matrices: Tensor) -> Tensor:
    """Singular values in descending order, for any number of matrices at once.

    Args:
        matrices: `[..., T, S]`; half precision is computed in float32. Rows and columns of zeros (padding) add only
            zeros at the end, so sequences of different lengths can share a batch.

    Returns:
        `[..., min(T, S)]`.
    """
    if matrices.dtype in (torch.float16, torch.bfloat16):
        matrices = matrices.float()
    return torch.linalg.svdvals(matrices)


def shares(values: Tensor) -> Tensor:
    """Each singular value's part of their sum, `[..., R]`; an all-zero matrix gives zeros."""
    return values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)


def cumulative_curve(values: Tensor) -> Tensor:
    """Normalised cumulative singular values (Mixhead paper, figures 1 and 3): point k is the share of the first k.

    Args:
        values: singular values in descending order, `[..., R]`.

    Returns:
        `[..., R + 1]`, from 0 to 1; equal singular values give the diagonal, rank one jumps to 1 at the first step.
    """
    return F.pad(shares(values).cumsum(-1), (1, 0))


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares: between 1 (rank one) and R (all equal).

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    return torch.special.entr(shares(values)).sum(-1).exp()


def area_under_curve(values: Tensor) -> Tensor:
    """Area under the cumulative curve over [0, 1]: 0.5 where all singular values are equal, near 1 at rank one."""
    return torch.trapezoid(cumulative_curve(values), dx=1 / values.size(-1))


def mass_in_first(values: Tensor, count: int) -> Tensor:
    """Share of the sum held by the first `count` singular values, e.g. the first d_k."""
    if count < 1:
        raise ValueError(f"count is {count}, must be at least 1")
    return shares(values)[..., :count].sum(-1)


def resample(curve: Tensor, points: int = CURVE_POINTS) -> Tensor:
    """A cumulative curve `[..., R + 1]` at `points` places even over [0, 1], so that lengths can be averaged."""
    flat = curve.reshape(-1, 1, curve.size(-1))
    flat = F.interpolate(flat, size=points, mode="linear", align_corners=True)
    return flat.reshape(*curve.shape[:-1], points)


def measures(values: Tensor, head_dim: int) -> dict[str, Tensor]:
    """All scalar measures of singular values `[..., R]`, each `[...]`.

    `rank_share` is the effective rank as a part of the greatest possible rank R.
    """
    rank = effective_rank(values)
    return {
        "effective_rank": rank,
        "rank_share": rank / values.size(-1),
        "area": area_under_curve(values),
        "mass_in_head_dim": mass_in_first(values, head_dim),
    }


BOUND = ("pattern_rank", "others_rank", "c", "d", "bound", "mixed_rank", "tolerance")
"""The measures of :func:`rank_bound`."""


def rank_bound(patterns: Tensor, matrix: Tensor | None = None) -> dict[str, Tensor]:
    """Compute Marsaglia's lower bound on the rank of mixed heads (Mixhead paper, theorem 2, equations 17 to 19).

    Mixed head i is A + B: its own part A = M[i, i] P_i, and the part of the other heads, B = Σ_{j≠i} M[j, i] P_j. With
    d = dim(R_A ∩ R_B) for row spaces, c = dim(C_A ∩ C_B) for column spaces, rank(A + B) ≥ rank(A) + rank(B) − c − d.
    An intersection is counted by ranks: d = rank(A) + rank(B) − rank([A; B]), and c the same with [A B].

    A rank is numerical: the number of singular values above max(T, S)·ε·σ, for ε of the patterns' type and σ the greatest
    singular value of all A, B and A + B. One tolerance for all of them keeps the bound comparable with the rank.

    Args:
        patterns: P before mixing, `[H, T, S]`; computed in float64.
        matrix: M `[H, H]` (indices j, i), or `[T, H, H]` with a matrix for each query; None for heads that are not mixed.

    Returns:
        By the names of :data:`BOUND`, each `[H]` in float64: the rank of A, that of B, c, d, the bound, the rank of A + B,
        and the tolerance.
    """
    epsilon = torch.finfo(patterns.dtype).eps
    patterns = patterns.double()
    heads = torch.arange(len(patterns))
    if matrix is None:
        matrix = torch.eye(len(patterns), dtype=torch.float64)
    matrix = matrix.double()
    own = (
        torch.einsum("ti,its->its", matrix[:, heads, heads], patterns)
        if matrix.dim() == 3
        else (matrix.diagonal()[:, None, None] * patterns)
    )
    mixed = torch.einsum("tji,jts->its" if matrix.dim() == 3 else "ji,jts->its", matrix, patterns)
    others = mixed - own
    parts = (own, others, torch.cat((own, others), 2), torch.cat((own, others), 1), mixed)
    values = [torch.linalg.svdvals(part) for part in parts]
    largest = max(part[..., 0].max() for part in (values[0], values[1], values[4]))
    tolerance = max(patterns.shape[1:]) * epsilon * largest
    own_rank, others_rank, columns, rows, mixed_rank = ((part > tolerance).sum(-1).double() for part in values)
    c, d = own_rank + others_rank - columns, own_rank + others_rank - rows
    found = (own_rank, others_rank, c, d, own_rank + others_rank - c - d, mixed_rank, tolerance.expand(len(patterns)))
    return dict(zip(BOUND, found, strict=True))


@contextlib.contextmanager
def before_mixing(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While open, gather `(P, M)` of the last call of every layer that mixes probabilities, by the layer's name.

    P is `[H, B, T, S]`, computed by the same layer without its mixing; M is `[H, H]` or `[B, T, H, H]`.
    """
    from fairseq_lowrank.tools.architecture import attention_layers

    found: dict[str, tuple[Tensor, Tensor]] = {}
    handles, changed = [], []
    for layer in attention_layers(model):
        mixing = getattr(layer.module, "mixing", None)
        if mixing is None:
            continue
        operations = []

        def operation(query, inputs=None, mixing=mixing, operations=operations):
            operations[:] = [type(mixing).operation(mixing, query, inputs)]
            return operations[0]

        def again(module, args, kwargs, output, name=layer.name, mixing=mixing, operations=operations):
            module.mixing = None
            try:
                kwargs = {**kwargs, "need_weights": True, "need_head_weights": True}
                patterns = module.forward(*args, **kwargs)[1]
            finally:
                module.mixing = mixing
            found[name] = patterns, operations[0].mixing_matrix()

        mixing.operation = operation
        changed.append(mixing)
        handles.append(layer.module.register_forward_hook(again, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for mixing in changed:
            del mixing.operation


CONTROLS = ("without mixing", "random M", "random off-diagonal", "shuffled off-diagonal")


def controls(mixed: Tensor, matrix: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What a layer's mixed heads would be with another M in place of the learned one, its own patterns P_j kept.

    P̄_i = Σ_j M[j, i] P_j is solved for P. *Without mixing* is P itself. A *random M* is I + R, the entries of R normal and
    ‖R‖_F = ‖M − I‖_F: as far from I as the learned one. *Random off-diagonal* keeps the diagonal of M, which only scales, and
    draws what is off it, of either sign, at the same norm: so the weights of a mixed head have another sum, and where M is
    mostly negative there, as one that damps is, the control takes away less of what all heads share. *Shuffled off-diagonal*
    exchanges what is off the diagonal within each column: diagonal, norm and sum of a mixed head's weights stay, and
    what is lost is which of the other heads each weight was for.

    Args:
        mixed: P̄, `[H, ...]`.
        matrix: M, `[H, H]` (indices j, i).
        generator: draws R, whose entries also order each column again.

    Returns:
        By the names of :data:`CONTROLS`, each `[H, ...]` in float64.

    Raises:
        ValueError: M is singular, or so near it that P cannot be told from P̄.
    """
    matrix, identity = matrix.double(), torch.eye(len(matrix), dtype=torch.float64)
    if not torch.linalg.cond(matrix) < LARGEST_CONDITION:
        raise ValueError(f"M of {len(matrix)} heads is singular, or nearly: what the heads were before mixing is lost")
    patterns = torch.linalg.solve(matrix.t(), mixed.double().flatten(1)).view(mixed.shape)
    noise = torch.randn(matrix.shape, dtype=torch.float64, generator=generator)
    off = noise - torch.diag(noise.diagonal())
    learned_off = matrix - torch.diag(matrix.diagonal())
    # the rows of a column but for the diagonal's, in the order of what was drawn and in their own
    order, places = (
        keys.clone().fill_diagonal_(torch.inf).argsort(dim=0, stable=True)[:-1]
        for keys in (noise, torch.zeros_like(noise))
    )
    others = {
        "random M": identity + noise * ((matrix - identity).norm() / noise.norm()),
        "random off-diagonal": torch.diag(matrix.diagonal()) + off * (learned_off.norm() / off.norm().clamp_min(1e-30)),
        "shuffled off-diagonal": torch.diag(matrix.diagonal()).scatter(0, places, matrix.gather(0, order)),
    }
    mix = {name: torch.einsum("ji,j...->i...", other, patterns) for name, other in others.items()}
    return {"without mixing": patterns, **mix}


class Spectra:
    """Gathers the spectra of attention matrices, layer by layer and head by head, and averages them over sequences."""

    def __init__(self) -> None:
        self.layers: dict[tuple[str, int], list[dict[str, Tensor]]] = {}

    def add(
        self, site: str, layer: int, head_dim: int, weights: Tensor, bound: dict[str, Tensor] | None = None
    ) -> None:
        """Add one sequence's matrices of a layer, `[H, 1, T, S]`, and their :func:`rank_bound` if it was computed."""
        values = singular_values(weights[:, 0])
        found = {"curve": resample(cumulative_curve(values)), **measures(values, head_dim)}
        found |= bound or {}
        found["head_dim"] = torch.full_like(found["area"], head_dim)
        found["length"] = torch.full_like(found["area"], values.size(-1))
        self.layers.setdefault((site, layer), []).append(found)

    def summary(self) -> dict[str, dict]:
        """By site: `layers`, each with its measures, mean curve and heads, and the `mean` over layers.

        `length` is the mean of the matrices' smaller sides.
        """
        sites: dict[str, dict] = {}
        for (site, layer), found in sorted(self.layers.items()):
            heads = {name: torch.stack([one[name] for one in found]).mean(0) for name in found[0]}
            head_dim, length = int(heads.pop("head_dim")[0]), float(heads.pop("length")[0])
            rows = [{name: value[head].tolist() for name, value in heads.items()} for head in range(len(heads["area"]))]
            entry = {"layer": layer, "head_dim": head_dim, **_mean(heads), "heads": rows}
            sites.setdefault(site, {"length": length, "layers": []})["layers"].append(entry)
        for site in sites.values():
            names = [name for name in site["layers"][0] if name not in ("layer", "head_dim", "heads")]
            site["mean"] = {
                name: torch.tensor([layer[name] for layer in site["layers"]], dtype=torch.float64).mean(0).tolist()
                for name in names
            }
        return sites


def _mean(heads: dict[str, Tensor]) -> dict:
    return {name: value.double().mean(0).tolist() for name, value in heads.items()}


def draw_layers(results: list[dict], site: str):
    """A plot for each layer: thin lines for heads, a bold one for their mean, a colour for each checkpoint.

    As in the Mixhead paper's figure 1; returns the matplotlib figure.
    """
    from fairseq_lowrank.tools import pictures

    count = max(len(result["sites"][site]["layers"]) for result in results)
    figure, plots = pictures.grid(count)
    styles = pictures.styles(pictures.kind_of_flags(result["attention"]) for result in results)
    for number, axes in enumerate(plots):
        for style, result in zip(styles, results, strict=True):
            layers = result["sites"][site]["layers"]
            if number < len(layers):
                for head in layers[number]["heads"]:
                    _plot(axes, head["curve"], color=style["color"], linewidth=0.5, alpha=0.25)
                # above the heads of every checkpoint
                label = pictures.plain(result["label"])
                _plot(axes, layers[number]["curve"], **style, linewidth=2, label=label, zorder=3)
        axes.set_title(f"{site}, layer {number}", fontsize=9)
    plots[0].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"{_about(results, site)}: heads (thin) and their mean (bold)", fontsize=10)
    _name_axes(figure)
    return figure


def draw_mean(results: list[dict], site: str):
    """Thin lines for layers, a bold one for their mean, a colour for each checkpoint (Mixhead paper, figure 3)."""
    from fairseq_lowrank.tools import pictures

    figure, axes = pictures.new_figure(5.5, 4.4)
    for style, result in zip(
        pictures.styles(pictures.kind_of_flags(result["attention"]) for result in results), results, strict=True
    ):
        for layer in result["sites"][site]["layers"]:
            _plot(axes, layer["curve"], color=style["color"], linewidth=0.7, alpha=0.6)
        label = pictures.plain(result["label"])
        _plot(axes, result["sites"][site]["mean"]["curve"], **style, linewidth=2.4, label=label)
    axes.set_title(f"{_about(results, site)}: layers (thin), their mean (bold)", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    _name_axes(figure)
    return figure


def _about(results: list[dict], site: str) -> str:
    """A site with the length of its sequences and its head sizes."""
    found = [result["sites"][site] for result in results]
    lengths = dict.fromkeys(f"{entry['length']:.4g}" for entry in found)
    sizes = dict.fromkeys(str(layer["head_dim"]) for entry in found for layer in entry["layers"])
    return f"{site} attention, n = {', '.join(lengths)}, d_k = {', '.join(sizes)}"


def _plot(axes, curve: list[float], **style) -> None:
    axes.plot([point / (len(curve) - 1) for point in range(len(curve))], curve, **style)
    axes.set(xlim=(0, 1), ylim=(0, 1.01))


def _name_axes(figure) -> None:
    figure.supxlabel("share of singular values, largest first", fontsize=9)
    figure.supylabel("cumulative share of their sum", fontsize=9)
