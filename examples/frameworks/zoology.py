"""A mixer of zoology: its models call ``Mixer(d_model, layer_idx=…, **kwargs)(x)``, as ``ModuleConfig(name, kwargs)`` says."""

from torch import nn

from fairseq_lowrank.attention import build_core


class LowrankMixer(nn.Module):
    def __init__(self, d_model, layer_idx=None, num_heads=1, method="mixhead-a", dropout=0.0, **axes):
        super().__init__()
        self.wqkv, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        depth = (layer_idx or 0) + 1
        self.core = build_core(
            method, num_heads, d_model // num_heads, layout="BTHD", dropout=dropout, depth=depth, **axes
        )

    def forward(self, x, *args, **kwargs):
        q, k, v = self.wqkv(x).unflatten(-1, (3, -1, self.core.config.head_dim)).unbind(2)
        return self.out_proj(self.core(q, k, v, "causal", inputs=x).flatten(2))

    def state_size(self, sequence_length=2048):
        return 2 * self.wqkv.in_features * sequence_length
