"""A wheel and a source distribution, built from a copy: their files, their metadata and the links of their description."""

import inspect
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from fairseq_lowrank import attention, huggingface

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
DATA = (
    "fairseq_lowrank/py.typed",
    "fairseq_lowrank/tools/sites/fairseq.csv",
    "fairseq_lowrank/tools/sites/transformers.csv",
)
ADDRESS = "https://example.org/owner/repository"


def build(folder: Path, address: str = "") -> tuple[list[str], list[str], Message]:
    """Return the names in the wheel and in the source distribution, and the wheel's metadata."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fairseq_lowrank", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    project = folder / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(re.sub('^repository = ".*"$', f'repository = "{address}"', text, flags=re.M), encoding="utf-8")
    stale = folder / "build/lib/fairseq_lowrank/stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True)
    (wheel,), (archive,) = ((folder / "dist").glob(kind) for kind in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = opened.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    with tarfile.open(archive) as sources:
        return names, [name.partition("/")[2] for name in sources.getnames()], message_from_string(metadata)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("source"))


def test_wheel_contains_the_package_and_nothing_else(built):
    wheel, _, _ = built
    assert {name.partition("/")[0] for name in wheel if ".dist-info/" not in name} == {"fairseq_lowrank"}
    tracked = {str(file.relative_to(ROOT)) for file in (ROOT / "fairseq_lowrank").rglob("*.py")}
    assert {name for name in wheel if name.startswith("fairseq_lowrank/")} == {*tracked, *DATA}


def test_source_distribution_contains_what_builds_the_package_and_no_tests(built):
    _, sources, _ = built
    assert {*FILES, "fairseq_lowrank/py.typed"} <= set(sources)
    assert not [name for name in sources if name.startswith(("tests", "experiments", "build"))]


def test_metadata_names_licence_pythons_and_no_invented_address(built):
    _, _, metadata = built
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11.4"
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert metadata.get_all("Project-URL") is None
    assert metadata.get_all("Requires-Dist")[0] == "torch>=2.6"


def test_an_address_makes_every_link_of_the_description_absolute(tmp_path):
    _, _, metadata = build(tmp_path, ADDRESS)
    assert f"Repository, {ADDRESS}" in metadata.get_all("Project-URL")
    text = re.sub(r"```.*?```|`[^`]*`", "", metadata.get_payload(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert (
        f"{ADDRESS}/raw/HEAD/docs/pictures/bottleneck-seen.png" in links
        and f"{ADDRESS}/blob/HEAD/docs/evidence.md" in links
    )
    assert not [link for link in links if not re.match(r"https://|#", link)]


PUBLIC = [*(getattr(attention, name) for name in attention.__all__), *vars(huggingface).values()]


@pytest.mark.parametrize(
    "public",
    [
        one
        for one in PUBLIC
        if callable(one) and one.__module__.startswith("fairseq_lowrank.") and one.__name__[0] != "_"
    ],
    ids=lambda public: public.__name__,
)
def test_a_type_checker_sees_all_of_a_public_function(public):
    methods = [value for name, value in vars(public).items() if name[0] != "_" or name == "__init__"]
    for function in filter(inspect.isfunction, methods if inspect.isclass(public) else [public]):
        signature = inspect.signature(function)
        bare = [name for name, one in signature.parameters.items() if one.annotation is one.empty and name != "self"]
        assert not bare and signature.return_annotation is not signature.empty, function.__qualname__
