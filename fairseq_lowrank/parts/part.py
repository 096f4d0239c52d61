"""What every part of a layer declares: its name, its options, and the layers that it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


@dataclass(frozen=True)
class Option:
    """A size or a setting that only some parts read.

    Args:
        name: its keyword in Python, and its name in saved configurations.
        help: what it decides, as a phrase.
        default: the value if none is given; ``None`` if the part computes it, which ``help`` then describes. ``False`` makes a
            switch.
        choices: the names of its values; empty for a positive integer and for a switch.
        flag: its name on the command line, if it is another one.
        letter: its letter in formulas of parameters and cache.
    """

    name: str
    help: str
    default: str | int | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    letter: str = ""


class Place(NamedTuple):
    """What decides whether a part works in a layer.

    Args:
        self_attention: query, key and value are the same tensor.
        has_appended_keys: the layer appends keys that have no position.
        qk_norm: the layer divides queries and keys by their root mean square.
        rotary: the layer turns queries and keys by their positions.
    """

    self_attention: bool = False
    has_appended_keys: bool = False
    qk_norm: bool = False
    rotary: bool = False


class Part:
    """A value of one axis.

    A part takes the sizes of the layer and its options by name. It keeps the value that it uses of each option as an attribute of the
    same name.
    """

    name: ClassVar[str]
    """The name on the command line and in saved configurations."""
    options: ClassVar[tuple[Option, ...]] = ()
    """The options that this part reads."""
    mixing_note: ClassVar[tuple[str, str] | None] = None
    """Why mixing of probabilities has less effect with this part than it seems to, and the source; ``None`` if it has not."""
    keys_reason: ClassVar[str | None] = None
    """Why keys can be neither normalised nor rotated before they are cached; ``None`` if they can: ``key`` of the cached tensors
    is what heads compare their queries with, and nothing else."""

    @classmethod
    def check_place(cls, axis: str, place: Place) -> None:
        """Check that the part, a value of ``axis``, works in such a layer.

        Raises:
            ValueError: it does not.
        """
        if cls.keys_reason is None:
            return
        for name in ("qk_norm", "rotary"):
            if getattr(place, name):
                raise ValueError(
                    f"{name} with {axis} {cls.name!r}: {cls.keys_reason}. Choose another {axis}, or remove {name}."
                )
