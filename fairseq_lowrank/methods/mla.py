"""Multi-head latent attention: keys and values from one small vector for each position, which is all that is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionCall
from fairseq_lowrank.ops.attention import is_traced
from fairseq_lowrank.parts import AttentionConfig, Method, Paper, RotaryPositions, register
from fairseq_lowrank.parts.part import Option
from fairseq_lowrank.parts.plain import NotPlain, Plain, fold_biases, own_weights
from fairseq_lowrank.parts.projection import (
    AttentionInputs,
    KeyValueStates,
    Layer,
    Projection,
    check_value_is_key,
    is_plain_linear,
    split_heads,
)
from fairseq_lowrank.parts.sizes import LayerSizes


class LatentProjection(Projection):
    """c = RMSNorm(y W_c) of size r, k_i = c W^k_i, v_i = c W^v_i.

    With ``rotary_dim`` e, queries and keys have e more features that carry positions: q_i = [x W^q_i, R_t x W^qr_i] and
    k_i = [c W^k_i, R_s y W^kr], where R turns by the position and all heads share y W^kr. Scores are divided by √(d_k + e).

    Source: DeepSeek-V2 (arXiv 2405.04434, equations 9 to 19); details from ``fla/layers/mla.py`` of flash-linear-attention. A
    token caches the r numbers of c, and the e numbers of the turned key. Either the keys and values of all heads are computed
    from c, or W^k is absorbed into the query, (q_i W^k_iᵀ)·c, and W^v into the output, (Σ_s P_i c) W^v_i, so that c is the one key
    and value of all heads. Both are the same function; the cheaper form is used. With ``qk_norm`` the keys of each head are
    normalised after they are computed, and nothing is absorbed; the e features are cached as they are, and turned after the norm.
    """

    name = "latent"
    key_state = "latent"
    groups = ()
    factor = "latent_dim"
    factor_loss = "the norm of the latent depends on the input"
    composes = False
    options = (
        Option(
            "latent_dim",
            "size r of the cached vector from which keys and values are computed (default: embedding size / 2)",
            letter="r",
        ),
        Option(
            "rotary_dim",
            "size e of further features of queries and keys that rotary positions turn, an even number (default: none)",
            letter="e",
        ),
    )

    def __init__(self, config: AttentionConfig, latent_dim: int | None = None, rotary_dim: int | None = None) -> None:
        super().__init__(config)
        if config.vdim != config.kdim:
            raise ValueError(
                f"projection {self.name!r} computes keys and values from one input: kdim={config.kdim}, vdim={config.vdim}. Set vdim = kdim."
            )
        self.latent_dim = latent_dim or config.embed_dim // 2
        self.rotary_dim = self.rotary_size = rotary_dim or 0
        self.query_size = self.score_size = config.head_dim + self.rotary_dim
        self.state_heads = 1
        self.state_sizes = {"latent": self.latent_dim}
        if rotary_dim:
            self.config = replace(config, rotary=config.rotary or RotaryPositions())
            self.rotary_state = "rotary_key"
            self.state_sizes[self.rotary_state] = rotary_dim

    @property
    def key_heads(self) -> int:
        return self.config.num_heads

    def score_rank(self, *, mixed: bool) -> int:
        return min(super().score_rank(mixed=mixed), self.latent_dim) + self.rotary_dim

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        built: dict[str, nn.Module | None] = {
            "latent_proj": linear(config.kdim, self.latent_dim, bias=False),
            "k_proj": linear(self.latent_dim, config.num_heads * config.head_dim, bias=False),
            "v_proj": linear(self.latent_dim, config.num_heads * config.value_dim, bias=False),
            "q_proj": linear(config.embed_dim, config.num_heads * self.query_size),
        }
        if self.rotary_dim:
            built["rotary_key_proj"] = linear(config.kdim, self.rotary_dim, bias=False)
        return built

    def build_extra_parameters(self) -> dict[str, nn.Module | nn.Parameter]:
        return {"latent_norm": nn.RMSNorm(self.latent_dim)}

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        check_value_is_key(self.name, self.config, key, value)
        states = {"latent": layer.latent_norm(layer.latent_proj(key))}
        if self.rotary_dim:
            states[self.rotary_state] = layer.rotary_key_proj(key)
        return {name: tensor.transpose(0, 1)[:, None] for name, tensor in states.items()}

    def project_query(self, layer: Layer, query: Tensor) -> Tensor:
        return split_heads(layer.q_proj(query), self.query_size)

    def attention_inputs(self, layer: Layer, q: Tensor, states: KeyValueStates, **needs: bool) -> AttentionInputs:
        latent = states["latent"]
        heads, size = self.config.num_heads, self.config.head_dim
        if self._absorbs(layer, q, q.size(2), latent.size(2)):
            up = layer.k_proj.weight.view(heads, size, self.latent_dim)
            absorbed = q[..., :size] @ up.to(q.dtype)
            if not self.rotary_dim:
                return AttentionInputs(absorbed, latent, latent)
            q = torch.cat([absorbed, q[..., size:]], dim=-1)
            return AttentionInputs(q, torch.cat([latent, states[self.rotary_state]], dim=-1), latent)
        keys = layer.k_proj(latent[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.rotary_dim:
            keys = torch.cat([keys, states[self.rotary_state].expand(-1, heads, -1, -1)], dim=-1)
        return AttentionInputs(q, keys, self.expand_values(layer, states))

    def finalize_heads(self, layer: Layer, heads: Tensor, call: AttentionCall) -> Tensor:
        if not self._absorbs(layer, heads, heads.size(2), call.scores.shape[3]):
            return heads
        up = layer.v_proj.weight.view(self.config.num_heads, self.config.value_dim, self.latent_dim)
        return heads @ up.mT.to(heads.dtype)

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        values = layer.v_proj(states["latent"][:, 0])
        return values.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)

    def _absorbs(self, layer: Layer, tensor: Tensor, queries: int, keys: int) -> bool:
        """Return True if absorbing takes fewer multiplications than computing the keys and values of all heads.

        Only plain projections are absorbed: the weight of an adapter or a quantised layer is not all that it computes.
        """
        if self.config.qk_norm or is_traced(tensor):  # keys are normalised whole; a trace has one form for all lengths
            return False
        if not is_plain_linear(layer.k_proj) or not is_plain_linear(layer.v_proj):
            return False
        size = self.config.head_dim + self.config.value_dim
        return queries * self.latent_dim * (size + 2 * keys) < keys * size * (self.latent_dim + queries)

    def plain(self, layer: Any) -> Plain:
        if not isinstance(layer.latent_norm, nn.Identity):
            raise NotPlain("projection", self.name, "its norm depends on the input")
        down = layer.latent_proj.weight
        return own_weights(layer.q_proj), (layer.k_proj.weight @ down, None), (layer.v_proj.weight @ down, None)

    @classmethod
    def full_size(cls, config: LayerSizes) -> int:
        """Return the rank of the joint weight of keys and values; the norm still changes something."""
        return min(config.kdim, config.num_heads * (config.head_dim + config.value_dim))

    @classmethod
    def factorize(cls, plain: Any, result: Any) -> None:
        """Set c = W_c y with orthonormal rows, so that the norm changes nothing where y has unit length a feature.

        Features that rotary positions turn are 0 at first.
        """
        projection = result.projection
        # The layer divides scores by the root of all features.
        scale = (projection.query_size / projection.config.head_dim) ** 0.5
        for name, tensor in plain.q_proj.named_parameters():
            heads = getattr(result.q_proj, name).view(
                projection.config.num_heads, projection.query_size, *tensor.shape[1:]
            )
            heads[:, : projection.config.head_dim] = scale * tensor.view(heads.size(0), -1, *tensor.shape[1:])
        fold_biases(plain, result)
        joint = torch.cat([plain.k_proj.weight, plain.v_proj.weight])
        left, values, right = torch.linalg.svd(joint, full_matrices=False)
        rank = min(result.latent_proj.weight.size(0), len(values))
        up = left[:, :rank] * values[:rank]
        result.latent_proj.weight[:rank] = right[:rank]
        result.k_proj.weight[:, :rank], result.v_proj.weight[:, :rank] = up.split(
            [len(plain.k_proj.weight), len(plain.v_proj.weight)]
        )
        torch.nn.init.ones_(result.latent_norm.weight)


register(
    Method(
        name="mla",
        title="Multi-head latent attention",
        formula=(
            "c = RMSNorm(y W_c)   K_i = c W^k_i   V_i = c W^v_i   Q_i = x W_Q,i,   W_c: d × r\n"
            "with --rotary-dim e: K_i = [c W^k_i, R_s y W_R]   Q_i = [x W_Q,i, R_t x W_QR,i],   W_R, W_QR,i: d × e"
        ),
        parts={"projection": LatentProjection},
        parameters="d·r + 2·r·h·d_k + 2·d·h·d_k + r + d·h·e + d·e",
        cached="r + e",
        kind="restricted",
        papers=(
            Paper(
                "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model",
                "DeepSeek-AI 2024",
                "https://arxiv.org/abs/2405.04434",
            ),
        ),
        examples=({"latent_dim": 5}, {"latent_dim": 5, "rotary_dim": 2}),
        colour="#006d5b",
    )
)
