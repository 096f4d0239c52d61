"""The projection axis: a projection is a class in a module of this folder, which finds it."""

from __future__ import annotations

import importlib
import pkgutil

from fairseq_lowrank.attention.projections.projection import AttentionDims, Projection

__all__ = ["PROJECTIONS", "AttentionDims", "Projection"]

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))

PROJECTIONS: dict[str, type[Projection]] = {
    member.name: member
    for module in _MODULES
    for member in vars(module).values()
    if isinstance(member, type) and issubclass(member, Projection) and "name" in vars(member)
}
"""The values of the projection axis."""
