"""The call of attention, in parts that every backend understands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fairseq_lowrank.ops.activation import check_activation
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import HeadMixing
from fairseq_lowrank.ops.attention.scores import DotProduct, Scores
from fairseq_lowrank.ops.attention.tree import TensorTree


class AlreadySet(ValueError):
    """Two parts, or a part and the model around it, set one field of a call."""


@dataclass(frozen=True)
class AttentionCall(TensorTree):
    """One call of :func:`fairseq_lowrank.ops.attention`.

    ::

        scores → cap → score_mixing → + biases, mask → activation (with sinks) → prob_mixing → dropout → · v

    Args:
        scores: what queries and keys make, ``[B, H, T, S]``, such as :class:`~.scores.DotProduct`.
        v: ``[B, G, S, Dv]`` values; G divides H, head i reads group ⌊i·G/H⌋. As many groups as keys have, or others.
        mask: which keys each query may see. A query that may see none gives zeros. With ``score_mixing`` it is that of the
            mixed heads: what is hidden is never mixed.
        score_bias: added to the (mixed) scores, broadcastable to ``[B, H, T, S]``. It is no mask: of its values −inf
            alone hides.
        score_mixing: mixes the heads' scores, S'_i = Σ_j L[j, i] S_j (talking heads, arXiv 2003.02436).
        prob_mixing: mixes the heads' probabilities, P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12).
        activation: one of :data:`~fairseq_lowrank.ops.activation.ACTIVATIONS`.
        dropout_p: probability of zeroing a mixed attention weight.
        need_weights: also return the weights the values were averaged with, after mixing and before dropout.
        score_cap: c in c·tanh(s / c), applied to the scores of each head before they are mixed, as in Gemma 2.
        sinks: ``[H]`` one more score in each row of the mixed scores, whose weight reads no value, as in gpt-oss.
        distance_bias: ``[1 or B, 1 or H, T + S − 1]`` added to the (mixed) scores by distance: query t adds entry T − 1 − t + s
            to the score of key s. T counts the queries of one of ``mask.query_repeats``. Of its values −inf alone hides.
    """

    scores: Scores
    v: Tensor
    mask: AttentionMask
    score_bias: Tensor | None = None
    score_mixing: HeadMixing | None = None
    prob_mixing: HeadMixing | None = None
    activation: str = "softmax"
    dropout_p: float = 0.0
    need_weights: bool = False
    score_cap: float | None = None
    sinks: Tensor | None = None
    distance_bias: Tensor | None = None

    def adding(self, **fields: Any) -> AttentionCall:
        """Return the call with further fields. A bias is added to the one that is there.

        Raises:
            AlreadySet: the call has another of these fields already.
        """
        for name in fields:
            if (known := getattr(self, name)) is not None:
                if name not in ("score_bias", "distance_bias"):
                    raise AlreadySet(
                        f"{name} of this attention is set already, and it can be set once. Remove one of the two."
                    )
                fields[name] = known + fields[name]
        return self.replace(**fields)

    @property
    def for_reference_alone(self) -> str | None:
        """Return what only the reference computes, in words, or ``None``."""
        return None if self.score_cap is None else "capped scores"

    @property
    def for_blocks_alone(self) -> str | None:
        """Return what only the reference and blocks compute, in words, or ``None``."""
        return self.for_reference_alone or (None if self.sinks is None else "sinks")

    @property
    def dot_product(self) -> DotProduct:
        """The scores, in backends that compute only dot products."""
        return cast(DotProduct, self.scores)

    @property
    def mixes_weights(self) -> bool:
        """Return True if probabilities of different heads are mixed."""
        return self.prob_mixing is not None and self.prob_mixing.head_scale is None

    def scaled(self, heads: Tensor) -> Tensor:
        """Return ``heads`` of unmixed probabilities, scaled by a mixing that only scales heads."""
        scale = None if self.prob_mixing is None else self.prob_mixing.head_scale
        return heads if scale is None else heads * scale.to(heads.dtype)

    def check(self) -> None:
        """Check what no backend can compute.

        Raises:
            ValueError: shapes that do not fit together, or values out of range.
        """
        self.scores.check()
        shape = self.scores.shape
        batch, heads, queries, keys = shape
        v, mask = self.v, self.mask
        if v.dim() != 4 or v.size(0) != batch or v.size(2) != keys or v.size(1) < 1 or heads % v.size(1):
            raise ValueError(
                f"v of shape {list(v.shape)} does not fit scores {list(shape)}: expected [B, G, S, Dv] = [{batch}, G, {keys}, Dv], G dividing {heads}"
            )
        if not v.is_floating_point():
            raise ValueError(f"v of {v.dtype}: expected a float tensor")
        check_activation(self.activation)
        check_rate("dropout_p", self.dropout_p)
        mask.check(shape)
        for name, tensor in (("mask.additive", mask.additive), ("score_bias", self.score_bias)):
            if tensor is None:
                continue
            if not _broadcasts(tensor, shape):
                raise ValueError(
                    f"{name} of shape {list(tensor.shape)}: expected one that broadcasts to scores [B, H, T, S] = {list(shape)}"
                )
            if not tensor.is_floating_point() and (name == "score_bias" or tensor.dtype != torch.bool):
                kinds = "a float tensor" if name == "score_bias" else "a bool or float tensor"
                raise ValueError(f"{name} of {tensor.dtype}: expected {kinds}")
        if (bias := self.distance_bias) is not None:
            distances = max(queries // mask.query_repeats + keys - 1, 0)
            if bias.dim() != 3 or bias.size(2) != distances or not _broadcasts(bias, (batch, heads, distances)):
                raise ValueError(
                    f"distance_bias of shape {list(bias.shape)}: expected {[batch, heads, distances]}, with 1 in place of equal entries"
                )
            if not bias.is_floating_point():
                raise ValueError(f"distance_bias of {bias.dtype}: expected a float tensor")
        for mixing in (self.score_mixing, self.prob_mixing):
            if mixing is not None:
                mixing.check(shape)
        if self.score_cap is not None and not self.score_cap > 0:
            raise ValueError(f"score_cap={self.score_cap}: expected a number above 0")
        if self.sinks is not None and self.sinks.shape != (heads,):
            raise ValueError(f"sinks of shape {list(self.sinks.shape)}: expected [{heads}], one for each head")


def check_rate(name: str, rate: float) -> None:
    """Check that ``rate`` is a rate of dropout.

    Raises:
        ValueError: with the argument's name.
    """
    if not isinstance(rate, (int, float)) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{name}={rate!r}: expected a number with 0 <= {name} < 1")


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    if tensor.dim() > len(shape):
        return False
    # compilers do not find symbolic sizes by "in"
    return all(
        size == 1 or size == expected
        for size, expected in zip(tensor.shape, shape[len(shape) - tensor.dim() :], strict=True)
    )
