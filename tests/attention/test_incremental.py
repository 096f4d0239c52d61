"""Decoding step by step, with beams, equals the pass over the whole sequence."""

import copy
import itertools
import pickle

import pytest
import torch
from needed_axes import PRESETS

from fairseq_lowrank.attention import CAUSAL, DecodingCache, build_attention, decoding
from fairseq_lowrank.messages import UserError

ACTIVATIONS = ("softmax", "sigsoftmax")


def decode(layer, x, state, **options):
    """The outputs of feeding ``x [T, B, C]`` one position at a time."""
    steps = [layer(step, step, step, incremental_state=state, need_weights=False, **options)[0] for step in x.split(1)]
    return torch.cat(steps)


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """Small caches have buffers too."""
    monkeypatch.setattr(decoding, "SMALL_CACHE", 0)


@pytest.fixture(params=["recording gradients", "in place", "concatenated"])
def recording(request, monkeypatch):
    if request.param == "concatenated":
        monkeypatch.setattr(decoding, "SMALL_CACHE", 10**9)
    with torch.set_grad_enabled(request.param == "recording gradients"):
        yield


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_decoding_equals_the_full_pass_when_beams_are_reordered(preset, activation, make, inputs, device, recording):
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}):
        layer = make(preset, head_dim=4, activation=activation, self_attention=True, **options)
        x, rest, state = inputs(3, 4, 12), inputs(2, 4, 12, seed=3), {}
        order = torch.tensor([2, 0, 0, 3], device=device)
        first = decode(layer, x, state)
        torch.testing.assert_close(first, layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0])
        state = layer.reorder_incremental_state(state, order)
        whole = torch.cat((x[:, order], rest))
        expected = layer(whole, whole, whole, attn_mask=CAUSAL, need_weights=False)[0]
        torch.testing.assert_close(decode(layer, rest, state), expected[3:])


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_of_a_step_are_the_last_row_of_the_full_pass(preset, make, inputs):
    layer, x, state = make(preset, head_dim=4, self_attention=True), inputs(4, 2, 12), {}
    decode(layer, x[:3], state)
    last = x[3:]
    weights = layer(last, last, last, incremental_state=state, need_head_weights=True)[1]
    torch.testing.assert_close(weights, layer(x, x, x, attn_mask=CAUSAL, need_head_weights=True)[1][:, :, 3:])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_prefix_is_decoded_in_one_step(preset, make, inputs):
    for options in ({}, {"add_bias_kv": True}):
        layer, x, state = make(preset, head_dim=4, self_attention=True, **options), inputs(5, 2, 12), {}
        parts = [
            layer(part, part, part, incremental_state=state, attn_mask=CAUSAL, need_weights=False)[0]
            for part in x.split([2, 3])
        ]
        torch.testing.assert_close(torch.cat(parts), layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_padding_is_joined_with_that_of_new_keys(preset, make, inputs, device):
    layer, x = make(preset, head_dim=4, self_attention=True), inputs(4, 2, 12)
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    expected = layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=padding, need_weights=False)[0]

    def run(masks):
        state, outputs = {}, []
        for step, mask in zip(x.split([2, 1, 1]), masks, strict=True):
            outputs.append(
                layer(
                    step,
                    step,
                    step,
                    incremental_state=state,
                    attn_mask=CAUSAL,
                    key_padding_mask=mask,
                    need_weights=False,
                )[0]
            )
        return torch.cat(outputs), layer.cache.get(state).padding

    of_new_keys, of_all_keys = padding.split([2, 1, 1], dim=1), [padding[:, :2], padding[:, :3], padding]
    for masks in (
        of_new_keys,
        of_all_keys,
        [padding[:, :2].clone(), None, None],
        [padding[:, :2], None, padding[:, 3:]],
    ):
        output, saved = run(masks)
        torch.testing.assert_close(output, expected)
        assert torch.equal(saved.bool(), padding)
    assert run([None, None, None])[1] is None
    # padding that appears only at the end
    late = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    assert torch.equal(run([None, None, late[:, 3:]])[1], late)


