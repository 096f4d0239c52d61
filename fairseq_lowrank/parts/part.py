"""What every part of a layer declares: its name, its options, and the layers that it works in."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fairseq_lowrank.parts.sizes import LayerSizes

Value = int | float | str | bool | None
"""The value of an axis or of an option; ``None`` if none is given."""
Kind = type[int] | type[float] | type[bool] | type[str]
"""The type of such values: a positive integer, a number, a switch, or a choice."""


def check_size(name: str, size: object) -> None:
    """Check a size.

    Raises:
        ValueError: it is no positive integer.
    """
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}={size!r}: expected a positive integer")


def check_value(name: str, kind: Kind, value: Any) -> Value:
    """Return a value of an axis or of an option, as its type. A choice is not looked up here.

    Raises:
        ValueError: a value of another type, a size below 1, or a number that is not finite.
    """
    if value is None:
        return None
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")
    if kind is int:
        check_size(name, value)
    if kind is float:
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: expected a finite number")
        return float(value)
    return value


def type_of_values(kind: Kind | None, default: Value, choices: Collection[str] | None) -> Kind:
    """Return the type of a declared value: as declared, else that of choices or of the default, else ``int``."""
    if kind is not None:
        return kind
    return str if choices is not None else int if default is None else type(default)


@dataclass(frozen=True)
class Option:
    """A size or a setting that only some parts read.

    Args:
        name: its keyword in Python, and its name in saved configurations.
        help: what it decides, as a phrase.
        default: the value if none is given; ``None`` if the part computes it, which ``help`` then describes. A switch has
            ``False``.
        choices: the names of its values, if it is a choice.
        flag: its name on the command line, if it is another one.
        letter: its letter in formulas of parameters and cache.
        type: ``int`` for a positive integer, ``float``, ``bool`` for a switch, or ``str`` for a choice. By default that of the
            choices or of the default, and ``int`` without them.

    ``register`` checks the declaration, and a layer checks each value.
    """

    name: str
    help: str
    default: Value = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    letter: str = ""
    type: Kind = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", type_of_values(self.type, self.default, self.choices or None))

    def check(self) -> None:
        """Check the declaration.

        Raises:
            ValueError: a type, a default, choices or a name that an option cannot have.
        """
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"option {self.name!r}: expected the name of a keyword argument, such as 'my_size'")
        if not self.help:
            raise ValueError(f"option {self.name!r}: help={self.help!r}: expected a phrase on what it decides")
        if self.type not in (int, float, bool, str):
            raise ValueError(f"option {self.name!r}: type={self.type!r}: expected int, float, bool or str")
        if (self.type is str) != bool(self.choices):
            raise ValueError(
                f"option {self.name!r}: choices={self.choices!r}: expected names if, and only if, type is str"
            )
        if self.type is bool and self.default is not False:
            raise ValueError(
                f"option {self.name!r}: default={self.default!r}: expected False, from which a switch starts"
            )
        if self.type is str and self.default not in self.choices:
            raise ValueError(
                f"option {self.name!r}: default={self.default!r}: expected one of {', '.join(map(str, self.choices))}"
            )
        check_value(f"option {self.name!r}: default", self.type, self.default)


class Part:
    """A value of one axis.

    A part takes the configuration of the layer, and its options by name. It keeps the value that it uses of each option as an attribute of the
    same name.
    """

    name: ClassVar[str]
    """The name on the command line and in saved configurations."""
    options: ClassVar[tuple[Option, ...]] = ()
    """The options that this part reads."""
    keys_reason: ClassVar[str | None] = None
    """Why keys can be neither normalised nor rotated before they are cached; ``None`` if they can: ``key`` of the cached tensors
    is what heads compare their queries with, and nothing else."""

    @classmethod
    def check_place(cls, axis: str, config: LayerSizes) -> None:
        """Check that the part, a value of ``axis``, works in such a layer.

        Raises:
            ValueError: it does not.
        """
        if cls.keys_reason is None:
            return
        for name in ("qk_norm", "rotary"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} with {axis} {cls.name!r}: {cls.keys_reason}. Choose another {axis}, or remove {name}."
                )
