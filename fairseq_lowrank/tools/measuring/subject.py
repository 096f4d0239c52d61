"""What is measured: a model, its attention layers, sequences, and a number that says how good the model is on one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.tools.measuring.verdict import TOKENS_OF_A_DIRECTION

TOKENS, LEAST, MOST = 6144, 48, 384
"""Without a number of sequences: as many as have these tokens, at least and at most so many sequences."""


def draw(total: int, count: int, seed: int, read: Callable[[int], Any]) -> list[Any]:
    """Return up to ``count`` samples, drawn without replacement from ``total``.

    Args:
        read: returns the sample of an index, or None to leave it out.
    """
    samples: list[Any] = []
    for index in torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist():
        if (sample := read(index)) is not None:
            samples.append(sample)
        if len(samples) == count:
            break
    return samples


def enough(lengths: Sequence[int], tokens: int, rank: int) -> int:
    """Return how many sequences of these lengths to take from the start, so that short ones give as many tokens as long ones.

    Args:
        tokens: the number of tokens that are wanted.
        rank: of a head's scores. One half of the tokens is the basis, which needs ten tokens for each direction.
    """
    tokens, least = max(tokens, 2 * TOKENS_OF_A_DIRECTION * rank), LEAST * tokens // TOKENS
    total = count = 0
    for length in lengths[:MOST]:
        if total >= tokens and count >= least:
            break
        total, count = total + length, count + 1
    return count


CallHook = Callable[[int, AttentionCall], AttentionCall]
"""Receives a layer's index and its call, and returns the call that is computed."""


class Metric(NamedTuple):
    """A number for each sequence, averaged with weights such as tokens.

    Args:
        name: what it is, with its unit.
        less_is_better: True for losses.
        unit: the unit of a difference.
        ignorance: what the best constant prediction knows; empty if there is none.
    """

    name: str
    less_is_better: bool
    unit: str = ""
    ignorance: str = ""

    def loss(self, value: float, uncut: float) -> float:
        """Return by how much a value is worse than the uncut one."""
        return value - uncut if self.less_is_better else uncut - value


BITS = Metric("bits per token", True, "bits", "the frequency of words")
DECISIONS = Metric("bits per decision of the uncut model", True, "bits", "the mean of all decisions")
"""The cross-entropy of a classifier's probabilities with those of the uncut model: its entropy, and the divergence from it."""
LABELS = Metric("bits per label", True, "bits")
COSINE = Metric("cosine of mean states", False, "of cosine", "the mean of all states")

Values = dict[int, tuple[float, ...]]
"""The metric's sum and weight for each sample, and the sum of a second metric."""


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    Args:
        name: its name in the model.
        site: encoder, decoder or cross.
        layer: its number within the site.
        heads: number of heads.
        head_size: d_k.
        limit: the greatest rank of a head's scores; above d_k if scores of heads are mixed.
        query_weight, key_weight: ``[H, d, E]``, whose products x W_Q (y W_K)ᵀ are a head's scores without biases; None if
            there are no such matrices.
        output_weight: ``[H, Dv, d]``, or None if unknown.
    """

    name: str
    site: str
    layer: int
    heads: int
    head_size: int
    limit: int
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    output_weight: Tensor | None = None


class Subject(ABC):
    """A model with sequences.

    Attributes:
        name: the class or architecture of the model.
        metric: see :class:`Metric`.
        layers: all attention layers.
        samples: the sequences, in the order in which they were drawn.
        sequence_length: the mean length of the samples.
        second: a further metric, which no verdict uses; None if there is none.
        compares: True if :meth:`prepare` runs the unchanged model.
        about: what a reader must know of the model, such as that its weights were quantised; empty if nothing.
        available: number of sequences of the data; None if there is no limit.
    """

    name: str
    metric: Metric
    second: Metric | None = None
    compares: bool = False
    about: str = ""
    available: int | None = None
    layers: list[Layer]
    samples: list[Any]
    sequence_length: float

    @abstractmethod
    def hooked(self, hook: CallHook) -> AbstractContextManager[None]:
        """Let ``hook`` change the calls of all layers while the context is open."""

    @abstractmethod
    def evaluate(self, index: int) -> tuple[float, ...]:
        """Return the metric's sum on a sample, its weight, such as the number of tokens, and the sum of the second metric, if any."""

    def prepare(self, indices: list[int]) -> None:
        """Compute what :meth:`evaluate` compares these samples with, on the unchanged model."""
        return None

    def constant(self, basis: list[int], held_out: list[int]) -> Values | None:
        """Return the values of held-out samples under the constant prediction that is best for the basis, or None.

        A model that knows nothing of a sequence cannot do better, so its loss bounds what attention is worth.
        """
        return None


def frequency_bits(basis: Iterable[Tensor], held_out: Iterable[Tensor], words: int) -> list[tuple[float, float]]:
    """Return the bits and the number of the words of each held-out sample, predicted by their frequency in the basis.

    A word that occurs c times among N has p = (c + T/V) / (N + T), where T of the V words occur (Witten and Bell 1991).

    Args:
        basis, held_out: the words of each sample.
        words: V, the number of words.
    """
    counts = torch.cat([part.flatten() for part in basis]).bincount(minlength=words).double()
    kinds = (counts > 0).sum()
    bits = -((counts + kinds / len(counts)) / (counts.sum() + kinds)).log2()
    return [(bits[part.flatten()].sum().item(), float(part.numel())) for part in held_out]


def mean_decision_bits(
    basis: Sequence[Tensor], held_out: Sequence[Tensor], *, binary: bool = False
) -> list[tuple[float, float]]:
    """Return for each held-out sample the :func:`decision_bits` of the mean probabilities of the basis, and their number.

    Args:
        basis, held_out: the uncut model's logits ``[N, C]`` of each sample.
    """
    joined = torch.cat(list(basis)).double()
    mean = joined.sigmoid().mean(0).logit() if binary else joined.softmax(-1).mean(0).log()
    bits = [decision_bits(mean.expand_as(part), part, binary=binary) for part in held_out]
    return [(one, float(part.numel() if binary else len(part))) for one, part in zip(bits, held_out, strict=True)]


def decision_bits(logits: Tensor, uncut: Tensor, *, binary: bool = False) -> float:
    """Return the cross-entropy in bits, summed over decisions, of a classifier's probabilities with those of the uncut model.

    Args:
        logits, uncut: ``[N, C]``.
        binary: each of the C numbers is a decision between yes and no.
    """
    logits, uncut = logits.double(), uncut.double()
    if binary:
        logits, uncut = (torch.stack([part, torch.zeros_like(part)], dim=-1) for part in (logits, uncut))
    return -(uncut.softmax(-1) * logits.log_softmax(-1)).sum().item() / math.log(2)
