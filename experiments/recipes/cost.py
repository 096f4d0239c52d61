"""What a recipe costs before it is run: tokens, hours, disk and downloads. All of it is estimated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.corpora.catalogue import parse_corpus_name
from experiments.recipes.recipe import Run, effective_flags, last_value, tokens_of_update
from experiments.recipes.sizes import sizes, vocab_size
from fairseq_lowrank.messages import UserError

H100_RATE = 2.9e14
"""Operations a second of training on one H100: 230,136 tokens a second of 16 layers of d 1024 (mha, benchmarks/results/gpu.json)."""
H100_UPDATE = 0.09
"""Seconds of the shortest update there: 2,048 tokens at 22,374 a second in rows next to each other (head-maps, results/evidence.jsonl)."""
CPU_RATE = 1.2e11
"""The same on 2 cores: 1,127 tokens a second of 4 layers of d 512 (mha, benchmarks/results/training-512.json). Narrower models are slower."""
EPOCH_TOKENS = {"iwslt14": 4_000_000, "multi30k": 420_000}
"""Target tokens of a training part, for recipes that count epochs."""
VOCABULARIES = {"wikitext-103": 267_744, "wikitext-2": 33_278, "lm1b": 793_470, "wmt14": 32_768, "brown": 40_000}
"""Sizes of dictionaries that are not known before the corpus is prepared; of others :data:`SUBWORDS`."""
SUBWORDS = 10_000
FREQUENT = 20_000
"""Columns of the output that a token costs at most; an adaptive softmax multiplies those of rare words for few tokens."""


class Cost(NamedTuple):
    """What one training costs; hours are of training alone, without scoring."""

    tokens: float
    gpu_hours: float
    cpu_hours: float
    disk: float
    """Gigabytes of checkpoints."""

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(one + another for one, another in zip(self, other, strict=True)))


def cost(run: Run) -> Cost:
    """Estimate the cost of a run.

    A token takes 6 operations for each weight that multiplies it, forward and backward; those of attention over n positions are
    left out. A checkpoint holds weights and two averages of Adam in float32.

    Raises:
        UserError: the number of tokens is not known.
    """
    flags = effective_flags(run.flags)
    corpus = parse_corpus_name(run.corpus)[0].name
    try:
        vocabulary = vocab_size(run)
    except UserError:
        names = (size for name, size in VOCABULARIES.items() if run.corpus.startswith(name))
        vocabulary = next(names, SUBWORDS)
    counts = sizes(run, vocabulary)
    width = int(flags.get("--decoder-embed-dim") or flags.get("--encoder-embed-dim") or 512)
    weights = counts["total"] - counts["embeddings"] + min(vocabulary, FREQUENT) * width
    step = tokens_of_update(run.flags)
    if updates := int(flags.get("--max-update", 0)):
        tokens = updates * step
    elif corpus in EPOCH_TOKENS:
        tokens = int(flags["--max-epoch"]) * EPOCH_TOKENS[corpus]
        updates = tokens // step
    else:
        raise UserError(f"the number of tokens of {run.corpus} is not known. Give EXTRA='--max-update N'.")
    operations = 6 * weights * tokens
    kept = 2 + int(last_value(run.flags, "--keep-interval-updates", "0"))
    seconds = max(operations / H100_RATE, updates * H100_UPDATE)
    return Cost(tokens, seconds / 3600, operations / CPU_RATE / 3600, kept * 12 * counts["total"] / 1e9)


def trainings(runs: Iterable[Run]) -> list[Run]:
    """Return the runs and what they start from, each once, without published models."""
    found: dict[Path, Run] = {}
    for run in runs:
        chain = [run]
        while (base := chain[-1].base) and not base.published:
            chain.append(base)
        found |= {one.folder: one for one in reversed(chain)}
    return list(found.values())


def lines(runs: Iterable[Run]) -> Iterator[str]:
    """Yield a line for each training, and the sum with what is downloaded."""
    every = trainings(runs)
    total, unknown = Cost(0, 0, 0, 0), []
    for run in every:
        try:
            found = cost(run)
        except UserError as error:
            unknown.append(run.row)
            yield f"{run}: {error}"
            continue
        total += found
        yield f"{run}: {_described(found)}"
    corpora = {corpus.name: corpus for corpus in (parse_corpus_name(one.corpus)[0] for one in every)}
    megabytes = sum(corpus.download for corpus in corpora.values())
    left_out = f", without {len(unknown)} trainings" if unknown else ""
    yield f"{len(every)} trainings (estimates{left_out}): {_described(total)}; at most {megabytes:,} MB of downloads"


def _described(cost: Cost) -> str:
    large = cost.tokens >= 1e9
    tokens = f"{_number(cost.tokens / (1e9 if large else 1e6))} {'billion' if large else 'million'}"
    return (
        f"{tokens} tokens, {_number(cost.gpu_hours)} hours on one H100, {_number(cost.cpu_hours)} hours on 2 cores, "
        f"{_number(cost.disk)} GB of checkpoints"
    )


def _number(value: float) -> str:
    """Return a number with two digits, or more before the point."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"
