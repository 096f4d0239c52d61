"""A result line says with what patches of fairseq it was made."""

import subprocess
from pathlib import Path

from experiments.recipes.provenance import versions

REPOSITORY = Path(__file__).resolve().parents[3]


def test_versions_hold_the_switched_patches(monkeypatch):
    monkeypatch.setenv("LOWRANK_ENABLE", "whole-validation")
    monkeypatch.delenv("LOWRANK_DISABLE", raising=False)
    found = versions()
    assert found["enabled"] == "whole-validation" and "disabled" not in found


def test_recipes_switch_on_the_patches_of_their_results(monkeypatch):
    monkeypatch.delenv("LOWRANK_ENABLE", raising=False)
    shell = f"source {REPOSITORY}/examples/environment.sh; printenv LOWRANK_ENABLE"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "whole-validation,bf16-evaluation"
