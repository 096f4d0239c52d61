"""Each axis that a preset leaves open, over every preset and activation: legal ones compute their formula, others name the flag."""

import itertools

import brute_force
import pytest
import torch
from needed_axes import AXES, PRESETS

from fairseq_lowrank.attention import CAUSAL, AttentionSpec

ADDED = {"key_value_heads": (None, 1, 2), "value_dim": (None, 5), "score_mixing": (None, "static")}
COMBINATIONS = [
    {name: value for name, value in zip(ADDED, values, strict=True) if value is not None}
    for values in itertools.product(*ADDED.values())
    if any(values)
]
SIZES = {"embed_dim": 8, "num_heads": 4, "self_attention": True}
GROUPS = {"independent": (None, 1, 2), "shared-kv": (None, 1, 2), "multi-query": (None, 1)}


def refused(preset, axes):
    """The axes for which a composition must be refused."""
    projection = AttentionSpec(**PRESETS[preset]).projection
    groups = axes.get("key_value_heads", 1 if preset == "gqa" else None)
    wrong = {"key_value_heads"} if groups not in GROUPS.get(projection, (None,)) else set()
    return wrong | ({"value_dim"} if projection in ("shared-kv", "el") and "value_dim" in axes else set())


def legal(preset):
    return [axes for axes in COMBINATIONS if not refused(preset, axes)]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_projection_cannot_have_is_refused_by_its_name(preset, make):
    for axes in COMBINATIONS:
        if wrong := refused(preset, axes):
            with pytest.raises(ValueError) as error:
                make(preset, **SIZES, **axes)
            assert any(name in str(error.value) for name in wrong)
        else:
            make(preset, **SIZES, **axes)


@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_composition_computes_its_formula_and_decodes_to_it(preset, activation, make, inputs, device):
    x = inputs(3, 1, 8)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for axes in legal(preset):
        layer = make(preset, activation=activation, **SIZES, **axes)
        expected, weights, *_ = brute_force.layer(layer, x, x, x, hidden=later)
        output, returned = layer(x, x, x, attn_mask=CAUSAL, need_head_weights=True)
        torch.testing.assert_close(output.cpu(), expected)
        torch.testing.assert_close(returned.transpose(0, 1).cpu(), weights)
        state = {}
        with torch.no_grad():
            steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x.split(1)]
        torch.testing.assert_close(torch.cat(steps).cpu(), expected)


@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_composition_trains_as_its_reference_does(preset, activation, make, inputs):
    def gradients(layer):
        x = inputs(5, 2, 8).requires_grad_()
        layer.train().zero_grad()
        layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].square().sum().backward()
        return {"x": x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}

    for axes in legal(preset):
        reference, blocked = (
            gradients(make(preset, activation=activation, backend=backend, **SIZES, **axes))
            for backend in ("reference", "blocked")
        )
        assert set(reference) == set(blocked)
        for name, gradient in reference.items():
            if gradient is not None or blocked[name] is not None:
                torch.testing.assert_close(blocked[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_composition_trains_and_decodes_in_bfloat16(preset, activation, make, inputs):
    x = inputs(4, 2, 8).bfloat16()
    for axes in legal(preset):
        layer = make(preset, activation=activation, dtype=torch.bfloat16, **SIZES, **axes)
        wide = x.double()
        exact = layer.double()(wide, wide, wide, attn_mask=CAUSAL, need_weights=False)[0]
        layer.bfloat16().train()
        output, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
        assert output.dtype == torch.bfloat16 and (output.double() - exact).norm() < 0.03 * exact.norm()
        output.float().square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
        state = {}
        with torch.no_grad():
            steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x.split(1)]
        assert (torch.cat(steps).double() - exact).norm() < 0.03 * exact.norm()
