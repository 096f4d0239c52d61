"""Rules of single methods: what weights sum to, which states continue, and what is refused."""

import pytest
import torch
from tiny_layers import BATCH, HEADS, SIZE, build, normal

from fairseq_lowrank.attention import METHODS, PRESETS, build_attention


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_sum_as_the_method_says(preset):
    layer, x = build(preset), normal(5, BATCH, SIZE, seed=7)
    output, weights = layer(x, x, x, need_head_weights=True)
    assert weights.shape == (HEADS, BATCH, 5, 5)
    torch.testing.assert_close(output, layer(x, x, x, need_weights=False)[0])
    # mixed or combined weights need not sum to 1
    if not METHODS[preset].axes.keys() & {"mixing"} and preset != "diff":
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(HEADS, BATCH, 5, dtype=torch.double))


@pytest.mark.parametrize(("preset", "axes"), [("gated", {"gate_start": "half"}), ("diff", {}), ("mla", {})])
def test_a_stock_state_is_refused_where_outputs_would_change(preset, axes):
    layer = build_attention(preset, SIZE, HEADS, self_attention=True, **axes)
    with pytest.raises(RuntimeError):
        layer.load_state_dict(build_attention("mha", SIZE, HEADS).state_dict())


def test_a_half_start_halves_the_outputs():
    torch.manual_seed(1)
    layer = build_attention("gated", SIZE, HEADS, bias=False, self_attention=True, gate_start="half")
    stock, x = build_attention("mha", SIZE, HEADS, bias=False), normal(5, BATCH, SIZE).float()
    stock.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "head_output" not in name})
    torch.testing.assert_close(2 * layer(x, x, x)[0], stock(x, x, x)[0])


@pytest.mark.parametrize(
    ("preset", "axes", "value"),
    [
        ("mha", {"latent_dim": 4}, "latent_dim=4"),
        ("mha", {"gate_start": "half"}, "gate_start='half'"),
        ("diff", {"mixing": "static"}, "'static'"),
        ("gated", {"factor_rank": 2}, "factor_rank=2"),
        ("mea", {"projection": "single"}, "head_map='heads'"),
    ],
)
def test_axes_that_do_not_go_together_are_refused(preset, axes, value):
    with pytest.raises(ValueError, match=value):
        build_attention(preset, SIZE, HEADS, self_attention=True, **axes)


def test_exclusive_attention_is_refused_outside_self_attention():
    with pytest.raises(ValueError, match="exclusive"):
        build_attention("xsa", SIZE, HEADS, encoder_decoder_attention=True)


def test_projections_with_several_group_counts_take_no_appended_keys():
    with pytest.raises(ValueError, match="low-rank-kv"):
        build_attention("lrkv", SIZE, HEADS, add_zero_attn=True)
