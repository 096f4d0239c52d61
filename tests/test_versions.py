"""Versions of packages with and without pip's metadata, and the warning about an old torch."""

import importlib.metadata
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fairseq_lowrank import versions

WITHOUT_METADATA = """
import importlib.metadata, sys

def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = missing
importlib.metadata.packages_distributions = lambda: {}
from fairseq_lowrank import cli
sys.exit(cli.main(["env"]))
"""


@pytest.mark.usefixtures("quick_starts")
def test_env_names_packages_without_metadata():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_METADATA], capture_output=True, text=True)
    rows = dict(line.split(maxsplit=1) for line in ended.stdout.partition("\npatch ")[0].splitlines())
    assert rows["torch"] == torch.__version__, ended.stderr


def test_installed_version_of_a_package_without_its_own_version(tmp_path, monkeypatch):
    (tmp_path / "package_without_version.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert versions.installed_version("package_without_version") == "of unknown version"
    assert versions.installed_version("package_that_is_not_there") is None
    assert versions.installed_version("torch") == importlib.metadata.version("torch")


@pytest.mark.parametrize(
    ("version", "warns"), [("2.9.1+cpu", True), ("2.10.0rc1", True), ("2.10.0", False), ("2.13.0+cpu", False)]
)
def test_old_torch_gives_one_warning_when_a_checkpoint_is_loaded(monkeypatch, tmp_path, version, warns):
    checkpoint_file = pytest.importorskip("fairseq_lowrank.repairs.checkpoint_file")
    monkeypatch.setattr(versions, "installed_version", lambda package: version)
    versions.warn_of_loading_risk.cache_clear()
    torch.save({"model": {}}, path := Path(tmp_path, "checkpoint.pt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with path.open("rb") as file:
                checkpoint_file.load(file)
    versions.warn_of_loading_risk.cache_clear()
    assert ["CVE-2026-24747" in str(each.message) for each in caught] == [True] * warns
    assert (versions.loading_risk() is not None) == warns


def test_commit_that_pip_recorded_is_that_of_an_installed_package(tmp_path, monkeypatch):
    folder = tmp_path / "some_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions.recorded_commit("some-package") is None
    (folder / "direct_url.json").write_text('{"url": "https://example.org/a", "vcs_info": {"commit_id": "abc"}}')
    assert versions.recorded_commit("some-package") == "abc"
    assert versions.recorded_commit("package-that-is-not-there") is None
