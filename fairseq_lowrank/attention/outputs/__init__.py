"""The output axis: what happens to the outputs of heads before the output projection. A choice is a class in a module here."""

from __future__ import annotations

import importlib
import pkgutil

from fairseq_lowrank.attention.outputs.output import HeadOutput

__all__ = ["HEAD_OUTPUTS", "HeadOutput"]

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))

HEAD_OUTPUTS: dict[str, type[HeadOutput] | None] = {
    "none": None,
    **{
        member.name: member
        for module in sorted(_MODULES, key=lambda module: module.__name__)
        for member in vars(module).values()
        if isinstance(member, type) and issubclass(member, HeadOutput) and "name" in vars(member)
    },
}
"""The values of the output axis."""
