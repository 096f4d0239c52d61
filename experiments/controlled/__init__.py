"""Controlled tasks: small problems with a known answer, learned by this package's attention layers.

A task module has ``TABLE`` (its name), ``METRIC``, ``SPLIT``, ``ARCHITECTURE``, ``STEPS`` (number of updates),
and ``runs(seeds, quick, steps)`` (every run, the most important first).
"""

from __future__ import annotations

from types import ModuleType

from experiments.controlled import matrices, nearest_point, recall, regression

TASKS: dict[str, ModuleType] = {task.TABLE: task for task in (matrices, nearest_point, recall, regression)}
"""The tasks by name."""
