"""When the package extends fairseq: as soon as fairseq is loaded and names it, in whatever order they are imported."""

import os
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


@pytest.mark.parametrize(
    "program",
    [
        f"import fairseq\nimport fairseq_lowrank\n{IS_REGISTERED}{USER_DIR}",
        f"import fairseq_lowrank.plugin\n{IS_REGISTERED}{USER_DIR}{IS_REGISTERED}",
        f"from fairseq_lowrank.models.transformer import LowrankTransformerModel\n{IS_REGISTERED}",
    ],
    ids=["fairseq, then the package", "the plugin", "a model by its name"],
)
def test_whoever_needs_fairseq_gets_it_extended(program):
    run(program)


def test_package_imported_before_fairseq_is_registered_by_hand():
    """--user-dir imports a package once: the plugin of one that is there has to be imported by its name."""
    run(f"{NOTHING_BUT_TORCH}\nimport fairseq\nimport fairseq_lowrank.plugin\n{IS_REGISTERED}{USER_DIR}{IS_REGISTERED}")
