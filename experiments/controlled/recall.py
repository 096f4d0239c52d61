"""Multi-query associative recall: sparse attention, for which small heads are enough in theory.

A sequence lists key–value pairs, and then repeats each key somewhere among noise. At each repeated key the answer is its value.
Source: MQAR of "Zoology" (Arora et al. 2023, arXiv 2312.04927) in its basic setting. The vocabulary is 256 (keys 1 to 127,
values 128 to 255), the length 64, with 4 pairs. Gaps before a repeated key have a power law of exponent 0.01. Other tokens are
random. The model has 2 pre-norm layers, GELU feed-forward of 4·d, learned positions, an output tied to the embedding, and
AdamW with weight decay 0.1.

Differences: each update has 64 new sequences, because a fixed set of 10,000 is memorised before the task is learned. So
there is no dropout. Embeddings are multiplied by √d, as in fairseq. d is 64, one of zoology's widths. The learning rate is 2e-3,
with a warm-up over 100 updates and a cosine. Training ends when 99 % of the answers in 1,000 test sequences are correct, which
is measured every 100 updates.

Each query must find one key among n. Such patterns are sparse, and heads of size O(log n) can produce them (Likhosherstov et
al., arXiv 2106.03764). The value is the error rate at the end; the number of updates is recorded too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.controlled.runs import Journal, Method, Run
from fairseq_lowrank.attention import CAUSAL, build_attention

TABLE = "recall"
METRIC = "error rate"
SPLIT = "test"
ARCHITECTURE = "two pre-norm layers, d 64"
VOCABULARY, LENGTH, PAIRS = 256, 64, 4
EXPONENT = 0.01
TEST, BATCH = 1_000, 64
EMBED_DIM, LAYERS = 64, 2
LEARNING_RATE, OTHER_LEARNING_RATES = "2e-3", ("5e-4", "4e-3")
GRID = ("1e-3", "3.2e-3", "1e-2", "3.2e-2")
"""Rates of the rows that fail at the task's rate, in the span of zoology's search."""
WEIGHT_DECAY, WARMUP = 0.1, 100
TEST_INTERVAL, STEPS = 100, 6_000
TARGET_ERROR = 0.01
IGNORED = -100
SEEDS = (1, 2, 3)


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and answers, ``[count, length]``; an answer is −100 if the token is not a question."""

    def distinct(choices: int, weights: Tensor | None = None) -> Tensor:
        weights = torch.ones(choices) if weights is None else weights
        return torch.multinomial(weights.expand(count, -1), PAIRS, generator=generator)

    keys, values = 1 + distinct(VOCABULARY // 2 - 1), VOCABULARY // 2 + distinct(VOCABULARY // 2)
    context = 2 * PAIRS
    spaces = (LENGTH - context) // 2
    # the smaller the gap, the likelier: P(gap) ~ gap^(a − 1)
    places = context + 2 * distinct(spaces, torch.arange(1, spaces + 1).float() ** (EXPONENT - 1))
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    tokens.scatter_(1, places, keys)
    answers = torch.full_like(tokens, IGNORED).scatter_(1, places, values)
    return tokens, answers


class Block(nn.Module):
    """A pre-norm layer over ``[length, batch, d]``."""

    def __init__(self, method: Method, heads: int) -> None:
        super().__init__()
        self.attention = build_attention(method.preset, EMBED_DIM, heads, self_attention=True, **method.axes)
        self.norms = nn.ModuleList(nn.LayerNorm(EMBED_DIM) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(EMBED_DIM, 4 * EMBED_DIM), nn.Linear(4 * EMBED_DIM, EMBED_DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=CAUSAL, need_weights=False)[0]
        return x + self.fc2(F.gelu(self.fc1(self.norms[1](x))))


class Model(nn.Module):
    """A small language model: ``[batch, length]`` tokens to ``[batch, length, vocabulary]`` scores."""

    def __init__(self, method: Method, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED_DIM), nn.Embedding(LENGTH, EMBED_DIM)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=EMBED_DIM**-0.5)
        self.blocks = nn.Sequential(*(Block(method, heads) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(EMBED_DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = math.sqrt(EMBED_DIM) * (self.tokens(tokens) + self.positions.weight)
        return self.norm(self.blocks(x.transpose(0, 1))).transpose(0, 1) @ self.tokens.weight.t()


def error_rate(model: Model, tokens: Tensor, answers: Tensor) -> float:
    """Return the share of wrong answers."""
    with torch.no_grad():
        chosen = torch.cat([model(batch).argmax(-1) for batch in tokens.split(250)])
    asked = answers != IGNORED
    return (chosen != answers)[asked].float().mean().item()


def trained(
    method: Method, heads: int, seed: int, steps: int, journal: Journal, learning_rate: float = float(LEARNING_RATE)
) -> tuple[Model, float, int]:
    """Train until at most 1 % of test answers are wrong or ``steps`` updates are done.

    Return the model, its error rate and the number of updates. The journal is given the loss and the error rate at each test.
    """
    generator = torch.Generator().manual_seed(seed)
    test = sequences(TEST, generator)
    torch.manual_seed(seed)
    model = Model(method, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1, (done + 1) / WARMUP) * (1 + math.cos(math.pi * done / steps)) / 2
    )
    done, wrong = 0, 1.0
    while done < steps and wrong > TARGET_ERROR:
        tokens, answers = sequences(BATCH, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
        if done % TEST_INTERVAL == 0 or done == steps:
            wrong = error_rate(model, *test)
            journal(f"{done} loss {loss.item():.4g} wrong {wrong:.4g}")
    return model, wrong, done


def train(
    method: Method, heads: int, seed: int, steps: int, journal: Journal, learning_rate: float = float(LEARNING_RATE)
) -> dict:
    """Train a model, see :func:`trained`, and return ``value``, ``updates`` and ``parameters``."""
    model, wrong, done = trained(method, heads, seed, steps, journal, learning_rate)
    return {"value": wrong, "updates": done, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def rows() -> Iterator[tuple[Method, int, str]]:
    """Yield every method, its number of heads and its learning rate: the task's, and others for rows that fail with it."""
    yield from ((method, heads, LEARNING_RATE) for method, heads in methods())
    yield from ((Method(f"mha-{rate}", "mha"), 8, rate) for rate in OTHER_LEARNING_RATES)
    for method, heads in failed():
        yield from ((replace(method, name=f"{method.name}-{rate}"), heads, rate) for rate in GRID)


def failed() -> Iterator[tuple[Method, int]]:
    """Yield the methods that fail at the task's rate, and two controls, with their numbers of heads."""
    mha = Method("mha", "mha")
    yield from ((mha, 8), (mha, 4), (Method("gain", "gain"), 8), (Method("score-gain", "score-gain"), 8))
    yield Method("queries-64", "mha", {"head_dim": EMBED_DIM, "value_dim": EMBED_DIM // 8}), 8


def methods() -> Iterator[tuple[Method, int]]:
    """Yield every method and its number of heads, at the task's learning rate."""
    mha = Method("mha", "mha")
    yield from ((mha, heads) for heads in (1, 8, 32, 2, 4))
    yield from ((Method("fixedhead", "fixedhead", {"head_dim": EMBED_DIM}), heads) for heads in (8, 4))
    for name in ("mixhead-a", "talking-heads"):
        yield from ((Method(name, name), heads) for heads in (8, 32))
    yield Method("values-64", "mha", {"value_dim": EMBED_DIM}), 8
    yield Method("queries-64", "mha", {"head_dim": EMBED_DIM, "value_dim": EMBED_DIM // 8}), 8
    yield Method("gain", "gain"), 8


def runs(seeds: Sequence[int] | None = None, *, quick: bool = False, steps: int | None = None) -> Iterator[Run]:
    """Yield every run, with all rows of a seed before the next seed.

    Args:
        seeds: by default 1 to 3, with ``quick`` 1.
        quick: only ``mha`` with heads of 64 and of 8.
        steps: number of updates. Another number than the task's makes separate rows; with fewer updates they are trials.
    """
    for seed in seeds or (SEEDS[:1] if quick else SEEDS):
        for method, heads, rate in rows():
            if method.exists() and (not quick or (method.name == "mha" and heads in (1, 8))):
                yield _run(method, heads, float(rate), seed, steps)


def _run(method: Method, heads: int, learning_rate: float, seed: int, steps: int | None) -> Run:
    return Run(
        f"h{heads}-{method.name}",
        seed,
        method,
        STEPS if steps is None else steps,
        STEPS,
        {
            "heads": heads,
            "head_dim": method.axes.get("head_dim", EMBED_DIM // heads),
            "learning_rate": learning_rate,
        },
        lambda seed, steps, journal: train(method, heads, seed, steps, journal, learning_rate),
    )
