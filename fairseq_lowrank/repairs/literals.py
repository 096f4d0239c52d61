"""Checks of texts that fairseq evaluates as Python, because a checkpoint's configuration could run any code.

fairseq gives some strings of a configuration, such as ``conv_feature_layers``, to ``eval``. A text that passes
:func:`literal` is made of literals and arithmetic, so evaluating it is safe.
"""

import ast
import functools
import operator
from collections.abc import Callable
from typing import Any

from fairseq_lowrank.messages import UserError

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
SEQUENCES: dict[type[ast.AST], type] = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
MAX_LENGTH = 10_000
"""The largest number of characters of a text, and of elements of its value."""
MAX_LINE_LENGTH = 10_000_000
"""The largest number of characters of a line of data, which may describe an hour of speech."""


def literal(text: str, *, max_length: int = MAX_LENGTH) -> object:
    """Return the value of literals and of arithmetic on them, such as ``[(512, 3)] * 4``.

    Raises:
        UserError: the text is anything else.
    """
    shown = repr(text if len(text) <= 200 else f"{text[:200]}…")
    if len(text) > max_length:
        raise UserError(f"{shown}: the text has {len(text):,} characters. Use at most {max_length:,}.")

    def value(node: ast.AST | None) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List() | ast.Set():
                return SEQUENCES[type(node)](value(element) for element in node.elts)
            case ast.Dict() if None not in node.keys:
                return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True)}
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                left, right = value(node.left), value(node.right)
                if isinstance(node.op, ast.Mult):
                    check_product(left, right)
                return OPERATORS[type(node.op)](left, right)
        raise UserError(f"{shown}: not a literal. Use numbers, strings, and lists, tuples or dictionaries of them.")

    def check_product(*factors: object) -> None:
        for repeated, times in (factors, factors[::-1]):
            if not isinstance(times, int) or isinstance(repeated, (int, float, complex)):
                continue
            if count_elements(repeated) * times > MAX_LENGTH:
                raise UserError(f"{shown}: the value has more than {MAX_LENGTH:,} elements. Write a shorter list.")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise UserError(f"{shown}: not a value ({error.msg}). Use Python's notation for literals.") from error
    except UserError:
        raise
    except (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{shown}: not a value ({error or type(error).__name__}). Use a literal.") from error


def count_elements(value: object) -> int:
    """Return the number of elements in a value, those of nested values included."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(count_elements, (*value, *value.values())))
    return sum(map(count_elements, value)) if isinstance(value, (list, tuple, set)) else 1


def check_argument(function: Callable) -> Callable:
    """Wrap a function that evaluates its first argument: accept only literals."""

    @functools.wraps(function)
    def checked(text, *args, **kwargs):
        if isinstance(text, str):
            literal(text)
        return function(text, *args, **kwargs)

    return checked


def check_fields(*names: str) -> Callable[[Callable], Callable]:
    """Return a wrapper of functions that evaluate these fields of their arguments, or these keyword arguments."""

    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args, **kwargs):
            for name in names:
                for text in (kwargs.get(name), *(getattr(each, name, None) for each in (*args, *kwargs.values()))):
                    if isinstance(text, str):
                        literal(text)
            return function(*args, **kwargs)

        return checked

    return wrap


def check_manifest(parse: Callable) -> Callable:
    """Accept only literals in a file of audio codes."""

    @functools.wraps(parse)
    def parse_manifest(manifest, dictionary):
        with open(manifest) as lines:
            for line in lines:
                literal(line, max_length=MAX_LINE_LENGTH)
        return parse(manifest, dictionary)

    return parse_manifest


FASTA = "--dataset-impl fasta"


def refuse_fasta(build: Callable) -> Callable:
    """Wrap ``FastaDataset.__init__``, which writes the path into a line of shell: raise an error instead."""

    @functools.wraps(build)
    def __init__(self, path, cache_indices=False):
        raise UserError(
            f"{FASTA}: {path}.fasta would be read by a shell, which runs what is in its path. Use mmap or raw."
        )

    return __init__
