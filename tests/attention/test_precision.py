"""Half precision, of the layer's own numbers and under autocast."""

import math

import pytest
import torch
from needed_axes import PRESETS

from fairseq_lowrank.attention import (
    METHODS,
    AttentionConfig,
    AttentionSpec,
    MultiheadAttention,
    build_attention,
    replace_attention,
)
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.parts import parts_of


def assert_near(actual, exact):
    assert (actual.double() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_half_precision_keeps_its_dtype_and_stays_near_float64(preset, dtype, make, inputs, device):
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    for options in ({}, {"activation": "sigsoftmax"}, {"add_bias_kv": True, "add_zero_attn": True}):
        layer = make(preset, head_dim=4, **options)
        x = inputs(4, 2, 12).to(dtype)
        layer.to(dtype).double()  # the same numbers, exactly
        wide = x.double()
        exact = layer(wide, wide, wide, key_padding_mask=padding)
        for need_weights in (True, False):
            output, weights = layer.to(dtype)(x, x, x, key_padding_mask=padding, need_weights=need_weights)
            assert output.dtype == dtype
            assert_near(output, exact[0])
            if need_weights:
                assert weights.dtype == torch.float32
                assert_near(weights, exact[1])


def learn(model, x, rate=1e-3):
    """One step of Adam, which moves every number by the rate."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model(x).float().square().sum().backward()
    torch.optim.Adam(model.parameters(), lr=rate).step()
    return before


@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b", "gain", "score-gain", "talking-heads", "headmix"])
def test_parts_of_a_bfloat16_model_keep_small_steps(preset):
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    after = replace_attention(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).bfloat16(), preset)
    later = replace_attention(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), preset).bfloat16()
    for model in (after, later):
        before = learn(model, torch.randn(2, 5, 16).bfloat16())
        parts = {name: tensor for name, tensor in model.named_parameters() if tensor.dtype == torch.float32}
        assert parts and {name.split(".")[3] for name in parts} <= {"mixing", "score_mixing", "head_map"}
        for name, tensor in parts.items():
            changed = (tensor - before[name])[before[name] == 1.0]
            torch.testing.assert_close(changed.abs(), torch.full_like(changed, 1e-3), atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("preset", ["mixhead-b", "gated", "t5-bias", "diff", "headmix"])
def test_parts_stay_float32_if_a_half_precision_state_is_assigned(preset):
    layer = build_attention(preset, 16, 4, self_attention=True)
    state = layer.state_dict()
    for name, tensor in state.items():
        state[name] = tensor.bfloat16()
    loaded = build_attention(preset, 16, 4, self_attention=True, device="meta", dtype=torch.bfloat16)
    loaded.load_state_dict(state, assign=True)
    assert loaded.q_proj.weight is not layer.q_proj.weight and loaded.q_proj.weight.dtype == torch.bfloat16
    assert {tensor.dtype for part in parts_of(loaded).values() for tensor in part.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    x = torch.randn(5, 2, 16)
    torch.testing.assert_close(loaded(*(x.bfloat16(),) * 3)[0].float(), layer(x, x, x)[0], atol=0.05, rtol=0)


@pytest.fixture
def half_default():
    """Models are built in bfloat16, as ``from_pretrained`` builds them."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("half_default")
def test_parts_are_built_in_float32_under_a_half_precision_default():
    for name, method in METHODS.items():
        axes = method.examples[-1] if method.examples else {}
        spec = AttentionSpec(**method.axes | axes)
        layer = MultiheadAttention(AttentionConfig(spec, 12, 4, self_attention=True, max_positions=4))
        assert layer.out_proj.weight.dtype == torch.bfloat16
        for reset in (lambda: None, layer.reset_parameters):
            reset()
            tensors = [tensor for part in parts_of(layer).values() for tensor in part.state_dict().values()]
            assert {tensor.dtype for tensor in tensors} <= {torch.float32}, name
    layer = build_attention("diff", 12, 4, diff_version="1", depth=2, self_attention=True)
    assert layer.head_output.initial.item() == pytest.approx(0.8 - 0.6 * math.exp(-0.3), abs=1e-6)


@pytest.mark.usefixtures("half_default")
def test_a_half_precision_default_changes_no_number():
    slopes = build_attention("alibi", 32, 16, self_attention=True).score_bias.slopes(torch.device("cpu"))
    torch.testing.assert_close(slopes, torch.exp2(-torch.arange(1, 17, dtype=torch.float32) / 2))
    seen = AttentionMask(causal=True).has_visible_key((1, 1, 301, 300), torch.device("cpu"))
    assert seen.flatten().tolist() == [False] + 300 * [True]


@pytest.mark.parametrize("preset", PRESETS)
def test_autocast_stays_near_float64(preset, make, inputs, device):
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    for options in ({}, {"activation": "sigsoftmax"}, {"add_zero_attn": True}, {"dropout": 1e-9}):
        layer, x = make(preset, head_dim=4, **options), inputs(4, 2, 12)
        exact = layer(x, x, x, key_padding_mask=padding)
        layer.float().train()
        x = x.float()
        for need_weights in (True, False):
            layer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                output, weights = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
            assert_near(output, exact[0])
            if need_weights:
                assert_near(weights, exact[1])
            output.square().sum().backward()
            assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
