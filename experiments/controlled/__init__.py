"""Controlled tasks: small problems whose answer is known, learned by the product's own attention layer.

A task module has ``TABLE`` (its name), ``METRIC``, ``SPLIT``, ``ARCHITECTURE``, ``STEPS`` (updates), ``runs(seeds,
quick, steps)`` (every run, the most telling first), and ``tables(lines)`` and ``draw(lines)`` over the lines of a
results file.
"""

from __future__ import annotations

from types import ModuleType

from experiments.controlled import matrices, nearest_point, recall

TASKS: dict[str, ModuleType] = {task.TABLE: task for task in (matrices, nearest_point, recall)}
"""The tasks by name."""
