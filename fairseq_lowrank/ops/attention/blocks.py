"""What the parts of an operation compute on in the blocked backend: one block of queries over the keys it may see."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

NARROW = 8
"""A product with so few columns or fewer is computed transposed on the CPU, where it takes a fifth of the time."""
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
"""What a processor needs for fast products of a dtype, by torch's names."""


@functools.cache
def _is_fast_on_cpu(dtype: torch.dtype) -> bool:
    """Return True if this processor has instructions for products of a dtype, or if torch does not know."""
    found: dict = getattr(torch.cpu, "get_capabilities", dict)()
    names = _INSTRUCTIONS.get(dtype, ())
    return found.get("architecture") != "x86_64" or not names or any(found.get(name) for name in names)


class Block(NamedTuple):
    """Queries ``rows`` of the batch entries ``batch`` over ``keys``; ``index`` counts blocks."""

    index: int  # type: ignore[assignment]
    batch: slice
    rows: slice
    keys: slice

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


class Workspace:
    """Buffers that every block reuses, and matrix products.

    Args:
        like: its dtype is that of the operation, its device that of all.
        elements: size of a buffer. A buffer grows if a block needs more.
    """

    def __init__(self, like: Tensor, elements: int) -> None:
        self.like, self.elements = like, elements
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        """In which everything but the products is computed."""
        fast = like.device.type != "cpu" or _is_fast_on_cpu(like.dtype)
        self.product_dtype = like.dtype if fast else self.dtype
        """In which products are computed. Without instructions for it, half precision takes 2.5 times as long as float32."""
        self._buffers: dict[str, Tensor] = {}
        self._converted: dict[int, tuple[slice, Tensor]] = {}

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory that every block reuses under this name."""
        size = 1
        for length in shape:
            size *= length
        if name not in self._buffers or self._buffers[name].numel() < size:
            elements = max(self.elements, size)
            self._buffers[name] = torch.empty(elements, dtype=dtype or self.dtype, device=self.like.device)
        return self._buffers[name][:size].view(shape)

    def release(self) -> None:
        self._buffers.clear()
        self._converted.clear()

    def keys(self, tensor: Tensor, block: Block) -> Tensor:
        """Return a block's part of keys or values ``[B, G, S, D]``, as ``[b·G, keys, D]`` in the dtype of products.

        They are converted once for all blocks of the same batch entries.
        """
        if tensor.dtype == self.product_dtype:
            return tensor[block.batch, :, block.keys].flatten(0, 1)
        entries, converted = self._converted.get(id(tensor), (None, tensor))
        if entries != block.batch:
            converted = tensor[block.batch].to(self.product_dtype)
            self._converted[id(tensor)] = block.batch, converted
        return converted[:, :, block.keys].flatten(0, 1)

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Compute scale · left @ right in the dtype of products, into float32 or better. A new result may be a transposed view."""
        if self.product_dtype == torch.float16 and scale != 1:
            # Unscaled products may pass the largest float16.
            left, right = (left * scale, right) if left.numel() < right.numel() else (left, right * scale)
            scale = 1.0
        left, right = left.to(self.product_dtype), right.to(self.product_dtype)
        if self.product_dtype != self.dtype:
            result = torch.bmm(left, right)
            result = result.to(self.dtype) if out is None else out.copy_(result)
            return result if scale == 1 else result.mul_(scale)
        if out is None and right.size(2) <= NARROW and left.device.type == "cpu":
            return self._product(right.mT, left.mT, scale).mT
        return self._product(left, right, scale, out)

    @staticmethod
    def _product(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = left.new_empty(left.size(0), left.size(1), right.size(2))
        return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)


class KeyGradient:
    """The gradient of keys or values ``[B, G, S, D]``, summed over blocks.

    It is summed transposed, as ``[B·G, D, S]``, since qᵀ ds is a faster product than dsᵀ q.
    """

    def __init__(self, keys: Tensor, work: Workspace) -> None:
        self.keys, self.work = keys, work
        batch, groups, count, dim = keys.shape
        self.total = torch.zeros(batch * groups, dim, count, dtype=work.dtype, device=keys.device)

    def add(self, block: Block, rows: Tensor, weights: Tensor, scale: float = 1.0) -> None:
        """Add scale · weightsᵀ rows of ``rows [b·G, N, D]`` and ``weights [b·G, N, keys]``."""
        groups = self.keys.size(1)
        rows, part = rows.transpose(1, 2), self.total[block.batch.start * groups : block.batch.stop * groups]
        part = part[:, :, block.keys]
        if self.work.product_dtype == part.dtype:
            part.baddbmm_(rows.to(part.dtype), weights.to(part.dtype), alpha=scale)
        else:
            part.add_(self.work.product(rows, weights, scale=scale))

    def result(self) -> Tensor:
        """Return the sum as ``[B, G, S, D]``, not contiguous: whoever reads it copies it into the order that it needs."""
        return self.total.unflatten(0, self.keys.shape[:2]).mT.to(self.keys.dtype)


def group_queries(tensor: Tensor, groups: int) -> Tensor:
    """Reshape ``[b, H, rows, N]`` to ``[b·G, (H/G)·rows, N]``: heads that share a key become further queries of it.

    So keys and values are never expanded. Head i is of group ⌊i·G/H⌋.
    """
    return tensor.reshape(tensor.size(0) * groups, -1, tensor.size(3))


def slice_block(tensor: Tensor, block: Block) -> Tensor:
    """Return the part of a tensor broadcastable to ``[B, H, T, S]`` that a block sees, still unexpanded."""
    tensor = tensor[(None,) * (4 - tensor.dim())]
    parts = (block.batch, slice(None), block.rows, block.keys)
    return tensor[tuple(part if size > 1 else slice(None) for part, size in zip(parts, tensor.shape, strict=True))]
