"""What an attention layer is on each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fairseq_lowrank.attention import AXES, AttentionConfig, AttentionSpec, MultiheadAttention
from fairseq_lowrank.parts.score import ScoreFunction


def spec_of(module: Any) -> AttentionSpec:
    """Return what an attention layer computes; fairseq's attention is plain."""
    return getattr(module, "spec", None) or AttentionSpec()


def config_of(module: Any, spec: AttentionSpec | None = None) -> AttentionConfig:
    """Return the configuration of an attention layer, or that which it would have with another `spec`."""
    if isinstance(module, MultiheadAttention):
        return module.config if spec is None else replace(module.config, spec=spec)
    return AttentionConfig(
        spec or AttentionSpec(), module.embed_dim, module.num_heads, kdim=module.kdim, vdim=module.vdim
    )


def score_of(module: Any, spec: AttentionSpec | None = None) -> ScoreFunction:
    """Return the score function of an attention layer, or that which it would have with another `spec`."""
    config = config_of(module, spec)
    return config.build_score(config.build_projection())


def axes_of(module: Any, spec: AttentionSpec | None = None) -> dict[str, Any]:
    """Return an attention layer's choice or size on every axis, or that which it would have with another `spec`."""
    config = config_of(module, spec)
    projection = config.build_projection()
    sizes = {"head_dim": config.head_dim, "value_dim": config.value_dim, "key_value_heads": projection.state_heads}
    sizes |= {option.name: getattr(projection, option.name) for option in projection.options}
    return {"num_heads": module.num_heads} | {name: sizes.get(name, getattr(config.spec, name)) for name in AXES}
