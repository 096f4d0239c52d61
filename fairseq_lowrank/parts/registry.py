"""The registry: every method is declared once, and tables, flags, pages, commands and tests read its declaration."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import nn

from fairseq_lowrank.messages import UserError, did_you_mean
from fairseq_lowrank.ops.activation import ACTIVATIONS, Softmax
from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.head_output import HeadOutput
from fairseq_lowrank.parts.mixing import Mixing
from fairseq_lowrank.parts.part import Kind, Option, Part, Value, type_of_values
from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.score import ScoreFunction
from fairseq_lowrank.parts.stages import LayerPart

CLASSES = {
    "restricted": "plain attention with tied or factored weights: fewer parameters or a smaller cache, nothing else",
    "equal": "plain attention in other words: it can differ in how it is learned, not in what it computes",
    "OV": "a wider or input-dependent map from values to outputs; each pattern stays one of a plain head",
    "QK": "scores of higher rank than the head size",
    "patterns": "patterns that no heads of this size make, by another route than rank",
}
"""What a method can add to plain attention of the same heads and head size, in words."""


@dataclass(frozen=True)
class Axis:
    """An independent choice, declared here for the flags, the tables and the messages that are about it.

    Args:
        flag: its name on the command line and in a model's configuration.
        help: what it decides.
        choices: the names of its values; ``None`` if it is a number or a switch.
        default: the value if none is given; ``False`` for a switch.
        readers: the names of the parts that read it, if it is an option of parts: (axis, part).
        type: of its values: ``str`` for a choice, ``bool`` for a switch, ``int`` for a positive integer, or ``float``.
    """

    flag: str
    help: str
    choices: Collection[str] | None = None
    default: Value = None
    readers: tuple[tuple[str, str], ...] = ()
    type: Kind = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", type_of_values(self.type, self.default, self.choices))

    @property
    def is_recorded(self) -> bool:
        """True if states name the value, because no tensor has to show it: a choice, a float, or a whole number with a default."""
        return self.type in (str, float) or (self.type is int and self.default is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.choices or ())


class Slot(NamedTuple):
    """What the parts on an axis are: their base class, and the fields of ``AttentionCall`` that the axis lets them set."""

    base: type
    fields: tuple[str, ...] = ()

    @property
    def holds_tensors(self) -> bool:
        """False if a value is a formula without tensors, such as an activation."""
        return issubclass(self.base, Part)


SLOTS: dict[str, Slot] = {
    "projection": Slot(Projection),
    "score": Slot(ScoreFunction),
    "score_mixing": Slot(Mixing, ("score_mixing",)),
    "activation": Slot(Softmax, ("activation",)),
    "mixing": Slot(Mixing, ("prob_mixing",)),
    "head_map": Slot(HeadMap),
    "head_output": Slot(HeadOutput),
    "score_bias": Slot(LayerPart),
    "attention_sinks": Slot(LayerPart),
}
"""The axes whose values are parts."""

MODULE_AXES = tuple(axis for axis, slot in SLOTS.items() if issubclass(slot.base, nn.Module))
"""The axes whose choice is a module of the layer, under the name of the axis. Most start as the identity."""


def parts_of(module: nn.Module) -> dict[str, Any]:
    """Return the parts that are children of a module, by axis; another library may have wrapped them."""
    children = module._modules
    return {axis: part for axis in MODULE_AXES if (part := children.get(axis)) is not None}


class LayerParts:
    """The parts that are modules of a layer, by axis, or ``None``."""

    score_mixing: Mixing | None
    mixing: Mixing | None
    head_map: HeadMap | None
    head_output: HeadOutput | None
    score_bias: LayerPart | None
    attention_sinks: LayerPart | None


PARTS: dict[str, dict[str, Any]] = {
    "projection": {},
    "score": {},
    "score_mixing": {"none": None},
    "activation": ACTIVATIONS,
    "mixing": {"none": None},
    "head_map": {"none": None},
    "head_output": {"none": None},
    "score_bias": {"none": None},
    "attention_sinks": {"none": None},
}
"""The values of each axis whose values are parts: classes, or ``None``. Activations are objects."""

AXES: dict[str, Axis] = {
    "head_dim": Axis(
        "head_dim",
        "size of a head's queries, keys and values (default: embedding size / heads); "
        "the FixedHead paper sets it to the sequence length",
    ),
    "value_dim": Axis(
        "value_dim",
        "size of a head's values, if it differs from that of its queries and keys (default: the head size)",
    ),
    "key_value_heads": Axis(
        "key_value_heads",
        "number of heads of keys and values: g, a divisor of the heads; head i reads the keys of head floor(i g / h) "
        "(default: one per head)",
    ),
    "projection": Axis(
        "attention_projection", "how heads get queries, keys and values", PARTS["projection"], "independent"
    ),
    "score": Axis("attention_score", "how scores are computed", PARTS["score"], "dot-product"),
    "score_mixing": Axis(
        "score_mixing", "how the heads' scores are mixed before the softmax", PARTS["score_mixing"], "none"
    ),
    "activation": Axis("attention_activation", "what turns scores into probabilities", PARTS["activation"], "softmax"),
    "mixing": Axis("head_mixing", "how the heads' probabilities are mixed", PARTS["mixing"], "none"),
    "head_map": Axis(
        "head_map",
        "a static map of projected queries, keys and values, over features or over heads",
        PARTS["head_map"],
        "none",
    ),
    "head_output": Axis(
        "head_output", "what happens to the outputs of heads before the output projection", PARTS["head_output"], "none"
    ),
    "score_bias": Axis(
        "score_bias", "what is added to scores by the positions of query and key", PARTS["score_bias"], "none"
    ),
    "attention_sinks": Axis(
        "attention_sinks", "what joins the denominator of the softmax", PARTS["attention_sinks"], "none"
    ),
}
"""The axes and the options of parts, by their names in :class:`~fairseq_lowrank.attention.AttentionSpec`."""


class Paper(NamedTuple):
    """A paper: its title, its authors with the year, and its address."""

    title: str
    authors: str
    url: str


class Need(NamedTuple):
    """An axis that a preset leaves to its user, in words, and what to set it to."""

    axis: str
    what: str
    advice: str


@dataclass(frozen=True)
class Method:
    """The declaration of a method.

    Formulas of numbers are sums of products of numbers and sizes, such as ``4·d·h·d_k + h²``. d is the embedding size, h the number of
    heads, d_k the head size, g the number of heads of keys and values, n the greatest length. Options have their own letters.

    Args:
        name: the value of ``--attention``, and the name of its page.
        title: the name in words.
        formula: the formula of head i of h, with queries Q_i, keys K_i, values V_i and P_i = softmax(Q_i K_iᵀ/√d_k).
        parts: the parts that differ from plain attention, by axis.
        parameters: the formula of the parameters of one layer without biases.
        cached: the formula of the numbers that a decoding layer caches for a token.
        kind: one of :data:`CLASSES`; ``None`` if the method is not classified.
        kind_of: returns the class of a layer, if the class depends on sizes.
        papers: its papers; none if the method is from this project.
        needs: the axis that the user has to set, if there is one.
        examples: sizes and options with which tests build a layer of d 8 and 2 heads.
        colour: its colour in figures; ``None`` if it takes a free one.
        preset: False if the method is a part that goes with any preset: then it is no value of ``--attention``.
    """

    name: str
    title: str
    formula: str
    parts: Mapping[str, Any] = field(default_factory=dict)
    parameters: str = ""
    cached: str = ""
    kind: str | None = None
    kind_of: Callable[[Any], str] | None = None
    papers: tuple[Paper, ...] = ()
    needs: Need | None = None
    examples: tuple[Mapping[str, int | str], ...] = ({},)
    colour: str | None = None
    preset: bool = True

    @property
    def axes(self) -> dict[str, str]:
        """The values on the axes that the method sets, without those that plain attention has too."""
        return {axis: part.name for axis, part in self.parts.items() if part.name != AXES[axis].default}


PLAIN = "mha"
"""The name of plain attention, which other libraries compute, and the choice if none is given."""

METHODS: dict[str, Method] = {}
"""The declared methods, by name."""

PRESETS: dict[str, dict[str, str]] = {}
"""The axes that each value of ``--attention`` sets. An axis flag overrides the preset."""


def register(method: Method, *, replace: bool = False) -> Method:
    """Add a method and its parts to the registry, and return the method.

    Then ``--attention``, ``build_attention``, ``fairseq-lowrank`` and the generated pages know the method. The same declaration
    may be registered again, as a notebook does that runs a cell twice. Its parts replace the first ones: classes of the same
    module and name are the same part. Layers that are built keep their parts.

    Args:
        replace: another declaration of this name is replaced.

    Raises:
        UserError: a name that exists or is malformed, an unknown axis, a part of another kind or without a function of its
            base, or an option that is declared wrongly or in two ways. Nothing is registered.
    """
    old = METHODS.get(method.name)
    if old is not None and not replace and not _is_same(old, method):
        _refuse(method, "another method of this name is registered. Choose another name, or pass replace=True.")
    _check(method, old)
    # A dict keeps their order, which tables and pages show.
    options = dict.fromkeys(option.name for one in (old, method) if one is not None for _, option in _options_of(one))
    METHODS[method.name] = method
    if old is not None:
        _forget_parts(old)
    for axis, part in method.parts.items():
        PARTS[axis][part.name] = part() if axis == "activation" else part
    for name in options:
        _declare_option(name)
    if method.preset:
        PRESETS[method.name] = method.axes
    else:
        PRESETS.pop(method.name, None)
    return method


def _is_same_part(first: type, second: type) -> bool:
    """Return True for two classes that one statement makes, also if it runs twice."""
    return first is second or (first.__module__, first.__qualname__) == (second.__module__, second.__qualname__)


def _is_same(first: Method, second: Method) -> bool:
    """Return True if two methods have the same fields, and parts of the same classes."""
    if first.parts.keys() != second.parts.keys() or dataclasses.replace(first, parts=second.parts) != second:
        return False
    return all(_is_same_part(part, second.parts[axis]) for axis, part in first.parts.items())


def _options_of(method: Method) -> Iterator[tuple[tuple[str, str], Option]]:
    """Return the options of a method's parts, with the reader of each: (axis, part)."""
    for axis, part in method.parts.items():
        for option in getattr(part, "options", ()):
            yield (axis, part.name), option


