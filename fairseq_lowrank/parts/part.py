"""What every part of a layer declares: its name and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Option:
    """A size or a setting that only some parts read.

    Args:
        name: its keyword in Python, and its name in saved configurations.
        help: what it decides, as a phrase.
        default: the value if none is given; ``None`` if the part computes it, which ``help`` then describes.
        choices: the names of its values; empty for a positive integer.
        flag: its name on the command line, if it is another one.
        letter: its letter in formulas of parameters and cache.
    """

    name: str
    help: str
    default: str | int | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    letter: str = ""


class Part:
    """A value of one axis.

    A part takes the sizes of the layer and its options by name. It keeps the value that it uses of each option as an attribute of the
    same name.
    """

    name: ClassVar[str]
    """The name on the command line and in saved configurations."""
    options: ClassVar[tuple[Option, ...]] = ()
    """The options that this part reads."""
