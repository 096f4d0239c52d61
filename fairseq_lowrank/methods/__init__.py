"""The methods, one file for a method or a close family: its parts and its declaration. Importing this package registers all."""

from __future__ import annotations

import importlib
import pkgutil

# Plain attention first, as the tables list it.
for _name in sorted(
    (module.name for module in pkgutil.iter_modules(__path__)), key=lambda name: (name != "standard", name)
):
    importlib.import_module(f"{__name__}.{_name}")
