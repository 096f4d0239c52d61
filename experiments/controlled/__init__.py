"""Controlled tasks: small problems with a known answer, learned by this package's attention layers.

A task module has ``TABLE`` (its name), ``METRIC``, ``SPLIT``, ``ARCHITECTURE``, ``STEPS`` (number of updates),
``runs(seeds, quick, steps)`` (every run, the most important first), and ``tables(lines)`` and ``plot(lines)`` of the lines of a
results file.
"""

from __future__ import annotations

from types import ModuleType

from experiments.controlled import matrices, nearest_point, recall, regression

TASKS: dict[str, ModuleType] = {task.TABLE: task for task in (matrices, nearest_point, recall, regression)}
"""The tasks by name."""
