"""Parts of an operation, which autograd and compilers want to see as a list of tensors and a description of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor


class Part:
    """Tensors, numbers and further parts that belong together; every kind is a frozen dataclass."""

    kinds: ClassVar[dict[str, type[Part]]] = {}

    def __init_subclass__(cls) -> None:
        Part.kinds[cls.__name__] = cls

    def changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor, of its parts too, put through ``change``."""

        def of(value: object) -> object:
            if isinstance(value, Part):
                return value.changed(change)
            return change(value) if isinstance(value, Tensor) else value

        return type(self)(*[of(getattr(self, name)) for name in type(self).__dataclass_fields__])


def taken_apart(part: Part) -> tuple[str, list[Tensor], list[float]]:
    """A description of ``part``, and its tensors and its floats in the order of its fields."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    return _described(part, tensors, numbers), tensors, numbers


def put_together(layout: str, tensors: Iterable[Tensor], numbers: Iterable[float]) -> Part:
    """The part that was :func:`taken_apart`, with these tensors in place of its own."""
    return _made(json.loads(layout), iter(tensors), iter(numbers))


def _described(value: object, tensors: list[Tensor], numbers: list[float]) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return '"#"'
    if isinstance(value, float):
        numbers.append(value)
        return '"."'
    if isinstance(value, Part):
        fields = [_described(getattr(value, name), tensors, numbers) for name in type(value).__dataclass_fields__]
        return f'["{type(value).__name__}", {", ".join(fields)}]'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _made(described: object, tensors: Iterator[Tensor], numbers: Iterator[float]) -> object:
    if isinstance(described, list):
        kind, *fields = described
        return Part.kinds[kind](*[_made(field, tensors, numbers) for field in fields])
    return next(tensors) if described == "#" else next(numbers) if described == "." else described


def is_traced(tensor: Tensor) -> bool:
    """Whether operations are only looked at (by a compiler, an export, the meta device): then no number can be read."""
    return torch.compiler.is_compiling() or tensor.is_meta


def empty_heads(like: Tensor, queries: int, heads: int, dim: int) -> Tensor:
    """``[B, H, T, D]`` laid out as ``[T, B, H, D]``, the order in which a layer's output projection reads it."""
    return like.new_empty(queries, like.size(0), heads, dim).permute(1, 2, 0, 3)
