"""The rivals of 2020 to 2026, held to their formulas: values, gradients, masks, decoding, beams, precision, memory, starts."""

import pytest
import torch
from rivals_brute_force import attend

from fairseq_lowrank.attention import CAUSAL, build_attention

RIVALS = {
    "gated-head": {},
    "gated": {},
    "mla": {"latent_dim": 5},
    "dcmha": {"factor_rank": 2},
    "diff": {},
    "collaborative": {"shared_dim": 7},
    "mfa": {"latent_dim": 5, "head_dim": 6},
    "lrkv": {"factor_rank": 2},
    "tpa": {"factor_rank": 2, "query_rank": 3},
    "xsa": {},
    "knocking-linear": {},
    "mea": {},
}
SELF_ONLY = ("xsa",)
STOCK = ("gated-head", "gated", "dcmha", "xsa", "knocking-linear", "mea")
SIZE, HEADS, BATCH = 8, 2, 2


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def build(preset, noise=0.4, **options):
    """A layer in float64 with no parameter at its start."""
    torch.manual_seed(1)
    layer = build_attention(preset, SIZE, HEADS, **{"self_attention": True} | RIVALS.get(preset, {}) | options).double()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.add_(noise * normal(*parameter.shape, seed=index))
    return layer.eval()


def padding(keys):
    hidden = torch.zeros(BATCH, keys, dtype=torch.bool)
    hidden[1, -2:] = True
    return hidden


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("masked", ["open", "causal", "padding", "causal-padding", "row"])
@pytest.mark.parametrize("preset", RIVALS)
def test_self_attention_equals_brute_force(preset, masked, backend):
    layer, x = build(preset, backend=backend), normal(5, BATCH, SIZE, seed=7)
    options, hidden = {}, torch.zeros(BATCH, 5, 5, dtype=torch.bool)
    if "causal" in masked:
        options["attn_mask"], hidden = CAUSAL, hidden | causal(5, 5)
    if "padding" in masked:
        options["key_padding_mask"], hidden = padding(5), hidden | padding(5)[:, None]
    if masked == "row":  # the second query sees no key
        options["attn_mask"] = torch.zeros(5, 5, dtype=torch.bool)
        options["attn_mask"][1] = True
        hidden = hidden | options["attn_mask"]
    output, _ = layer(x, x, x, need_weights=False, **options)
    expected = attend(preset, layer, x, x, hidden)
    if masked == "causal-padding":  # outputs at padding mean nothing
        real = ~padding(5).T
        output, expected = output[real], expected[real]
    torch.testing.assert_close(output, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("queries", "keys"), [(3, 6), (6, 3), (1, 5)])
@pytest.mark.parametrize("preset", [preset for preset in RIVALS if preset not in SELF_ONLY])
def test_cross_attention_equals_brute_force(preset, queries, keys):
    layer = build(preset, self_attention=False, encoder_decoder_attention=True)
    x, y = normal(queries, BATCH, SIZE, seed=7), normal(keys, BATCH, SIZE, seed=8)
    output, _ = layer(x, y, y, padding(keys), need_weights=False)
    hidden = padding(keys)[:, None].expand(-1, queries, -1)
    torch.testing.assert_close(output, attend(preset, layer, x, y, hidden), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("preset", RIVALS)
def test_gradients_equal_finite_differences(preset, backend):
    layer, x = build(preset, backend=backend), normal(4, BATCH, SIZE, seed=7).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x, *values):
        call = {"attn_mask": CAUSAL, "key_padding_mask": padding(4), "need_weights": False}
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, x, x), call)[0]

    assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("preset", RIVALS)
def test_steps_of_decoding_equal_the_full_pass(preset):
    layer, x = build(preset), normal(6, BATCH, SIZE, seed=7)
    full, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    state = {}
    steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x.split(1)]
    torch.testing.assert_close(torch.cat(steps), full, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("preset", RIVALS)
def test_decoding_follows_the_beam(preset):
    layer, x = build(preset), normal(4, BATCH, SIZE, seed=7)
    order, state = torch.tensor([1, 1]), {}
    for step in x[:3].split(1):
        layer(step, step, step, incremental_state=state, need_weights=False)
    layer.reorder_incremental_state(state, order)
    last, _ = layer(x[3:], x[3:], x[3:], incremental_state=state, need_weights=False)
    moved = torch.cat([x[:3, order], x[3:]])
    full, _ = layer(moved, moved, moved, attn_mask=CAUSAL, need_weights=False)
    torch.testing.assert_close(last, full[3:], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("preset", [preset for preset in RIVALS if preset not in SELF_ONLY])
def test_hypotheses_share_the_keys_of_a_sentence(preset):
    layer = build(preset, self_attention=False, encoder_decoder_attention=True)
    x, y = normal(1, 3 * BATCH, SIZE, seed=7), normal(5, BATCH, SIZE, seed=8)
    repeated = y.repeat_interleave(3, dim=1)
    apart, _ = layer(x, repeated, repeated, need_weights=False)
    layer.beam_size = 3
    torch.testing.assert_close(layer(x, y, y, need_weights=False)[0], apart, atol=1e-12, rtol=1e-12)


# numbers that a token caches
CACHED = {
    "mla": 5,
    "collaborative": 7 + SIZE,
    "mfa": 2 * 6,
    "lrkv": 2 * (4 + HEADS * 2),
    "tpa": 2 * 2 * (HEADS + 4),
    **dict.fromkeys(("gated-head", "gated", "dcmha", "diff", "xsa", "knocking-linear", "mea"), 2 * SIZE),
}


@pytest.mark.parametrize("preset", RIVALS)
def test_a_token_caches_what_the_paper_says(preset):
    layer, x, state = build(preset), normal(3, 1, SIZE), {}
    for step in x.split(1):
        layer(step, step, step, incremental_state=state, need_weights=False)
    cached = layer.cache.get(state).tensors.values()
    assert sum(tensor.size(1) * tensor.size(3) for tensor in cached) == CACHED[preset]
    assert all(tensor.size(2) == 3 for tensor in cached)


@pytest.mark.parametrize("preset", RIVALS)
def test_bfloat16_is_near_float64(preset):
    layer, x = build(preset, noise=0.1), normal(5, BATCH, SIZE, seed=7)
    expected, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    half = x.bfloat16()
    output, _ = layer.bfloat16()(half, half, half, attn_mask=CAUSAL, need_weights=False)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, atol=0.05, rtol=0.1)


@pytest.mark.parametrize("preset", RIVALS)
def test_weights_sum_as_the_method_says(preset):
    layer, x = build(preset), normal(5, BATCH, SIZE, seed=7)
    output, weights = layer(x, x, x, need_head_weights=True)
    assert weights.shape == (HEADS, BATCH, 5, 5)
    torch.testing.assert_close(output, layer(x, x, x, need_weights=False)[0])
    if preset not in ("dcmha", "diff"):
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(HEADS, BATCH, 5, dtype=torch.double))


@pytest.mark.parametrize("preset", STOCK)
def test_a_stock_state_continues_with_the_same_outputs(preset):
    stock = build("mha")
    layer = build_attention(preset, SIZE, HEADS, self_attention=True, **RIVALS[preset]).double()
    layer.load_state_dict(stock.state_dict())
    x = normal(5, BATCH, SIZE, seed=7)
    torch.testing.assert_close(layer(x, x, x)[0], stock(x, x, x)[0], atol=1e-12, rtol=1e-12)


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
