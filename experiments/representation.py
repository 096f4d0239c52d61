"""An experiment on the representation theorem: which attention matrices can a head of size d_k produce?

Bhojanapalli et al. 2020, Theorem 1 (also Theorem 1 of the Mixhead paper): let X have full row rank. If d_k ≥ n,
softmax(X W_q (X W_k)ᵀ/√d_k) can equal any positive row-stochastic n×n matrix. If d_k < n, there are matrices that it cannot
equal. A constant added to a row of scores does not change the softmax. This saves one dimension, so d_k = n − 1 is enough.

Text does not give X of full row rank: function words repeat, and equal rows of X give equal rows of P (Mixhead paper, §4.4.1).
With X of rank r < n the scores are in an r-dimensional space, and heads of any size miss some matrices. `input_rank` sets r.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import Progress

ONE_HEAD, ONE_MATRIX, ALL_MATRICES = "one head", "h heads mixed into one matrix", "h heads mixed into h matrices"


@dataclass
class Fit:
    """The error of one method at one head size, over all random matrices.

    `error` is the mean of ‖P̂ − P‖_F / ‖P‖_F, and `largest` the largest |P̂ − P| of an entry.
    """

    method: str
    series: str
    head_dim: int
    heads: int
    error: float
    largest: float


def random_row_stochastic(count: int, n: int, *, generator: torch.Generator) -> Tensor:
    """Return `count` positive matrices `[count, n, n]`, with each row uniform on the simplex."""
    exponential = torch.empty(count, n, n, dtype=torch.float64).exponential_(generator=generator)
    return exponential / exponential.sum(-1, keepdim=True)


def random_inputs(n: int, embed_dim: int, rank: int | None = None, *, generator: torch.Generator) -> Tensor:
    """Return normal hidden states `[n, d]` of rank `rank`; by default of full row rank, with probability one."""
    if rank is not None and not 1 <= rank <= min(n, embed_dim):
        raise UserError(
            f"--input-rank {rank}: expected 1 to {min(n, embed_dim)}, the smaller of length and embedding size."
        )
    if rank is None and embed_dim < n:
        raise UserError(
            f"--embed-dim {embed_dim}: X needs full row rank. Use at least the length {n}, or --input-rank."
        )
    if rank in (None, n):
        return torch.randn(n, embed_dim, dtype=torch.float64, generator=generator)
    z = torch.randn(n, rank, dtype=torch.float64, generator=generator)
    return z @ torch.randn(rank, embed_dim, dtype=torch.float64, generator=generator)


def attention_matrix(x: Tensor, w_query: Tensor, w_key: Tensor) -> Tensor:
    """Return softmax((X W_q)(X W_k)ᵀ / √d_k), `[..., n, n]`, for x `[n, d]` and weights `[..., d, d_k]`."""
    scores = (x @ w_query) @ (x @ w_key).mT
    return (scores / math.sqrt(w_query.size(-1))).softmax(-1)


def closed_form(x: Tensor, target: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return W_q and W_k of head size d_k that give `target`, exactly if d_k ≥ n − 1.

    log P has rank n at most. Without each row's mean, which does not change the softmax, it has rank n − 1 at most. The
    truncated singular value decomposition U Σ Vᵀ of this matrix gives the queries U√Σ and keys V√Σ. The pseudo-inverse of X
    converts them to weights. Below n − 1 this is the nearest fit to the *scores*.

    Args:
        x: hidden states `[n, d]` of full row rank.
        target: positive row-stochastic matrices `[..., n, n]`.

    Returns:
        W_q and W_k, each `[..., d, d_k]`.
    """
    if torch.linalg.matrix_rank(x) < x.size(0):
        raise ValueError(f"X of shape [{x.size(0)}, {x.size(1)}]: expected full row rank")
    scores = target.log()
    scores = (scores - scores.mean(-1, keepdim=True)) * math.sqrt(head_dim)
    u, s, vt = torch.linalg.svd(scores)
    kept = min(head_dim, s.size(-1))
    root = s[..., :kept].sqrt().unsqueeze(-2)
    unused = (0, head_dim - kept)
    query = F.pad(u[..., :kept] * root, unused)
    key = F.pad(vt.mT[..., :kept] * root, unused)
    inverse = torch.linalg.pinv(x)
    return inverse @ query, inverse @ key


def relative_error(fitted: Tensor, target: Tensor) -> Tensor:
    """Return ‖P̂ − P‖_F / ‖P‖_F over the last two dimensions."""
    return (fitted - target).flatten(-2).norm(dim=-1) / target.flatten(-2).norm(dim=-1)


