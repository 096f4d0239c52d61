"""The head that answers questions by spans, on any of fairseq's encoders that returns features of each token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class SpanHead(nn.Module):
    """A head that scores each token as the first and the last of an answer, x W + b with W [d, 2] (Devlin et al. 2019, §4.2)."""

    def __init__(self, embed_dim: int):
        super().__init__()
        self.out_proj = nn.Linear(embed_dim, 2)
        nn.init.normal_(self.out_proj.weight, std=0.02)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores [B, T, 2] of features [B, T, d]."""
        return self.out_proj(features)

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        """Keep the head's values if a state, as of pre-training, does not have the head."""
        for key, value in self.state_dict().items():
            state_dict.setdefault(f"{name}.{key}", value)


def add_span_head(model: nn.Module, embed_dim: int) -> nn.Module:
    """Make ``model(…, features_only=True)`` return the scores of a :class:`SpanHead`, [B, T, 2], instead of features.

    Nothing else changes, so spectra and checkpoints are the model's own.
    """
    model.span_head = SpanHead(embed_dim)

    def score(module: Any, args: tuple, kwargs: dict, output: tuple) -> tuple | None:
        return (module.span_head(output[0]), *output[1:]) if kwargs.get("features_only") else None

    model.register_forward_hook(score, with_kwargs=True)
    return model
