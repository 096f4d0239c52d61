"""Versions of installed packages, the commit of this one, and the oldest torch whose safe loading is safe."""

import importlib
import importlib.util
import json
import re
import subprocess
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path

from fairseq_lowrank import __version__

CODE = ("fairseq_lowrank", "experiments", "examples")
"""The folders of a clone whose files of Python are run."""
SAFE_TORCH = (2, 10)
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
        try:
            module = importlib.import_module(package)
        except ImportError:  # it asks for metadata itself
            module = None
        return str(getattr(module, "__version__", "of unknown version"))


def commit(root: Path | None = None) -> str:
    """Return the commit of the code, with ``-dirty`` if a file except results has changed, or a file of code is new.

    Args:
        root: the clone; by default the one that this package is in. If the package is installed from a repository, pip has recorded
            the commit. Without both, the version is returned.
    """
    root = root or Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if (
            Path(git("rev-parse", "--show-toplevel")).resolve() == root.resolve()
        ):  # else a folder within another repository
            changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
            # methods are found by their files, so a new file is code too
            new = git("ls-files", "--others", "--exclude-standard", "--", *(f"{folder}/*.py" for folder in CODE))
            return git("rev-parse", "HEAD") + ("-dirty" if changed or new else "")
    except (subprocess.CalledProcessError, OSError):
        pass
    return recorded_commit("fairseq-lowrank") or __version__


def recorded_commit(distribution: str) -> str | None:
    """Return the commit from which pip installed a distribution, if it did so from a repository."""
    try:
        origin = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")


def loading_risk() -> str | None:
    """Return what a checkpoint of a stranger can do with this torch, and the remedy; None if its loading is safe."""
    version = installed_version("torch")
    number = re.fullmatch(r"(\d+)\.(\d+)[.\d]*(\+.*)?", version or "")  # no release candidate
    if number is not None and (int(number[1]), int(number[2])) >= SAFE_TORCH:
        return None
    return (
        f"torch {version}: a crafted checkpoint can corrupt memory (CVE-2026-24747). "
        "Install torch 2.10 or newer, or load only checkpoints that you trust."
    )


@cache
def warn_of_loading_risk() -> None:
    """Warn, once in a process, if a checkpoint could harm this torch."""
    if (risk := loading_risk()) is not None:
        warnings.warn(risk, stacklevel=3)
