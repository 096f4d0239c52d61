"""An experiment on fixed and standard heads: how near does a layer of h heads of size d/h come to one with larger heads?

Bhojanapalli et al. 2020, Theorem 2: for h > d/d_p, let h heads of size d_p share one bilinear form U of rank d_p. Let
A = Σ_i V_i W_i, the product of values and outputs, have full rank. The layer is then

    g(X) = softmax(X U Xᵀ / √d_p) X A,

and no standard layer f with the same d and h, so with head size d/h < d_p, equals it for every X.

The paper's proof is in its appendix, which we do not have. A shorter proof: let B_i = V_i W_i and U_i belong to the heads of f,
in units of their scales, and let X = t·Y for small t. The terms of first order in t give Σ_i B_i = A. A has rank d, and each B_i
has rank d/h at most. So their row spaces are independent, and B_i = Π_i A with Π_i Π_i = Π_i, Π_i Π_j = 0. Let n = 2, and let z
be the difference of the two inputs. The terms of third order give Σ_i (x U_i zᵀ) z B_i = (x U zᵀ) z A for all x and z.
Multiplied by A⁻¹ Π_i this is x U_i zᵀ = x U zᵀ if z Π_i ≠ 0. So U_i = U, which has rank d_p > d/h. But U_i cannot have this rank.

Here inputs are from a space of dimension r, which is d or less, as an embedding of rank r gives them. If r ≤ d/h, one
standard head can compute the same as the larger ones: on this space U and A have rank r at most.

The experiment has neither the paper's own construction nor its bound on the distance between f and g. It measures how near
Adam comes, which is an upper bound on the distance. As a control, layers with heads of size d_p reach 0 in the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import Progress

BATCH, HELD_OUT = 32, 512


@dataclass(frozen=True)
class Layer:
    """A layer of attention heads without biases.

    Scores are x U_i yᵀ/√size with U_i = query_i key_iᵀ. Values and outputs are B_i = value_i output_i.

    Args:
        query, key, value: [h, d, size].
        output: [h, size, d].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of the layer, [B, n, d] → [B, n, d]."""
        x = x.unsqueeze(1)
        scores = (x @ self.query) @ (x @ self.key).mT / math.sqrt(self.query.size(-1))
        return (scores.softmax(-1) @ (x @ self.value) @ self.output).sum(1)


@dataclass
class LayerFit:
    """The error of a fitted layer of `heads` heads of size `head_dim`, on inputs of rank `input_rank`.

    `error` is √(Σ‖f(X) − g(X)‖² / Σ‖g(X)‖²) over held-out X. `largest` is the greatest ‖f(X) − g(X)‖ / ‖g(X)‖ of a single X.
    """

    head_dim: int
    heads: int
    input_rank: int
    error: float
    largest: float


def theorem_layer(embed_dim: int, heads: int, head_dim: int, *, generator: torch.Generator) -> Layer:
    """Return a layer of the theorem: one bilinear form of rank d_p for all heads; values and outputs of full rank."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    query, key = (drawn(1, embed_dim, head_dim) / embed_dim**0.5 * 2 for _ in range(2))
    value, output = drawn(heads, embed_dim, head_dim), drawn(heads, head_dim, embed_dim)
    scale = (heads * head_dim * embed_dim) ** -0.25
    return Layer(query.expand(heads, -1, -1), key.expand(heads, -1, -1), value * scale, output * scale)


def inputs(count: int, n: int, basis: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return `count` normal inputs [count, n, d] with variance 1 from the span of the rows of `basis`, [r, d]."""
    rank, embed_dim = basis.shape
    z = torch.randn(count, n, rank, dtype=torch.float64, generator=generator)
    return z @ basis * math.sqrt(embed_dim / rank)


def random_basis(rank: int, embed_dim: int, *, generator: torch.Generator) -> Tensor:
    """Return random orthonormal rows [r, d]."""
    return torch.linalg.qr(torch.randn(embed_dim, rank, dtype=torch.float64, generator=generator)).Q.mT


def fit(target: Layer, head_dim: int, basis: Tensor, n: int, *, steps: int, generator: torch.Generator) -> Layer:
    """Fit a layer with the same number of heads, of size `head_dim`, to `target` by Adam, on inputs from a span."""
    heads, embed_dim, _ = target.value.shape
    shapes = [(heads, embed_dim, head_dim)] * 3 + [(heads, head_dim, embed_dim)]
    parameters = [torch.randn(shape, dtype=torch.float64, generator=generator) / embed_dim**0.5 for shape in shapes]
    layer = Layer(*(parameter.requires_grad_() for parameter in parameters))
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = inputs(BATCH, n, basis, generator=generator)
        wanted = target(x)
        optimizer.zero_grad()
        ((layer(x) - wanted).square().sum() / wanted.square().sum()).backward()
        optimizer.step()
        schedule.step()
    return Layer(*(parameter.detach() for parameter in parameters))


def errors(layer: Layer, target: Layer, x: Tensor) -> tuple[float, float]:
    """Return the error over all inputs, and the largest error of a single input."""
    wanted, missed = target(x), layer(x) - target(x)
    each = missed.flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    return (missed.norm() / wanted.norm()).item(), each.max().item()


def experiment(
    n: int = 8,
    embed_dim: int = 16,
    heads: int = 8,
    head_dim: int = 8,
    input_ranks: Iterable[int] | None = None,
    *,
    steps: int = 500,
    seed: int = 1,
) -> list[LayerFit]:
    """Return the errors of layers with heads of size d/h to d_p, on inputs of each rank.

    Args:
        n: sequence length.
        embed_dim: d.
        heads: h, the number of heads of both layers.
        head_dim: d_p, the size of the fixed heads.
        input_ranks: dimensions of the spaces of inputs; by default d, d/2, … down to d/h.
        steps: the number of updates of each fit.

    Raises:
        UserError: the theorem does not apply to these sizes.
    """
    if n < 2 or steps < 1 or embed_dim % heads or not embed_dim // heads < head_dim <= embed_dim:
        raise UserError(
            f"length {n}, embedding size {embed_dim}, heads {heads}, head size {head_dim}, steps {steps}: expected a length of at "
            "least 2, heads that divide the embedding size, d/h < head size <= d, and at least 1 step."
        )
    standard = embed_dim // heads
    halves = {max(embed_dim >> power, standard) for power in range(embed_dim.bit_length())}
    ranks = sorted(set(input_ranks or halves), reverse=True)
    if not 1 <= ranks[-1] <= ranks[0] <= embed_dim:
        raise UserError(f"input ranks {ranks}: expected 1 to {embed_dim}, the embedding size.")
    sizes = sorted({standard, *(standard << power for power in range(8) if standard << power < head_dim), head_dim})
    generator = torch.Generator().manual_seed(seed)
    target = theorem_layer(embed_dim, heads, head_dim, generator=generator)
    fits = []
    with Progress("fitting", len(ranks) * len(sizes), "fits") as progress:
        for rank in ranks:
            basis = random_basis(rank, embed_dim, generator=generator)
            held_out = inputs(HELD_OUT, n, basis, generator=generator)
            for size in sizes:
                layer = fit(target, size, basis, n, steps=steps, generator=generator)
                fits.append(LayerFit(size, heads, rank, *errors(layer, target, held_out)))
                progress.update()
    return fits


def as_rows(fits: list[LayerFit]) -> list[dict]:
    return [asdict(fit) for fit in fits]
