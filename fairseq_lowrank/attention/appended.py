"""Keys behind those of the input: a learned one and one of zeros."""

from __future__ import annotations

import torch
from torch import nn

from fairseq_lowrank.attention.projections.projection import Memory, Projection
from fairseq_lowrank.attention.scores import Score
from fairseq_lowrank.ops import AttentionMask


class AppendedKeys(nn.Module):
    """What fairseq's ``add_bias_kv`` and ``add_zero_attn`` append, which every query sees.

    Attributes:
        bias_k, bias_v: the learned key and value or ``None``, as ``bias_v`` is too where values are the keys.
    """

    projection: Projection
    score: Score
    add_zero_attn: bool

    def make_appended(self, add_bias_kv: bool) -> None:
        """Give the layer its learned key and value, not started."""
        widths = [size * self.projection.memory_heads for size in self.score.memory_sizes.values()]
        learned = [nn.Parameter(torch.empty(1, 1, width)) for width in widths if add_bias_kv]
        self.bias_k, self.bias_v = [*learned, None, None][:2]

    def append_keys(self, memory: Memory, mask: AttentionMask) -> tuple[Memory, AttentionMask]:
        """Memory, and the mask of its keys, with those behind."""
        appended = (self.bias_k is not None) + self.add_zero_attn
        if not appended:
            return memory, mask
        longer, biases = {}, dict(zip(memory, (self.bias_k, self.bias_v), strict=False))
        for name, remembered in memory.items():
            batch, groups, keys, size = remembered.shape
            parts = [remembered]
            if (bias := biases.get(name)) is not None:
                parts.append(bias.view(1, groups, 1, size).expand(batch, -1, -1, -1).to(remembered.dtype))
            if self.add_zero_attn:
                parts.append(remembered.new_zeros(batch, groups, 1, size))
            longer[name] = torch.cat(parts, dim=2)
        return longer, mask.append_keys(keys, appended)
