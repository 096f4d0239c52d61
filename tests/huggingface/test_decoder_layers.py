"""A layer with rotary positions, normalised queries and keys and a window against the same layer of ``transformers``."""

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from fairseq_lowrank.attention import CAUSAL, RotaryPositions, SlidingWindow, build_attention


@pytest.mark.parametrize("window", [None, 4])
def test_an_attention_layer_of_qwen3_is_one_of_ours(window):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Qwen3Config(
        **sizes, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}
    )
    config._attn_implementation = "eager"
    theirs = Qwen3Attention(config, layer_idx=0).double().eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        norm.weight.data = torch.rand(8, dtype=torch.float64) + 0.5
    layer = build_attention(
        "gqa",
        24,
        4,
        key_value_heads=2,
        head_dim=8,
        self_attention=True,
        bias=False,
        batch_first=True,
        qk_norm=True,
        rotary=RotaryPositions(5000.0),
    ).double()
    layer.load_state_dict({name.replace("o_proj", "out_proj"): tensor for name, tensor in theirs.state_dict().items()})
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    angles = Qwen3RotaryEmbedding(config).double()(x, torch.arange(11)[None])
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones(11, 11, dtype=torch.bool).tril(-window)
    mask = torch.zeros(11, 11, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    expected, _ = theirs(x, position_embeddings=angles, attention_mask=mask[None, None])
    output, _ = layer(x, x, x, attn_mask=CAUSAL if window is None else SlidingWindow(window), need_weights=False)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # their angles are of float32


def test_an_attention_layer_of_deepseek_v2_is_one_of_ours():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1}
    heads = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "kv_lora_rank": 7, "q_lora_rank": None}
    config = transformers.DeepseekV2Config(
        **sizes, **heads, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    config._attn_implementation = "eager"
    theirs = DeepseekV2Attention(config, layer_idx=0).double().eval()
    theirs.kv_a_layernorm.weight.data = torch.rand(7, dtype=torch.float64) + 0.5
    options = {"head_dim": 6, "value_dim": 5, "latent_dim": 7, "rotary_dim": 4, "rotary": RotaryPositions(500.0)}
    layer = build_attention("mla", 24, 3, self_attention=True, bias=False, batch_first=True, **options).double()
    pairs = [0, 2, 1, 3]  # features 2i and 2i + 1 turn together there, i and i + 2 here
    query = theirs.q_proj.weight.data.unflatten(0, (3, 10))
    down, turning = theirs.kv_a_proj_with_mqa.weight.data.split([7, 4])
    up = theirs.kv_b_proj.weight.data.unflatten(0, (3, 11))
    weights = {
        "q_proj": torch.cat([query[:, :6], query[:, 6:][:, pairs]], dim=1).flatten(0, 1),
        "latent_proj": down,
        "rotary_key_proj": turning[pairs],
        "latent_norm": theirs.kv_a_layernorm.weight.data,
        "k_proj": up[:, :6].flatten(0, 1),
        "v_proj": up[:, 6:].flatten(0, 1),
        "out_proj": theirs.o_proj.weight.data,
    }
    layer.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    angles = DeepseekV2RotaryEmbedding(config)(x, torch.arange(9)[None])
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    expected, _ = theirs(x, position_embeddings=angles, attention_mask=mask[None, None])
    output, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # their angles are of float32
    assert layer.cached_numbers == 7 + 4
