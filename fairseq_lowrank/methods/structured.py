"""Structured score matrices: scores of full rank at little cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_lowrank.parts import AttentionConfig, Method, Option, Paper, register
from fairseq_lowrank.parts.parameters import assign
from fairseq_lowrank.parts.projection import KeyValueStates, Layer, Projection, split_heads


class StructuredScores(Projection):
    """S_i = RMSNorm(x M_i) RMSNorm(y)ᵀ / √d with M_i: d×d a product of two block-diagonal matrices and a fixed permutation.

    Source: structured score matrices (Kuang et al. 2025, arXiv 2509.07963), their bilinear block tensor-train of two cores and rank 1;
    start and scale from ``YilunKuang/structured-attention``. With c blocks of e = d / c features, the first matrix maps
    each block to e numbers for each head, and the second maps the c numbers of one place in all blocks to c outputs. So M_i can be the
    identity, for every c. Both start normal with variance 1 / inputs. Differs from the source: the query is mapped and the input of the
    keys is the one key of all heads (there the keys are mapped, so every head has keys of size d), and the two matrices are not
    rescaled when they grow. Norms divide by the root mean square, because the source's layer norm subtracts the mean too, so
    that all heads would lose the same direction of the keys. The source's inputs come from a layer norm; here keys are
    divided too, so that a score has the same size for any input. A token caches d + h·d_v numbers.
    """

    name = "structured"
    keys_reason = "its key is the input itself"
    groups = ()
    composes = False
    options = (
        Option(
            "blocks",
            "number c of blocks of each structured matrix, a divisor of d (default: the divisor nearest to √d)",
            letter="c",
        ),
    )

    def __init__(self, config: AttentionConfig, blocks: int | None = None) -> None:
        super().__init__(config)
        divisors = [c for c in range(1, config.embed_dim + 1) if config.embed_dim % c == 0 and config.kdim % c == 0]
        self.blocks = blocks or min(divisors, key=lambda c: abs(math.log(c * c / config.embed_dim)))
        if self.blocks not in divisors:
            raise ValueError(
                f"blocks={blocks}: expected a divisor of embed_dim={config.embed_dim} and of kdim={config.kdim}"
            )
        self.query_size = config.kdim
        self.state_sizes = {"key": config.kdim, "value": config.value_dim}
        self.state_groups = {"key": 1, "value": config.num_heads}

    def score_rank(self, *, mixed: bool) -> int:
        return self.config.kdim

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {"k_proj": None, "v_proj": linear(config.vdim, config.num_heads * config.value_dim), "q_proj": None}

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        config, blocks = self.config, self.blocks
        inputs, rows = config.embed_dim // blocks, config.num_heads * config.kdim // blocks
        return {
            "query_first": nn.Parameter(torch.empty(blocks, inputs, rows)),
            "query_second": nn.Parameter(torch.empty(rows, blocks, blocks)),
            "query_scale": nn.Parameter(torch.empty(config.kdim)),
        }

    @torch.no_grad()
    def reset_parameters(self, layer: Layer) -> None:
        for matrix, inputs in ((layer.query_first, -2), (layer.query_second, -1)):
            assign(matrix, torch.randn(matrix.shape) / math.sqrt(matrix.size(inputs)))
        nn.init.ones_(layer.query_scale)

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        config, blocks = self.config, self.blocks
        weights = (layer.query_first, layer.query_second, layer.query_scale)
        first, second, scale = (weight.to(query.dtype) for weight in weights)
        inputs = query.unflatten(-1, (blocks, -1)).flatten(0, 1).transpose(0, 1)  # [c, T·B, d/c]
        inner = torch.bmm(inputs, first).permute(2, 0, 1)  # [h·kdim/c, c, T·B]
        outer = torch.bmm(second, inner).unflatten(0, (config.num_heads, -1))  # [h, kdim/c, c, T·B]
        mapped = outer.permute(3, 0, 2, 1).flatten(2).unflatten(0, query.shape[:2])  # [T, B, h, kdim]
        scaled = _normalised(mapped) * (scale * math.sqrt(config.head_dim / config.kdim))  # scores are divided by √d_k
        return scaled.permute(1, 2, 0, 3)

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        return {
            "key": split_heads(_normalised(key), self.config.kdim),
            "value": split_heads(layer.v_proj(value), self.config.value_dim),
        }


def _normalised(x: Tensor) -> Tensor:
    """Return vectors divided by their root mean square, and zeros for a vector of zeros."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


register(
    Method(
        name="structured",
        title="Structured score matrices: block tensor-train",
        formula=(
            "S_i = RMSNorm(x M_i) RMSNorm(y)ᵀ / √d   P_i = softmax(S_i)   O_i = P_i y W_V,i\n"
            "M_i: d × d, two block-diagonal matrices of c blocks with a permutation between them"
        ),
        parts={"projection": StructuredScores},
        parameters="c·d·h + h·d²/c + d + 2·d·h·d_k",
        cached="d + h·d_k",
        kind="QK",
        papers=(
            Paper(
                "Customizing the inductive biases of softmax attention using structured matrices",
                "Kuang et al. 2025",
                "https://arxiv.org/abs/2509.07963",
            ),
        ),
        examples=({}, {"blocks": 4}),
        colour="#3b8ea5",
    )
)