def _forget_parts(old: Method) -> None:
    """Remove the parts of a replaced method that no method has now."""
    for axis, part in old.parts.items():
        used = any(axis in one.parts and one.parts[axis].name == part.name for one in METHODS.values())
        if not used and part.name != AXES[axis].default:
            del PARTS[axis][part.name]


def _refuse(method: Method, problem: str) -> NoReturn:
    raise UserError(f"method {method.name!r}: {problem}")


def _check(method: Method, old: Method | None) -> None:
    """Check a declaration, which takes the place of ``old``."""
    if not isinstance(method.name, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", method.name):
        _refuse(method, "expected a name of small letters and digits, such as 'my-method'")
    for name in ("title", "formula"):
        if not getattr(method, name):
            _refuse(method, f"{name} is empty. Give it in words.")
    if method.kind not in (None, *CLASSES):
        _refuse(method, f"kind={method.kind!r}: expected one of {', '.join(CLASSES)}, or None")
    for axis, part in method.parts.items():
        if axis not in PARTS:
            _refuse(method, f"parts[{axis!r}]: expected one of {', '.join(PARTS)}")
        is_part = isinstance(part, type) and issubclass(part, SLOTS[axis].base)
        if not is_part or not isinstance(getattr(part, "name", 0), str):
            _refuse(method, f"parts[{axis!r}]={part!r}: expected a subclass of {SLOTS[axis].base.__name__} with a name")
        if part.name in PARTS[axis]:
            known = PARTS[axis][part.name]
            known = known if known is None or isinstance(known, type) else type(known)  # activations are objects
            others = [one.parts.get(axis) for one in METHODS.values() if one is not old]
            replaced = old is not None and old.parts.get(axis) is known and known not in others
            if known is None or not (replaced or _is_same_part(known, part)):
                _refuse(method, f"parts[{axis!r}]: {known!r} has the name {part.name!r} already. Choose another name.")
    if not method.axes and method.needs is None and method.name != PLAIN:
        _refuse(method, "it has no part, so it would compute plain attention. Pass parts={axis: class}.")
    _check_options(method, old)
    for axis, part in method.parts.items():
        _check_functions(method, axis, part)
    axes = AXES.keys() | {option.name for _, option in _options_of(method)}
    for sizes in (*method.examples, {method.needs.axis: 0} if method.needs else {}):
        if unknown := sizes.keys() - axes:
            _refuse(method, f"{', '.join(sorted(unknown))}: no such axis or option. Use {', '.join(axes)}.")


def _check_functions(method: Method, axis: str, part: Any) -> None:
    """Check that a part defines a function of its base: with a misspelled one it would compute what the base computes."""
    base = SLOTS[axis].base
    expected = {
        name
        for kind in base.__mro__
        if kind.__module__.startswith("fairseq_lowrank.")
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, (property, classmethod)))
    }
    own = {
        name
        for kind in part.__mro__
        if kind not in base.__mro__
        for name, value in vars(kind).items()
        if callable(value)
    }
    own -= {"__init__"} if issubclass(base, nn.Module) else set()
    steps = getattr(part, "filled", None)
    if part.name == AXES[axis].default or (steps != frozenset() and own & {*expected, "__init__"}):
        return
    near = [text for name in sorted(own) if not name.startswith("_") and (text := did_you_mean(name, expected))]
    _refuse(
        method,
        f"parts[{axis!r}]: {part.__name__} defines no function that {base.__name__} calls, so it would compute what "
        f"{base.__name__} computes.{''.join(near[:1])}",
    )


