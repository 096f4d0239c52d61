"""Trees of tensors, which autograd and compilers read as a list of tensors and a static structure."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

TENSOR, NUMBER = "#", "."
"""Placeholders of a structure: they are replaced by the next tensor, or by the next float."""

_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY

Structure = tuple[Any, ...]
"""A subclass of :class:`TensorTree` and its fields: placeholders, static values, and structures of other trees."""


class TensorTree:
    """Tensors, static values and other trees. Each subclass is a frozen dataclass."""

    kinds: ClassVar[dict[str, type[TensorTree]]] = {}
    __match_args__: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        TensorTree.kinds[cls.__name__] = cls

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy in which ``change`` replaces every tensor, also those of the trees in the fields."""

        def mapped(value: Any) -> Any:
            if isinstance(value, TensorTree):
                return value.map_tensors(change)
            return change(value) if isinstance(value, Tensor) else value

        return type(self)(*[mapped(getattr(self, name)) for name in type(self).__match_args__])

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other fields, as ``dataclasses.replace``, which compilers before torch 2.7 cannot trace."""
        if not torch.compiler.is_compiling():  # a fifth of the time of building it from its fields
            copied = object.__new__(type(self))
            fields = copied.__dict__
            fields.update(self.__dict__)
            fields.update(changes)
            return copied
        return type(self)(
            *[changes[name] if name in changes else getattr(self, name) for name in type(self).__match_args__]
        )


def flatten(tree: TensorTree) -> tuple[Structure, list[Tensor], list[float]]:
    """Return the structure of ``tree``, and its tensors and floats in the order of the fields."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    return _flatten(tree, tensors, numbers), tensors, numbers


def unflatten(structure: Structure, tensors: Iterable[Tensor], numbers: Iterable[float]) -> Any:
    """Return the tree of this structure with these tensors and floats."""
    return _unflatten(structure, iter(tensors), iter(numbers))


# One call for each tree and none for each field: eager code flattens every call whose gradient it needs.
def _flatten(tree: TensorTree, tensors: list[Tensor], numbers: list[float]) -> Structure:
    structure: list[Any] = [type(tree)]
    for name in type(tree).__match_args__:
        value = getattr(tree, name)
        if isinstance(value, Tensor):
            tensors.append(value)
            value = TENSOR
        elif isinstance(value, float):
            numbers.append(value)
            value = NUMBER
        elif isinstance(value, TensorTree):
            value = _flatten(value, tensors, numbers)
        structure.append(value)
    return tuple(structure)


def _unflatten(structure: Structure, tensors: Iterator[Tensor], numbers: Iterator[float]) -> Any:
    kind, *fields = structure
    for index, field in enumerate(fields):
        if isinstance(field, tuple):
            fields[index] = _unflatten(field, tensors, numbers)
        elif field == TENSOR:
            fields[index] = next(tensors)
        elif field == NUMBER:
            fields[index] = next(numbers)
    return kind(*fields)


def is_traced(tensor: Tensor) -> bool:
    """Return True while tracing (``torch.compile``, ``torch.export``, meta and fake tensors), when values cannot be read."""
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    # FakeTensorMode or make_fx is on
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (_FAKE, _PROXY))


def hides_values(tensor: Tensor) -> bool:
    """Return True if a tensor's values cannot be read: while tracing, and under the transforms of ``torch.func``."""
    return is_traced(tensor) or torch._C._are_functorch_transforms_active()


def empty_heads(like: Tensor, queries: int, heads: int, dim: int) -> Tensor:
    """Return ``[B, H, T, D]`` with the memory of ``[T, B, H, D]``, the order in which the output projection reads."""
    return like.new_empty(queries, like.size(0), heads, dim).permute(1, 2, 0, 3)


def encode(structure: Any) -> str:
    """Return a structure as JSON. A compiler traces this function once, so it formats strings itself."""
    if isinstance(structure, tuple):
        kind, *fields = structure
        return f'["{kind.__name__}", {", ".join([encode(field) for field in fields])}]'
    if structure is None:
        return "null"
    if isinstance(structure, bool):
        return "true" if structure else "false"
    if isinstance(structure, str):
        return f'"{structure}"'
    # A compiler may have made a number symbolic. This makes the graph one for this number.
    return str(operator.index(structure))


@functools.lru_cache(maxsize=1024)
def decode(layout: str) -> Structure:
    """Return the structure that :func:`encode` wrote; each layout is parsed once."""

    def decoded(value: Any) -> Any:
        if isinstance(value, list):
            kind, *fields = value
            return (TensorTree.kinds[kind], *[decoded(field) for field in fields])
        return value

    return decoded(json.loads(layout))
