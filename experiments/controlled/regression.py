"""In-context regression: the scores of all heads together need the rank of the inputs.

A prompt has n pairs (x_i, y_i) and n further inputs x_q, with y = ⟨w, x⟩, Gaussian x of size d_x, and w ~ N(0, I / d_x) drawn for each
prompt. The answer is y_q. The metric is the squared error E(ŷ_q − y_q)², with new prompts in each update; the output 0 has 1.

Source: Kuang et al., "Customizing the Inductive Biases of Softmax Attention using Structured Matrices" (arXiv 2509.07963), whose
regression has 16 to 128 inputs, n = 2 d_x, 6 layers, and 8 heads. Differences: one attention layer of width 32 without a feed-forward part, positions,
norms or a residual connection. A pair is one token (in the paper x_i and y_i are two), because one layer cannot join two tokens and compare
them too. Further inputs attend to the pairs alone. d_x is 16, n is 32; AdamW, 1e-2, betas 0.9 and 0.95, no weight decay,
warm-up over the first 5 % of updates and a cosine to 0, 4,000 updates of 64 prompts. The value is the error on 2,048 new prompts, the
same for all rows of a seed.

Known answer: linear attention ŷ_q = Σ_i x_qᵀ A x_i y_i with rank(A) ≤ r has the error 1 − r / d_x · n / (n + d_x + 1) at best, with A
a multiple of a projection. The ranks of heads add up in it, because the output adds heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from experiments.controlled.runs import (
    Log,
    Method,
    Run,
    outcome_on_new_problems,
    trained_on_new_problems,
)
from fairseq_lowrank.attention import build_attention

TABLE = "regression"
METRIC = "squared error"
SPLIT = "fresh prompts"
ARCHITECTURE = "one attention layer, d 32"
EMBED_DIM = 32
INPUTS, PAIRS = 16, 32
SMALL = 2
BATCH = 64
STEPS = 4_000
LEARNING_RATE = 1e-2
TEST_BATCHES = 32
SEEDS = (1, 2, 3)


def prompts(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs ``[2n, batch, d_x]`` and their answers ``[2n, batch, 1]``: first those of the pairs."""
    x = torch.randn(2 * PAIRS, batch, INPUTS, generator=generator)
    w = torch.randn(batch, INPUTS, generator=generator) / INPUTS**0.5
    return x, (x * w).sum(-1, keepdim=True)


def linear_error(rank: int) -> float:
    """Return the least error of linear attention whose scores have this rank over all heads."""
    return 1 - min(rank, INPUTS) / INPUTS * PAIRS / (PAIRS + INPUTS + 1)


class Model(nn.Module):
    """One attention layer between a linear map of tokens (x, y) and a linear map to ŷ."""

    def __init__(self, method: Method, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(INPUTS + 1, EMBED_DIM, bias=False)
        self.attention = build_attention(method.preset, EMBED_DIM, heads, **method.axes)
        self.answer = nn.Linear(EMBED_DIM, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ŷ of the inputs after the pairs, ``[n, batch, 1]``; their ``y`` are not read."""
        pairs = self.tokens(torch.cat([x, y], dim=-1)[:PAIRS])
        queries = self.tokens(torch.cat([x, torch.zeros_like(y)], dim=-1)[PAIRS:])
        return self.answer(self.attention(queries, pairs, pairs, need_weights=False)[0])


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return (ŷ − y)², averaged over the inputs after the pairs."""
    return (model(x, y) - y[PAIRS:]).square().mean()


def fresh_error(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Return the error on new prompts."""
    return squared_error(model, *prompts(BATCH, generator))


def train(method: Method, heads: int, seed: int, steps: int, log: Log) -> dict:
    """Train one layer, and return ``value``, the squared error on new prompts, and ``parameters``."""
    model = trained_on_new_problems(lambda: Model(method, heads), fresh_error, LEARNING_RATE, seed, steps, log)
    return outcome_on_new_problems(model, fresh_error, TEST_BATCHES, seed)


def rows() -> Iterator[tuple[Method, int]]:
    """Yield every method and its number of heads, with those of the planned contrasts first; presets have heads of 2."""
    small = {"head_dim": SMALL}
    yield Method("mha", "mha", small), 4
    yield Method("queries-32", "mha", {"head_dim": EMBED_DIM, "value_dim": SMALL}), 4
    yield from ((Method(name, name, small), 4) for name in ("structured", "score-mixing", "mixhead-a", "gain"))
    yield from ((Method("mha", "mha", small), heads) for heads in (8, 16))
    yield Method("mha-16", "mha", {"head_dim": 16}), 2
    yield Method("mha-32", "mha", {"head_dim": 32}), 1


def rank(line: dict) -> int:
    """Return the rank of the scores of a line's heads together, at most d_x."""
    full = line["method"].startswith("structured")
    return INPUTS if full else min(INPUTS, line["heads"] * line["head_dim"])


def runs(seeds: Sequence[int] | None = None, *, quick: bool = False, steps: int | None = None) -> Iterator[Run]:
    """Yield every run, with all rows of a seed before the next seed.

    Args:
        seeds: by default 1 to 3, with ``quick`` 1.
        quick: only 4 heads: small ones, and those with large queries and keys.
        steps: number of updates. Another number than the task's makes separate rows; with fewer updates they are trials.
    """
    for seed in seeds or (SEEDS[:1] if quick else SEEDS):
        for method, heads in rows():
            if method.exists() and (not quick or (method.name in ("mha", "queries-32") and heads == 4)):
                yield _run(method, heads, seed, steps)


def _run(method: Method, heads: int, seed: int, steps: int | None) -> Run:
    return Run(
        f"h{heads}-{method.name}",
        seed,
        method,
        STEPS if steps is None else steps,
        STEPS,
        {"heads": heads, "head_dim": method.axes["head_dim"]},
        lambda seed, steps, log: train(method, heads, seed, steps, log),
    )
