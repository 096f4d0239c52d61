"""How heads get their queries, keys and values: the projection axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Projection:
    """A value of the projection axis.

    Args:
        name: as on the command line.
        shared_query: one d→d_k query projection for all heads instead of one for each.
        shared_key_value: one d→d_k key and one value projection for all heads.
        hidden_keys: keys are the hidden states themselves, cut into heads; there is no W_k.
        value_is_key: values are the keys; there is no W_v and only keys are cached.
        head_embedding: how head embeddings enter the shared queries, keys and values: ``add``, ``mul`` or ``None``.
    """

    name: str
    shared_query: bool = False
    shared_key_value: bool = False
    hidden_keys: bool = False
    value_is_key: bool = False
    head_embedding: str | None = None

    def check(self, embed_dim: int, num_heads: int, head_dim: int, kdim: int, vdim: int) -> None:
        """Refuse sizes that this projection cannot work with.

        Raises:
            ValueError: see the messages.
        """
        if self.hidden_keys and kdim != embed_dim:
            raise ValueError(
                f"projection {self.name!r} uses the hidden states as keys and needs kdim = embed_dim: "
                f"kdim={kdim}, embed_dim={embed_dim}"
            )
        if self.hidden_keys and head_dim * num_heads != embed_dim:
            raise ValueError(
                f"projection {self.name!r} cuts the hidden states into heads and needs head_dim = embed_dim / num_heads = "
                f"{embed_dim / num_heads:g}: head_dim={head_dim}"
            )
        if self.value_is_key and vdim != kdim:
            raise ValueError(
                f"projection {self.name!r} uses the keys as values and needs vdim = kdim: vdim={vdim}, kdim={kdim}"
            )


PROJECTIONS = {
    projection.name: projection
    for projection in (
        Projection("independent"),
        Projection("single", shared_query=True, shared_key_value=True),
        Projection("multi-query", shared_key_value=True),
        Projection("shared-kv", value_is_key=True),
        Projection("el", hidden_keys=True, value_is_key=True),
        Projection("head-embedding-add", shared_query=True, shared_key_value=True, head_embedding="add"),
        Projection("head-embedding-mul", shared_query=True, shared_key_value=True, head_embedding="mul"),
    )
}


class HeadEmbeddings(nn.Module):
    """Multiple Head Embeddings attention (Xue and Aletras 2023): ψ(A, e_i) for A in Q, K, V and head i.

    ``add`` is ψ(A, e) = A + e and ``mul`` is ψ(A, e) = A ⊙ (1 + e). Keys and values are never expanded to h heads: the
    key embedding is folded into the query and the value embedding is applied to the head's output, which is exact.

    Args:
        num_heads: h.
        head_dim: d_k.
        combine: ``add`` or ``mul``.
    """

    def __init__(self, num_heads: int, head_dim: int, combine: str) -> None:
        super().__init__()
        self.combine = combine
        for name in ("query", "key", "value"):
            embedding = nn.Parameter(torch.empty(num_heads, head_dim))
            # Small against the projections (whose entries are of order 1), yet enough to tell the heads apart.
            nn.init.normal_(embedding, std=0.02)
            embedding.optim_overrides = {"optimizer": {"weight_decay": 0.0}}
            self.register_parameter(name, embedding)

    def extra_repr(self) -> str:
        return f"{self.query.size(0)} heads of {self.query.size(1)}, combine={self.combine}"

    def embed(self, shared: Tensor, embedding: Tensor) -> Tensor:
        """ψ of a shared ``[B, 1, N, D]`` and head embeddings ``[H, D]``: ``[B, H, N, D]``."""
        embedding = embedding[:, None, :]
        return shared + embedding if self.combine == "add" else shared * (1 + embedding)

    def fold_key(self, q: Tensor) -> Tensor:
        """Embedded queries ``[B, H, T, D]``, changed so that they meet the *unembedded* shared key.

        ``mul``: q·(k ⊙ (1 + e)) = (q ⊙ (1 + e))·k. ``add``: q·(k + e) = q·k + q·e, whose second term is
        :meth:`key_scores`.
        """
        return q if self.combine == "add" else q * (1 + self.key[:, None, :])

    def key_scores(self, q: Tensor) -> Tensor:
        """q·e, what additive key embeddings add to all scores of a row: ``[B, H, T, 1]`` of ``q: [B, H, T, D]``."""
        return (q * self.key[:, None, :]).sum(dim=-1, keepdim=True)

    def embed_output(self, heads: Tensor, row_sums: Tensor | bool) -> Tensor:
        """What the heads would be with embedded values.

        Args:
            heads: ``[B, H, T, D]`` weighted sums of the unembedded shared values.
            row_sums: sums of the weights of each row, broadcastable to ``[B, H, T, 1]`` (used by ``add``); as bool
                where they are 1 or 0.
        """
        if self.combine == "mul":
            return heads * (1 + self.value[:, None, :])
        # Under softmax the additive key embedding cancels: its gradient is zero, yet distributed training waits for it.
        return heads + (self.value + 0 * self.key)[:, None, :] * row_sums
