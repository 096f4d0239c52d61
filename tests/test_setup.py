"""scripts/setup.sh says in one line what is missing, before it downloads anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup(tmp_path):
    """``setup(*args, **environment)``: the script's exit status and last line, in a copy without .venv."""
    for name in ("scripts/setup.sh", "setup.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")

    def run(*args, **environment):
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        result = subprocess.run(
            [tmp_path / "scripts" / "setup.sh", *args],
            env=os.environ | offline | environment,
            capture_output=True,
            text=True,
        )
        return result.returncode, (result.stdout + result.stderr).splitlines()[-1]

    return run


def test_a_missing_python_is_named_with_ways_to_get_it(setup, tmp_path):
    status, message = setup(PYTHON="/nowhere/python3.11")
    assert status == 1
    assert message.startswith("setup: error: Python 3.11 is needed, but /nowhere/python3.11 is not it. Install it (apt")
    assert not (tmp_path / ".venv").exists()


def test_a_broken_environment_is_made_anew_and_a_missing_compiler_is_named(setup, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python3.11")
    assert setup(PYTHON=sys.executable, CXX="/nowhere/c++") == (
        1,
        "setup: error: fairseq has to be compiled and there is no C++ compiler; on Debian and Ubuntu: apt install g++",
    )
    subprocess.run([python, "-c", "import pip"], check=True)


def test_an_unknown_argument_is_refused(setup):
    assert setup("--tset") == (1, "setup: error: unknown arguments '--tset'; usage: scripts/setup.sh [--test]")
