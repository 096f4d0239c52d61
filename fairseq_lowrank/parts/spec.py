"""One choice on every axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

from fairseq_lowrank.messages import IMPORT_PLUGIN, UserError, did_you_mean
from fairseq_lowrank.parts.part import Value, check_value
from fairseq_lowrank.parts.registry import AXES, METHODS, PARTS, PRESETS, SLOTS

_ELSEWHERE = {
    "causal": "masks belong to the call. Pass attn_mask=CAUSAL there.",
    "is_causal": "masks belong to the call. Pass attn_mask=CAUSAL there.",
    "rope": "it is called rotary here. Use rotary=RotaryPositions().",
    "rotary_embedding": "it is called rotary here. Use rotary=RotaryPositions().",
} | {
    other: f"it is called {name} here. Use {name}=N."
    for name, others in {
        "key_value_heads": ("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
        "head_dim": ("head_size", "dim_head", "d_head", "d_k"),
        "value_dim": ("d_v", "v_head_dim"),
        "latent_dim": ("kv_lora_rank",),
    }.items()
    for other in others
}
"""What other libraries call an option, and what to write here."""


def check_names(names: Collection[str], others: Collection[str] = ()) -> None:
    """Check that options are axes or options of their parts.

    Args:
        names: of the options.
        others: further names that the caller takes, which a misspelled one may mean.

    Raises:
        UserError: an unknown name.
    """
    if unknown := sorted(set(names) - AXES.keys()):
        first = unknown[0]
        remedy = _ELSEWHERE.get(first) or f"expected {', '.join(AXES)}.{did_you_mean(first, [*AXES, *others])}"
        raise UserError(f"unknown attention axis {', '.join(unknown)}: {remedy}")


class AttentionSpec:
    """One choice on every axis, and the options of the chosen parts; it never changes.

    Args:
        choices: values by the names of :data:`~fairseq_lowrank.parts.AXES`, which describes each. ``None`` is the same as no value.

    Raises:
        ValueError: an unknown axis or value, or values that do not go together.
    """

    head_dim: int | None
    value_dim: int | None
    key_value_heads: int | None
    projection: str
    score: str
    score_mixing: str
    activation: str
    mixing: str
    head_map: str
    head_output: str
    score_bias: str
    attention_sinks: str

    def __init__(self, **choices: Value) -> None:
        check_names(choices)
        for name, axis in AXES.items():
            value = choices.get(name)
            value = axis.default if value is None else check_value(name, axis.type, value)
            if isinstance(value, type):
                raise UserError(
                    f"{name}={value.__name__}: expected the name of a part. Declare the class first, with "
                    f"register(Method(…, parts={{{name!r}: {value.__name__}}})), and pass its name."
                )
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
        """Return the axes whose values differ from those of plain attention."""
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
        check_names(axes)
        if preset not in tuple(PRESETS):  # a value of any type, also a list
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

    @property
    def call_settings(self) -> dict[str, Any]:
        """The fields of ``AttentionCall`` that choices without tensors set, such as the activation."""
        formulas = {axis: slot for axis, slot in SLOTS.items() if not slot.holds_tensors}
        return {field: getattr(self, axis) for axis, slot in formulas.items() for field in slot.fields}

    @property
    def shift_invariant(self) -> bool:
        """True if the activation cancels what is added to every score of a row."""
        return PARTS["activation"][self.activation].shift_invariant
