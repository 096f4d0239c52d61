"""Attention layers of this package, as parts of a subject."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.attention.watching import changing_calls
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts import PARTS
from fairseq_lowrank.tools.measuring.probe import factors
from fairseq_lowrank.tools.measuring.subject import (
    DECISIONS,
    LABELS,
    CallHook,
    Layer,
    Metric,
    Subject,
    Values,
    decision_bits,
    mean_decision_bits,
)

AFFINE = 1e-3
"""The greatest relative error of queries and keys that count as affine maps of the inputs."""


class LayerSubject(Subject):
    """A model whose attention layers are all of this package.

    Args:
        name: of the model.
        places: name, site, number within the site, and module of each layer.
        samples: the sequences.
        score: the metric's sum and its weight on one sample.
        metric: see :class:`.Metric`.
        sequence_length: the mean length of the samples.
        constant: the values of held-out samples under the best constant prediction for others; None if unknown.

    Raises:
        UserError: a layer's scores are not products of queries and keys.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[tuple[str, str, int, MultiheadAttention]],
        samples: list[Any],
        score: Callable[[Any], tuple[float, float]],
        metric: Metric,
        sequence_length: float,
        constant: Callable[[list[Any], list[Any]], list[tuple[float, float]]] | None = None,
    ) -> None:
        self.name, self.samples, self.score, self.metric = name, samples, score, metric
        self.sequence_length, self.best_constant = sequence_length, constant
        self.modules = [module for *_, module in places]
        for place, site, layer, module in places:
            if not module.spec.is_default("score"):
                raise UserError(
                    f"{name}: {site} attention {layer} ({place}) has {module.spec.score} scores, which are not products of queries "
                    "and keys, so no rank bounds them. Use a model with --attention-score dot-product."
                )
        self.layers = [layer_of(*place) for place in places]

    def hooked(self, hook: CallHook) -> AbstractContextManager[None]:
        return hooked(self.modules, hook)

    @torch.no_grad()
    def evaluate(self, index: int) -> tuple[float, ...]:
        return self.score(self.samples[index])

    def constant(self, basis: list[int], held_out: list[int]) -> Values | None:
        if self.best_constant is None:
            return None
        first, second = ([self.samples[index] for index in part] for part in (basis, held_out))
        return dict(zip(held_out, self.best_constant(first, second), strict=True))


class ClassifierSubject(LayerSubject):
    """A classifier whose attention layers are all of this package. It is measured by the divergence of its outputs.

    Args:
        decide: the scores ``[N, C]`` and the labels ``[N]`` of a sample.
    """

    compares = True

    def __init__(
        self,
        name: str,
        places: Sequence[tuple[str, str, int, MultiheadAttention]],
        samples: list[Any],
        decide: Callable[[Any], tuple[Tensor, Tensor]],
        sequence_length: float,
    ) -> None:
        super().__init__(name, places, samples, lambda sample: (0.0, 0.0), DECISIONS, sequence_length)
        self.second, self.decide = LABELS, decide
        self.uncut: dict[int, Tensor] = {}

    @torch.no_grad()
    def prepare(self, indices: list[int]) -> None:
        self.uncut = {index: self.decide(self.samples[index])[0] for index in indices}

    def constant(self, basis: list[int], held_out: list[int]) -> Values | None:
        first, second = ([self.uncut[index] for index in part] for part in (basis, held_out))
        return dict(zip(held_out, mean_decision_bits(first, second), strict=True))

    @torch.no_grad()
    def evaluate(self, index: int) -> tuple[float, ...]:
        logits, labels = self.decide(self.samples[index])
        nats = F.cross_entropy(logits.double(), labels, reduction="sum").item()
        return decision_bits(logits, self.uncut.get(index, logits)), float(len(logits)), nats / math.log(2)


def hooked(modules: Sequence[MultiheadAttention], hook: CallHook) -> AbstractContextManager[None]:
    """Let ``hook`` change the calls of layers in this thread while the context is open."""
    return changing_calls({module: functools.partial(hook, index) for index, module in enumerate(modules)})


def layer_of(name: str, site: str, number: int, module: MultiheadAttention) -> Layer:
    """Return what is known of a layer without data."""
    query, key = score_weights(module)
    output, heads = getattr(module.out_proj, "weight", None), module.num_heads
    if isinstance(output, Tensor) and output.size(1) == heads * module.config.value_dim:
        output = output.detach().t().unflatten(0, (heads, -1))
    else:
        output = None
    return Layer(name, site, number, heads, module.head_dim, score_rank(module), query, key, output)


def score_rank(module: MultiheadAttention) -> int:
    """Return the greatest rank of a head's scores: min(d, d_k), or min(d, h·d_k) if the scores of h heads are mixed.

    The part of the scores says its own rank, which need not be one of these.
    """
    mixing = PARTS["score_mixing"][module.spec.score_mixing]
    return module.score.rank(mixed=mixing is not None and mixing.mixes_heads)


class _SeenError(Exception):
    """The queries and keys were seen, so the rest of the pass is not needed."""


@torch.no_grad()
def score_weights(module: MultiheadAttention) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the matrices ``[H, d, E]`` of queries and of keys that a layer makes, with mixing of scores included.

    The layer reads the zero vector, the unit vectors and a random vector. If its queries and keys are not affine in these inputs,
    as with rotary positions or norms, there are no such matrices: the result is None twice.
    """
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(1)

    def inputs(width: int) -> Tensor:
        random = torch.randn(1, width, generator=generator)
        rows = torch.cat([torch.zeros(1, width), torch.eye(width), random])
        return rows.to(weight)[:, None]

    queries = inputs(module.embed_dim)
    same = module.kdim == module.vdim == module.embed_dim
    keys = queries if same else inputs(module.kdim)
    values = keys if module.kdim == module.vdim else inputs(module.vdim)
    if module.batch_first:
        queries, keys, values = (part.transpose(0, 1) for part in (queries, keys, values))
    seen: list[AttentionCall] = []

    def keep(index: int, call: AttentionCall) -> AttentionCall:
        seen.append(call)
        raise _SeenError

    with hooked([module], keep), contextlib.suppress(_SeenError):
        nn.Module.__call__(module, queries, keys, values, need_weights=False)
    found = []
    for part, given in zip(factors(seen[0]), (queries, keys), strict=True):
        maps = part[0] - part[0][:, :1]
        expected = given.flatten(0, 1)[-1] @ maps[:, 1:-1]
        if not (maps[:, -1] - expected).norm() <= AFFINE * maps[:, -1].norm():
            return None, None
        found.append(maps[:, 1:-1])
    return found[0], found[1]
