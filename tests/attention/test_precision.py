"""Half precision, of the layer's own numbers and under autocast."""

import pytest
import torch
from needed_axes import PRESETS


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
