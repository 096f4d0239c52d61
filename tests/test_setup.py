"""scripts/setup.sh says in one line what is missing, before it downloads anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path):
    """Where the copy is; its path has a space."""
    return tmp_path / "a folder"


@pytest.fixture
def setup(folder):
    """``setup(*args, **environment)``: the script's exit status and last line, in a copy without .venv."""
    shutil.copytree(REPOSITORY / "requirements", folder / "requirements")
    for name in ("scripts/setup.sh", "setup.py", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)

    def run(*args, **environment):
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        result = subprocess.run(
            [folder / "scripts" / "setup.sh", *args],
            env=os.environ | offline | environment,
            capture_output=True,
            text=True,
        )
        return result.returncode, (result.stdout + result.stderr).splitlines()[-1]

    return run


def test_a_missing_python_is_named_with_ways_to_get_it(setup, folder):
    status, message = setup(PYTHON="/nowhere/my python3.11")
    assert status == 1
    assert message.startswith("setup: error: Python 3.11 is needed, but /nowhere/my python3.11 is not it. Install it (")
    assert not (folder / ".venv").exists()


def test_a_python_whose_path_has_a_space_is_used(setup, folder):
    python = folder / "my python3.11"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert setup(PYTHON=str(python))[1].startswith(f"setup: error: {python} cannot make a virtual environment")


def test_a_broken_environment_is_made_anew_once_and_a_missing_compiler_is_named(setup, folder):
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python3.11")
    error = (
        "setup: error: fairseq has to be compiled and there is no C++ compiler; on Debian and Ubuntu: apt install g++"
    )
    assert setup(PYTHON=sys.executable, CXX="/nowhere/c++") == (1, error)
    subprocess.run([python, "-c", "import pip"], check=True)
    kept = folder / ".venv" / "kept"
    kept.touch()
    assert setup(PYTHON=sys.executable, CXX="/nowhere/c++") == (1, error) and kept.exists()
    moved = folder.rename(folder.with_name("another folder"))
    folder.symlink_to(moved)
    assert setup(PYTHON=sys.executable, CXX="/nowhere/c++") == (1, error) and not kept.exists()


def test_an_unknown_argument_is_refused(setup):
    assert setup("--tset") == (1, "setup: error: unknown arguments '--tset'; usage: scripts/setup.sh [--test]")
