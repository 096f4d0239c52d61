"""scripts/test.sh: how many processes run the tests, and which tests need a real corpus."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(tmp_path):
    """``script(*args, **environment)``: what a copy of the script asks of pytest, on a machine of six cores."""
    stubs = {
        "scripts/setup.sh": "exit",
        ".venv/bin/ruff": "exit",
        ".venv/bin/mypy": "exit",
        ".venv/bin/pytest": 'echo "$OMP_NUM_THREADS: $*"',
        ".venv/bin/nproc": 'echo "${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-6}}"',
    }
    for name, line in stubs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    shutil.copy(REPOSITORY / "scripts/test.sh", tmp_path / "scripts/test.sh")

    def run(*args, **environment):
        command = [tmp_path / "scripts/test.sh", *args]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stdout

    return run


@pytest.mark.parametrize("environment", [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "", "OMP_THREAD_LIMIT": "2"}])
def test_there_is_a_process_of_one_thread_for_every_core_whatever_limits_threads(script, environment):
    said = script("-m", "not corpus", **environment)
    assert said == "1: -q --numprocesses 6 --dist loadfile -m not corpus\n"


def test_no_folder_of_cdpath_is_taken_for_one_of_the_clone(tmp_path):
    (tmp_path / "examples").mkdir()
    command = ["bash", "-c", 'source examples/environment.sh; printf %s "$ROOT"']
    environment = os.environ | {"CDPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == str(REPOSITORY)
    for folder in ("benchmarks", "examples", "scripts"):
        for script in (REPOSITORY / folder).rglob("*.sh"):
            assert not re.search(r'(?<!CDPATH= )\bcd "', script.read_text()), script


# Without the start of Python, and of torch, that `python -m pytest` needs.
PYTEST = ["-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", "-q", "-p", "no:cacheprovider"]


@pytest.mark.usefixtures("quick_starts")
def test_tests_of_a_real_corpus_are_marked_and_no_others(tmp_path):
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = corpus: needs one\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def lines(corpus):\n    return 1\n"
        "def test_one(corpus): pass\n"
        "def test_one_by_way_of_a_fixture(lines): pass\n"
        "def test_other(tmp_path): pass\n"
    )
    command = [sys.executable, *PYTEST, "--collect-only", "-m", "not corpus"]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert [line for line in result.stdout.splitlines() if "::" in line] == ["test_it.py::test_other"]
    assert "2 deselected" in result.stdout


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 failed")])
def test_a_missing_corpus_is_skipped_and_fails_in_ci(tmp_path, ci, outcome):
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    corpus: needs one\n    grid: many\n    device: a GPU\n"
    )
    (tmp_path / "test_it.py").write_text("def test_one(corpus):\n    corpus('brown')\n")
    done = subprocess.run(
        [sys.executable, *PYTEST],
        cwd=tmp_path,
        env=os.environ | {"CI": ci, "LOWRANK_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
