"""When the package extends fairseq: as soon as both are imported, in any order."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

PACKAGE = Path(__file__).resolve().parents[2] / "fairseq_lowrank"
NOTHING_BUT_TORCH = """
import sys
import fairseq_lowrank, fairseq_lowrank.ops
from fairseq_lowrank.attention import build_attention
build_attention("mixhead-b", 8, 2)
assert not {"fairseq", "fairseq_cli", "hydra", "omegaconf"} & set(sys.modules)
"""
IS_REGISTERED = """
import sys
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
assert "lowrank_transformer_iwslt_de_en" in ARCH_MODEL_REGISTRY
regularised = sys.modules["fairseq_lowrank.plugin"].criterions.RegularisedCriterion
assert issubclass(CRITERION_REGISTRY["cross_entropy"], regularised)
assert hasattr(checkpoint_utils.load_checkpoint_to_cpu, "__wrapped__"), "not loaded safely"
"""
USER_DIR = f"""
from argparse import Namespace
from fairseq import utils
utils.import_user_module(Namespace(user_dir={str(PACKAGE)!r}))
"""


def run(program: str) -> str:
    """What a program of its own process prints."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_operations_and_attention_load_torch_alone_where_fairseq_is_installed():
    run(NOTHING_BUT_TORCH)


ACTIVE_ONCE = """
import sys
assert sum(name.endswith(".plugin.patches") for name in sys.modules) == 1
"""


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    "program",
    [
        "import fairseq\nimport fairseq_lowrank",
        "import fairseq_lowrank\nimport fairseq",
        "import fairseq_lowrank.attention\nfrom fairseq.models import transformer",
        "import fairseq_lowrank.huggingface\nimport fairseq_cli.train",
        "import importlib.util\nimport fairseq_lowrank\nimportlib.util.find_spec('fairseq')\nimport fairseq",
        "import fairseq_lowrank.plugin",
        "from fairseq_lowrank.models.transformer import LowrankTransformerModel",
        "from fairseq_lowrank.tasks.segment_lm import SegmentLanguageModelingTask",
    ],
)
def test_plugin_is_active_in_any_order_of_imports(program):
    run(f"{program}\n{IS_REGISTERED}{USER_DIR}{IS_REGISTERED}{ACTIVE_ONCE}")


def test_operations_stay_without_fairseq_until_it_is_imported():
    run(f"{NOTHING_BUT_TORCH}\nimport fairseq\n{IS_REGISTERED}{ACTIVE_ONCE}")


def test_folder_that_is_called_fairseq_is_left_alone(tmp_path):
    (tmp_path / "fairseq").mkdir()
    program = "import fairseq_lowrank\nimport fairseq, sys\nassert 'fairseq_lowrank.plugin' not in sys.modules"
    without = (
        f"import sys\nsys.path[:] = [path for path in sys.path if 'site-packages' not in path] + [{str(tmp_path)!r}]"
    )
    run(f"{without}\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n{program}")


def given(folder: Path) -> str:
    """Return a program that gives a folder as --user-dir, and prints the error of a user."""
    return f"""
from argparse import Namespace
from fairseq import utils
try:
    utils.import_user_module(Namespace(user_dir={str(folder)!r}))
except ValueError as error:
    print("refused:", error)
"""


@pytest.fixture
def link(tmp_path):
    (tmp_path / "lowrank").symlink_to(PACKAGE)
    return tmp_path / "lowrank"


@pytest.mark.usefixtures("quick_starts")
def test_link_of_another_name_is_the_same_plugin(link):
    assert "refused" not in run(f"import fairseq_lowrank.attention\n{given(link)}{IS_REGISTERED}{ACTIVE_ONCE}")


@pytest.mark.usefixtures("quick_starts")
def test_user_dir_names_the_folder_to_give(tmp_path, link):
    copy = tmp_path / "copies" / "fairseq_lowrank"
    copy.mkdir(parents=True)
    refused = run("import fairseq_lowrank\n" + "".join(map(given, (PACKAGE.parent, tmp_path / "none", copy))))
    root, missing, other = refused.splitlines()[-3:]
    assert f"Use {PACKAGE}" in root and "the plugin is in its folder" in root
    assert f"or {PACKAGE} for this one" in missing and "there is no such folder" in missing
    assert f"another copy, {PACKAGE}" in other


@pytest.mark.usefixtures("quick_starts")
def test_folder_of_another_name_ends_a_command_in_one_line(tmp_path, link):
    """Nothing of this package has been imported before."""
    renamed = tmp_path / "renamed"
    shutil.copytree(PACKAGE, renamed)
    for folder, remedy in ((link, f"Use --user-dir {PACKAGE}."), (renamed, "Rename the folder to fairseq_lowrank.")):
        command = [Path(sys.executable).with_name("fairseq-train"), "data", "--user-dir", folder]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
        assert str(folder) in ended.stderr and ended.stderr.endswith(f"{remedy}\n")
