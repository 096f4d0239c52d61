"""Values that are the keys."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fairseq_lowrank.attention.projections.projection import Entry, Memory, Projection, Sizes, split_heads


class SharedKeyValue(Projection):
    """Own W_q and W_k for each head and no W_v: V = K (SKV of the MHE poster, Xue and Aletras 2023). Keys alone are cached."""

    name = "shared-kv"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        if sizes.vdim != sizes.kdim:
            raise ValueError(
                f"projection {self.name!r} uses the keys as values and needs vdim = kdim: vdim={sizes.vdim}, kdim={sizes.kdim}"
            )
        if sizes.value_dim != sizes.head_dim:
            raise ValueError(
                f"projection {self.name!r} uses the keys as values and needs value_dim = head_dim: "
                f"value_dim={sizes.value_dim}, head_dim={sizes.head_dim}"
            )
        self.memory_sizes = {"key": sizes.head_dim}

    def make(self, layer: nn.Module, linear: Callable[..., nn.Module]) -> None:
        layer.k_proj = linear(self.sizes.kdim, self.memory_heads * self.sizes.head_dim)
        layer.v_proj = None
        layer.q_proj = linear(self.sizes.embed_dim, self.query_heads * self.sizes.head_dim)

    def project_memory(self, layer: nn.Module, key: Tensor, value: Tensor) -> Memory:
        if not _is_same(key, value):
            raise ValueError(f"projection {self.name!r} uses the keys as values: value must be key itself")
        return {"key": split_heads(self.project_key(layer, key), self.sizes.head_dim)}

    def project_key(self, layer: nn.Module, key: Tensor) -> Tensor:
        """``[S, B, kdim]`` to ``[S, B, heads * head_dim]``."""
        return layer.k_proj(key)

    def attend_to(self, layer: nn.Module, q: Tensor, memory: Memory, **needs: bool) -> Entry:
        return Entry(q, memory["key"], memory["key"])

    def head_values(self, layer: nn.Module, memory: Memory) -> Tensor:
        return super().head_values(layer, {"value": memory["key"]})


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same one, or equal views of the same memory."""
    return first is second or (
        first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()
    )
