"""One choice on every axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import fairseq_lowrank.methods  # noqa: F401  registers the methods
from fairseq_lowrank.messages import IMPORT_PLUGIN, did_you_mean
from fairseq_lowrank.parts import (
    AXES,
    METHODS,
    PARTS,
    PRESETS,
    SLOTS,
    AttentionDims,
    Mixing,
    Place,
    Projection,
    ScoreFunction,
)
from fairseq_lowrank.parts.parameters import exempt_from_decay
from fairseq_lowrank.parts.part import Value, check_size, check_value

LARGEST_PROJECTION = 2**31
"""The most numbers that the weight of one projection may hold (8 GiB in float32): more is a mistake in a size."""


class AttentionSpec:
    """One choice on every axis, and the options of the chosen parts; it never changes.

    Args:
        choices: values by the names of :data:`~fairseq_lowrank.parts.AXES`, which describes each. ``None`` is the same as no value.

    Raises:
        ValueError: an unknown axis or value, or values that do not go together.
    """

    def __init__(self, **choices: Value) -> None:
        if unknown := choices.keys() - AXES.keys():
            raise ValueError(
                f"unknown attention axis {', '.join(sorted(unknown))}: expected {', '.join(AXES)}.{did_you_mean(min(unknown), AXES)}"
            )
        for name, axis in AXES.items():
            value = choices.get(name)
            value = axis.default if value is None else check_value(name, axis.type, value)
            if axis.choices is not None and value not in tuple(axis):
                raise ValueError(
                    f"{name}={value!r}: expected one of {', '.join(axis)}.{did_you_mean(value, axis)} {IMPORT_PLUGIN}"
                )
            vars(self)[name] = value
        self._check_options()
        self._check_combinations()

    def __getattr__(self, name: str) -> Any:
        if name in AXES:  # an option of a part that was registered later
            return AXES[name].default
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to {name!r}")

    @property
    def choices(self) -> dict[str, Any]:
        """The values that differ from those of plain attention."""
        return {name: value for name, value in vars(self).items() if value != AXES[name].default}

    def replace(self, **choices: Value) -> AttentionSpec:
        """Return a spec with other values; ``None`` is the default."""
        return AttentionSpec(**self.choices | choices)

    def __eq__(self, other: object) -> bool:
        return self.choices == other.choices if isinstance(other, AttentionSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.choices.items()))

    def __repr__(self) -> str:
        return f"AttentionSpec({', '.join(f'{name}={value!r}' for name, value in self.choices.items())})"

    def is_default(self, *axes: str) -> bool:
        """Return True if the choices on these axes are those of plain attention."""
        return all(getattr(self, axis) == AXES[axis].default for axis in axes)

    @property
    def parts(self) -> Iterator[tuple[str, Any]]:
        """The chosen parts by axis: classes, or objects for activations."""
        chosen = ((axis, PARTS[axis][getattr(self, axis)]) for axis in PARTS)
        return ((axis, part) for axis, part in chosen if part is not None)

    def options_of(self, part: Any) -> dict[str, Any]:
        """Return the values of the options that a part reads."""
        return {option.name: getattr(self, option.name) for option in part.options}

    def _check_options(self) -> None:
        """Check that a chosen part reads each option that is given.

        Raises:
            ValueError: no chosen part reads it.
        """
        for name, value in self.choices.items():
            readers = AXES[name].readers
            if readers and not any(getattr(self, axis) == part for axis, part in readers):
                uses = " or ".join(f"{axis} {part!r}" for axis, part in readers)
                chosen = " and ".join(f"{axis} {getattr(self, axis)!r}" for axis in dict(readers))
                raise ValueError(f"{name}={value!r} has no effect with {chosen}. Use {uses}, or remove it.")

    def _check_combinations(self) -> None:
        """Check the axes that only work with certain values of others.

        Raises:
            ValueError: values that do not go together.
        """
        parts = dict(self.parts)
        projection, score, output = parts["projection"], parts["score"], parts.get("head_output")
        for axis in ("score_mixing", "mixing"):
            if axis in parts and parts[axis].reads_queries and not score.has_queries:
                raise ValueError(
                    f"{axis} {parts[axis].name!r} is computed from the queries, and score {self.score!r} has none. Use another mixing, "
                    "or another score."
                )
        if not projection.composes and self.score != AXES["score"].default:
            raise ValueError(
                f"projection={self.projection!r} works only with score 'dot-product', not with {self.score!r}. Remove one of the two."
            )
        plain = (self.projection, self.score) == (AXES["projection"].default, AXES["score"].default)
        for name in ("head_map", "head_output"):
            if name in parts and parts[name].changes_queries and not plain:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} works only with projection 'independent' and score 'dot-product', not with "
                    f"{self.projection!r} and {self.score!r}. Use these two, or remove {name}."
                )
        if output is not None and output.heads_per_output > 1 and parts.keys() & {"mixing", "score_mixing"}:
            raise ValueError(
                f"head_output={self.head_output!r} has {output.heads_per_output} heads of queries for each output, which mixing "
                f"{self.mixing!r} and score mixing {self.score_mixing!r} cannot mix. Remove the mixing, or head_output."
            )

        if output is not None and "head_map" in parts and self.keys_per_head > 1:
            raise ValueError(
                f"head_output={self.head_output!r} has {self.keys_per_head} heads of keys for each output, which head_map "
                f"{self.head_map!r} cannot map. Remove one of the two."
            )

    @property
    def queries_per_head(self) -> int:
        """How many heads of queries make the output of one head."""
        output = PARTS["head_output"][self.head_output]
        return 1 if output is None else output.heads_per_output

    @property
    def keys_per_head(self) -> int:
        """How many heads of keys make the output of one head."""
        output = PARTS["head_output"][self.head_output]
        return 1 if output is None else output.keys_per_output(**self.options_of(output))

    @classmethod
    def from_preset(cls, preset: str, **axes: Value) -> AttentionSpec:
        """Return the spec of a preset; each axis in ``axes`` that is not ``None`` overrides it.

        Raises:
            ValueError: an unknown preset, axis or value, or a preset without the axis that it needs.
        """
        if preset not in PRESETS:
            raise ValueError(
                f"attention method {preset!r}: expected one of {', '.join(PRESETS)}.{did_you_mean(preset, PRESETS)} {IMPORT_PLUGIN}"
            )
        chosen: dict[str, Any] = {axis: value for axis, value in axes.items() if value is not None}
        need = METHODS[preset].needs
        if need is not None and need.axis not in chosen:
            flag = AXES[need.axis].flag.replace("_", "-")
            raise ValueError(
                f"attention method {preset!r} needs {need.what}: {need.advice}. Give it with --{flag} N, or {need.axis}=N."
            )
        return cls(**PRESETS[preset] | chosen)

    def build(self, axis: str, dims: AttentionDims, query_size: int | None = None) -> Any:
        """Return the module of an axis whose parts are modules, or ``None`` if there is none.

        Args:
            dims: the sizes of the layer.
            query_size: size of a head's own queries, which mixing reads; by default the head size.
        """
        part = PARTS[axis][getattr(self, axis)]
        if part is None:
            return None
        sizes = (dims.head_dim if query_size is None else query_size,) if issubclass(part, Mixing) else ()
        built = part(dims, *sizes, **self.options_of(part))
        for field in SLOTS[axis].fields:
            built.field = field
        for parameter in built.parameters():  # weight decay would pull it to 0, and not to the identity
            exempt_from_decay(parameter)
        return built

    @property
    def call_settings(self) -> dict[str, Any]:
        """The fields of ``AttentionCall`` that choices without tensors set, such as the activation."""
        formulas = {axis: slot for axis, slot in SLOTS.items() if not slot.holds_tensors}
        return {field: getattr(self, axis) for axis, slot in formulas.items() for field in slot.fields}

    @property
    def shift_invariant(self) -> bool:
        """True if the activation cancels what is added to every score of a row."""
        return PARTS["activation"][self.activation].shift_invariant

    def check_place(self, place: Place) -> None:
        """Check that every chosen part works in a layer.

        Raises:
            ValueError: one does not.
        """
        for axis, part in self.parts:
            if SLOTS[axis].holds_tensors:
                part.check_place(axis, place)

    def projection_of(self, embed_dim: int, num_heads: int, kdim: int, vdim: int, **place: Any) -> Projection:
        """Return the projection of a layer of these sizes.

        Args:
            place: further fields of :class:`~fairseq_lowrank.parts.AttentionDims`, such as ``zero_key``.

        Raises:
            ValueError: embed_dim is not divisible by num_heads and no head size is given, or the projection
                cannot work with these sizes.
        """
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "kdim": kdim,
            "vdim": vdim,
            "depth": place.get("depth", 1),
        }
        for name, size in sizes.items():
            check_size(name, size)
        head_dim = self.head_dim
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}: "
                    "change one of them, or give a head size (--head-dim N, head_dim=N)"
                )
            head_dim = embed_dim // num_heads
        value_dim = head_dim if self.value_dim is None else self.value_dim
        if self.key_value_heads is not None and num_heads % self.key_value_heads:
            raise ValueError(f"key_value_heads={self.key_value_heads}: expected a divisor of num_heads={num_heads}")
        part = PARTS["projection"][self.projection]
        options = self.options_of(part)
        further = [size for size in options.values() if isinstance(size, int)]
        numbers = num_heads * max(head_dim, value_dim, *further) * max(embed_dim, kdim, vdim, *further)
        if numbers > LARGEST_PROJECTION:
            raise ValueError(
                f"embed_dim={embed_dim}, num_heads={num_heads}, head_dim={head_dim}, value_dim={value_dim}, kdim={kdim}, "
                f"vdim={vdim}: a projection would hold {numbers:,} numbers; expected sizes that make at most {LARGEST_PROJECTION:,}"
            )
        dims = AttentionDims(
            embed_dim=embed_dim,
            num_heads=num_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            kdim=kdim,
            vdim=vdim,
            key_value_heads=self.key_value_heads,
            queries_per_head=self.queries_per_head,
            keys_per_head=self.keys_per_head,
            **place,
        )
        return part(dims, **options)

    def score_of(self, projection: Projection) -> ScoreFunction:
        """Return the score function of a layer with this projection.

        Raises:
            ValueError: these scores cannot work in such a layer.
        """
        part = PARTS["score"][self.score]
        score = part(projection, **self.options_of(part))
        if score.num_parameters > LARGEST_PROJECTION:
            raise ValueError(
                f"max_positions={projection.dims.max_positions}: score {self.score!r} would hold {score.num_parameters:,} numbers; expected sizes "
                f"that make at most {LARGEST_PROJECTION:,}"
            )
        return score
