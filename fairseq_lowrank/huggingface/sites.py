"""Where an attention module of a model of ``transformers`` attends, read from the model's own code.

A module that gets keys of another sequence is cross attention, and the mask that is made for a module says whether it is causal.
"""

# Why no forward pass tells it: transformers 5.23 has 395 base classes whose attention can be chosen. A pass of two layers on the
# meta device, with inputs of text, images or sound, failed in 234 of them: MoE layers (AfmoeModel), values that are read from
# tensors (AlignModel), further arguments (Glm4vVisionModel). It differed in 10: masks that are rebuilt (SwinModel, Llama4TextModel),
# keys of fewer positions (SegformerModel), parts that a pass skips (Phi4MultimodalModel). And a sharded or offloaded model would
# have to run before anything is chosen.

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator

from torch import nn

from fairseq_lowrank.parts import AXES, AttentionSpec

SITES = ("encoder", "decoder", "cross")

_CAUSAL_MASKS = frozenset(
    (
        "create_causal_mask",
        "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
        "create_masks_for_generate",
    )
)
_OTHER_MASKS = frozenset(("create_bidirectional_mask", "create_bidirectional_sliding_window_mask"))
_NO_STATES = (
    "mask",
    "past",
    "cache",
    "position",
    "bias",
    "rotary",
    "freq",
    "ids",
    "shape",
    "index",
    "indices",
    "lens",
    "kwargs",
)
"""Parts of the names of arguments that reach keys and are no hidden states."""

Callers = dict[int, tuple[nn.Module, str, int | None]]
"""By the id of a module: the module whose code calls it, under which attribute, and at which index of a list."""


def callers_of(model: nn.Module) -> Callers:
    """Return for each module of a model which module calls it, and under which name."""
    callers: Callers = {}
    for owner in model.modules():
        if isinstance(owner, (nn.ModuleList, nn.ModuleDict)):
            continue
        for name, child in owner.named_children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                for index, member in enumerate(child.children()):
                    callers.setdefault(id(member), (owner, name, index))
            else:
                callers.setdefault(id(child), (owner, name, None))
    return callers


def site_of(module: nn.Module, callers: Callers) -> str:
    """Return where a module attends: ``cross``, ``decoder`` (causal) or ``encoder``."""
    if _reads_another_sequence(module, callers):
        return "cross"
    return "decoder" if _is_causal(module, callers) else "encoder"


def has_sinks_already(module: nn.Module, spec: AttentionSpec) -> bool:
    """Return True if attention with sinks is chosen for a module that passes sinks to the attention function."""
    return spec.attention_sinks != AXES["attention_sinks"].default and passes(module, "s_aux")


def passes(module: nn.Module, argument: str) -> bool:
    """Return True if a module passes a value for an argument to the attention function; ``self.name`` may be None."""
    forward = _function(type(module), "forward")  # type: ignore[arg-type]
    for node in ast.walk(forward) if forward is not None else ():
        if (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == "self"
        ):
            for value in (keyword.value for keyword in node.keywords if keyword.arg == argument):
                if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
                    return getattr(module, value.attr, None) is not None
                return True
    return False


def _reads_another_sequence(module: nn.Module, callers: Callers) -> bool:
    forward = _function(type(module), "forward")  # type: ignore[arg-type]
    if forward is None:
        return bool(getattr(module, "is_cross_attention", False))
    query, others = _sources(forward)
    call = _call_of(module, callers)
    if not others:
        return False
    if call is None:
        return bool(getattr(module, "is_cross_attention", False))
    owner, function, node = call
    given = _arguments(module, node)
    own = set().union(*(_origins(given[name], owner, function, callers) for name in query & given.keys()))
    return any(
        _is_given(given[name], owner, function, callers) and not _origins(given[name], owner, function, callers) & own
        for name in others & given.keys()
    )


def _is_causal(module: nn.Module, callers: Callers) -> bool:
    """Return True if the mask that is made for a module is causal; where that is not to be seen, the module says it."""
    made = _mask_makers(module, callers)
    if bool(made & _CAUSAL_MASKS) != bool(made & _OTHER_MASKS):
        return bool(made & _CAUSAL_MASKS)
    holder: nn.Module | None = module
    while holder is not None:
        names = names_used(type(holder))  # type: ignore[arg-type]
        causal, other = bool(names & _CAUSAL_MASKS), bool(names & _OTHER_MASKS)
        if causal != other:
            return causal
        call = _call_of(holder, callers)
        if causal or (call is not None and not any("mask" in name for name in _arguments(holder, call[2]))):
            break  # masks that are made further up do not reach the module
        holder = callers[id(holder)][0] if id(holder) in callers else None
    for source, name in (
        (module, "is_causal"),
        (module, "is_decoder"),
        (getattr(module, "config", None), "is_decoder"),
    ):
        if isinstance(value := getattr(source, name, None), bool):
            return value
    return False


