"""``--user-dir`` while this package is imported: each plugin once, and an error that names the folder to give."""

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fairseq import utils

from fairseq_lowrank.messages import FlagError

FOLDER = Path(__file__).resolve().parent.parent
"""The folder of this package."""


def is_imported(folder: str | None) -> bool:
    """Return True if the plugin in a folder is imported, or if there is none."""
    memo: set[str] = getattr(utils.import_user_module, "memo", set())
    return folder is None or Path(folder).resolve() == FOLDER or os.path.abspath(folder) in memo


def import_user_module_once(load: Callable) -> Callable:
    """Wrap ``import_user_module``: do nothing for the folder of this package, under any path.

    Raises:
        UserError: there is no such folder, it is a file, it is the root of a clone, or it is another copy of this package.
    """

    @functools.wraps(load)
    def import_user_module(args: argparse.Namespace) -> None:
        given = getattr(args, "user_dir", None)
        if given is None:
            return
        if (folder := Path(given).resolve()) == FOLDER:
            importlib.import_module(f"{FOLDER.name}.plugin")  # by name: it may be that the repairs alone are imported
            return
        if (inner := folder / FOLDER.name).is_dir() and not (folder / "__init__.py").exists():
            raise FlagError("--user-dir", given, f"the plugin is in its folder {FOLDER.name}", f"Use {inner}.")
        if Path(given).absolute().name == FOLDER.name and FOLDER.name in sys.modules:
            reason = f"this process has imported another copy, {FOLDER}"
            raise FlagError("--user-dir", given, reason, "Use its folder, or install the package from the other one.")
        remedy = f"Use the folder of your plugin, or {FOLDER} for this one."
        if folder.is_file():
            raise FlagError("--user-dir", given, "is a file", remedy)
        try:
            load(args)
        except BaseException as error:
            # fairseq notes the folder before it imports it, so a second try would pass in silence
            getattr(utils.import_user_module, "memo", set()).discard(os.path.abspath(given))
            if not isinstance(error, FileNotFoundError) or folder.exists():
                raise
            raise FlagError("--user-dir", given, "there is no such folder", remedy) from error

    return import_user_module
