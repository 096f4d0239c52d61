"""Grouped-query attention: g heads of keys and values for h heads of queries (arXiv 2305.13245)."""

import layer_checks
import pytest
import torch
from needed_axes import AXES

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.messages import StateDictMismatch

HEADS = 6


def build(make, groups, **options):
    return make("gqa", 12, HEADS, key_value_heads=groups, head_dim=4, **options)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("projection", ["independent", "shared-kv"])
@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("mixing", ["none", "static", "positionwise", "diagonal"])
def test_head_i_reads_group_i_g_over_h(groups, projection, activation, mixing, make, inputs, device):
    x = inputs(4, 2, 12)
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    for appended in (False, True):
        layer = build(
            make,
            groups,
            projection=projection,
            activation=activation,
            mixing=mixing,
            add_bias_kv=appended,
            add_zero_attn=appended,
        )
        layer_checks.equals_the_formula(layer, x, padding)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("value_dim", [None, 7])
def test_every_backend_and_its_gradients(backend, value_dim, make, inputs):
    layer, exact = (build(make, 2, value_dim=value_dim, backend=name) for name in (backend, "reference"))
    x = inputs(70, 2, 12)
    gradients = []
    for each in (layer, exact):
        each(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("projection", ["independent", "shared-kv"])
def test_decoding_with_beams_keeps_the_groups_alone(recording, projection, make, inputs, device):
    layer = build(make, 2, self_attention=True, projection=projection)
    state = layer_checks.follows_beams(layer, inputs(5, 3, 12), recording)
    assert all(tensor.shape == (3, 2, 5, 4) for tensor in layer.cache.get(state).tensors.values())


@pytest.mark.parametrize(("groups", "preset"), [(1, "mqa"), (HEADS, "mha")])
def test_one_group_is_multi_query_and_a_group_a_head_is_multi_head(groups, preset, make, inputs):
    torch.manual_seed(0)
    layer = build_attention("gqa", 12, HEADS, key_value_heads=groups)
    torch.manual_seed(0)
    other = build_attention(preset, 12, HEADS)
    x = inputs(5, 2, 12, dtype=torch.float32).cpu()
    assert all(torch.equal(one, two) for one, two in zip(layer.parameters(), other.parameters(), strict=True))
    for options in ({}, {"attn_mask": CAUSAL, "need_weights": False}):
        assert torch.equal(layer(x, x, x, **options)[0], other(x, x, x, **options)[0])


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_a_layer_has_d_times_d_k_times_2h_plus_2g_parameters(groups):
    layer = build_attention("gqa", 512, 8, key_value_heads=groups, bias=False)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 512 * 64 * (2 * 8 + 2 * groups)
    assert layer.k_proj.weight.shape == (groups * 64, 512)
    wide = build_attention("gqa", 512, 8, key_value_heads=groups, value_dim=16, bias=False)
    assert wide.v_proj.weight.shape == (groups * 16, 512) and wide.out_proj.weight.shape == (512, 8 * 16)


def test_a_state_says_its_groups(make):
    layer = build(make, 2)
    with pytest.raises(StateDictMismatch) as error:
        build(make, 3).load_state_dict(layer.state_dict())
    assert (error.value.saved, error.value.current) == ({"key_value_heads": 2}, {"key_value_heads": 3})
    # as many groups as heads are what states from before there was a choice mean
    state = make("mha", 12, HEADS, head_dim=4).state_dict()
    del state._metadata[""]["attention"]["key_value_heads"]
    build(make, HEADS).load_state_dict(state)
