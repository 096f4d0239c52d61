"""The projection axis: how heads get queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.plain import NotPlain, Plain

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes

KeyValueStates = dict[str, Tensor]
"""Tensors ``[B, G, S, D]`` by name, from which keys and values are made: everything that a decoding step caches."""

Layer = Any
"""The layer of a projection. It has what the projection and the score function built, under fairseq's names."""


class AttentionInputs(NamedTuple):
    """Inputs of the operation: ``q [B, H, T, D]`` (or one head for all), ``k [B, G, S, D]`` and ``v [B, G', S, D']``.

    G and G' divide H. D and D' are any sizes.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Projection(Part):
    """A value of the projection axis. This base class is standard attention with any number of query and key heads.

    A projection holds sizes and no parameters. It builds its modules once, and the layer adopts them under fairseq's names, so
    that checkpoints fit. Each method gets the layer and reads them there, for the layer is where adapters, hooks, sharding and
    replicas replace modules and parameters.

    Args:
        config: of the layer.

    Attributes:
        config: of the layer. A projection may complete it, as one does that turns features by their positions.
        query_heads: heads of queries: h, or 1 for all heads.
        state_heads: G, heads of the cached tensors.
        query_size: size of a head's own queries, which mixing reads.
        state_sizes: names of the cached tensors, and their size for one head.
        score_size: size of what a head compares, before anything is absorbed; scores are divided by its root.
        rotary_size: how many of its last features rotary positions turn; 0 if there are none to turn.
        rotary_state: the cached tensor that has these features of the keys.
        state_groups: heads of the cached tensors that have other numbers of heads than ``state_heads``. Such projections take no
            appended keys.

    Raises:
        ValueError: sizes that this projection cannot work with.
    """

    composes: ClassVar[bool] = True
    """False if the projection works with dot products and without appended keys only."""
    projects_keys: ClassVar[bool] = True
    """False if keys are the inputs themselves."""
    needs_keys: ClassVar[bool] = True
    """False if queries and values have a meaning without keys."""
    factor: ClassVar[str | None] = None
    """The option with the size of the factors, if plain attention can be factored into this projection."""
    factor_loss: ClassVar[str] = ""
    """Why the outputs of factors differ from those of plain attention at every size, if they do."""
    key_state: ClassVar[str] = "key"
    """The name of the cached tensor that keys are made of."""
    value_state: ClassVar[str] = "value"
    """The name of the cached tensor that values are made of, if it is another one."""
    groups: ClassVar[tuple[int, ...] | None] = None
    """The numbers of key and value heads that may be requested; ``None`` means any divisor of the heads."""

    def __init__(self, config: LayerSizes) -> None:
        self.config: Any = config
        self.query_heads = config.num_heads * config.queries_per_head
        self.state_heads = config.key_value_heads
        requested = config.chosen_key_value_heads
        if self.groups is not None and requested not in (None, *self.groups):
            expected = " or ".join(["none", *map(str, self.groups)])
            raise ValueError(f"key_value_heads={requested}: projection {self.name!r} expects {expected}")
        self.state_sizes = {"key": config.head_dim, "value": config.value_dim}
        self.state_groups: dict[str, int] = {}
        if config.keys_per_head > 1:
            if config.has_appended_keys or self.state_heads != config.num_heads:
                raise ValueError(
                    f"{config.keys_per_head} keys for each head: they work with a value for each head and without appended keys. Remove "
                    "key_value_heads, add_bias_kv and add_zero_attn."
                )
            self.state_groups["key"] = config.keys_per_head * config.num_heads
        self.query_size = self.score_size = self.rotary_size = config.head_dim
        self.rotary_state = "key"

    @classmethod
    def check_place(cls, axis: str, config: LayerSizes) -> None:
        if config.has_appended_keys and not cls.composes:
            raise ValueError(
                f"{axis} {cls.name!r} does not work with add_bias_kv or add_zero_attn. Remove them, or choose another {axis}."
            )
        super().check_place(axis, config)

    @property
    def key_heads(self) -> int:
        """The number of different keys that heads compare queries with, whose scores static mixing adds up."""
        return self.state_groups.get("key", self.state_heads)

    def score_rank(self, *, mixed: bool) -> int:
        """Return the greatest rank of a head's scores, for inputs of any width.

        Args:
            mixed: the scores of all heads are mixed.
        """
        return (self.key_heads if mixed else 1) * self.state_sizes.get("key", self.config.head_dim)

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        """Build ``k_proj``, ``v_proj`` and ``q_proj`` in fairseq's order, so that the same seed draws the same weights.

        Args:
            linear: builds a projection from ``(inputs, outputs)``.
        """
        config = self.config
        return {
            "k_proj": linear(config.kdim, self.key_heads * config.head_dim),
            "v_proj": linear(config.vdim, self.state_heads * config.value_dim),
            "q_proj": linear(config.embed_dim, self.query_heads * config.head_dim),
        }

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        """Build what is not a projection. The layer calls this after everything that fairseq's own layer draws.

        A parameter needs no values: :meth:`reset_parameters` sets them. A module has its initial values.
        """
        return {}

    def reset_parameters(self, layer: Layer) -> None:
        """Set the parameters from :meth:`build_extra_parameters` to their initial values; modules set theirs."""

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        """Return the heads' own queries, which mixing reads.

        ``[T, B, embed_dim]`` becomes ``[B, H, T, head_dim]``, or one head for all.
        """
        return split_heads(layer._modules["q_proj"](query), self.config.head_dim)

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        """Return the tensors to cache for ``key [S, B, kdim]`` and ``value [S, B, vdim]``.

        Raises:
            ValueError: a value that does not fit the key.
        """
        config = self.config
        children = layer._modules  # nn.Module finds an attribute there only after a slow search elsewhere
        return {
            "key": split_heads(children["k_proj"](key), config.head_dim),
            "value": split_heads(children["v_proj"](value), config.value_dim),
        }

    def attention_inputs(
        self,
        layer: Layer,
        q: Tensor,
        states: KeyValueStates,
        *,
        keep_row_constants: bool,
        rows_sum_to_one: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return :class:`AttentionInputs` for queries from :meth:`project_query` and cached tensors.

        Args:
            keep_row_constants: keep terms of the scores that are constant within a row.
            rows_sum_to_one: the weights of a row sum to 1, or to 0 if the row sees no key.
        """
        return q, states["key"], states["value"]  # a plain tuple, which is made faster in each step of decoding

    def finalize_heads(self, layer: Layer, heads: Tensor, call: AttentionCall) -> Tensor:
        """Return ``[B, H, T, value_dim]`` (or one head for all) from the result of the operation on ``call``."""
        return heads

    def plain(self, layer: Any) -> Plain:
        """Return the weights of plain attention with the outputs of ``layer``, which has this projection.

        Raises:
            NotPlain: no plain attention computes this.
        """
        raise NotPlain("projection", self.name)

    def share_value(self, layer: Any) -> bool:
        """Move what differs between the values of heads into the output projection of ``layer``, which has this projection.

        Returns:
            False if the heads have separate values. Then nothing changes.
        """
        return self.state_sizes.keys() == {"key", "value"} and self.state_groups.get("value", self.state_heads) == 1

    @classmethod
    def full_size(cls, config: LayerSizes) -> int:
        """Return the least size of :attr:`factor` at which plain attention loses nothing."""
        raise NotImplementedError

    @classmethod
    def factorize(cls, plain: Any, result: Any) -> None:
        """Set the parameters of the layer ``result``, which are zeros, so that its outputs come close to those of a plain layer.

        The output projection is set already.
        """
        raise NotImplementedError

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        """Return the values that each head averages, ``[B, H, S, value_dim]``."""
        values = states["value"]
        return values.repeat_interleave(self.config.num_heads // values.size(1), dim=1)


def split_heads(projected: Tensor, size: int) -> Tensor:
    """Reshape ``[N, B, heads * size]`` to ``[B, heads, N, size]``."""
    length, batch, width = projected.shape
    if length == 1:
        return projected.view(batch, width // size, 1, size)
    return projected.view(length, batch, width // size, size).permute(1, 2, 0, 3)


def merge_heads(heads: Tensor) -> Tensor:
    """Reshape ``[B, heads, N, size]`` to ``[N, B, heads * size]``."""
    batch, count, length, size = heads.shape
    if length == 1:
        return heads.reshape(1, batch, count * size)
    return heads.permute(2, 0, 1, 3).reshape(length, batch, count * size)


def is_plain_linear(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return True if a module is of this class and computes x Wᵀ + b from its ``weight`` and ``bias`` and does nothing else.

    Adapters, quantised and parametrised layers are other classes, and hooks may change inputs, outputs or gradients.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    plain = type(module) is kind and not any(hooks) and "forward" not in vars(module)
    return plain and type(module.weight) in (Tensor, nn.Parameter)


def linear_map(module: nn.Module, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return W ``[outputs, size]`` and b ``[outputs]`` of any affine module, from what it makes of the unit vectors and of 0."""
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    bias = module(unit.new_zeros(1, size))[0]
    return (module(unit) - bias).mT, bias


def _same_memory(first: Tensor, second: Tensor) -> bool:
    if first is second:
        return True
    if torch._C._are_functorch_transforms_active():  # vmap and grad wrap each argument, also if all are one tensor
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(first) and functorch.is_functorch_wrapped_tensor(second):
            first, second = functorch.get_unwrapped(first), functorch.get_unwrapped(second)
        if functorch.is_functorch_wrapped_tensor(first) or functorch.is_functorch_wrapped_tensor(second):
            return False
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()


def check_value_is_key(name: str, config: LayerSizes, key: Tensor, value: Tensor) -> None:
    """Check that values are the keys: one tensor, or equal views of the same memory.

    In self-attention and in attention to an encoder they are. There a wrapper may have cast or copied each argument on its own.

    Raises:
        UserError: they are not.
    """
    if config.self_attention or config.encoder_decoder_attention or _same_memory(key, value):
        return
    raise UserError(
        f"projection {name!r} computes keys and values from one input. Pass the same tensor as key and value, or build the layer "
        "with self_attention=True or encoder_decoder_attention=True, which takes the key for both."
    )
