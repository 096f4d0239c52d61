"""An object with the signature of fairseq2's ``SDPA``: all heads in one call, ``[N, S, H, K]``, layouts and a bias object.

A factory there is called as ``factory(bias, dropout_p=…, scale=…)`` and knows no sizes. So give the sizes first:
``functools.partial(LowrankSDPA, "mixhead-a", 8, 64)``. In a fairseq2 model, derive the class from its ``SDPA``.
"""

import torch
from torch import nn

from fairseq_lowrank.attention import build_core
from fairseq_lowrank.ops import AttentionMask


class LowrankSDPA(nn.Module):
    def __init__(self, method, num_heads, head_dim, bias, *, dropout_p=0.0, scale=None):
        super().__init__()
        self.bias, self.scale = bias, scale
        self.core = build_core(method, num_heads, head_dim, layout="BTHD", dropout=dropout_p)

    def forward(self, q, q_layout, k, k_layout, v, bias_cache, *, needs_weights=False):
        causal = type(self.bias).__name__ == "CausalAttentionBias"
        if k_layout.packed or not (causal or type(self.bias).__name__ == "IdentityBias"):
            raise NotImplementedError(f"{self.bias} with packed={k_layout.packed}")
        padding = None
        if k_layout.padded:
            lengths = torch.tensor(k_layout.seq_lens, device=k.device)
            padding = torch.arange(k.size(1), device=k.device) >= lengths[:, None]
        # fairseq2 counts the query in its window, as SlidingWindow does
        mask = AttentionMask(causal=causal, window=self.bias.attn_window_len if causal else None, key_padding=padding)
        result = self.core(q, k, v, mask, scale=self.scale, return_weights=needs_weights)
        return result if needs_weights else (result, None)
