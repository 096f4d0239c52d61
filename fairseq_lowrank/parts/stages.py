"""The stages of a layer's forward pass, and the parts that fill them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fairseq_lowrank.parts.parameters import NoDecayModule
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.projection import KeyValueStates

STAGES = ("map_query", "map_states", "call_fields", "forward", "combine_weights")
"""The methods of :class:`LayerPart` that are stages of the forward pass, in its order."""


class LayerPart(NoDecayModule, Part):
    """A part that is a module of the layer. It may fill any stage of the forward pass; by default it leaves each as it is.

    Attributes:
        fields: the names of the fields of :class:`~fairseq_lowrank.ops.AttentionCall` that :meth:`call_fields` sets.
    """

    filled: ClassVar[frozenset[str]] = frozenset()
    """The stages that this class fills."""
    reads_inputs: ClassVar[bool] = False
    """True if :meth:`call_fields` reads the input of the layer."""
    reads_own_value: ClassVar[bool] = False
    """True if the output of a position depends on the position's own value, which only self-attention has."""
    fields: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.filled = frozenset(stage for stage in STAGES if getattr(cls, stage) is not getattr(LayerPart, stage))

    @property
    def keeps_stock(self) -> bool:
        """True if the module starts as the identity, so that a state without it may continue with it."""
        return True

    def map_query(self, q: Tensor) -> Tensor:
        """Return the queries ``[B, H, T, D]`` of the heads."""
        return q

    def map_states(self, states: KeyValueStates) -> KeyValueStates:
        """Return keys and values ``[B, G, S, D]`` as they are cached."""
        return states

    def call_fields(self, query: Tensor | None, inputs: Tensor | None) -> dict[str, Any]:
        """Return :attr:`fields` of the call by name: what the part does to scores and probabilities.

        Args:
            query: ``[B, H, T, D]``, the heads' own queries, before the scale.
            inputs: ``[B, T, embed_dim]``, the input of the queries, if :attr:`reads_inputs`.
        """
        return {}

    def forward(self, heads: Tensor, inputs: Tensor, values: Tensor | None) -> Tensor:
        """Return the outputs ``[B, H, T, Dv]`` of heads, as the output projection reads them.

        Args:
            heads: ``[B, queries_per_head * H, T, Dv]``.
            inputs: ``[B, T, embed_dim]``, the layer's query.
            values: ``[B, H, T, Dv]`` values at the positions of the queries, if :attr:`reads_own_value`.
        """
        return heads

    def combine_weights(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the weights ``[B, H, T, S]`` with which values are averaged, from those of all heads of queries."""
        return weights


class Stages(NamedTuple):
    """The names of the parts that fill each stage, in the order in which they change what passes through.

    Args:
        queries: fill :meth:`LayerPart.map_query`.
        states: fill :meth:`LayerPart.map_states`.
        call: fill :meth:`LayerPart.call_fields`.
        heads: fill :meth:`LayerPart.forward`.
        weights: fill :meth:`LayerPart.combine_weights`.
        fields: the fields of the call that parts set.
        read_inputs: a part reads the input of the layer for the call.
        read_own_values: a part reads the values at the positions of the queries.
        rows_sum_to_one: the parts leave the sum of each row of weights at 1.
    """

    queries: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()
    read_inputs: bool = False
    read_own_values: bool = False
    rows_sum_to_one: bool = True

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Stages:
        """Return the stages that these parts fill.

        Raises:
            ValueError: two parts set the same field of the call.
        """
        queries, states, call, heads, weights = (
            tuple(name for name, part in parts.items() if stage in part.filled) for stage in STAGES
        )
        fields = [field for part in parts.values() for field in part.fields]
        if twice := {field for field in fields if fields.count(field) > 1}:
            raise ValueError(
                f"{', '.join(parts)} set {', '.join(sorted(twice))} of the call together. Keep one of them."
            )
        return cls(
            queries,
            states,
            call,
            heads,
            weights,
            frozenset(fields),
            any(part.reads_inputs for part in parts.values()),
            any(part.reads_own_value for part in parts.values()),
            not {"prob_mixing", "sinks"}.intersection(fields),
        )
