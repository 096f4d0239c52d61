"""fairseq is imported on Python 3.14, whose ``Optional[X]`` is ``X | None``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

OPTIONAL_OF_PYTHON_3_14 = """
import typing
import hydra.experimental, omegaconf, torch.distributed.fsdp

optional = typing.Optional

class Optional:
    def __class_getitem__(cls, item):
        return item | None if isinstance(item, type) else optional[item]

typing.Optional = Optional
"""
REPAIRED = "from fairseq_lowrank.importing import import_fairseq\nimport_fairseq()\n"
IMPORT = """
from fairseq import options
from fairseq.tasks import TASK_REGISTRY

parser = options.get_training_parser()
args = parser.parse_args(["--max-tokens", "100", "--user-dir", "folder"])
assert (args.max_tokens, args.user_dir) == (100, "folder")
assert "translation" in TASK_REGISTRY
"""


def run(program: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )


@pytest.mark.usefixtures("quick_starts")
def test_fairseq_alone_does_not_read_optional_types_of_python_3_14():
    assert "str | None is not callable" in run(OPTIONAL_OF_PYTHON_3_14 + IMPORT).stderr


@pytest.mark.usefixtures("quick_starts")
def test_fairseq_imports_with_optional_types_of_python_3_14():
    ended = run(OPTIONAL_OF_PYTHON_3_14 + REPAIRED + IMPORT)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("quick_starts")
def test_a_failed_import_leaves_no_half_of_fairseq():
    broken = "import sys\nsys.modules['fairseq.criterions'] = None\n"
    check = "try:\n    import_fairseq()\nexcept ImportError:\n    assert 'fairseq' not in sys.modules\nelse:\n    raise SystemExit(1)\n"
    ended = run(broken + REPAIRED.splitlines()[0] + "\n" + check)
    assert ended.returncode == 0, ended.stderr
