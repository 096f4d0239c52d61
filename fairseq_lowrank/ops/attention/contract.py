"""The types every backend shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may see. The three parts combine; each is optional.

    Args:
        causal: query t sees keys s ≤ t + S − T: the last query sees every key, as in cached decoding.
        key_padding: ``[B, S]`` bool, True at keys that nobody sees.
        additive: broadcastable to ``[B, H, T, S]``. Bool: hides where it is True. Float: added to the scores, and hides
            where it is −inf or no more than half of the least number of its dtype (``torch.finfo(dtype).min / 2``), so
            that masks filled with ``finfo.min`` hide too. Any other finite number (−1e8, −1e4) is added.
    """

    causal: bool = False
    key_padding: Tensor | None = None
    additive: Tensor | None = None

    def hidden(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Where keys are hidden, by any part: bool, broadcastable to ``[B, H, T, S]``."""
        hidden = None
        if self.causal:
            ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
            hidden = ones.triu(1 + num_keys - num_queries)
        if self.key_padding is not None:
            padding = self.key_padding[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        if self.additive is not None:
            additive = hides(self.additive)
            hidden = additive if hidden is None else hidden | additive
        return hidden

    @property
    def bias(self) -> Tensor | None:
        """The additive mask where it is a float tensor."""
        return self.additive if self.additive is not None and self.additive.dtype != torch.bool else None

    @property
    def differs_by_head(self) -> bool:
        """Whether the heads may see different keys."""
        return self.additive is not None and self.additive.dim() > 2 and self.additive.size(-3) > 1

    def rows_with_keys(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | bool:
        """Whether a query sees any key: True if every one does, else bool, broadcastable to ``[B, H, T, 1]``."""
        if self.additive is not None:
            return ~self.hidden(num_queries, num_keys, device).all(dim=-1, keepdim=True)
        if self.key_padding is None and not (self.causal and num_queries > num_keys):
            return True
        visible = torch.ones(1, num_keys, device=device) if self.key_padding is None else ~self.key_padding
        if not self.causal:
            return visible.any(dim=1)[:, None, None, None]
        # The number of visible keys up to that of each query, which lies before the first where T > S.
        seen = F.pad(visible.cumsum(dim=1), (num_queries, 0))[:, -num_queries:]
        return (seen > 0)[:, None, :, None]

    def dense(self, inputs: AttentionInputs) -> Tensor | None:
        """All parts as one additive float tensor in the dtype of q, broadcastable to ``[B, H, T, S]``."""
        q = inputs.q
        hidden, bias = self.hidden(q.size(2), inputs.k.size(2), q.device), self.bias
        if hidden is None:
            return None
        base = q.new_zeros(()) if bias is None else narrowed(bias, q.dtype)
        return torch.where(hidden, float("-inf"), base)


def is_traced(tensor: Tensor) -> bool:
    """Whether operations are only looked at (by a compiler, an export, the meta device): then no number can be read."""
    return torch.compiler.is_compiling() or tensor.is_meta


def hiding_value(dtype: torch.dtype) -> float:
    """A float mask of this dtype hides where it is this or less."""
    return torch.finfo(dtype).min / 2


def hides(mask: Tensor) -> Tensor:
    """Where a mask hides, by itself: a bool one where it is True, a float one from :func:`hiding_value` down."""
    return mask if mask.dtype == torch.bool else mask <= hiding_value(mask.dtype)


def narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """``bias`` in ``dtype``: −inf stays, and what is finite stays finite."""
    if torch.finfo(bias.dtype).min >= torch.finfo(dtype).min:
        return bias.to(dtype)
    return torch.where(bias == float("-inf"), bias, bias.clamp(min=hiding_value(dtype))).to(dtype)


class HeadMixing(NamedTuple):
    """Weights that mix attention probabilities across heads: P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12).

    Args:
        weight: ``[H, H]``, M itself, or the base B of position-wise mixing; ``[H]``, the diagonal of a diagonal M.
        query_weight: ``[D, H]``, W^M: then M_t[j, i] = Σ_d q_{t,j,d} W^M[d, i] + B[j, i] for query t (section 3.1).
    """

    weight: Tensor
    query_weight: Tensor | None = None

    @property
    def is_diagonal(self) -> bool:
        """Whether each head's probabilities are only scaled, P̄_i = w_i P_i."""
        return self.weight.dim() == 1

    def matrices(self, mixing_query: Tensor | None) -> Tensor:
        """M as ``[H, H]``, or ``[B, T, H, H]`` (indices b, t, j, i) for position-wise mixing of ``[B, H, T, D]``."""
        if self.is_diagonal:
            return torch.diag(self.weight)
        if self.query_weight is None:
            return self.weight
        return torch.einsum("bjtd,di->btji", mixing_query, self.query_weight) + self.weight


