"""Rules of single methods: what weights sum to, which states continue, and what is refused."""

import math

import pytest
import torch
from tiny_layers import BATCH, HEADS, SIZE, build, normal

from fairseq_lowrank.attention import METHODS, PRESETS, build_attention
from fairseq_lowrank.parts import parts_of

CASES = [(name, number) for name, method in METHODS.items() for number in range(len(method.examples))]


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_sum_as_the_method_says(preset):
    layer, x = build(preset), normal(5, BATCH, SIZE, seed=7)
    output, weights = layer(x, x, x, need_head_weights=True)
    assert weights.shape == (HEADS, BATCH, 5, 5)
    torch.testing.assert_close(output, layer(x, x, x, need_weights=False)[0])
    if all(part.keeps_probabilities for part in parts_of(layer).values()):
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(HEADS, BATCH, 5, dtype=torch.double))


@pytest.mark.parametrize(("name", "example"), CASES)
def test_a_stock_state_is_refused_where_outputs_would_change(name, example):
    layer = build(name, example, noise=0.0)
    if all(part.keeps_stock for part in parts_of(layer).values()):
        return
    with pytest.raises(RuntimeError):
        layer.load_state_dict(build("mha").state_dict())


@pytest.mark.parametrize(
    "preset", [name for name, method in METHODS.items() if {"gate_start": "half"} in method.examples]
)
def test_a_half_start_halves_the_outputs(preset):
    torch.manual_seed(1)
    layer = build_attention(preset, SIZE, HEADS, bias=False, self_attention=True, gate_start="half")
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
        ("mea", {"head_output": "difference", "diff_version": "1"}, "head_map 'heads'"),
        ("diff", {"diff_version": "1", "key_value_heads": 1}, "key_value_heads"),
        ("diff", {"diff_version": "1", "add_zero_attn": True}, "add_zero_attn"),
        ("diff", {"diff_version": "1", "depth": 0}, "depth=0"),
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


def test_slopes_are_those_of_bloom():
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    for heads in range(1, 41):
        bias = build_attention("alibi", 64, heads, head_dim=2, self_attention=True).score_bias
        theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(bias.slopes(torch.device("cpu")), theirs)


@pytest.mark.parametrize("sides", ["both", "past"])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (12, 40), (4, 3)])
def test_buckets_are_those_of_t5(buckets, longest, sides):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    axes = {"position_buckets": buckets, "max_distance": longest, "bucket_sides": sides}
    bias = build_attention("t5-bias", SIZE, HEADS, self_attention=True, **axes).score_bias
    distances = torch.arange(-300, 301)[None]
    theirs = t5._relative_position_bucket(distances, sides == "both", buckets, longest)
    assert torch.equal(bias.buckets(distances), theirs)


def test_buckets_that_hold_no_distances_are_refused():
    for axes in ({"position_buckets": 3}, {"position_buckets": 1, "bucket_sides": "past"}, {"max_distance": 8}):
        with pytest.raises(ValueError, match=f"{next(iter(axes))}={next(iter(axes.values()))}"):
            build_attention("t5-bias", SIZE, HEADS, self_attention=True, **axes)


def test_a_state_with_other_buckets_is_refused():
    layer = build_attention("t5-bias", SIZE, HEADS, self_attention=True, max_distance=64)
    for axes in ({}, {"max_distance": 32}):
        with pytest.raises(ValueError, match="max_distance"):
            build_attention("t5-bias", SIZE, HEADS, self_attention=True, **axes).load_state_dict(layer.state_dict())
    layer.load_state_dict(build_attention("mha", SIZE, HEADS).state_dict())


@pytest.mark.parametrize("preset", ["alibi", "t5-bias"])
def test_a_bias_of_distances_is_refused_without_distances(preset):
    for place in ({"encoder_decoder_attention": True}, {"self_attention": True, "add_zero_attn": True}):
        with pytest.raises(ValueError, match="distances of queries and keys"):
            build_attention(preset, SIZE, HEADS, **place)


def test_the_first_differential_attention_starts_by_depth_and_keeps_its_start():
    sizes = {"head_dim": 2, "value_dim": 4, "self_attention": True, "bias": False, "diff_version": "1"}
    first, fourth = (build_attention("diff", SIZE, HEADS, depth=depth, **sizes).double() for depth in (1, 4))
    starts = [layer.head_output.initial.item() for layer in (first, fourth)]
    assert starts == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.9)])
    x = normal(5, BATCH, SIZE)
    first.load_state_dict(fourth.state_dict())
    assert torch.equal(first(x, x, x)[0], fourth(x, x, x)[0])
    first.reset_parameters()
    assert first.head_output.initial.item() == pytest.approx(0.2)
    # queries and keys of 2·h heads of 2, h values of 4, an output of h·4, four vectors of 2 and a gain of 4
    assert sum(p.numel() for p in first.parameters()) == 2 * SIZE * 8 + 2 * SIZE * 8 + 4 * 2 + 4
    assert first.cached_numbers == 2 * HEADS * 2 + HEADS * 4
