"""Multi-query associative recall, the negative control: sparse attention needs only small heads.

A sequence lists key–value pairs, then repeats each key somewhere among noise; at each repeated key the answer is its value. Source: MQAR of
"Zoology" (Arora et al. 2023, arXiv 2312.04927) in its basic setting: vocabulary 256 (keys 1 to 127, values 128 to 255),
length 64, 4 pairs, gaps before a repeat by a power law of exponent 0.01, other places random tokens; 10,000 training and 1,000
test sequences, batches of 32; 2 pre-norm layers, d 128, GELU feed-forward of 4·d, learned positions, dropout 0.1 on embeddings and on
attention weights, output tied to the embedding; AdamW, 1e-3, decay 0.1, a cosine over 100 epochs, ended when the
test accuracy reaches 0.99.

Each query must find one key among n, so patterns are sparse, and heads of size O(log n) have them (Likhosherstov et al., arXiv
2106.03764). The value is the error rate at the end; the epochs it took stand beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.analysis.controlled.runs import Journal, Method, Run, Table
from fairseq_lowrank.attention import CAUSAL, build_attention

TABLE = "recall"
METRIC = "error rate"
SPLIT = "test"
ARCHITECTURE = "two pre-norm layers, d 128"
VOCABULARY, LENGTH, PAIRS = 256, 64, 4
EXPONENT = 0.01
TRAIN, TEST, BATCH = 10_000, 1_000, 32
EMBED_DIM, LAYERS, DROPOUT = 128, 2, 0.1
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
EPOCH = math.ceil(TRAIN / BATCH)
STEPS = 100 * EPOCH
ENOUGH = 0.01
IGNORED = -100
SEEDS = (1, 2, 3)


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and answers, ``[count, length]``; an answer is −100 where none is asked."""

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
        self.attention = build_attention(
            method.preset, EMBED_DIM, heads, self_attention=True, dropout=DROPOUT, **method.axes
        )
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
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(method, heads) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(EMBED_DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        x = F.dropout(x, DROPOUT, self.training).transpose(0, 1)
        return self.norm(self.blocks(x)).transpose(0, 1) @ self.tokens.weight.t()


def error_rate(model: Model, tokens: Tensor, answers: Tensor) -> float:
    """The share of wrong answers where one is asked."""
    model.eval()
    with torch.no_grad():
        chosen = torch.cat([model(batch).argmax(-1) for batch in tokens.split(250)])
    model.train()
    asked = answers != IGNORED
    return (chosen != answers)[asked].float().mean().item()


def train(method: Method, heads: int, seed: int, steps: int, journal: Journal) -> dict:
    """Train until at most 1 % of test answers are wrong, or ``steps`` updates. Returns ``value``, ``updates`` and ``parameters``.

    Every epoch's end is kept in the journal, and what was kept there is where it goes on, to the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, answers = sequences(TRAIN, generator)
    test = sequences(TEST, generator)
    torch.manual_seed(seed)
    model = Model(method, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, math.ceil(steps / EPOCH))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done, wrong = 0, 1.0
    if state := journal.kept():
        done, wrong = state["done"], state["wrong"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        generator.set_state(state["order"])
        torch.set_rng_state(state["dropout"])
    while done < steps and wrong > ENOUGH:
        for chosen in torch.randperm(TRAIN, generator=generator).split(BATCH)[: steps - done]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[chosen]).flatten(0, 1), answers[chosen].flatten(), ignore_index=IGNORED)
            loss.backward()
            optimizer.step()
            done += 1
        schedule.step()
        wrong = error_rate(model, *test)
        journal(f"{done} loss {loss.item():.4g} wrong {wrong:.4g}")
        states = {name: part.state_dict() for name, part in parts.items()}
        drawn = {"order": generator.get_state(), "dropout": torch.get_rng_state()}
        journal.keep({"done": done, "wrong": wrong, **states, **drawn})
    return {"value": wrong, "updates": done, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def rows() -> Iterator[tuple[Method, int]]:
    """Every method and its number of heads."""
    mha = Method("mha", "mha")
    yield from ((mha, heads) for heads in (1, 16, 64, 4, 8))
    for name in ("mixhead-a", "talking-heads"):
        yield from ((Method(name, name), heads) for heads in (16, 64))


def runs(seeds: Sequence[int] | None = None, *, quick: bool = False, steps: int | None = None) -> Iterator[Run]:
    """Every run, all rows of a seed before the next.

    Args:
        seeds: by default 1 to 3, with ``quick`` 1.
        quick: ``mha`` with heads of 128 and of 8.
        steps: updates other than the task's make rows of their own: trials where they are fewer.
    """
    for seed in seeds or (SEEDS[:1] if quick else SEEDS):
        for method, heads in rows():
            if method.exists() and (not quick or (method.name == "mha" and heads in (1, 16))):
                yield _run(method, heads, seed, steps)


def _run(method: Method, heads: int, seed: int, steps: int | None) -> Run:
    return Run(
        f"h{heads}-{method.name}",
        seed,
        method,
        STEPS if steps is None else steps,
        STEPS,
        {"heads": heads, "head_dim": EMBED_DIM // heads},
        lambda seed, steps, journal: train(method, heads, seed, steps, journal),
    )


def tables(lines: list[dict]) -> list[Table]:
    """Error rate and epochs, means over seeds."""
    groups: dict[tuple[str, int], list[dict]] = {}
    for line in lines:
        groups.setdefault((line["method"], line["heads"]), []).append(line)
    body = [
        [
            name,
            f"{heads} × {EMBED_DIM // heads}",
            str(len(chosen)),
            f"{statistics.fmean(line['value'] for line in chosen):.4f}",
            f"{statistics.fmean(line['updates'] / EPOCH for line in chosen):.1f}",
        ]
        for (name, heads), chosen in sorted(groups.items())
    ]
    header = ["method", "heads × size", "seeds", METRIC, "epochs"]
    return [
        Table(
            f"Recall of {PAIRS} pairs in {LENGTH} tokens, means over seeds; ended at {ENOUGH:.0%} wrong", header, body
        )
    ]


def draw(lines: list[dict]):
    """Epochs until 99 % of answers are right against head size; hollow where they never were."""
    from fairseq_lowrank.analysis import pictures

    figure, axes = pictures.new_figure()
    names = list(dict.fromkeys(line["method"] for line in lines))
    for name, style in zip(names, pictures.styles(names), strict=True):
        for reached in (True, False):
            chosen = [line for line in lines if line["method"] == name and (line["value"] <= ENOUGH) == reached]
            axes.plot(
                [line["head_dim"] for line in chosen],
                [line["updates"] / EPOCH for line in chosen],
                "o",
                color=style["color"],
                fillstyle="full" if reached else "none",
                label=name if reached else None,
            )
    axes.set(xscale="log", yscale="log", xlabel="head size", ylabel=f"epochs until at most {ENOUGH:.0%} wrong")
    axes.legend(fontsize=8)
    return figure