def _mask_makers(module: nn.Module, callers: Callers) -> set[str]:
    """Return the functions that make the mask which a module gets, as far as it is handed down under names."""
    wanted = ""  # the first argument that is a mask; further up, the argument that becomes it
    while (call := _call_of(module, callers)) is not None:
        owner, function, node = call
        masks = [
            value
            for name, value in _arguments(module, node).items()
            if (name == wanted or (not wanted and "mask" in name)) and isinstance(value, ast.Name)
        ]
        if not masks:
            return set()
        wanted = masks[0].id
        values = _assignments(function, updates=True).get(wanted, ())
        calls = (value.func for value in values if isinstance(value, ast.Call))
        made = {called.id for called in calls if isinstance(called, ast.Name)}
        if made:  # a mask that is also made in another way says nothing
            return (
                made if all(isinstance(value, ast.Call) for value in _assignments(function).get(wanted, ())) else set()
            )
        if wanted not in _parameters(function) or function.name != "forward":
            return set()
        module = owner
    return set()


def _own_functions(kind: type) -> dict[str, Callable]:
    """Return the functions that a class and its bases define, without those of torch and of ``PreTrainedModel``.

    Models may also be defined elsewhere: exported ones in this package, and others in code that their folder brings.
    """
    functions: dict[str, Callable] = {}
    for base in reversed(kind.__mro__):
        library = base.__module__.partition(".")[0] in ("builtins", "torch", "transformers")
        if not library or base.__module__.startswith("transformers.models."):
            functions |= {name: value for name, value in vars(base).items() if callable(value)}
    return functions


@functools.cache
def names_used(kind: type) -> frozenset[str]:
    """Return the global names and attributes that the methods of a class use."""
    names: set[str] = set()
    for function in _own_functions(kind).values():
        code = getattr(inspect.unwrap(function), "__code__", None)
        names |= set(() if code is None else code.co_names)
    return frozenset(names)


@functools.cache
def _function(kind: type, name: str) -> ast.FunctionDef | None:
    """Return the syntax tree of a method, or None where its source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, name))))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@functools.cache
def _assignments(function: ast.FunctionDef, *, updates: bool = False) -> dict[str, list[ast.expr]]:
    """Return for each local name the expressions that it is given in a function; ``updates`` of itself too."""
    given: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            for name in _names(target) - (
                set() if updates else _names(value)
            ):  # query, key = rotated(query, key): each stays what it was
                given.setdefault(name, []).append(value)
    return given


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the parts of an assignment: ``a, b = x, y`` and ``a, b = f(x, y)`` give ``(a, x), (b, y)``."""
    if isinstance(target, ast.Tuple):
        values = value.args if isinstance(value, ast.Call) else getattr(value, "elts", [])
        if len(values) == len(target.elts):
            return list(zip(target.elts, values, strict=True))
    return [(target, value)]


def _names(expression: ast.AST) -> set[str]:
    """Return the names that an expression reads, without those whose size, device or dtype alone it reads."""
    if isinstance(expression, ast.Attribute) and expression.attr in ("shape", "size", "device", "dtype"):
        return set()
    inner = set().union(*(_names(part) for part in ast.iter_child_nodes(expression)))
    return inner | {expression.id} if isinstance(expression, ast.Name) else inner


def _reaches(expression: ast.expr, function: ast.FunctionDef) -> set[str]:
    """Return the parameters of a function from which an expression is computed."""
    local, seen, wanted = _assignments(function), set(), _names(expression)
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            for value in local.get(name, ()):
                wanted |= _names(value)
    numbers = {arg.arg for arg in function.args.args if getattr(arg.annotation, "id", "") in ("int", "bool", "float")}
    states = set(_parameters(function)) - numbers - {"self"}
    return {name for name in seen & states if not any(part in name for part in _NO_STATES)}


