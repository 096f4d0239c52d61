"""Versions of installed packages, and the oldest torch whose safe loading is safe."""

import importlib
import importlib.util
import warnings
from functools import cache
from importlib import metadata

import torch

SAFE_TORCH = "2.10"
"""The first torch without CVE-2026-24747: before, a crafted file corrupts memory under ``weights_only=True``."""


def installed_version(package: str, distribution: str | None = None) -> str | None:
    """Return the version of a package; None if it is not installed.

    A package that pip did not install, such as torch from a source tree, has no metadata, and is asked for its ``__version__``.

    Args:
        package: the name to import.
        distribution: the name on the package index, if it is another one.
    """
    try:
        return metadata.version(distribution or package)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            return None
        return str(getattr(importlib.import_module(package), "__version__", "of unknown version"))


def loading_risk() -> str | None:
    """Return what a checkpoint of a stranger can do with this torch, and the remedy; None if its loading is safe."""
    if torch.torch_version.TorchVersion(torch.__version__) >= SAFE_TORCH:
        return None
    return (
        f"torch {torch.__version__}: a crafted checkpoint can corrupt memory (CVE-2026-24747). "
        "Install torch 2.10 or newer, or load only checkpoints that you trust."
    )


@cache
def warn_of_loading_risk() -> None:
    """Warn, once in a process, if a checkpoint could harm this torch."""
    if (risk := loading_risk()) is not None:
        warnings.warn(risk, stacklevel=3)