@dataclass(frozen=True)
class AttentionInputs:
    """The checked arguments of :func:`fairseq_lowrank.ops.attention`, as backends receive them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask = AttentionMask()
    activation: str = "softmax"
    mixing: HeadMixing | None = None
    mixing_query: Tensor | None = None
    score_bias: Tensor | None = None
    scale: float = 1.0
    dropout_p: float = 0.0
    need_weights: bool = False

    @property
    def head_scale(self) -> Tensor | None:
        """``[H, 1, 1]``, what diagonal mixing multiplies each head's output with, or ``None`` without it.

        (w_i P_i) V = w_i (P_i V), with dropout too: no backend has to mix anything.
        """
        if self.mixing is None or not self.mixing.is_diagonal:
            return None
        return self.mixing.weight[:, None, None].to(self.v.dtype)

    def check(self, activations: tuple[str, ...]) -> None:
        """Refuse what no backend can compute.

        Raises:
            ValueError: shapes that do not fit together, or values out of range.
        """
        q, k, v = self.q, self.k, self.v
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            raise ValueError(
                f"q, k, v of shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: "
                "expected [B, H, T, D], [B, G, S, D], [B, G, S, Dv]"
            )
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {tensor.dtype}: expected a float tensor")
        batch, heads, queries, dim = q.shape
        if heads < 1 or dim < 1:
            raise ValueError(f"q of shape {list(q.shape)}: expected [B, H, T, D] with H and D of 1 or more")
        keys = k.size(2)
        if k.size(1) not in (1, heads) or k.shape != (batch, k.size(1), keys, dim):
            raise ValueError(
                f"k of shape {list(k.shape)} does not fit q {list(q.shape)}: expected [{batch}, 1 or {heads}, S, {dim}]"
            )
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v of shape {list(v.shape)} does not fit k {list(k.shape)}")
        if self.activation not in activations:
            raise ValueError(f"activation={self.activation!r}: expected one of {', '.join(activations)}")
        check_rate("dropout_p", self.dropout_p)
        if not is_traced(q) and not (isinstance(self.scale, (int, float)) and math.isfinite(self.scale)):
            raise ValueError(f"scale={self.scale!r}: expected a finite number")
        padding = self.mask.key_padding
        if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, keys)):
            raise ValueError(
                f"mask.key_padding of shape {list(padding.shape)} and {padding.dtype}: expected bool [{batch}, {keys}]"
            )
        scores = (batch, heads, queries, keys)
        for name, tensor in (("mask.additive", self.mask.additive), ("score_bias", self.score_bias)):
            if tensor is None:
                continue
            if not _broadcasts(tensor, scores):
                raise ValueError(f"{name} of shape {list(tensor.shape)} does not broadcast to scores {list(scores)}")
            if not tensor.is_floating_point() and (name == "score_bias" or tensor.dtype != torch.bool):
                kinds = "a float tensor" if name == "score_bias" else "a bool or float tensor"
                raise ValueError(f"{name} of {tensor.dtype}: expected {kinds}")
        if self.mixing is not None:
            self._check_mixing(self.mixing)

    def _check_mixing(self, mixing: HeadMixing) -> None:
        _, heads, _, dim = self.q.shape
        shapes = [(heads, heads)] if mixing.query_weight is not None else [(heads, heads), (heads,)]
        if mixing.weight.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"mixing.weight of shape {list(mixing.weight.shape)}: expected {expected}")
        if mixing.query_weight is None:
            return
        if mixing.query_weight.shape != (dim, heads):
            shape = list(mixing.query_weight.shape)
            raise ValueError(f"mixing.query_weight of shape {shape}: expected [{dim}, {heads}]")
        if self.mixing_query is None or self.mixing_query.shape != self.q.shape:
            given = None if self.mixing_query is None else list(self.mixing_query.shape)
            raise ValueError(
                f"position-wise mixing (mixing.query_weight) needs mixing_query {list(self.q.shape)}: got {given}"
            )


def check_rate(name: str, rate: float) -> None:
    """Refuse what is no rate of dropout.

    Raises:
        ValueError: with the argument's name.
    """
    if not isinstance(rate, (int, float)) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{name}={rate!r}: expected a number with 0 <= {name} < 1")


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)
