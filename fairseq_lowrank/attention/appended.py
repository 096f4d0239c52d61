"""Keys after those of the input: a learned one and one of zeros."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.parts.projection import KeyValueStates


def build_appended(state_sizes: dict[str, int], state_heads: int, wanted: bool) -> list[nn.Parameter | None]:
    """Return the learned key and value of fairseq's ``add_bias_kv``, not initialised, or ``None``.

    The value is ``None`` too if values are the keys.
    """
    widths = [size * state_heads for size in state_sizes.values()] if wanted else []
    learned = [nn.Parameter(torch.empty(1, 1, width)) for width in widths]
    return [*learned, None, None][:2]


def append_keys(
    states: KeyValueStates, mask: AttentionMask, learned: tuple[Tensor | None, Tensor | None], zero_key: bool
) -> tuple[KeyValueStates, AttentionMask]:
    """Append the learned key and the key of zeros, which every query sees, to cached tensors and to their mask."""
    longer, biases = {}, dict(zip(states, learned, strict=False))
    keys = 0
    for name, cached in states.items():
        batch, groups, keys, size = cached.shape
        parts = [cached]
        if (bias := biases.get(name)) is not None:
            parts.append(bias.view(1, groups, 1, size).expand(batch, -1, -1, -1).to(cached.dtype))
        if zero_key:
            parts.append(cached.new_zeros(batch, groups, 1, size))
        longer[name] = torch.cat(parts, dim=2)
    return longer, mask.append_keys(keys, (learned[0] is not None) + zero_key)