@pytest.mark.parametrize("preset", PRESETS)
def test_encoder_keys_are_projected_once(preset, make, inputs, device):
    layer = make(preset, head_dim=4, encoder_decoder_attention=True)
    query, encoded = inputs(3, 2, 12), inputs(5, 2, 12, seed=3)
    padding = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool, device=device)
    expected, expected_weights = layer(query, encoded, encoded, key_padding_mask=padding)
    state = {}
    steps = [layer(query[:1], encoded, encoded, padding, state)]
    # the mask that fairseq keeps giving is that of the saved keys
    steps += [layer(query[1:2], None, None, incremental_state=state), layer(query[2:], None, None, padding, state)]
    outputs, weights = zip(*steps, strict=True)
    torch.testing.assert_close(torch.cat(outputs), expected)
    torch.testing.assert_close(torch.cat(weights, dim=1), expected_weights)
    assert all(tensor.size(2) == 5 for tensor in layer.cache.get(state).tensors.values())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_unrepeated_encoder_keys_serve_all_beams(preset, need_weights, make, inputs, device):
    beam = 3
    layer = make(preset, head_dim=4, encoder_decoder_attention=True)
    query, encoded = inputs(2, 2 * beam, 12), inputs(4, 2, 12, seed=3)
    padding = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    repeated, repeated_padding = encoded.repeat_interleave(beam, 1), padding.repeat_interleave(beam, 0)
    options = {"need_head_weights": need_weights, "need_weights": need_weights}
    additive = inputs(2, 4, seed=8)
    expected = [
        layer(query, repeated, repeated, repeated_padding, attn_mask=mask, **options)
        for mask in (None, additive, CAUSAL)
    ]
    scores, _ = layer(query, repeated, repeated, repeated_padding, before_softmax=True)
    layer.beam_size, state = beam, {}
    for mask, (output, weights) in zip((None, additive, CAUSAL), expected, strict=True):
        key = None if state else encoded
        found = layer(query, key, key, padding, state, attn_mask=mask, **options)
        torch.testing.assert_close(found[0], output)
        assert (found[1] is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(found[1], weights)
    assert layer.cache.get(state).batch == 2
    torch.testing.assert_close(layer(query, encoded, encoded, padding, before_softmax=True)[0], scores)


@pytest.mark.parametrize("beam", [1, 3])
def test_encoder_keys_stay_while_beams_swap_and_go_with_their_sentence(beam, make, inputs, device):
    layer = make(encoder_decoder_attention=True)
    layer.beam_size = beam
    query, encoded, state = inputs(1, 3 * beam, 12), inputs(4, 3, 12, seed=3), {}
    padding = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    options = {"incremental_state": state, "need_weights": False}
    output = layer(query, encoded, encoded, padding, **options)[0]
    swapped = torch.arange(3 * beam, device=device).view(3, beam).flip(1).flatten()
    layer.reorder_incremental_state(state, swapped)
    torch.testing.assert_close(layer(query, None, None, **options)[0], output)
    # sentence 1 is finished
    left = torch.arange(3 * beam, device=device).view(3, beam)[[0, 2]].flatten()
    layer.reorder_incremental_state(state, left)
    torch.testing.assert_close(layer(query[:, left], None, None, **options)[0], output[:, left])


@pytest.mark.parametrize(
    ("preset", "numbers"),
    {
        **dict.fromkeys(("mha", "mixhead-a", "mixhead-b", "mixhead-random", "avghead", "fixedhead"), 2 * 3 * 4),
        **dict.fromkeys(("sha", "mqa", "gqa", "mhe-add", "mhe-mul"), 2 * 4),
        **dict.fromkeys(("skv", "el"), 3 * 4),
    }.items(),
)
def test_the_cache_holds_what_the_projection_needs_and_no_more(preset, numbers, make, inputs):
    layer, x, state = make(preset, head_dim=4, self_attention=True), inputs(5, 2, 12), {}
    decode(layer, x, state)
    saved = list(layer.cache.get(state).tensors.values())
    # storages, not views: a narrow view of a large tensor would keep all of it
    assert sum(tensor.untyped_storage().nbytes() for tensor in saved) == 5 * 2 * numbers * 8
    assert all(tensor.size(0) == 2 for tensor in saved)


@torch.no_grad()
@pytest.mark.parametrize("preset", PRESETS)
def test_steps_write_behind_the_saved_keys_and_copy_them_seldom(preset, make, inputs, device):
    layer, x, state = make(preset, head_dim=4, self_attention=True), inputs(64, 2, 12), {}
    places, outputs, stays = [], [], torch.arange(2, device=device)
    for step in x.split(1):
        outputs.append(decode(layer, step, state))
        if device == "cpu":
            layer.reorder_incremental_state(state, stays)
        places.append(layer.cache.get(state).tensors["key"].data_ptr())
    assert sum(first != second for first, second in itertools.pairwise(places)) <= 8
    keys = layer.cache.get(state).tensors["key"]
    assert keys.untyped_storage().nbytes() <= (1.25 * 64 + 8) * keys[:, :, 0].numel() * keys.element_size()
    torch.testing.assert_close(torch.cat(outputs), layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0])


