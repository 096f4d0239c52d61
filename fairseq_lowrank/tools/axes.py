"""What an attention layer is on each axis."""

from __future__ import annotations

from typing import Any

from fairseq_lowrank.attention import AXES, AttentionSpec
from fairseq_lowrank.parts.projection import Projection
from fairseq_lowrank.parts.score import ScoreFunction


def spec_of(module: Any) -> AttentionSpec:
    """Return what an attention layer computes; fairseq's attention is plain."""
    return getattr(module, "spec", None) or AttentionSpec()


def projection_of(module: Any, spec: AttentionSpec | None = None) -> Projection:
    """Return the projection of an attention layer, or that which it would have with another `spec`."""
    spec = spec or spec_of(module)
    longest = getattr(getattr(module, "config", None), "max_positions", None)
    return spec.projection_of(module.embed_dim, module.num_heads, module.kdim, module.vdim, max_positions=longest)


def score_of(module: Any, spec: AttentionSpec | None = None) -> ScoreFunction:
    """Return the score function of an attention layer, or that which it would have with another `spec`."""
    return (spec or spec_of(module)).score_of(projection_of(module, spec))


def axes_of(module: Any, spec: AttentionSpec | None = None) -> dict[str, Any]:
    """Return an attention layer's choice or size on every axis, or that which it would have with another `spec`."""
    spec = spec or spec_of(module)
    projection = projection_of(module, spec)
    sizes = projection.dims._asdict() | {"key_value_heads": projection.state_heads}
    sizes |= {option.name: getattr(projection, option.name) for option in projection.options}
    return {"num_heads": module.num_heads} | {name: sizes.get(name, getattr(spec, name)) for name in AXES}