def gradient_fit(
    x: Tensor,
    target: Tensor,
    head_dim: int,
    heads: int = 1,
    *,
    steps: int,
    learning_rate: float = 0.1,
    generator: torch.Generator,
) -> Tensor:
    """Fit W_q, W_k (and, with several heads, the mixing weights M) by Adam on the squared error.

    With X of full row rank every query matrix is reachable. So the parameters are Q = X W_q and K = X W_k, which are better
    conditioned. The pseudo-inverse of X gives the weights before the result is computed. With X of a lower rank r the parameters
    are coordinates in an orthonormal basis of its columns, [n, r].
    Mixing is P̄_i = Σ_j M[j,i] P_j (Mixhead paper, equation 12).

    Args:
        x: hidden states `[n, d]`.
        target: `[R, t, n, n]`: R independent problems with t matrices each. t is 1 for one head, and 1 or h for h mixed heads.
        heads: the number h of mixed heads; 1 means no mixing.

    Returns:
        The fitted matrices `[R, t, n, n]`.
    """
    problems, wanted, n, _ = target.shape
    basis = column_basis(x)
    shape = (problems, heads, n if basis is None else basis.size(1), head_dim)
    query = torch.randn(shape, dtype=target.dtype, generator=generator).requires_grad_()
    key = torch.randn(shape, dtype=target.dtype, generator=generator).requires_grad_()
    initial = torch.eye(heads) if wanted == heads else torch.full((heads, wanted), 1 / heads)
    mixing = initial.to(target.dtype).repeat(problems, 1, 1).requires_grad_(heads > 1)

    def mix(matrices: Tensor) -> Tensor:
        return torch.einsum("rjts,rji->rits", matrices, mixing)

    optimizer = torch.optim.Adam([query, key, mixing] if heads > 1 else [query, key], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scale = 1 / math.sqrt(head_dim)

    def projected() -> tuple[Tensor, Tensor]:
        return (query, key) if basis is None else (basis @ query, basis @ key)

    for _ in range(steps):
        optimizer.zero_grad()
        q, k = projected()
        fitted = mix((q @ k.mT * scale).softmax(-1))
        relative_error(fitted, target).square().sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        inverse, (q, k) = torch.linalg.pinv(x), projected()
        return mix(attention_matrix(x, inverse @ q, inverse @ k))


def column_basis(x: Tensor) -> Tensor | None:
    """Return orthonormal columns with the same span as those of x `[n, d]`; None if the span is ℝⁿ."""
    rank = int(torch.linalg.matrix_rank(x))
    return None if rank == x.size(0) else torch.linalg.svd(x).U[:, :rank]


def default_head_dims(n: int) -> list[int]:
    """Return powers of two, and the head sizes n − 2 … n + 1 around the theorem's bound."""
    powers = [2**i for i in range(n.bit_length()) if 2**i < n - 2]
    between = [n // 4 * 3] if n >= 16 else []
    return sorted({*powers, *between, *(d for d in (n - 2, n - 1, n, n + 1) if d > 0)})


def experiment(
    n: int = 16,
    heads: int = 4,
    matrices: int = 4,
    head_dims: Iterable[int] | None = None,
    *,
    embed_dim: int | None = None,
    input_rank: int | None = None,
    steps: int = 1000,
    seed: int = 1,
) -> list[Fit]:
    """Return the error for each head size, for the closed form and for gradient fitting with and without mixing.

    The gradient fits one head to one matrix, h mixed heads to one matrix (the case in section 3.4 of the Mixhead paper), and h
    mixed heads to h unrelated matrices.

    Args:
        n: sequence length.
        heads: number of mixed heads h.
        matrices: number of problems; with h matrices, each problem has `heads` random matrices.
        embed_dim: width d of X, by default n; at least n.
        input_rank: rank of X, by default n; below n there is no closed form.
        steps: number of updates of each gradient fit.
    """
    if n < 2 or heads < 2 or matrices < 1 or steps < 1:
        raise UserError(
            f"length {n}, heads {heads}, matrices {matrices}, steps {steps}: expected at least 2, 2, 1 and 1."
        )
    head_dims = sorted(set(head_dims or default_head_dims(n)))
    if head_dims[0] < 1:
        raise UserError(f"--head-dims {head_dims[0]}: expected a number >= 1.")
    generator = torch.Generator().manual_seed(seed)
    x = random_inputs(n, n if embed_dim is None else embed_dim, input_rank, generator=generator)
    full_rank = input_rank in (None, n)
    target = random_row_stochastic(matrices * heads, n, generator=generator).view(matrices, heads, n, n)
    first = target[:, :1]
    fits = []

    def record(method: str, series: str, head_dim: int, used: int, fitted: Tensor, wanted: Tensor) -> None:
        error, largest = relative_error(fitted, wanted).mean().item(), (fitted - wanted).abs().max().item()
        fits.append(Fit(method, series, head_dim, used, error, largest))

    with Progress("fitting", 4 * len(head_dims), "fits") as progress:
        for head_dim in head_dims:
            if full_rank:
                fitted = attention_matrix(x, *closed_form(x, first, head_dim))
                record("closed form", ONE_HEAD, head_dim, 1, fitted, first)
            progress.update()
            for series, used, wanted in (
                (ONE_HEAD, 1, first),
                (ONE_MATRIX, heads, first),
                (ALL_MATRICES, heads, target),
            ):
                fitted = gradient_fit(x, wanted, head_dim, used, steps=steps, generator=generator)
                record("gradient", series, head_dim, used, fitted, wanted)
                progress.update()
    return fits


def as_rows(fits: list[Fit]) -> list[dict]:
    return [asdict(fit) for fit in fits]