@torch.no_grad()
def test_a_copied_state_goes_its_own_way(make, inputs):
    layer, x, one, other = make(self_attention=True), inputs(6, 2, 12), inputs(3, 2, 12), inputs(3, 2, 12, seed=5)
    state = {}
    decode(layer, x, state)
    fork = dict(state)
    for rest, branch in ((one, state), (other, fork)):
        whole = torch.cat((x, rest))
        expected = layer(whole, whole, whole, attn_mask=CAUSAL, need_weights=False)[0][6:]
        torch.testing.assert_close(decode(layer, rest[:2], branch), expected[:2])
    for rest, branch in ((one, state), (other, fork)):  # and neither wrote over the other
        whole = torch.cat((x, rest))
        expected = layer(whole, whole, whole, attn_mask=CAUSAL, need_weights=False)[0][6:]
        torch.testing.assert_close(decode(layer, rest[2:], branch), expected[2:])


@torch.no_grad()
def test_a_copied_state_is_reordered_after_the_other_stepped(make, inputs):
    layer, x, order = make(self_attention=True), inputs(50, 8, 12), torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    state, last = {}, inputs(1, 8, 12, seed=5)
    decode(layer, x, state)
    for copied in (dict(state), copy.copy(state), copy.deepcopy(state)):
        decode(layer, inputs(1, 8, 12, seed=6), state)  # the first copy steps
        layer.reorder_incremental_state(copied, order.to(x.device))
        moved = torch.cat((x[:, order], last))
        expected = layer(moved, moved, moved, attn_mask=CAUSAL, need_weights=False)[0][-1:]
        torch.testing.assert_close(decode(layer, last, copied), expected)
        state = {}
        decode(layer, x, state)


@torch.no_grad()
def test_a_copied_model_continues_with_its_copied_state(make, inputs):
    layers, x, state = torch.nn.ModuleList([make(self_attention=True) for _ in range(2)]), inputs(6, 2, 12), {}

    def run(layers, x, state):
        for layer in layers:
            x = decode(layer, x, state)
        return x

    run(layers, x[:4], state)
    for copied, continued in (
        (copy.deepcopy(layers), copy.deepcopy(state)),
        (pickle.loads(pickle.dumps(layers)), dict(state)),
        copy.deepcopy((layers, state)),
    ):
        expected = run(layers, x[4:], dict(state))
        torch.testing.assert_close(run(copied, x[4:], continued), expected)
        assert len(continued) == 2


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_new_layer_are_the_layers_of_one_model(copied, make, inputs):
    first, x, state = make(self_attention=True), inputs(6, 2, 12), {}
    layers = [first, copied(first), copied(first)]  # as torch.nn.TransformerEncoder makes them
    full, steps = x, x.split(1)
    for layer in layers:
        full, _ = layer(full, full, full, attn_mask=CAUSAL, need_weights=False)
        steps = [decode(layer, step, state) for step in steps]
    torch.testing.assert_close(torch.cat(steps), full)
    assert len(state) == 3


