"""The steps of a layer's forward pass, the parts that fill them, and the one function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts.parameters import NoDecayModule
from fairseq_lowrank.parts.part import Part
from fairseq_lowrank.parts.plain import Inexact
from fairseq_lowrank.parts.projection import KeyValueStates

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes

STEPS = ("queries", "states", "call", "heads", "weights")
"""The methods of :class:`LayerPart` that are steps of the forward pass, in its order."""

Value = TypeVar("Value", Tensor, KeyValueStates, AttentionCall)


class Context(NamedTuple):
    """One forward pass of a layer. Each step gets it, and nothing keeps it.

    Inputs and own values are in float32 or wider, as the weights of parts are. Queries and states have the dtype of the model: to
    widen them all would double what is kept for the backward pass.

    Args:
        inputs: ``[B, T, embed_dim]``, the input of the queries; in the step ``states`` that of the keys, ``[B, S, kdim]``.
            Models of ``transformers`` give it only to parts with :attr:`LayerPart.reads_inputs`.
        queries: ``[B, H, T, D]``, the heads' own queries before the scale; ``None`` before the step ``call``.
        states: the tensors that are cached for all keys; ``key`` and ``value`` in models of ``transformers``.
        first: the number of keys before the first query, which is its position in self-attention. A tensor ``[1]`` if a static
            cache counts it; only parts with :attr:`LayerPart.reads_positions` or `reads_own_value` get this one.
        repeats: the queries are those of this many hypotheses in a row. Each begins at ``first``.
        own_values: ``[B, H, T, Dv]``, the values at the positions of the queries, if a part :attr:`reads_own_value`.
    """

    inputs: Tensor | None = None
    queries: Tensor | None = None
    states: KeyValueStates = MappingProxyType({})  # type: ignore[assignment]
    first: int | Tensor = 0
    repeats: int = 1
    own_values: Tensor | None = None

    def widened(self) -> Context:
        """Return the context with inputs and values in float32 or wider. Mixing widens queries itself, where it needs them."""
        if self.inputs is None and self.own_values is None:
            return self
        inputs, values = _wide(self.inputs), _wide(self.own_values)
        if inputs is self.inputs and values is self.own_values:
            return self
        return self._replace(inputs=inputs, own_values=values)

    def query_positions(self) -> Tensor:
        """Return the positions of the queries among the keys, ``[T]``, or ``[1, T]`` if a static cache counts them."""
        assert self.queries is not None
        positions = torch.arange(self.queries.size(2) // self.repeats, device=self.queries.device)
        if isinstance(self.first, Tensor):
            return self.first[:, None] + positions
        return positions.repeat(self.repeats) + self.first  # a number, also a symbolic one


class LayerPart(NoDecayModule, Part):
    """A part that is a module of the layer. It may fill any step of the forward pass; by default it leaves each as it is.

    Every step is a call of the module, ``part("heads", heads, context)``. So hooks, adapters, offloading and FSDP see it.
    A part and what it reads are in float32 or wider, also in half-precision models; what it returns is narrowed again. A step
    of 1e-3 is lost in a bfloat16 number near 1.

    Attributes:
        state_sizes: the names of further tensors ``[B, H, S, size]`` that the step ``states`` adds for decoding to cache.
    """

    filled: ClassVar[frozenset[str]] = frozenset()
    """The steps that this class fills."""
    learns: ClassVar[bool] = True
    """True if it has parameters."""
    reads_inputs: ClassVar[bool] = True
    """False if no step reads :attr:`Context.inputs`."""
    reads_queries: ClassVar[bool] = True
    """False if no step reads the values of :attr:`Context.queries`, which models of ``transformers`` rotate."""
    reads_own_value: ClassVar[bool] = False
    """True if the output of a position depends on the position's own value, which only self-attention has."""
    reads_positions: ClassVar[bool] = False
    """True if a step reads :attr:`Context.first`."""
    before_norm: ClassVar[bool] = False
    """True if its steps ``queries`` and ``states`` have a meaning before queries and keys are normalised, which cancels any scale."""
    folds: ClassVar[bool] = False
    """True if :meth:`fold` works with all values of the parameters."""
    keeps_float32 = True
    state_sizes: Mapping[str, int] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.filled = frozenset(step for step in STEPS if getattr(cls, step) is not getattr(LayerPart, step))

    @classmethod
    def needs_self_attention(cls) -> bool:
        """Return True if it reads positions that queries and keys have in common."""
        return cls.reads_own_value or cls.reads_positions

    @classmethod
    def check_place(cls, axis: str, config: LayerSizes) -> None:
        super().check_place(axis, config)
        if config.qk_norm and not cls.before_norm and cls.filled & {"queries", "states"}:
            raise ValueError(
                f"qk_norm with {axis} {cls.name!r}: it changes queries or keys before they are normalised, which cancels a scale. Scale "
                "scores instead (score_mixing), remove qk_norm, or set before_norm = True in the class if that is what it means."
            )
        if cls.needs_self_attention() and (not config.self_attention or config.has_appended_keys):
            what = (
                "the value at each query's own position" if cls.reads_own_value else "the distances of queries and keys"
            )
            raise ValueError(
                f"{axis} {cls.name!r} reads {what}, so it needs self-attention without appended keys. Choose sites without cross "
                "attention (--attention-sites encoder,decoder, sites=['encoder', 'decoder']), or self_attention=True."
            )

    @property
    def keeps_stock(self) -> bool:
        """True if the module starts as the identity, so that a state without it may continue with it."""
        return True

    @property
    def rows_sum_to_one(self) -> bool:
        """False if the weights of a row may sum to something else than 1 after the step ``call``."""
        return True

    @property
    def keeps_probabilities(self) -> bool:
        """True if the weights that the layer returns are probabilities."""
        return self.rows_sum_to_one and "weights" not in self.filled

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values, also after ``to_empty``."""

    def fold(self, layer: Any) -> None:
        """Change the projections of ``layer``, which lacks this part, so that the layer computes the same as with the part.

        Raises:
            Inexact: the projections cannot hold it.
        """
        raise Inexact("it depends on the input")

    def take_over(self, other: Any) -> None:
        """Set the parameters so that this part computes the same as ``other``, a different part of the same axis.

        Raises:
            Inexact: this part cannot compute the same.
        """
        raise Inexact("it is a different function")

    def forward(self, step: str, value: Any, context: Context) -> Any:
        """Return what ``step``, one of :data:`STEPS`, makes of a value."""
        return getattr(self, step)(value, context)

    def queries(self, queries: Tensor, context: Context) -> Tensor:
        """Return the queries ``[B, H, T, D]`` of the heads."""
        return queries

    def states(self, states: KeyValueStates, context: Context) -> KeyValueStates:
        """Return keys and values ``[B, G, S, D]`` as they are cached."""
        return states

    def call(self, call: AttentionCall, context: Context) -> AttentionCall:
        """Return the call with what the part does to scores and probabilities, see :meth:`.AttentionCall.adding`."""
        return call

    def heads(self, heads: Tensor, context: Context) -> Tensor:
        """Return the outputs ``[B, H, T, Dv]`` of heads, as the output projection reads them.

        Args:
            heads: ``[B, queries_per_head * H, T, Dv]``.
            context: of this forward pass.
        """
        return heads

    def weights(self, weights: Tensor, context: Context) -> Tensor:
        """Return the weights ``[B, H, T, S]`` with which values are averaged, from those of all heads of queries."""
        return weights


def declared(part: nn.Module) -> Any:
    """Return the part in a module that may wrap it, as adapters do, with what its class declares."""
    if isinstance(part, LayerPart):
        return part
    return next(module for module in part.modules() if isinstance(module, LayerPart))


Steps = dict[str, list[nn.Module]]
"""The parts that fill each step, in the order in which they change what passes through; a step that no part fills is left out."""


def by_step(parts: Iterable[nn.Module]) -> Steps:
    """Return the parts that fill each step."""
    steps: Steps = {}
    for part in parts:
        for step in declared(part).filled:
            steps.setdefault(step, []).append(part)
    return steps


class FilledSteps(NamedTuple):
    """What a layer reads of its parts in each forward pass, found once for the parts that it has.

    Args:
        children: the parts, or ``None``, by the names that they have in the layer.
        steps: the parts by the steps that they fill.
        reads_inputs: a part reads :attr:`Context.inputs`.
        reads_own_value: a part reads :attr:`Context.own_values`.
        rows_sum_to_one: no part changes the sum of the weights of a row.
        reads_positions: a part reads positions that queries and keys have in common.
    """

    children: tuple[tuple[str, nn.Module | None], ...]
    steps: Steps
    reads_inputs: bool
    reads_own_value: bool
    rows_sum_to_one: bool
    reads_positions: bool

    @classmethod
    def of(cls, layer: nn.Module, names: Iterable[str]) -> FilledSteps:
        """Return the steps that the children of these names fill."""
        children = tuple((name, layer._modules.get(name)) for name in names)
        parts = [part for _, part in children if part is not None]
        declarations = [declared(part) for part in parts]
        return cls(
            children,
            by_step(parts),
            any(part.reads_inputs for part in declarations),
            any(part.reads_own_value for part in declarations),
            all(part.rows_sum_to_one for part in declarations),
            any(part.needs_self_attention() for part in declarations),
        )

    def readers(self) -> str:
        """Return the parts that read inputs, in words."""
        return ", ".join(
            f"{name} {declared(part).name!r}"
            for name, part in self.children
            if part is not None and declared(part).reads_inputs
        )

    def is_of(self, layer: nn.Module) -> bool:
        """Return False if a part of the layer was replaced, removed or wrapped, by whatever way."""
        children = layer._modules
        for name, part in self.children:  # noqa: SIM110 (a generator takes twice the time, in every call)
            if children.get(name) is not part:
                return False
        return True


NO_CONTEXT = Context()
"""That of a layer without parts."""


def take_step(steps: Steps, step: str, value: Value, context: Context) -> Value:
    """Return what all parts make of a value in one step, in the dtype of the value. The context is wide already."""
    for part in steps.get(step, ()):
        value = part(step, value, context) if step == "call" else _narrowed(part(step, _wide(value), context), value)
    return value


def run(
    steps: Steps,
    call: AttentionCall,
    context: Context,
    compute: Callable[[AttentionCall], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with its parts, from the call to the heads that the output projection reads.

    Args:
        steps: the parts by the steps that they fill.
        call: without what the parts do.
        context: of this forward pass.
        compute: returns the heads of a call, and its weights or ``None``.
    """
    if not steps:
        return compute(call)
    context = context.widened()
    heads, weights = compute(take_step(steps, "call", call, context))
    if "heads" in steps:
        heads = take_step(steps, "heads", heads, context)
    return heads, None if weights is None else take_step(steps, "weights", weights, context)


def _wide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: at_least_float32(tensor) for name, tensor in value.items()}
    return None if value is None else at_least_float32(value)


def _narrowed(value: Any, like: Any) -> Any:
    if isinstance(value, dict):
        (dtype,) = {tensor.dtype for tensor in like.values()}
        return {name: tensor.to(dtype) for name, tensor in value.items()}
    return value.to(like.dtype)
