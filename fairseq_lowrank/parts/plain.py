"""Plain attention with the outputs of a part: weights of queries, keys and values for every head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.ops.activation import ACTIVATIONS

Weights = tuple[Tensor, Tensor | None]
Plain = tuple[Weights, Weights, Weights]
"""A projection ``[heads * size, inputs]`` and its bias; a plain layer has one of queries, keys and values."""


class Inexact(ValueError):
    """A conversion of a part that would change outputs.

    Args:
        reason: as a clause. The caller names the part and says what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotPlain(UserError):
    """A choice that no plain attention computes.

    Args:
        axis: of the choice.
        name: of the part.
        reason: why no plain attention computes it, if there is more to say.
    """

    def __init__(self, axis: str, name: str, reason: str = "") -> None:
        super().__init__(axis, name, reason)
        self.axis, self.name, self.reason = axis, name, reason

    def __str__(self) -> str:
        reason = f"{self.reason}, so no" if self.reason else "no"
        return f"{self.axis}={self.name!r}: {reason} plain attention computes this. Keep the layer as it is."


def own_weights(projection: Any, copies: int = 1) -> Weights:
    """Return a projection's weight and bias, for ``copies`` heads in a row that share it."""
    bias = projection.bias
    return projection.weight.repeat(copies, 1), None if bias is None else bias.repeat(copies)


def grouped_weights(layer: Any) -> Plain:
    """Return queries, keys and values of every head, copied where heads share them."""
    config = layer.config
    size = {"q_proj": config.head_dim, "k_proj": config.head_dim, "v_proj": config.value_dim}

    def expand(name: str) -> Weights:
        weight, bias = own_weights(getattr(layer, name))
        heads = weight.view(-1, size[name], weight.size(1))
        copies = layer.num_heads // len(heads)
        weight = heads.repeat_interleave(copies, dim=0).flatten(0, 1)
        return weight, None if bias is None else bias.view(-1, size[name]).repeat_interleave(copies, dim=0).flatten()

    return expand("q_proj"), expand("k_proj"), expand("v_proj")


@torch.no_grad()
def scale_queries(layer: Any, factors: Tensor) -> None:
    """Multiply the queries of each head by a factor, ``[H]``.

    Raises:
        Inexact: heads share a query.
    """
    if layer.projection.query_heads != layer.num_heads:
        raise Inexact("its heads share one query")
    for tensor in (layer.q_proj.weight, layer.q_proj.bias):
        if tensor is not None:
            rows = factors.repeat_interleave(len(tensor) // len(factors))
            tensor.mul_(rows if tensor.dim() == 1 else rows[:, None])


def copy_weights(source: Any, target: Any) -> None:
    """Copy weight and bias of a projection."""
    with torch.no_grad():
        target.weight.copy_(source.weight)
        if source.bias is not None and target.bias is not None:
            target.bias.copy_(source.bias)


def fold_biases(plain: Any, result: Any) -> None:
    """Move biases of keys and values into the output, because factored projections have none.

    A key's bias adds the same to all scores of a row, which softmax cancels. A value's bias adds a constant to the output.
    """
    if plain.k_proj.bias is None:
        return
    if plain.k_proj.bias.any() and not ACTIVATIONS[plain.spec.activation].shift_invariant:
        raise FlagError(
            "--attention-activation",
            plain.spec.activation,
            "does not cancel the biases of keys, which this projection does not have",
            "Use softmax, or a checkpoint without biases.",
        )
    if result.out_proj.bias is not None:
        result.out_proj.bias.add_(plain.out_proj.weight @ plain.v_proj.bias)
