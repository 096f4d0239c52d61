"""Static mixing of heads before attention: of keys and values, and of queries too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, register
from fairseq_lowrank.parts.head_map import HeadMap
from fairseq_lowrank.parts.projection import KeyValueStates
from fairseq_lowrank.parts.stages import Context


class MapOfHeads(HeadMap):
    """k_i ← Σ_j A[j, i] k_j and v_i ← Σ_j C[j, i] v_j with two h×h matrices, initialised to the identity.

    Source: explicit multi-head attention, MEA (arXiv 2601.19611), its head-level linear composition without norms. The matrices fold into
    the projections, so it is plain attention.
    """

    name = "heads"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        groups = config.key_value_heads
        self.key = nn.Parameter(torch.eye(groups))
        self.value = nn.Parameter(torch.eye(groups))

    def equation(self) -> str:
        return "ji,jdx->idx"

    def states(self, states: KeyValueStates, context: Context) -> KeyValueStates:
        maps = {name: at_least_float32(getattr(self, name)) for name in ("key", "value")}
        return {name: torch.einsum("ji,bjsd->bisd", matrix, states[name]) for name, matrix in maps.items()}


class MapOfAllHeads(MapOfHeads):
    """q_i ← Σ_j A[j, i] q_j, and keys and values likewise, with three h×h matrices, initialised to the identity.

    With grouped keys and values, their matrices act on groups. All three fold into the projections.
    """

    name = "all-heads"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.query = nn.Parameter(torch.eye(config.num_heads))

    def queries(self, queries: Tensor, context: Context) -> Tensor:
        return torch.einsum("ji,bjtd->bitd", at_least_float32(self.query), queries)


register(
    Method(
        name="mea",
        title="Explicit mixing of keys and values over heads, without norms",
        formula="K_i ← Σ_j A[j, i] K_j   V_i ← Σ_j C[j, i] V_j,   A and C: h × h, from I",
        parts={"head_map": MapOfHeads},
        parameters=f"{PARAMETERS} + 2·h²",
        cached=CACHED,
        kind="equal",
        papers=(
            Paper(
                "Explicit multi-head attention for inter-head interaction in large language models",
                "Peng et al. 2026",
                "https://arxiv.org/abs/2601.19611",
            ),
        ),
        colour="#aec7e8",
    )
)

register(
    Method(
        name="headmix",
        title="Static mixing of queries, keys and values over heads",
        formula="Q_i ← Σ_j A[j, i] Q_j   K_i ← Σ_j B[j, i] K_j   V_i ← Σ_j C[j, i] V_j,   A, B and C: h × h, from I",
        parts={"head_map": MapOfAllHeads},
        parameters=f"{PARAMETERS} + 3·h²",
        cached=CACHED,
        kind="equal",
        colour="#9ecae1",
    )
)