def test_a_state_made_in_inference_mode_goes_on_outside(make, inputs):
    layer, x, state = make(self_attention=True), inputs(6, 2, 12), {}
    with torch.inference_mode():
        decode(layer, x[:4], state)
    with torch.no_grad():
        rest = decode(layer, x[4:], state)
        torch.testing.assert_close(rest, layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0][4:])


def test_nothing_is_saved_before_the_first_step(make):
    layer, state = make(), {}
    assert layer.cache.get(None) is None and layer.cache.get(state) is None
    assert layer.reorder_incremental_state(state, torch.tensor([0])) == {}


@pytest.mark.parametrize("state", [[], [{}], (), "state", torch.zeros(1)])
def test_a_state_that_is_no_dictionary_is_refused(make, inputs, state):
    layer, x = make(self_attention=True), inputs(1, 2, 12)
    for use in (lambda: decode(layer, x, state), lambda: layer.reorder_incremental_state(state, torch.tensor([0, 1]))):
        with pytest.raises(ValueError, match=f"incremental_state is a {type(state).__name__}: expected a dictionary"):
            use()


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong",
    [
        {"attn_mask": torch.zeros(7, 7)},
        {"key_padding_mask": torch.zeros(2, 9)},
        {"attn_mask": CAUSAL.replace(window=0)},
    ],
)
def test_a_step_that_failed_can_be_repeated(wrong, make, inputs):
    layer, x, state = make(self_attention=True), inputs(3, 2, 12), {}
    decode(layer, x[:2], state)
    for before_softmax in (False, True):
        with pytest.raises(ValueError, match=r"mask|window"):
            layer(*(x[2:],) * 3, incremental_state=state, before_softmax=before_softmax, **wrong)
    expected = layer(x, x, x, attn_mask=CAUSAL)[0][2:]
    torch.testing.assert_close(decode(layer, x[2:], state), expected)


def test_copies_of_a_layer_keep_apart_what_they_save(make, inputs):
    layer, x, state = make(self_attention=True), inputs(3, 2, 12), {}
    twin = copy.deepcopy(layer)
    for step in x.split(1):
        assert torch.equal(decode(layer, step, state), decode(twin, step, state))
    assert len(state) == 2
    expected = layer(x, x, x, attn_mask=CAUSAL)[0][2:]
    fresh = {}
    decode(layer, x[:2], fresh)
    torch.testing.assert_close(decode(layer, x[2:], fresh), expected)


def test_a_cache_is_copied_and_reordered():
    layer = build_attention("mixhead-b", 16, 2, self_attention=True, batch_first=True).eval()
    x, cache, order = torch.randn(3, 5, 16), DecodingCache(), torch.tensor([2, 0])
    options = {"need_weights": False, "attn_mask": CAUSAL}
    with torch.no_grad():
        whole, _ = layer(x, x, x, **options)
        first, last = x.split((4, 1), dim=1)
        layer(first, first, first, incremental_state=cache, **options)
        layer(last, last, last, incremental_state=cache.copy(), **options)
        assert cache.length == 4
        kept = cache.copy()
        kept.reorder(order)
        for state, entries in ((cache, slice(None)), (kept, order)):
            step = last[entries]
            result, _ = layer(step, step, step, incremental_state=state, **options)
            torch.testing.assert_close(result, whole[entries, 4:])
    assert cache.length == kept.length == 5
    cache.clear()
    assert cache.length == 0 and kept.length == 5


def test_a_dictionary_that_is_copied_is_an_error_at_the_next_step():
    layer = build_attention("mha", 16, 2, self_attention=True).eval()
    x, state = torch.randn(4, 1, 16), {}
    layer(x, x, x, incremental_state=dict(state))  # as a wrapper calls it
    step = x[:1]
    with pytest.raises(UserError, match="DecodingCache"):
        layer(step, step, step, incremental_state=dict(state))
    for _ in range(2):  # texts of one step that live side by side, and new texts
        states = [{}, {}, DecodingCache()]
        for state in states:
            layer(step, step, step, incremental_state=state)
        layer(step, step, step, incremental_state=states[1])
