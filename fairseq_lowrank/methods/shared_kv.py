"""Values that are the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fairseq_lowrank.methods.multi_query import MHE
from fairseq_lowrank.parts import AttentionConfig, Method, register
from fairseq_lowrank.parts.plain import Plain, own_weights
from fairseq_lowrank.parts.projection import (
    AttentionInputs,
    KeyValueStates,
    Layer,
    Projection,
    check_value_is_key,
    split_heads,
)


class SharedKeyValue(Projection):
    """A separate W_q and W_k for each head and no W_v: V = K. Only keys are cached.

    Source: SKV of the MHE poster (Xue and Aletras 2023).
    """

    name = "shared-kv"
    keys_reason = "its cached keys are its values too"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.vdim != config.kdim:
            raise ValueError(
                f"vdim={config.vdim}: projection {self.name!r} uses the keys as values. Set vdim = kdim = {config.kdim}."
            )
        if config.value_dim != config.head_dim:
            raise ValueError(
                f"value_dim={config.value_dim}: projection {self.name!r} uses the keys as values. Set value_dim = head_dim = "
                f"{config.head_dim}."
            )
        self.state_sizes = {"key": config.head_dim}

    def build_projections(self, linear: Callable[..., nn.Module]) -> dict[str, nn.Module | None]:
        config = self.config
        return {
            "k_proj": linear(config.kdim, self.state_heads * config.head_dim),
            "v_proj": None,
            "q_proj": linear(config.embed_dim, self.query_heads * config.head_dim),
        }

    def project_key_value(self, layer: Layer, key: Tensor, value: Tensor) -> KeyValueStates:
        check_value_is_key(self.name, self.config, key, value)
        return {"key": split_heads(self.project_key(layer, key), self.config.head_dim)}

    def project_key(self, layer: Layer, key: Tensor) -> Tensor:
        """Project ``[S, B, kdim]`` to ``[S, B, heads * head_dim]``."""
        return layer.k_proj(key)

    def attention_inputs(self, layer: Layer, q: Tensor, states: KeyValueStates, **needs: bool) -> AttentionInputs:
        return AttentionInputs(q, states["key"], states["key"])

    def expand_values(self, layer: Layer, states: KeyValueStates) -> Tensor:
        return super().expand_values(layer, {"value": states["key"]})

    def plain(self, layer: Any) -> Plain:
        keys = own_weights(layer.k_proj)
        return own_weights(layer.q_proj), keys, keys


register(
    Method(
        name="skv",
        title="Shared keys and values",
        formula="Q_i = x W_Q,i   K_i = V_i = y W_K,i   O_i = softmax(Q_i K_iᵀ / √d_k) K_i",
        parts={"projection": SharedKeyValue},
        parameters="3·d·h·d_k",
        cached="h·d_k",
        kind="restricted",
        papers=(MHE,),
        colour="#9edae5",
    )
)
