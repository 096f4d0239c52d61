"""The registry: declarations are complete, mistakes in them are refused, and nothing else lists methods by name."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_lowrank import cli
from fairseq_lowrank.attention import METHODS, PRESETS, Method, Paper, build_attention, register
from fairseq_lowrank.messages import StateDictMismatch, UserError
from fairseq_lowrank.parts import AXES, CLASSES, PARTS, SLOTS, HeadOutput, Mixing, Option, evaluate
from fairseq_lowrank.tools import pictures

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fairseq_lowrank"
# tests/test_layers.py holds the folders of tools to more
FOLDERS = ("attention", "models", "ops", "parts", "repairs", "tasks")
FILES = [file for folder in FOLDERS for file in (PACKAGE / folder).rglob("*.py")] + [
    ROOT / "experiments" / "variants.py"
]


def names_in(node: ast.AST) -> set[str]:
    """The names of methods among the strings of a literal."""
    strings = [
        inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    ]
    return {string for string in strings if string in METHODS}


def test_no_other_file_lists_methods():
    literals = (
        (file, node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set)
    )
    assert not [(file, node.lineno, names_in(node)) for file, node in literals if len(names_in(node)) > 1]


@pytest.mark.parametrize("name", METHODS)
def test_a_declaration_is_complete(name):
    method = METHODS[name]
    assert method.parameters and method.cached
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


def part_with(*options):
    """Return a part that has these options."""
    return type("Optional", (Doubled,), {"name": "optional", "options": options})


MINE = Method("mine", "Mine", "2 O_i", {"head_output": Doubled})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Mine!"}, "expected a name of small letters"),
        ({"name": "mha"}, "another method of this name is registered. Choose another name, or pass replace=True"),
        ({"title": ""}, "title is empty"),
        ({"kind": "better"}, "kind='better': expected one of restricted, equal"),
        ({"parts": {"output": Doubled}}, r"parts\['output'\]: expected one of projection, score"),
        ({"parts": {"mixing": Doubled}}, "expected a subclass of Mixing with a name"),
        ({"parts": {"mixing": Halved}}, "has the name 'static' already"),
        ({"parts": {"head_output": Loud}}, "option 'latent_dim': another one has this name"),
        (
            {"parts": {"head_output": part_with(Option("mixing", "an axis"))}},
            "option 'mixing': another one has this name",
        ),
        (
            {"parts": {"head_output": part_with(Option("not a name", "words"))}},
            "expected the name of a keyword argument",
        ),
        ({"parts": {"head_output": part_with(Option("size", ""))}}, "help='': expected a phrase"),
        ({"parts": {"head_output": part_with(Option("size", "of it", 0))}}, "default=0: expected a positive integer"),
        ({"parts": {"head_output": part_with(Option("size", "of it", 1.5, type=int))}}, "expected a positive integer"),
        ({"parts": {"head_output": part_with(Option("rate", "of it", float("nan")))}}, "expected a finite number"),
        (
            {"parts": {"head_output": part_with(Option("on", "or off", True))}},
            "expected False, from which a switch starts",
        ),
        (
            {"parts": {"head_output": part_with(Option("way", "of it", "a"))}},
            "expected names if, and only if, type is str",
        ),
        ({"parts": {"head_output": part_with(Option("way", "of it", "a", ("b", "c")))}}, "expected one of b, c"),
        ({"parts": {"head_output": part_with(Option("way", "of it", type=list))}}, "expected int, float, bool or str"),
        (
            {"parts": {"head_output": part_with(Option("size", "of it"), Option("size", "of it", 2))}},
            "option 'size': another one has this name",
        ),
        ({"examples": ({"size": 3},)}, "size: no such axis or option"),
        ({"parts": {}}, "it has no part, so it would compute plain attention"),
        ({"parts": {"score": PARTS["score"]["dot-product"]}}, "it has no part, so it would compute plain attention"),
    ],
)
def test_a_mistake_in_a_declaration_is_refused_and_registers_nothing(change, message, methods_leave):
    before = dict(METHODS), dict(PRESETS), dict(AXES)
    with pytest.raises(UserError, match=message):
        register(replace(MINE, **change))
    assert before == (METHODS, PRESETS, AXES)


MISSPELLED = {
    "projection": "project_keys_values",
    "score": "attention_inputs_",
    "score_mixing": "matrx",
    "activation": "logit",
    "mixing": "operations",
    "head_map": "querys",
    "head_output": "head",
    "score_bias": "calls",
    "attention_sinks": "cal",
}


@pytest.mark.parametrize("axis", SLOTS)
def test_a_part_that_overrides_nothing_of_its_base_is_refused(axis, methods_leave):
    functions = {MISSPELLED[axis]: lambda self, *values: values[0], "name": "own"}
    if issubclass(SLOTS[axis].base, nn.Module):  # with a parameter, so that it looks whole
        functions["__init__"] = lambda self, *values: SLOTS[axis].base.__init__(self, *values)
    part = type("Own", (SLOTS[axis].base,), functions)
    with pytest.raises(UserError, match=rf"parts\['{axis}'\]: Own defines no function .* Did you mean"):
        register(Method("own", "Own", "f", {axis: part}))
    assert "own" not in METHODS and "own" not in PARTS[axis]


def test_a_part_that_fills_no_step_is_refused(methods_leave):
    part = type("Own", (SLOTS["head_output"].base,), {"name": "own", "reset_parameters": lambda self: None})
    with pytest.raises(UserError, match="Own defines no function"):
        register(Method("own", "Own", "f", {"head_output": part}))


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


CELL = """
from fairseq_lowrank.attention import Method, register
from fairseq_lowrank.parts import HeadOutput, Option


