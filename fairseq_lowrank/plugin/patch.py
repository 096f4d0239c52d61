"""The type of a patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


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
