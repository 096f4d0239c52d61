"""The fields of a line of results that prove its code."""

import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.engine import refuse_dirty
from fairseq_lowrank import __version__
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records.provenance import PACKAGE, code, origin, versions

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_copy_without_git_has_the_hash_of_the_clone(tmp_path):
    copy = tmp_path / "elsewhere" / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert code(copy) == code(PACKAGE) == code(PACKAGE, PACKAGE)
    assert origin(copy)["commit"] == __version__ and origin(copy)["code"] == code(PACKAGE)
    (copy / "new.py").touch()
    assert code(copy) != code(PACKAGE)


@pytest.mark.parametrize(("commit", "allowed"), [("a" * 40, ""), ("a" * 40 + "-dirty", "1"), (None, "0")])
def test_committed_code_makes_results(commit, allowed, monkeypatch):
    monkeypatch.setenv("DIRTY", allowed)
    refuse_dirty("b" * 40, commit)


@pytest.mark.parametrize("allowed", ["", "0"])
def test_uncommitted_code_makes_none(allowed, monkeypatch):
    monkeypatch.setenv("DIRTY", allowed)
    with pytest.raises(UserError, match="DIRTY=1"):
        refuse_dirty("b" * 40, "a" * 40 + "-dirty")


def test_versions_hold_the_switched_patches(monkeypatch):
    monkeypatch.setenv("LOWRANK_ENABLE", "whole-validation")
    monkeypatch.delenv("LOWRANK_DISABLE", raising=False)
    found = versions()
    assert found["enabled"] == "whole-validation" and "disabled" not in found


@pytest.mark.parametrize(("gpus", "more"), [(0, ""), (1, ""), (2, ",last-update")])
def test_recipes_switch_on_the_patches_of_their_results(monkeypatch, tmp_path, gpus, more):
    """One process never has the fault that last-update mends, so its lines keep the patches of earlier ones."""
    monkeypatch.delenv("LOWRANK_ENABLE", raising=False)
    for name, value in {"GPUS": gpus, "DRY_RUN": 1, "LOWRANK_WORK": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    shell = f"source {REPOSITORY}/examples/common.sh; printenv LOWRANK_ENABLE"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"whole-validation,bf16-evaluation{more}"
