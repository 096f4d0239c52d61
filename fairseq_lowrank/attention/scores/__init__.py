"""The score axis: a score function is a class in a module of this folder, which finds it."""

from __future__ import annotations

import importlib
import pkgutil

from fairseq_lowrank.attention.scores.score import LayerContext, ScoreFunction

__all__ = ["SCORE_FUNCTIONS", "LayerContext", "ScoreFunction"]

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))

SCORE_FUNCTIONS: dict[str, type[ScoreFunction]] = {
    member.name: member
    for module in sorted(_MODULES, key=lambda module: module.__name__)
    for member in vars(module).values()
    if isinstance(member, type) and issubclass(member, ScoreFunction) and "name" in vars(member)
}
"""The values of the score axis."""