def _check_options(method: Method, old: Method | None) -> None:
    """Check that a method declares its options well, and as the other parts that read them."""
    replaced = {(axis, part.name) for one in (old, method) if one is not None for axis, part in one.parts.items()}
    declared: dict[str, Option] = {}
    for _, option in _options_of(method):
        try:
            option.check()
        except ValueError as error:
            _refuse(method, str(error))
        first = declared.setdefault(option.name, option)
        axis = AXES.get(option.name)
        known: list[Option | Axis] = (
            [first] if axis is None or (axis.readers and replaced.issuperset(axis.readers)) else [first, axis]
        )
        if any(_values(one) != _values(option) for one in known) or (axis is not None and not axis.readers):
            _refuse(method, f"option {option.name!r}: another one has this name. Choose another name.")


def _values(declared: Option | Axis) -> tuple[Kind, Value, tuple[str, ...] | None]:
    """Return what two declarations of one option have in common."""
    return declared.type, declared.default, tuple(declared.choices) if declared.choices else None


def _declare_option(name: str) -> None:
    """Write what the registered methods declare of an option into the table of axes."""
    readers: dict[tuple[str, str], Option] = {}
    texts: dict[str, dict[str, None]] = {}
    for method in METHODS.values():
        for reader, option in _options_of(method):
            if option.name == name:
                readers[reader] = option
                texts.setdefault(option.help, {})[method.name] = None
    if not readers:
        del AXES[name]
        return
    text = "; ".join(f"{', '.join(methods)}: {text}" for text, methods in texts.items())
    option = next(iter(readers.values()))
    AXES[name] = Axis(option.flag or name, text, option.choices or None, option.default, tuple(readers), option.type)


def evaluate(formula: str, sizes: dict[str, int]) -> int:
    """Return the value of a sum of products of numbers, sizes and exact quotients, such as ``4·d·h·d_k + h²`` or ``h·d²/c``.

    Args:
        sizes: the sizes by name.

    Raises:
        KeyError: a name has no size.
    """

    def value(factor: str) -> int:
        factor, _, divisor = factor.partition("/")
        base = factor.removesuffix("²")
        power = (int(base) if base.isdecimal() else sizes[base]) ** (2 if factor.endswith("²") else 1)
        return power // (sizes[divisor] if divisor else 1)

    return sum(math.prod(value(factor) for factor in term.split("·")) for term in formula.split(" + "))
