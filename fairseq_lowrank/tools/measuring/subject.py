"""What is measured: a model, its attention layers, sequences, and a number that says how good the model is on one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    """

    name: str
    less_is_better: bool

    def loss(self, value: float, uncut: float) -> float:
        """Return by how much a value is worse than the uncut one."""
        return value - uncut if self.less_is_better else uncut - value


BITS = Metric("bits per token", True)
DECISIONS = Metric("bits per decision of the uncut model", True)
"""The cross-entropy of a classifier's probabilities with those of the uncut model: its entropy, and the divergence from it."""
LABELS = Metric("bits per label", True)
COSINE = Metric("cosine of mean states", False)


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
    """

    name: str
    metric: Metric
    second: Metric | None = None
    compares: bool = False
    about: str = ""
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
