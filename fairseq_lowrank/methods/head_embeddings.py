"""Multiple head embeddings: one projection of queries, keys and values, and a vector that distinguishes each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.multi_query import MHE, SingleHeadProjection
from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.parts import AttentionConfig, Method, register
from fairseq_lowrank.parts.parameters import NoDecayModule, no_weight_decay
from fairseq_lowrank.parts.plain import Plain, Weights, own_weights
from fairseq_lowrank.parts.projection import AttentionInputs, KeyValueStates, Layer


class HeadEmbeddings(NoDecayModule):
    """The vectors e_i of queries, keys and values, ``[H, D]`` each.

    Args:
        num_heads: h.
        sizes: D of the vectors of queries, keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, num_heads: int, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, no_weight_decay(torch.empty(num_heads, size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for embedding in self.parameters():
            # Small against the projections (entries of order 1), yet enough to distinguish the heads.
            nn.init.normal_(embedding, std=0.02)

    def forward(self, name: str) -> Tensor:
        """Return the vectors ``[H, D]`` of queries, keys or values. Hooks before this call may bring them."""
        embedding = getattr(self, name)
        return embedding.clone() if self._forward_hooks else embedding

    def extra_repr(self) -> str:
        return f"{self.query.size(0)} heads of {self.query.size(1)}"


class HeadEmbeddingMul(SingleHeadProjection):
    """Head i's queries, keys and values are A ⊙ (1 + e_i) of the shared A (MHE-Mul, Xue and Aletras 2023).

    Keys and values are never expanded to h heads. The key embedding is folded into the query, since
    q·(k ⊙ (1 + e)) = (q ⊙ (1 + e))·k. The value embedding is applied to the head's output, which is exact.
    """

    name = "head-embedding-mul"
    needs_keys = True
    keys_reason = "its heads share one cached key, and the head embeddings of keys are folded into queries"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.embedding_sizes = {"query": config.head_dim, **self.state_sizes}

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        return {"head_embeddings": HeadEmbeddings(self.config.num_heads, **self.embedding_sizes)}

    def embed(self, shared: Tensor, embedding: Tensor) -> Tensor:
        """Return each head's own ``[B, H, N, D]`` from a shared ``[B, 1, N, D]`` and head embeddings ``[H, D]``."""
        return shared * (1 + embedding[:, None, :])

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        return self.embed(super().project_query(layer, query), layer.head_embeddings("query"))

    def attention_inputs(
        self,
        layer: Layer,
        q: Tensor,
        states: KeyValueStates,
        *,
        keep_row_constants: bool,
        rows_sum_to_one: bool,
    ) -> AttentionInputs:
        return AttentionInputs(q * (1 + layer.head_embeddings("key")[:, None, :]), states["key"], states["value"])

    def finalize_heads(self, layer: Layer, heads: Tensor, call: AttentionCall) -> Tensor:
        return heads * (1 + layer.head_embeddings("value")[:, None, :])

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        values = states["value"]
        embedded = self.embed(values, layer.head_embeddings("value"))
        return torch.where(self.embedded_keys(values)[..., None].bool(), embedded, values)

    def embedded_keys(self, keys: Tensor) -> Tensor:
        """Return 1 at keys that have embeddings, 0 at the key of zeros: ``[1, S]`` for keys ``[B, G, S, D]``."""
        embedded = keys.new_ones(1, keys.size(2))
        if self.config.add_zero_attn:
            embedded[:, -1] = 0
        return embedded

    @torch.no_grad()
    def share_value(self, layer: Any) -> bool:
        embedding = layer.head_embeddings.value
        layer.out_proj.weight.mul_(1 + embedding.flatten())
        embedding.zero_()
        return True

    def plain(self, layer: Any) -> Plain:
        query, key, value = (self._embedded(layer, name) for name in ("query", "key", "value"))
        return query, key, value

    def _embedded(self, layer: Any, name: str) -> Weights:
        weight, bias = own_weights(getattr(layer, f"{name[0]}_proj"), layer.num_heads)
        bias = torch.zeros(len(weight)).to(weight) if bias is None else bias
        return self.embed_weights(weight, bias, getattr(layer.head_embeddings, name).flatten())

    def embed_weights(self, weight: Tensor, bias: Tensor, embedding: Tensor) -> Weights:
        """Return weight and bias of all heads with the head embeddings ``[H * D]`` in them."""
        return weight * (1 + embedding)[:, None], bias * (1 + embedding)


class HeadEmbeddingAdd(HeadEmbeddingMul):
    """Head i's queries, keys and values are A + e_i of the shared A (MHE-Add, Xue and Aletras 2023).

    q·(k + e) = q·k + q·e, and q·e is constant within a row of scores, so softmax cancels it. Softmax does not cancel it if
    there is a key of zeros, which has no embedding, and sigsoftmax never does. Then q·e is one more number of the query,
    and embedded keys have a 1 there. The value embedding enters a head's output as often as the head's row of weights sums
    to: values have one more number, a 1.
    """

    name = "head-embedding-add"

    def share_value(self, layer: Any) -> bool:
        return False

    def embed_weights(self, weight: Tensor, bias: Tensor, embedding: Tensor) -> Weights:
        return weight, bias + embedding

    def embed(self, shared: Tensor, embedding: Tensor) -> Tensor:
        return shared + embedding[:, None, :]

    def attention_inputs(
        self,
        layer: Layer,
        q: Tensor,
        states: KeyValueStates,
        *,
        keep_row_constants: bool,
        rows_sum_to_one: bool,
    ) -> AttentionInputs:
        k, v = states["key"], states["value"]
        embedded = self.embedded_keys(k)[..., None].expand(
            k.size(0), 1, -1, -1
        )  # 1 at keys with an embedding: [B, 1, S, 1]
        if keep_row_constants or self.config.add_zero_attn:  # the activation does not cancel q·e
            shifts = (q * layer.head_embeddings("key")[:, None, :]).sum(dim=-1, keepdim=True)
            q, k = torch.cat((q, shifts), dim=-1), torch.cat((k, embedded), dim=-1)
        if not rows_sum_to_one or self.config.add_zero_attn:  # the last number of a head becomes the sum of its row
            v = torch.cat((v, embedded), dim=-1)
        return AttentionInputs(q, k, v)

    def finalize_heads(self, layer: Layer, heads: Tensor, call: AttentionCall) -> Tensor:
        row_sums: Tensor | bool
        if heads.size(-1) > self.state_sizes["value"]:
            heads, row_sums = heads[..., :-1], heads[..., -1:]
        else:
            row_sums = call.mask.has_visible_key(call.scores.shape, heads.device)
        # If softmax cancels the key embedding, its gradient is zero, yet distributed training waits for it.
        unused = 0 * layer.head_embeddings("key").sum()
        return heads + (layer.head_embeddings("value") + unused)[:, None, :] * row_sums


register(
    Method(
        name="mhe-add",
        title="Multiple head embeddings, added",
        formula="Q_i = x W_Q + e^q_i   K_i = y W_K + e^k_i   V_i = y W_V + e^v_i   O_i = P_i V_i",
        parts={"projection": HeadEmbeddingAdd},
        parameters="3·d·d_k + 3·h·d_k + h·d_k·d",
        cached="2·d_k",
        kind="restricted",
        papers=(MHE,),
        colour="#903048",
    )
)

register(
    Method(
        name="mhe-mul",
        title="Multiple head embeddings, multiplied",
        formula="Q_i = x W_Q ⊙ (1 + e^q_i)   K_i = y W_K ⊙ (1 + e^k_i)   V_i = y W_V ⊙ (1 + e^v_i)   O_i = P_i V_i",
        parts={"projection": HeadEmbeddingMul},
        parameters="3·d·d_k + 3·h·d_k + h·d_k·d",
        cached="2·d_k",
        kind="restricted",
        papers=(MHE,),
        colour="#a0c0e0",
    )
)
