"""The configuration of an attention layer: its choices, its sizes, and its place in a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts.mixing import Mixing
from fairseq_lowrank.parts.parameters import exempt_from_decay, wide_defaults
from fairseq_lowrank.parts.part import check_size, check_value
from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.registry import PARTS, SLOTS
from fairseq_lowrank.parts.rotary import Rotation
from fairseq_lowrank.parts.score import ScoreFunction
from fairseq_lowrank.parts.sizes import LayerSizes
from fairseq_lowrank.parts.spec import AttentionSpec

_SWITCHES = (
    *("bias", "add_bias_kv", "add_zero_attn", "self_attention", "encoder_decoder_attention", "batch_first", "qk_norm"),
)
LARGEST_WEIGHT = 2**31
"""The most numbers that a weight may hold (8 GiB in float32): more is a mistake in a size."""


@dataclass(frozen=True)
class AttentionConfig(LayerSizes):
    """The choice on every axis, the sizes of a layer, and its place in a model. The layer and its parts read it.

    Args:
        spec: the choice on every axis.
        embed_dim: d, size of queries and of the output.
        num_heads: h.
        kdim: size of keys, by default d.
        vdim: size of values, by default d.
        bias: whether the projections add a bias.
        add_bias_kv: append a learned key and value.
        add_zero_attn: append a key and value of zeros.
        self_attention: query, key and value are the same tensor.
        encoder_decoder_attention: keys and values come from an encoder.
        batch_first: query, key, value and output are ``[batch, time, .]`` instead of ``[time, batch, .]``.
        max_positions: the greatest length of a sentence: synthesizers need it, other scores take any length.
        qk_norm: divide each head's queries and keys by their root mean square, and multiply them by a learned gain for each feature
            (``q_norm``, ``k_norm``: ``torch.nn.RMSNorm``, shared by heads, before rotary positions), as Qwen3 does.
        depth: the number of the layer in its encoder or decoder, from 1. Parts may start differently in deeper layers.
        rotary: turns projected queries and keys ``[B, H, T, D]`` by their positions ``[T]``, like
            :class:`~fairseq_lowrank.attention.RotaryPositions` or any function or module ``rotary(heads, positions)``. Positions count all keys from 0, padding and cached keys too.
        backend: one of :data:`fairseq_lowrank.ops.BACKENDS` that runs on the device of the inputs. If weights are requested and it
            has none, another one computes them.

    Attributes:
        head_dim: size of a head's queries and keys: the chosen one, or embed_dim / num_heads.
        value_dim: size of a head's values: the chosen one, or the head size.
        key_value_heads: heads of keys and values: the chosen number, or num_heads.
        queries_per_head: heads of queries that make the output of one head.
        keys_per_head: heads of keys that make the output of one head.
        has_appended_keys: the layer appends keys that have no position.

    Raises:
        ValueError: sizes that do not fit together.
    """

    spec: AttentionSpec
    embed_dim: int
    num_heads: int
    kdim: int = None  # type: ignore[assignment]  # set below
    vdim: int = None  # type: ignore[assignment]  # set below
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    self_attention: bool = False
    encoder_decoder_attention: bool = False
    batch_first: bool = False
    max_positions: int | None = None
    qk_norm: bool = False
    depth: int = 1
    rotary: Rotation | None = None
    backend: str = "auto"
    head_dim: int = field(init=False)
    value_dim: int = field(init=False)
    key_value_heads: int = field(init=False)
    chosen_key_value_heads: int | None = field(init=False)
    queries_per_head: int = field(init=False)
    keys_per_head: int = field(init=False)
    has_appended_keys: bool = field(init=False)

    def __post_init__(self) -> None:
        spec, own = self.spec, vars(self)
        own.update({name: self.embed_dim for name in ("kdim", "vdim") if own[name] is None})
        for name in ("embed_dim", "num_heads", "kdim", "vdim", "depth"):
            check_size(name, own[name])
        for name in _SWITCHES:
            check_value(name, bool, own[name])
        if self.rotary is not None and (isinstance(self.rotary, type) or not callable(self.rotary)):
            raise UserError(
                f"rotary={self.rotary!r}: expected RotaryPositions(), a function of heads and positions, or None"
            )
        if spec.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}: "
                "change one of them, or give a head size (--head-dim N, head_dim=N)"
            )
        if spec.key_value_heads is not None and self.num_heads % spec.key_value_heads:
            raise ValueError(
                f"key_value_heads={spec.key_value_heads}: expected a divisor of num_heads={self.num_heads}"
            )
        own["head_dim"] = spec.head_dim or self.embed_dim // self.num_heads
        own["value_dim"] = spec.value_dim or self.head_dim
        own["chosen_key_value_heads"] = spec.key_value_heads
        own["key_value_heads"] = spec.key_value_heads or self.num_heads
        own["queries_per_head"], own["keys_per_head"] = spec.queries_per_head, spec.keys_per_head
        own["has_appended_keys"] = self.add_bias_kv or self.add_zero_attn
        options = spec.options_of(PARTS["projection"][spec.projection]).values()
        further = [size for size in options if isinstance(size, int)]
        names = ("embed_dim", "num_heads", "head_dim", "value_dim", "kdim", "vdim")
        _check_weight(
            ", ".join(f"{name}={own[name]}" for name in names),
            "a projection",
            self.num_heads
            * max(self.head_dim, self.value_dim, *further)
            * max(self.embed_dim, self.kdim, self.vdim, *further),
        )

    def check_place(self) -> None:
        """Check that every chosen part works in this place.

        Raises:
            ValueError: one does not.
        """
        for axis, part in self.spec.parts:
            if SLOTS[axis].holds_tensors:
                part.check_place(axis, self)

    def build_projection(self) -> Projection:
        """Return the projection.

        Raises:
            ValueError: it cannot work with these sizes.
        """
        part = PARTS["projection"][self.spec.projection]
        return part(self, **self.spec.options_of(part))

    def build_score(self, projection: Projection) -> ScoreFunction:
        """Return the score function of a layer with this projection.

        Raises:
            ValueError: these scores cannot work in such a layer.
        """
        part = PARTS["score"][self.spec.score]
        score = part(projection, **self.spec.options_of(part))
        _check_weight(f"max_positions={self.max_positions}", f"score {self.spec.score!r}", score.num_parameters)
        return score

    def build(self, axis: str, query_size: int | None = None) -> Any:
        """Return the module of an axis whose parts are modules, or ``None`` if there is none.

        Args:
            query_size: size of a head's own queries, which mixing reads; by default the head size.
        """
        part = PARTS[axis][getattr(self.spec, axis)]
        if part is None:
            return None
        sizes = (self.head_dim if query_size is None else query_size,) if issubclass(part, Mixing) else ()
        with wide_defaults():
            built = part(self, *sizes, **self.spec.options_of(part))
        for field_of_call in SLOTS[axis].fields:
            built.field = field_of_call
        for parameter in built.parameters():  # weight decay would pull it to 0, and not to the identity
            exempt_from_decay(parameter)
        return built


def _check_weight(sizes: str, what: str, numbers: int) -> None:
    """Check the size of a weight before it is allocated.

    Raises:
        ValueError: it is too large.
    """
    if numbers > LARGEST_WEIGHT:
        raise ValueError(
            f"{sizes}: {what} would hold {numbers:,} numbers; expected sizes that make at most {LARGEST_WEIGHT:,}. "
            "Give smaller sizes, such as --head-dim or head_dim."
        )