@functools.cache
def _sources(forward: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Return the arguments from which an attention module makes its queries, and those that only its keys and values read."""
    for node in ast.walk(forward):
        # attention_interface(self, query, key, value, …)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 4:
            continue
        if isinstance(node.args[0], ast.Name) and node.args[0].id == "self":
            query = _reaches(node.args[1], forward)
            return query, (_reaches(node.args[2], forward) | _reaches(node.args[3], forward)) - query
    return set(), set()


def _origins(
    expression: ast.expr, owner: nn.Module, function: ast.FunctionDef, callers: Callers
) -> set[tuple[int, str]]:
    """Return the tensors that an expression reads: the callers' names of arguments, the parts of sums, what a call unpacks."""
    origins: set[tuple[int, str]] = set()

    def follow(expression: ast.expr, owner: nn.Module, function: ast.FunctionDef, unfold: bool = True) -> None:
        call = _call_of(owner, callers) if function.name == "forward" else None
        above = {} if call is None else _arguments(owner, call[2])
        for name in _names(expression) - {"self"}:
            if (id(owner), name) in origins:
                continue
            origins.add((id(owner), name))
            if name not in _parameters(function):
                for value in _assignments(function).get(name, ()) if unfold else ():
                    if isinstance(value, (ast.BinOp, ast.Name)) or (
                        isinstance(value, ast.Call) and _is_unpacked(name, function)
                    ):
                        follow(value, owner, function, unfold=False)
            elif call is not None and name in above:
                follow(above[name], call[0], call[1])

    follow(expression, owner, function)
    return origins


def _is_unpacked(name: str, function: ast.FunctionDef) -> bool:
    """Return True if a name is one of several that one call returns."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    tuples = [target for node in assigned for target in node.targets if isinstance(target, ast.Tuple)]
    return any(name in _names(target) for target in tuples)


def _call_of(module: nn.Module, callers: Callers) -> tuple[nn.Module, ast.FunctionDef, ast.Call] | None:
    """Return who calls a module, in which function, and the call."""
    if id(module) not in callers:
        return None
    owner, attribute, index = callers[id(module)]
    for name in sorted(_own_functions(type(owner)), key=lambda name: name != "forward"):
        function = None if name.startswith("__") else _function(type(owner), name)  # type: ignore[arg-type]
        if function is None:
            continue
        for call in _calls(function, attribute):
            where = call.func.slice if isinstance(call.func, ast.Subscript) else None
            if index is not None and where is not None:
                number = _constant(where)
                size = len(getattr(owner, attribute))
                if isinstance(number, int) and number % size != index:
                    continue
            # a wrapper such as BartDecoderWrapper passes on all its arguments
            return (_call_through(owner, attribute, callers) if _passes_all(call) else None) or (owner, function, call)
    return None


def _call_through(
    wrapper: nn.Module, attribute: str, callers: Callers
) -> tuple[nn.Module, ast.FunctionDef, ast.Call] | None:
    """Return the module that calls ``wrapper`` or ``wrapper.attribute``, the function, and the call."""
    if id(wrapper) not in callers:
        return None
    owner, name, _ = callers[id(wrapper)]
    function = _function(type(owner), "forward")  # type: ignore[arg-type]
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Call) and isinstance(called := node.func, ast.Attribute):
            inner = called.value if called.attr == attribute else called
            if _is_member(inner, name):
                assert function is not None
                return owner, function, node
    return None


def _passes_all(call: ast.Call) -> bool:
    """Return True if a call has all arguments of its function and no others: ``f(*args, **kwargs)``."""
    return (
        len(call.args) == len(call.keywords) == 1
        and isinstance(call.args[0], ast.Starred)
        and call.keywords[0].arg is None
    )


def _constant(expression: ast.expr) -> object:
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return None


def _calls(function: ast.FunctionDef, attribute: str) -> Iterator[ast.Call]:
    """Yield the calls of ``self.attribute``, of its members, and of a loop's variable that runs over them."""
    variables = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.comprehension)) and _mentions(node.iter, attribute):
            variables |= _names(node.target)
        elif isinstance(node, ast.Assign) and _is_member(node.value, attribute):
            variables |= set().union(*(_names(target) for target in node.targets))
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if (isinstance(called, ast.Name) and called.id in variables) or (
            isinstance(called, (ast.Attribute, ast.Subscript)) and _is_member(called, attribute)
        ):
            yield node


def _is_member(expression: ast.expr, attribute: str) -> bool:
    if isinstance(expression, ast.Subscript):
        return _is_member(expression.value, attribute)
    return (
        isinstance(expression, ast.Attribute)
        and expression.attr == attribute
        and isinstance(expression.value, ast.Name)
        and expression.value.id == "self"
    )


def _mentions(expression: ast.expr, attribute: str) -> bool:
    return any(isinstance(node, ast.expr) and _is_member(node, attribute) for node in ast.walk(expression))


def _arguments(module: nn.Module, call: ast.Call) -> dict[str, ast.expr]:
    """Return what a call gives to the arguments of a module's ``forward``."""
    names = [name for name in inspect.signature(module.forward).parameters]
    given = {name: value for name, value in zip(names, call.args, strict=False) if not isinstance(value, ast.Starred)}
    return given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _is_given(expression: ast.expr, owner: nn.Module, function: ast.FunctionDef, callers: Callers) -> bool:
    """Return True if an argument is not None: neither in this call, nor in the calls from which it comes."""
    if isinstance(expression, ast.IfExp):
        chosen = _truth(expression.test, owner)
        branches = [(expression.body, True), (expression.orelse, False)]
        return any(_is_given(part, owner, function, callers) for part, side in branches if chosen in (None, side))
    if isinstance(expression, ast.Constant):
        return expression.value is not None
    if not isinstance(expression, ast.Name):
        return True
    if expression.id not in _parameters(function):
        values = _assignments(function).get(expression.id, [])
        named = values and all(isinstance(value, ast.Name) and value.id != expression.id for value in values)
        return not named or any(_is_given(value, owner, function, callers) for value in values)
    if function.name != "forward":
        return True
    if (call := _call_of(owner, callers)) is None:
        return True
    above, outer, node = call
    given = _arguments(owner, node)
    return expression.id in given and _is_given(given[expression.id], above, outer, callers)


def _truth(test: ast.expr, owner: nn.Module) -> bool | None:
    """Return the value of a condition such as ``self.is_cross_attention``, or None where it is not that simple."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _truth(test.operand, owner)
        return None if value is None else not value
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == "self":
        value = getattr(owner, test.attr, None)
        return value if isinstance(value, bool) else None
    return None
