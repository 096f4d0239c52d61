"""What an attention layer is on each axis."""

from __future__ import annotations

from typing import Any

from fairseq_lowrank.attention import AXES, AttentionConfig, AttentionSpec, MultiheadAttention


def config_of(module: Any) -> AttentionConfig:
    """Return the configuration of an attention layer; fairseq's attention is plain."""
    if isinstance(module, MultiheadAttention):
        return module.config
    return AttentionConfig(AttentionSpec(), module.embed_dim, module.num_heads, kdim=module.kdim, vdim=module.vdim)


def axes_of(module: Any) -> dict[str, Any]:
    """Return an attention layer's choice or size on every axis."""
    config = config_of(module)
    projection = config.build_projection()
    sizes = {"head_dim": config.head_dim, "value_dim": config.value_dim, "key_value_heads": projection.state_heads}
    sizes |= {option.name: getattr(projection, option.name) for option in projection.options}
    return {"num_heads": module.num_heads} | {name: sizes.get(name, getattr(config.spec, name)) for name in AXES}
