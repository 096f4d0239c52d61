"""The table of patches: every target is there as its wrapper expects, and switches do what they say."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import fairseq_lowrank.plugin  # noqa: F401
from fairseq_lowrank import cli
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin.patches import ALL
from fairseq_lowrank.repairs import patch as patches
from fairseq_lowrank.repairs.patch import ORIGINALS, Patch

SIGNATURES = Path(__file__).with_name("signatures.json")
"""The parameters that each target had when its wrapper was written. The test below shows those of a new one."""


def signature(original: object) -> str:
    """Return the parameters of a function of fairseq, and for other targets what they are."""
    if inspect.isfunction(original) and original.__module__.startswith("fairseq"):
        found = inspect.signature(original)
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
        return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return "callable" if callable(original) else type(original).__name__


def test_originals_have_the_signatures_of_their_wrappers():
    on = {patch.target for patch in patches.selected(ALL)}
    found = {target: signature(ORIGINALS[target]) for target in sorted(on)}
    assert found == {target: text for target, text in json.loads(SIGNATURES.read_text()).items() if target in on}


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: f"{patch.name} {patch.target}")
def test_patch_says_what_it_is_for(patch):
    patches.locate(patch.target)
    assert patch.reason.endswith(".") and len(patch.reason.split()) <= 25
    assert patch.remove_when and patch.group in ("required", "attention", "fix", "optional")


def test_names_belong_to_one_group():
    groups = {}
    for patch in ALL:
        groups.setdefault(patch.name, set()).add(patch.group)
    assert all(len(found) == 1 for found in groups.values())


@pytest.fixture
def module(monkeypatch):
    """A module ``patched`` with a function, a class method and a static method."""
    module = type(sys)("patched")
    exec(
        "def one(): return 1\nclass C:\n two = classmethod(lambda cls: 2)\n three = staticmethod(lambda: 3)",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, "patched", module)
    monkeypatch.setattr(patches, "ORIGINALS", {})
    monkeypatch.setattr(patches, "STEPS", {})
    return module


def negative(function):
    return lambda *args: -function(*args)


def table(**groups: str) -> list[Patch]:
    targets = {"one": "patched.one", "two": "patched.C.two", "three": "patched.C.three"}
    return [Patch(name, targets[name], negative, "It is so.", "never", group) for name, group in groups.items()]


def test_apply_keeps_the_kind_of_a_method(module):
    patches.apply(table(one="required", two="attention", three="fix"))
    assert (module.one(), module.C.two(), module.C().two(), module.C.three(), module.C().three()) == (
        -1,
        -2,
        -2,
        -3,
        -3,
    )


@pytest.mark.parametrize(
    ("variables", "values"),
    [
        ({}, (-1, 2)),
        ({"LOWRANK_ENABLE": "two"}, (-1, -2)),
        ({"LOWRANK_DISABLE": "one"}, (1, 2)),
        ({"LOWRANK_DISABLE": "one", "LOWRANK_ENABLE": " two,"}, (1, -2)),
    ],
)
def test_variables_switch_fixes_and_options(module, monkeypatch, variables, values):
    for name in ("LOWRANK_ENABLE", "LOWRANK_DISABLE"):
        monkeypatch.setenv(name, variables.get(name, ""))
    patches.apply(table(one="fix", two="optional"))
    assert (module.one(), module.C.two()) == values


@pytest.mark.parametrize("variable", ["LOWRANK_ENABLE", "LOWRANK_DISABLE"])
def test_variables_name_known_patches_only(monkeypatch, variable):
    monkeypatch.setenv(variable, "one,nope")
    with pytest.raises(UserError, match=f"{variable}=nope"):
        patches.selected(table(one="fix" if variable == "LOWRANK_DISABLE" else "optional"))


def test_variables_name_patches_of_one_of_several_tables(monkeypatch):
    """The plugin's own table has neither fixes nor optional patches, and is applied with the same variables."""
    monkeypatch.setenv("LOWRANK_ENABLE", "two")
    monkeypatch.setenv("LOWRANK_DISABLE", "one")
    assert [patch.name for patch in patches.selected(table(one="fix", two="optional"))] == ["two"]
    assert len(patches.selected(table(one="attention"))) == 1


@pytest.mark.parametrize(("tested", "warnings"), [("2.13.0", 0), ("1.0", 1)])
def test_untested_versions_give_one_warning(monkeypatch, recwarn, tested, warnings):
    monkeypatch.setattr(patches, "TESTED", {"torch": tested, "fairseq-fixed": "0.12.3.1" if not warnings else "0"})
    monkeypatch.setattr(patches.versions.metadata, "version", {"torch": "2.13.0+cpu", "fairseq-fixed": "0.12.3.1"}.get)
    patches.warn_of_untested_versions()
    assert len(recwarn) == warnings


def test_env_prints_the_table(capsys):
    assert cli.main(["env", "--patches", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(target for row in rows for target in row["targets"]) == sorted(patch.target for patch in ALL)
    assert all(row["on"] is (row["group"] != "optional") for row in rows)
    assert cli.main(["env", "--patches"]) == 0
    text = capsys.readouterr().out
    assert all(f"{row['reason']}\n  until {row['remove_when']}\n  {row['targets'][0]}" in text for row in rows)


def test_linear_layers_of_fairseq_compute_by_onednn(tmp_path):
    """The patch is off by default, and reaches the layers of torch and the tied layers of fairseq's adaptive softmax."""
    lines = """
import torch
own = torch.nn.functional.linear
import fairseq_lowrank.repairs
from fairseq.modules.adaptive_softmax import TiedLinear
from fairseq_lowrank import linear
calls, product, linear.SMALLEST = [], linear._product, 0
linear._product = lambda *tensors: (calls.append(1), product(*tensors))[1]
x = torch.randn(5, 4)
torch.nn.Linear(4, 4)(x), TiedLinear(torch.randn(4, 4), False)(x)
print(torch.nn.functional.linear is own, len(calls))
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", lines],
            env=os.environ | {"LOWRANK_ENABLE": enabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for enabled in ("", "onednn-linear")
    ]
    assert found == [["True", "0"], ["False", "2"]]
