"""Multiple head embeddings: one projection of queries, keys and values, and a vector a head that tells the heads apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.parameters import undecayed
from fairseq_lowrank.attention.projections.projection import Entry, Memory, Sizes
from fairseq_lowrank.attention.projections.shared import Single
from fairseq_lowrank.ops import AttentionCall


class HeadEmbeddings(nn.Module):
    """The vectors e_i of queries, keys and values, ``[H, D]`` each.

    Args:
        num_heads: h.
        sizes: D of the queries', the keys' and the values' vectors.
    """

    def __init__(self, num_heads: int, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            embedding = undecayed(torch.empty(num_heads, size))
            # Small against the projections (whose entries are of order 1), yet enough to tell the heads apart.
            nn.init.normal_(embedding, std=0.02)
            self.register_parameter(name, embedding)

    def extra_repr(self) -> str:
        return f"{self.query.size(0)} heads of {self.query.size(1)}"


class HeadEmbeddingMul(Single):
    """Head i's queries, keys and values are A ⊙ (1 + e_i) of the shared A (MHE-Mul, Xue and Aletras 2023).

    Keys and values are never expanded to h heads: q·(k ⊙ (1 + e)) = (q ⊙ (1 + e))·k, so the key embedding is folded into the
    query, and the value embedding is applied to the head's output, which is exact.
    """

    name = "head-embedding-mul"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.embedding_sizes = {"query": sizes.head_dim, **self.memory_sizes}

    def make_further(self, layer: nn.Module) -> None:
        layer.head_embeddings = HeadEmbeddings(self.sizes.num_heads, **self.embedding_sizes)

    def embed(self, shared: Tensor, embedding: Tensor) -> Tensor:
        """Of a shared ``[B, 1, N, D]`` and head embeddings ``[H, D]`` each head's own ``[B, H, N, D]``."""
        return shared * (1 + embedding[:, None, :])

    def project_query(self, layer: nn.Module, query: Tensor) -> Tensor:
        return self.embed(super().project_query(layer, query), layer.head_embeddings.query)

    def attend_to(self, layer: nn.Module, q: Tensor, memory: Memory, **needs: bool) -> Entry:
        return Entry(q * (1 + layer.head_embeddings.key[:, None, :]), memory["key"], memory["value"])

    def finish(self, layer: nn.Module, heads: Tensor, call: AttentionCall) -> Tensor:
        return heads * (1 + layer.head_embeddings.value[:, None, :])

    def head_values(self, layer: nn.Module, memory: Memory) -> Tensor:
        values = memory["value"]
        embedded = self.embed(values, layer.head_embeddings.value)
        return torch.where(_embedded_keys(layer, values)[..., None].bool(), embedded, values)


class HeadEmbeddingAdd(HeadEmbeddingMul):
    """Head i's queries, keys and values are A + e_i of the shared A (MHE-Add, Xue and Aletras 2023).

    q·(k + e) = q·k + q·e, and q·e is the same in a whole row of scores: softmax cancels it, but neither beside a key of zeros,
    which has no embedding, nor does sigsoftmax. There q·e is a further number of the query, which meets a 1 in embedded keys.
    The value embedding enters a head's output as often as the head's row of weights sums to: a further number of values.
    """

    name = "head-embedding-add"

    def embed(self, shared: Tensor, embedding: Tensor) -> Tensor:
        return shared + embedding[:, None, :]

    def attend_to(self, layer: nn.Module, q: Tensor, memory: Memory, *, whole_scores: bool, unit_rows: bool) -> Entry:
        k, v = memory["key"], memory["value"]
        embedded = _embedded_keys(layer, k)[..., None].expand(k.size(0), 1, -1, -1)
        if whole_scores or layer.add_zero_attn:
            shifts = (q * layer.head_embeddings.key[:, None, :]).sum(dim=-1, keepdim=True)
            q, k = torch.cat((q, shifts), dim=-1), torch.cat((k, embedded), dim=-1)
        if not unit_rows or layer.add_zero_attn:
            v = torch.cat((v, embedded), dim=-1)
        return Entry(q, k, v)

    def finish(self, layer: nn.Module, heads: Tensor, call: AttentionCall) -> Tensor:
        if heads.size(-1) > self.memory_sizes["value"]:
            heads, row_sums = heads[..., :-1], heads[..., -1:]
        else:
            row_sums = call.mask.has_visible_key(heads.size(2), call.scores.shape[3], heads.device)
        # Where softmax cancels the key embedding its gradient is zero, yet distributed training waits for it.
        unused = 0 * layer.head_embeddings.key.sum()
        return heads + (layer.head_embeddings.value + unused)[:, None, :] * row_sums


def _embedded_keys(layer: nn.Module, keys: Tensor) -> Tensor:
    """1 at keys that have embeddings, 0 at the key of zeros: ``[1, S]`` for keys ``[B, G, S, D]``."""
    embedded = keys.new_ones(1, keys.size(2))
    if layer.add_zero_attn:
        embedded[:, -1] = 0
    return embedded
