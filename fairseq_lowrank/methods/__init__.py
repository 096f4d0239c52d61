"""The parts of each method, one file for a method or a close family. A part is a class in a module of this folder, which finds it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, TypeVar

from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.score import ScoreFunction

_NAMES = sorted((module.name for module in pkgutil.iter_modules(__path__)), key=lambda name: (name != "standard", name))
_MODULES = [importlib.import_module(f"{__name__}.{name}") for name in _NAMES]
_Part = TypeVar("_Part")


def _find(base: type[_Part]) -> dict[str, type[_Part]]:
    members: Iterator[Any] = (member for module in _MODULES for member in vars(module).values())
    return {
        vars(member)["name"]: member
        for member in members
        if isinstance(member, type) and issubclass(member, base) and "name" in vars(member)
    }


PROJECTIONS: dict[str, type[Projection]] = _find(Projection)
"""The values of the projection axis."""
SCORE_FUNCTIONS: dict[str, type[ScoreFunction]] = _find(ScoreFunction)
"""The values of the score axis."""
HEAD_MAPS: dict[str, type[HeadMap] | None] = {"none": None, **_find(HeadMap)}
"""The values of the map axis."""
HEAD_OUTPUTS: dict[str, type[HeadOutput] | None] = {"none": None, **_find(HeadOutput)}
"""The values of the output axis."""
