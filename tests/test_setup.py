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
    """``setup(*args, **environment)``: the script's exit status and what it says, in a copy without .venv."""
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
        return result.returncode, (result.stdout + result.stderr).splitlines()

    return run


@pytest.fixture(scope="module")
def quick_python(tmp_path_factory):
    """A Python that makes an environment by copying one, because pip needs seconds to install itself."""
    folder = tmp_path_factory.mktemp("an original")
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    path = folder / "python"
    path.write_text(
        f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
cp -R -P "{folder}/.venv" "$3" && sed "s|{folder}|$(pwd -P)|g" "{folder}/.venv/bin/pip" >"$3/bin/pip"
"""
    )
    path.chmod(0o755)
    return str(path)


def test_a_missing_python_is_named_with_ways_to_get_it(setup, folder):
    status, lines = setup(PYTHON="/nowhere/my python3")
    assert status == 1
    message = "setup: error: Python 3.11.4 or newer is needed; none of these is: /nowhere/my python3. Install it ("
    assert lines[-1].startswith(message)
    assert not (folder / ".venv").exists()


def test_a_broken_environment_is_made_again_once_and_a_missing_compiler_is_named(setup, folder, quick_python):
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python3.11")
    error = (
        "setup: error: fairseq has to be compiled and there is no C++ compiler; on Debian and Ubuntu: apt install g++"
    )

    def fails_with_the_error():
        status, lines = setup(PYTHON=quick_python, CXX="/nowhere/c++")
        return (status, lines[-1]) == (1, error)

    assert fails_with_the_error()
    subprocess.run([python, "-c", "import pip"], check=True)
    kept = folder / ".venv" / "kept"
    kept.touch()
    assert fails_with_the_error() and kept.exists()
    moved = folder.rename(folder.with_name("another folder"))
    folder.symlink_to(moved)
    assert fails_with_the_error() and not kept.exists()


def test_an_unknown_argument_is_refused(setup):
    status, lines = setup("--tset")
    assert (status, lines) == (1, ["setup: error: unknown arguments '--tset'; usage: scripts/setup.sh [--test]"])
