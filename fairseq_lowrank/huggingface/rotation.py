"""Queries before rotary positions: what mixing reads in a model of transformers, whose attention function gets rotated ones."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError

MIXING_QUERIES = ("unrotated", "rotated")
"""Which queries mixing reads. Folders of 0.2.0 and before record none, and were trained with rotated ones."""
_ROTATION = re.compile(r"rotary|rotate|(^|_)rope($|_)|freqs_cis", re.IGNORECASE)


class Rotation(NamedTuple):
    """How the attention modules of a class rotate queries.

    Args:
        function: the model's own function of ``(q, k, cos, sin)``, which returns rotated queries and keys.
        takes_heads: it gets whole heads; if false, the module gives it the first features, as many as there are cosines.
        argument: the index of ``position_embeddings`` among the arguments of the module.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    takes_heads: bool
    argument: int

    def undone(self, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries ``[B, H, T, D]`` before their rotation by ``cos`` and ``sin`` ``[B or 1, T, R]``: rotated back by −sin.

        Some models scale cosines and sines, by one number: s² R(−θ) R(θ) is divided by s².
        """
        wide, cos, sin = queries.float(), cos.float(), sin.float()
        size = queries.size(-1) if self.takes_heads else cos.size(-1)
        squares = (cos.square() + sin.square())[:, None, :, :1]
        first, _ = self.function(wide[..., :size], wide[..., :size], cos, -sin)
        return torch.cat([first / squares, wide[..., size:]], dim=-1).to(queries.dtype)


def rotates(kind: type[nn.Module]) -> bool:
    """Return True if the attention modules of a class rotate queries, by the names that their forward pass uses."""
    code = inspect.unwrap(kind.forward).__code__
    return any(_ROTATION.search(name) for name in (*code.co_names, *code.co_varnames))


@lru_cache(maxsize=256)
def rotation_of(kind: type[nn.Module], head_dim: int) -> Rotation | None:
    """Return how the modules of a class rotate queries, or ``None`` if they rotate them in a way that cannot be undone here.

    It can be undone if the class gets ``position_embeddings``, rotates under no condition, normalises nothing after that, and its
    function of ``(q, k, cos, sin)`` is undone by −sin.
    """
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.startswith("apply_") and _ROTATION.search(name)]
    if "position_embeddings" not in inspect.signature(forward).parameters or len(names) != 1:
        return None
    argument = list(inspect.signature(forward).parameters).index("position_embeddings") - 1
    function = forward.__globals__.get(names[0])
    if not callable(function) or "unsqueeze_dim" not in inspect.signature(function).parameters:
        return None  # a function for another layout, such as those of pictures
    if not _rotates_always(forward, names[0]):
        return None
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(1, 1, 3, head_dim, generator=generator)
    angles = torch.tensor([0.3, 1.0, 2.0])[None, :, None]
    for size in (head_dim // 2, head_dim):
        given = angles.expand(-1, -1, size)
        rotation = Rotation(function, size < head_dim, argument)
        try:
            rotated, _ = function(heads, heads, given.cos(), given.sin())
            restored = rotation.undone(rotated, given.cos(), given.sin())
        except (RuntimeError, TypeError, ValueError):
            continue  # it takes other sizes, or other arguments
        right = restored.shape == heads.shape and torch.allclose(restored, heads, atol=1e-5)
        return rotation if right else None
    return None


def _rotates_always(forward: Callable[..., object], name: str) -> bool:
    """Return True if a forward pass calls a function under no condition but that positions are given, and no norm after it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name]
    for node in ast.walk(tree):
        under = any(one in calls for one in ast.walk(node))
        if isinstance(node, ast.If | ast.IfExp) and under and "position_embeddings" not in ast.unparse(node.test):
            return False
        if isinstance(node, ast.Attribute) and "norm" in node.attr and calls and node.lineno > calls[0].lineno:
            return False
    return len(calls) == 1


def check_mixing_queries(value: str) -> None:
    """Check the argument ``mixing_queries``.

    Raises:
        UserError: another value.
    """
    if value not in MIXING_QUERIES:
        raise UserError(f"mixing_queries={value!r}: expected {' or '.join(map(repr, MIXING_QUERIES))}")


def chosen_rotation(module: nn.Module, parts: Collection[Any], head_dim: int, queries: str) -> Rotation | None:
    """Return what has to be undone before parts read queries of a module, or ``None``.

    Raises:
        UserError: the module rotates queries in a way that cannot be undone here, and a part reads them.
    """
    reader = next((part for part in parts if part.reads_queries), None)
    if reader is None or queries == "rotated" or not rotates(type(module)):
        return None
    if (rotation := rotation_of(type(module), head_dim)) is None:  # type: ignore[arg-type]
        raise UserError(
            f"{type(module).__name__}: {reader.name!r} reads queries before their rotary positions, and this class rotates them in a way "
            'that cannot be undone. Pass mixing_queries="rotated" to let the mixing depend on absolute positions, or choose mixing '
            "that reads no queries, such as mixhead-a. If a part of yours reads none, set reads_queries = False in its class."
        )
    return rotation
