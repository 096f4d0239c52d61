"""The origin of a result: the code and the packages that made it."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from pathlib import Path

from fairseq_lowrank import __version__
from fairseq_lowrank.versions import commit, installed_version

PACKAGE = Path(__file__).parents[1]


def origin(*folders: Path) -> dict:
    """Return the fields of a line of results that prove its code: commit, code, versions and date.

    Args:
        folders: folders of code, first that of the package, which may be in a clone of the repository.
    """
    return {
        "commit": commit(folders[0].parent),
        "code": code(*folders),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict:
    """Return the versions of packages (None if not installed), and the patches of fairseq that are switched."""
    found: dict[str, str | None] = {"python": platform.python_version(), "fairseq_lowrank": __version__}
    for name, package in {"torch": "torch", "fairseq": "fairseq-fixed"}.items():
        found[name] = installed_version(name, package)
    switched = {"enabled": os.environ.get("LOWRANK_ENABLE"), "disabled": os.environ.get("LOWRANK_DISABLE")}
    return found | {name: patches for name, patches in switched.items() if patches}


def code(*folders: Path) -> str:
    """Return the SHA-256 of all files in folders of code, by their paths within the folders.

    A copy of the same files has the same value, also without git. A folder that is given twice counts once.
    """
    digest = hashlib.sha256()
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()
