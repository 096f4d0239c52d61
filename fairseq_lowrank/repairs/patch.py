"""Patches: what one is, and how a table of them is applied to fairseq."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fairseq_lowrank import versions
from fairseq_lowrank.messages import UserError

ENABLE, DISABLE = "LOWRANK_ENABLE", "LOWRANK_DISABLE"
TESTED = {"fairseq-fixed": "0.12.3.1", "torch": "2.13.0"}
"""The versions that the patches are tested with, by distribution."""


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


def group(
    group: Literal["required", "attention", "fix", "optional"],
    name: str,
    targets: dict[str, Callable[[Any], Any]],
    reason: str,
    remove_when: str,
) -> tuple[Patch, ...]:
    """Return the patches that one reason needs, one for each target."""
    return tuple(Patch(name, target, wrap, reason, remove_when, group) for target, wrap in targets.items())


def warn_of_untested_versions() -> None:
    """Warn once if fairseq or torch has another version than the tested one."""
    others = []
    for distribution, tested in TESTED.items():
        version = versions.installed_version(distribution.removesuffix("-fixed"), distribution) or "missing"
        if version.partition("+")[0] != tested:
            others.append(f"{distribution} {version} (tested: {tested})")
    if others:
        warnings.warn(f"fairseq_lowrank patches functions of fairseq, untested with {', '.join(others)}", stacklevel=2)


def names_in(variable: str) -> set[str]:
    """Return the names in a comma-separated environment variable."""
    return {name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()}


def selected(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches that are switched on.

    Raises:
        UserError: ``LOWRANK_ENABLE`` names no optional patch, or ``LOWRANK_DISABLE`` no fix, in a table that has such patches.
    """
    patches = list(patches)
    chosen = {}
    for variable, group in ((ENABLE, "optional"), (DISABLE, "fix")):
        known = {patch.name for patch in patches if patch.group == group}
        chosen[variable] = names_in(variable)
        # the names are those of the table that has the group
        if known and (unknown := chosen[variable] - known):
            raise UserError(
                f"{variable}={','.join(sorted(unknown))}: no patch of group {group} has this name. "
                f"Choose from {', '.join(sorted(known))}."
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


ORDER = ("required", "attention", "fix", "optional")
"""The groups in the order in which their steps wrap a function."""

ORIGINALS: dict[str, Any] = {}
"""The function of fairseq that is replaced, by target."""
STEPS: dict[str, list[Patch]] = {}
"""The patches that make the one replacement of a target, from the innermost to the outermost."""


def apply(patches: Iterable[Patch]) -> None:
    """Replace each target by the original in the steps of all tables so far.

    A wrapper of a class method or static method gets the plain function, and its replacement becomes the same kind of method.
    """
    changed: dict[str, None] = {}
    for patch in selected(patches):
        STEPS.setdefault(patch.target, []).append(patch)
        changed[patch.target] = None
    for target in changed:
        holder, attribute = locate(target)
        present = vars(holder).get(attribute, getattr(holder, attribute))
        kind = type(present) if isinstance(present, classmethod | staticmethod) else None
        replacement = ORIGINALS.setdefault(target, present.__func__ if kind else present)
        STEPS[target].sort(key=lambda patch: ORDER.index(patch.group))
        for patch in STEPS[target]:
            replacement = patch.wrap(replacement)
        setattr(holder, attribute, kind(replacement) if kind else replacement)
