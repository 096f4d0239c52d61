"""The table of patches: every function of fairseq that this package replaces, with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fairseq_lowrank.messages import UserError

ENABLE, DISABLE = "LOWRANK_ENABLE", "LOWRANK_DISABLE"


@dataclass(frozen=True)
class Patch:
    """A replacement of one function, class or attribute of fairseq.

    Args:
        name: the name in ``LOWRANK_ENABLE`` and ``LOWRANK_DISABLE``; patches of one name are switched together.
        target: the full name, such as ``fairseq.checkpoint_utils.load_checkpoint_to_cpu``.
        wrap: a function from the original to its replacement.
        reason: one sentence that says why fairseq needs the replacement.
        remove_when: the condition that makes the patch unnecessary.
        group: ``required`` (fairseq does not run on this stack without it), ``attention`` (needed for our flags; does nothing
            for a model without them), ``fix`` (a bug of fairseq; on unless ``LOWRANK_DISABLE`` names it) or ``optional`` (off
            unless ``LOWRANK_ENABLE`` names it).
    """

    name: str
    target: str
    wrap: Callable[[Any], Any]
    reason: str
    remove_when: str
    group: Literal["required", "attention", "fix", "optional"]


from fairseq_lowrank.plugin import fixes  # noqa: E402 (its entries are instances of Patch)

PATCHES: tuple[Patch, ...] = (*fixes.PATCHES,)
"""Every patch, in the order in which they are applied."""


def names_in(variable: str) -> set[str]:
    """Return the names in a comma-separated environment variable."""
    return {name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()}


def selected(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches that are switched on.

    Raises:
        UserError: ``LOWRANK_ENABLE`` names no optional patch, or ``LOWRANK_DISABLE`` no fix.
    """
    patches = list(patches)
    chosen = {}
    for variable, group in ((ENABLE, "optional"), (DISABLE, "fix")):
        known = {patch.name for patch in patches if patch.group == group}
        chosen[variable] = names_in(variable)
        if unknown := chosen[variable] - known:
            raise UserError(
                f"{variable}={','.join(sorted(unknown))}: no patch of group {group} has this name. "
                f"Choose from {', '.join(sorted(known)) or 'none'}."
            )

    def is_on(patch: Patch) -> bool:
        if patch.group == "optional":
            return patch.name in chosen[ENABLE]
        return patch.group != "fix" or patch.name not in chosen[DISABLE]

    return [patch for patch in patches if is_on(patch)]


def locate(target: str) -> tuple[object, str]:
    """Return the module or class that holds a target, and the name of the attribute.

    Raises:
        AttributeError, ModuleNotFoundError: the installed fairseq has no such target.
    """
    path, _, attribute = target.rpartition(".")
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            if end == 1:
                raise
            continue
        for part in parts[end:]:
            holder = getattr(holder, part)
        getattr(holder, attribute)
        return holder, attribute
    raise ModuleNotFoundError(path)


def apply(patches: Iterable[Patch]) -> None:
    """Replace the target of each selected patch by what its ``wrap`` returns for the original."""
    for patch in selected(patches):
        holder, attribute = locate(patch.target)
        setattr(holder, attribute, patch.wrap(vars(holder).get(attribute, getattr(holder, attribute))))
