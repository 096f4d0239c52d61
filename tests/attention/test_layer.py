"""The layer computes what the papers say, for every combination of choices."""

import copy
import itertools
import pickle

import brute_force
import pytest
import torch
from needed_axes import AXES, PRESETS, needed_axes
from torch import nn

from fairseq_lowrank.attention import CAUSAL, build_attention

HEADS, EMBED_DIM = 3, 12
TIME, KEYS, BATCH = 3, 4, 2
CELLS = list(itertools.product(AXES["projection"], AXES["activation"], AXES["mixing"], (None, 2, 5)))


def padding(device, *rows):
    return torch.tensor(rows, dtype=torch.bool, device=device)


LEFT, RIGHT = ((1, 1, 0, 0), (0, 0, 0, 0)), ((0, 0, 0, 0), (0, 0, 0, 1))


def assert_layer(layer, query, key, value, expected, **forward):
    output, weights = layer(query, key, value, need_head_weights=True, **forward)
    torch.testing.assert_close(output.cpu(), expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(weights.cpu(), expected[1].transpose(0, 1), rtol=1e-9, atol=1e-9)
    # the faster backends that need no weights
    torch.testing.assert_close(layer(query, key, value, need_weights=False, **forward)[0].cpu(), expected[0])


@pytest.mark.parametrize(("projection", "activation", "mixing", "head_dim"), CELLS)
def test_every_combination_computes_its_formula_or_is_refused(
    projection, activation, mixing, head_dim, make, inputs, device
):
    axes = {"projection": projection, "activation": activation, "mixing": mixing, "head_dim": head_dim}
    if projection == "el" and head_dim is not None:
        with pytest.raises(ValueError, match="Set head_dim = embed_dim / num_heads = 4"):
            make(**axes)
        return
    layer, x = make(**axes, self_attention=True), inputs(KEYS, BATCH, EMBED_DIM)
    future = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    hidden = future | padding("cpu", *LEFT)[:, None, None, :]
    expected = brute_force.layer(layer, x, x, x, hidden=hidden)
    assert_layer(layer, x, x, x, expected, attn_mask=CAUSAL, key_padding_mask=padding(device, *LEFT))


@pytest.mark.parametrize("projection", AXES["projection"])
@pytest.mark.parametrize("mixing", ["none", "positionwise"])
@pytest.mark.parametrize("activation", AXES["activation"])
def test_appended_keys_are_seen_by_every_query(projection, mixing, activation, make, inputs, device):
    key_padding = padding(device, *RIGHT)
    for bias_kv, zero_attn in ((True, False), (False, True), (True, True)):
        layer = make(
            projection=projection, mixing=mixing, activation=activation, add_bias_kv=bias_kv, add_zero_attn=zero_attn
        )
        query, key = inputs(TIME, BATCH, EMBED_DIM), inputs(KEYS, BATCH, EMBED_DIM, seed=3)
        expected = brute_force.layer(layer, query, key, key, hidden=key_padding.cpu()[:, None, None, :])
        assert_layer(layer, query, key, key, expected, key_padding_mask=key_padding)
        # causality is aligned to the last query and says nothing about appended keys
        future = torch.ones(TIME, KEYS, dtype=torch.bool).triu(1 + KEYS - TIME)
        expected = brute_force.layer(layer, query, key, key, hidden=future)
        assert_layer(layer, query, key, key, expected, attn_mask=CAUSAL)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in ("el", "skv")])
def test_cross_attention_takes_keys_and_values_of_other_sizes(preset, make, inputs):
    layer = make(preset, head_dim=5, kdim=7, vdim=9, encoder_decoder_attention=True)
    query, key, value = inputs(TIME, BATCH, EMBED_DIM), inputs(KEYS, BATCH, 7, seed=3), inputs(KEYS, BATCH, 9, seed=4)
    assert_layer(layer, query, key, value, brute_force.layer(layer, query, key, value))


def test_shared_key_and_value_take_keys_of_another_size(make, inputs):
    layer, query, key = make("skv", kdim=7, vdim=7), inputs(TIME, BATCH, EMBED_DIM), inputs(KEYS, BATCH, 7, seed=3)
    assert_layer(layer, query, key, key, brute_force.layer(layer, query, key, key))


@pytest.mark.parametrize("preset", PRESETS)
def test_masks_of_every_kind(preset, make, inputs, device):
    layer = make(preset, head_dim=4)
    query, key = inputs(TIME, BATCH, EMBED_DIM), inputs(KEYS, BATCH, EMBED_DIM, seed=3)
    forbidden = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    added = inputs(TIME, KEYS, seed=4).cpu().masked_fill(forbidden, float("-inf"))
    by_head = inputs(BATCH, HEADS, TIME, KEYS, seed=5).cpu()
    hidden_by_head = by_head > 0.5
    by_head_masked = by_head.masked_fill(hidden_by_head, float("-inf"))
    cases = [
        (forbidden, {"hidden": forbidden}),
        (added, {"bias": added}),
        (by_head_masked, {"bias": by_head_masked}),
        (by_head_masked.flatten(0, 1), {"bias": by_head_masked}),
        (hidden_by_head.flatten(0, 1), {"hidden": hidden_by_head}),
    ]
    for mask, meaning in cases:
        expected = brute_force.layer(layer, query, key, key, **meaning)
        assert_layer(layer, query, key, key, expected, attn_mask=mask.to(device))
        key_padding = padding(device, *RIGHT)
        hidden = meaning.get("hidden", torch.tensor(False)) | key_padding.cpu()[:, None, None, :]
        expected = brute_force.layer(layer, query, key, key, **(meaning | {"hidden": hidden}))
        assert_layer(layer, query, key, key, expected, attn_mask=mask.to(device), key_padding_mask=key_padding)


def test_the_constructor_changes_nothing_that_it_is_given():
    shared = nn.Sequential(nn.Dropout(0.5)).eval()
    for backend in ("auto", "blocked"):
        layer = build_attention("mixhead-a", 12, 3, dropout=shared[0], backend=backend)
        assert layer.dropout_module is shared[0] and not shared[0].training
        assert layer.training and layer.q_proj.training


@pytest.mark.parametrize("preset", PRESETS)
def test_a_copy_keeps_the_exemption_from_weight_decay(preset):
    layer = build_attention(preset, 12, 3, **needed_axes(preset))
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(copy.deepcopy(layer))):
        for (name, parameter), original in zip(made.named_parameters(), layer.parameters(), strict=True):
            assert torch.equal(parameter, original) and parameter is not original
            overrides = getattr(original, "optim_overrides", None)
            assert getattr(parameter, "optim_overrides", None) == overrides
            assert (overrides is not None) == ("mixing" in name or "head_embeddings" in name)


@pytest.mark.parametrize("preset", ["mixhead-b", "mhe-mul"])
def test_parameters_that_torch_replaces_keep_their_exemption(preset):
    def overrides(layer):
        return {name: getattr(parameter, "optim_overrides", None) for name, parameter in layer.named_parameters()}

    layer = build_attention(preset, 12, 3, **needed_axes(preset))
    expected = overrides(layer)
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    assert overrides(layer) == expected
    assert overrides(layer.to("meta").to_empty(device="cpu")) == expected
