"""Scripts stay in their clone, and a missing corpus is skipped or fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


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
