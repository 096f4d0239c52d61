"""The repairs without the plugin: a stock fairseq that runs here."""

import subprocess
import sys

import pytest

pytest.importorskip("fairseq")

ALONE = """
import sys
import fairseq_lowrank.repairs
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY

mine = {name.split(".")[1] for name in sys.modules if name.startswith("fairseq_lowrank.")}
assert not mine & {"attention", "ops", "parts", "methods", "plugin", "models"}, mine
assert not any(name.startswith("lowrank") for name in ARCH_MODEL_REGISTRY)
words = ["data", "--arch", "transformer", "--task", "translation", "--bf16"]
args = options.parse_args_and_arch(options.get_training_parser(), words)
assert args.bf16 and not args.tpu and not hasattr(args, "attention")

import fairseq_lowrank.plugin  # it can be asked for later
args = options.parse_args_and_arch(options.get_training_parser(), [*words, "--attention", "mixhead-a"])
assert args.attention == "mixhead-a" and "lowrank_transformer" in ARCH_MODEL_REGISTRY
"""


@pytest.mark.usefixtures("quick_starts")
def test_repairs_alone_bring_no_attention_until_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_repairs_import_nothing_of_attention():
    from pathlib import Path

    import fairseq_lowrank.repairs as repairs

    for file in Path(repairs.__file__).parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        for package in ("attention", "ops", "parts", "methods", "plugin", "models", "tools"):
            assert f"from fairseq_lowrank.{package}" not in text, (file.name, package)


@pytest.mark.parametrize("target", ["fairseq.options.parse_args_and_arch", "fairseq.trainer.Trainer.load_checkpoint"])
def test_a_target_is_replaced_once_from_named_steps(target):
    import fairseq_lowrank.plugin  # noqa: F401
    from fairseq_lowrank.repairs.patch import ORDER, STEPS

    groups = [ORDER.index(step.group) for step in STEPS[target]]
    assert len(groups) > 1 and groups == sorted(groups)
    assert len({(step.name, step.wrap) for step in STEPS[target]}) == len(groups)
