"""The registry: declarations are complete, mistakes in them are refused, and nothing else lists methods by name."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.attention import METHODS, PRESETS, Method, Paper, build_attention, register
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import AXES, CLASSES, PARTS, HeadOutput, Mixing, Option, evaluate
from fairseq_lowrank.tools import pictures

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fairseq_lowrank"
FILES = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "methods"] + [
    ROOT / "experiments" / "variants.py"
]


def names_in(node: ast.AST) -> set[str]:
    """The names of methods among the strings of a literal."""
    strings = [
        inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    ]
    return {string for string in strings if string in METHODS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_other_file_lists_methods(file):
    literals = (
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set)
    )
    assert not [(node.lineno, names_in(node)) for node in literals if len(names_in(node)) > 1]


@pytest.mark.parametrize("name", METHODS)
def test_a_declaration_is_complete(name):
    method = METHODS[name]
    assert method.parameters and method.cached and method.notes and not method.use_if.endswith(".")
    assert all(isinstance(paper, Paper) and paper.url.startswith("https://") for paper in method.papers)
    assert (method.kind in CLASSES and method.colour) or not method.preset
    parts = [part for values in PARTS.values() for part in values.values() if isinstance(part, type)]
    letters = {option.letter for part in parts for option in getattr(part, "options", ())}
    assert evaluate(method.parameters, dict.fromkeys(("d", "h", "d_k", "g", "n", *letters), 1)) > 0


def test_every_method_has_a_colour_of_its_own():
    colours = [method.colour for method in METHODS.values() if method.colour] + [pictures.colour_of(pictures.STOCK)]
    assert len({*colours, *pictures.OTHER_COLOURS}) == len(colours) + len(pictures.OTHER_COLOURS)


class Doubled(HeadOutput):
    """2 O_i."""

    name = "doubled"

    def heads(self, heads, context):
        return 2 * heads


class Halved(Mixing):
    """A part with the name of another one."""

    name = "static"


class Loud(HeadOutput):
    """A part whose option has the name of another one."""

    name = "loud"
    options = (Option("latent_dim", "another size", default="none", choices=("none",)),)


MINE = Method("mine", "Mine", "2 O_i", {"head_output": Doubled})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Mine!"}, "expected a name of small letters"),
        ({"name": "mha"}, "a method of this name is registered"),
        ({"title": ""}, "title is empty"),
        ({"kind": "better"}, "kind='better': expected one of restricted, equal"),
        ({"parts": {"output": Doubled}}, r"parts\['output'\]: expected one of projection, score"),
        ({"parts": {"mixing": Doubled}}, "expected a subclass of Mixing with a name"),
        ({"parts": {"mixing": Halved}}, "has the name 'static' already"),
        ({"parts": {"head_output": Loud}}, "option 'latent_dim': another one has this name"),
        ({"examples": ({"size": 3},)}, "size: no such axis or option"),
    ],
)
def test_a_mistake_in_a_declaration_is_refused_and_registers_nothing(change, message, methods_leave):
    before = dict(METHODS), dict(PRESETS), dict(AXES)
    with pytest.raises(UserError, match=message):
        register(replace(MINE, **change))
    assert before == (METHODS, PRESETS, AXES)


def test_a_registered_method_is_built_by_its_name(methods_leave):
    register(MINE)
    layer = build_attention("mine", 8, 2)
    assert layer.spec.head_output == "doubled" and repr(layer.spec) == "AttentionSpec(head_output='doubled')"


def test_parameters_of_a_registered_method_are_counted(methods_leave, capsys):
    pytest.importorskip("fairseq")
    register(MINE)
    assert cli.main(["params", "--arch", "lowrank_transformer_lm", "--vocab-size", "20", "--attention", "mine"]) == 0
    assert "doubled" in capsys.readouterr().out


def test_registered_part_without_tensors_is_marked_in_states(methods_leave):
    register(MINE)
    assert "head_output_doubled" in build_attention("mine", 8, 2).state_dict()