class Scaled(HeadOutput):
    name = "scaled"
    options = (Option("output_factor", "factor of the outputs (default: 1)", 1.0),)

    def __init__(self, config, output_factor=1.0):
        super().__init__(config)
        self.output_factor = output_factor

    def heads(self, heads, context):
        return CALLS.append(self) or self.output_factor * heads


register(Method("scaled", "Scaled heads", "c O_i", {"head_output": Scaled}))
"""


def test_a_cell_of_a_notebook_may_run_twice(methods_leave):
    spaces = [{"CALLS": [], "__name__": "__main__"} for _ in range(2)]
    for space in spaces:
        exec(CELL, space)
    x = torch.randn(3, 2, 8)
    build_attention("scaled", 8, 2, output_factor=0.5)(x, x, x)
    assert [len(space["CALLS"]) for space in spaces] == [0, 1]
    assert AXES["output_factor"].readers == (("head_output", "scaled"),)


def test_another_method_of_a_name_replaces_parts_and_options_if_it_says_so(methods_leave):
    exec(CELL, {"CALLS": []})
    with pytest.raises(UserError, match="pass replace=True"):
        register(replace(MINE, name="scaled"))
    register(replace(MINE, name="scaled"), replace=True)
    assert "scaled" not in PARTS["head_output"] and "output_factor" not in AXES
    assert build_attention("scaled", 8, 2).spec.head_output == "doubled"
    register(MINE)
    register(replace(MINE, title="Mine again"), replace=True)
    assert "doubled" in PARTS["head_output"] and METHODS["mine"].title == "Mine again"


def test_a_part_of_another_method_cannot_be_replaced(methods_leave):
    register(MINE)
    other = type("Other", (Doubled,), {"name": "doubled", "__qualname__": "Other"})
    with pytest.raises(UserError, match="has the name 'doubled' already"):
        register(replace(MINE, name="theirs", parts={"head_output": other}), replace=True)


def test_a_number_of_a_part_is_a_flag_and_is_recorded_in_states(methods_leave):
    exec(CELL, {"CALLS": []})
    one, half = build_attention("scaled", 8, 2), build_attention("scaled", 8, 2, output_factor=0.5)
    assert AXES["output_factor"].type is float and half.head_output.output_factor == 0.5
    half.load_state_dict(half.state_dict())
    for layer, other in ((one, half), (half, one)):
        with pytest.raises(StateDictMismatch, match="output_factor"):
            layer.load_state_dict(other.state_dict())
    for wrong in ("2", float("inf"), True):
        with pytest.raises(ValueError, match=r"output_factor=.*expected a finite number"):
            build_attention("scaled", 8, 2, output_factor=wrong)


def test_a_number_of_a_part_is_read_from_the_command_line(request, capsys):
    pytest.importorskip("fairseq")
    request.getfixturevalue("plugins_leave")
    exec(CELL, {"CALLS": []})
    sizes = ("--arch", "lowrank_transformer_lm", "--vocab-size", "20", "--attention", "scaled")
    assert cli.main(["params", *sizes, "--output-factor", "0.25"]) == 0
    assert "0.25" in capsys.readouterr().out
