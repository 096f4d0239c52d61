"""Mixhead: each head's probabilities become a sum of those of all heads; with its controls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.methods.standard import CACHED, PARAMETERS
from fairseq_lowrank.ops import DiagonalMixing, HeadMixing, PositionwiseMixing
from fairseq_lowrank.ops.activation import at_least_float32
from fairseq_lowrank.parts import AttentionConfig, Method, Mixing, Option, Paper, register
from fairseq_lowrank.parts.parameters import assign

MIXHEAD = Paper(
    "Mixhead: Breaking the low-rank bottleneck in multi-head attention language models",
    "Zhong Zhang, Nian Shao, Chongming Gao, Rui Miao, Qinli Yang, Junming Shao, Knowledge-Based Systems, 2022",
    "https://doi.org/10.1016/j.knosys.2021.108075",
)
NORMALIZATION = Option(
    "mixing_normalization",
    "divisor of each column of M: its sum, which can be 0 (Mixhead paper, equation 13), or its l2 norm (equation 14)",
    default="none",
    choices=("none", "sum", "l2"),
)


def normalize_columns(matrix: Tensor, normalization: str) -> Tensor:
    """Divide each column of M ``[..., H, H]`` by its sum (Mixhead paper, eq. 13) or by its ℓ2 norm (eq. 14).

    A sum may be 0 or near 0, which makes eq. 13 numerically unstable; eq. 14 has no such limit.
    """
    if normalization == "none":
        return matrix
    matrix = at_least_float32(matrix)
    if normalization == "sum":
        return matrix / matrix.sum(dim=-2, keepdim=True)
    return matrix / torch.linalg.vector_norm(matrix, dim=-2, keepdim=True)


class StaticMatrix(Mixing):
    """M is learned, from I."""

    name = "static"
    options = (NORMALIZATION,)

    def __init__(self, config: AttentionConfig, query_size: int, mixing_normalization: str = "none") -> None:
        super().__init__(config, query_size)
        self.mixing_normalization = mixing_normalization

    def matrix(self) -> Tensor:
        return normalize_columns(self.weight, self.mixing_normalization)

    def extra_repr(self) -> str:
        normalized = self.mixing_normalization != "none"
        return super().extra_repr() + f", columns divided by their {self.mixing_normalization}" * normalized


class PositionwiseMatrix(StaticMatrix):
    """M_t[j, i] = q_{t,j}·W^M[:, i] + B[j, i]: each query computes its M; W^M ``[D, H]`` starts at 0 (section 3.2)."""

    name = "positionwise"
    reads_queries = True
    rule = PositionwiseMixing
    query_weight: Tensor

    def __init__(self, config: AttentionConfig, query_size: int, mixing_normalization: str = "none") -> None:
        super().__init__(config, query_size, mixing_normalization)
        self.query_weight = nn.Parameter(torch.zeros(query_size, config.num_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.query_weight)

    def fixed_matrix(self) -> Tensor | None:
        return None if self.query_weight.any() else self.matrix()

    def operation(self, query: Tensor | None, inputs: Tensor | None = None) -> HeadMixing:
        assert query is not None
        mixing = PositionwiseMixing.of_queries(query, self.query_weight, self.weight)
        if self.mixing_normalization == "none":
            return mixing
        return PositionwiseMixing(normalize_columns(mixing.weight, self.mixing_normalization))


class RandomMatrix(Mixing):
    """M is drawn from the normal distribution and fixed (section 4.4.2).

    Columns are divided by their sums (eq. 13), as in the authors' released multihead_attention.py. A sum near 0 gives large weights.
    """

    name = "random"
    learns = False

    def initial_weight(self, num_heads: int) -> Tensor:
        weight = torch.randn(num_heads, num_heads)
        return weight / weight.sum(dim=0, keepdim=True)


class MeanOfHeads(Mixing):
    """M is 1/h everywhere, and fixed."""

    name = "average"
    learns = False

    @property
    def keeps_probabilities(self) -> bool:
        return True

    def initial_weight(self, num_heads: int) -> Tensor:
        return torch.full((num_heads, num_heads), 1 / num_heads)


class FactorOfHead(Mixing):
    """M is diagonal: a factor for each head, from 1."""

    name = "diagonal"
    rule = DiagonalMixing
    mixes_heads = False
    folds = True

    def initial_weight(self, num_heads: int) -> Tensor:
        return torch.ones(num_heads)

    def set_matrix(self, matrix: Tensor) -> None:
        assign(self.weight, matrix.diag())


register(
    Method(
        name="mixhead-a",
        title="Mixhead A: static mixing of probabilities",
        formula="P̄_i = Σ_j M[j, i] P_j   O_i = P̄_i V_i,   M learned, from I",
        parts={"mixing": StaticMatrix},
        parameters=f"{PARAMETERS} + h²",
        cached=CACHED,
        kind="OV",
        papers=(MIXHEAD,),
        examples=(
            {},
            {"mixing_normalization": "l2"},
        ),
        colour="#e69f00",
    )
)

register(
    Method(
        name="mixhead-b",
        title="Mixhead B: each query mixes for itself",
        formula="M_t[j, i] = q_{t,j} · W^M[:, i] + B[j, i]   P̄_i[t] = Σ_j M_t[j, i] P_j[t],   W^M from 0, B from I",
        parts={"mixing": PositionwiseMatrix},
        parameters=f"{PARAMETERS} + h² + d_k·h",
        cached=CACHED,
        kind="OV",
        papers=(MIXHEAD,),
        examples=(
            {},
            {"mixing_normalization": "l2"},
        ),
        colour="#a02000",
    )
)

register(
    Method(
        name="mixhead-random",
        title="Mixing by a fixed random matrix",
        formula="P̄_i = Σ_j M[j, i] P_j,   M normal, columns of sum 1, never trained",
        parts={"mixing": RandomMatrix},
        parameters=PARAMETERS,
        cached=CACHED,
        kind="OV",
        papers=(MIXHEAD,),
        colour="#e8b04a",
    )
)

register(
    Method(
        name="avghead",
        title="Mixing by the mean",
        formula="P̄_i = 1/h Σ_j P_j,   the same for every head",
        parts={"mixing": MeanOfHeads},
        parameters=PARAMETERS,
        cached=CACHED,
        kind="OV",
        papers=(MIXHEAD,),
        colour="#ff9896",
    )
)

register(
    Method(
        name="gain",
        title="A number for each head",
        formula="P̄_i = w_i P_i,   w learned, from 1",
        parts={"mixing": FactorOfHead},
        parameters=f"{PARAMETERS} + h",
        cached=CACHED,
        kind="equal",
        colour="#8c8c8c",
    )
)
