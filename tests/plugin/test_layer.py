"""What fairseq's models ask of an attention layer beyond the layer's own contract."""

import pytest
import torch
from needed_axes import needed_axes

pytest.importorskip("fairseq")

from tiny_transformer import needs_self_attention

from fairseq_lowrank.attention import CAUSAL, PRESETS, AttentionConfig, AttentionSpec
from fairseq_lowrank.plugin.layer import FairseqAttention

IN_CROSS_ATTENTION = [preset for preset in PRESETS if not needs_self_attention(preset)]


def make(preset="mha", **options):
    torch.manual_seed(1)
    spec = AttentionSpec.from_preset(preset, **needed_axes(preset) | {"head_dim": 4})
    layer = FairseqAttention(AttentionConfig(spec, 12, 3, **options))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double().eval()


def inputs(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decode(layer, x, state):
    return torch.cat([layer(step, step, step, incremental_state=state)[0] for step in x.split(1)])


PADDING = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("preset", IN_CROSS_ATTENTION)
def test_static_keys_are_projected_once(preset):
    layer, query, encoded = make(preset, encoder_decoder_attention=True), inputs(3, 2, 12), inputs(5, 2, 12, seed=3)
    expected, expected_weights = layer(query, encoded, encoded, key_padding_mask=PADDING)
    state, options = {}, {"static_kv": True, "key_padding_mask": PADDING}
    first = layer(query[:1], encoded, encoded, incremental_state=state, **options)
    again = layer(query[1:2], None, None, incremental_state=state, **options)
    # nobody looks at what is given once keys are saved
    other = layer(query[2:], torch.zeros_like(encoded), None, incremental_state=state, static_kv=True)
    torch.testing.assert_close(torch.cat((first[0], again[0], other[0])), expected)
    torch.testing.assert_close(torch.cat((first[1], again[1], other[1]), dim=1), expected_weights)
    assert layer._get_input_buffer(state)["prev_key"].size(2) == 5


@pytest.mark.parametrize("preset", IN_CROSS_ATTENTION)
def test_keys_that_a_search_repeated_are_kept_once_a_sentence(preset):
    beam, layer = 3, make(preset, encoder_decoder_attention=True)
    query, encoded = inputs(2, 2 * beam, 12), inputs(5, 2, 12, seed=3)
    repeated, repeated_padding = encoded.repeat_interleave(beam, 1), PADDING.repeat_interleave(beam, 0)
    expected = layer(query, repeated, repeated, repeated_padding)
    layer.set_beam_size(beam)
    for key, padding in ((encoded, PADDING), (repeated, repeated_padding)):
        state = {}
        for _ in range(2):
            found = layer(query, key, key, padding, state, static_kv=True)
            torch.testing.assert_close(found, expected)
        assert layer._get_input_buffer(state)["prev_key"].size(0) == 2
        torch.testing.assert_close(layer(query, key, key, padding), expected)


def test_a_layer_that_has_been_searched_with_reads_each_sentence_of_a_batch_for_itself():
    layer = make("mixhead-b", encoder_decoder_attention=True)
    query, encoded = inputs(2, 6, 12), inputs(5, 6, 12, seed=3)
    expected = layer(query, encoded, encoded)
    layer.set_beam_size(3)
    torch.testing.assert_close(layer(query, encoded, encoded), expected)
    of_five = layer(query[:, :5], encoded[:, :5], encoded[:, :5])
    torch.testing.assert_close(of_five, (expected[0][:, :5], expected[1][:5]))


def test_the_buffer_has_fairseqs_names():
    layer, state = make(), {}
    assert layer._get_input_buffer(None) == {} and layer._get_input_buffer(state) == {}
    buffer = {"prev_key": inputs(2, 3, 1, 4), "prev_value": inputs(2, 3, 1, 4), "prev_key_padding_mask": None}
    assert layer._set_input_buffer(state, buffer) is state
    assert layer._get_input_buffer(state) == buffer


@pytest.mark.parametrize("preset", ["mla", "lrkv", "tpa", "collaborative", "mfa"])
def test_a_state_with_keys_has_the_name_that_decoders_look_for(preset):
    # with --cross-self-attention, a decoder puts the encoder's states before the keys unless this name is there
    layer, state = make(preset, self_attention=True), {}
    decode(layer, inputs(1, 2, 12), state)
    buffer, given = layer._get_input_buffer(state), {}
    assert "prev_key" in buffer
    layer._set_input_buffer(given, buffer)
    step = inputs(1, 2, 12, seed=3)
    torch.testing.assert_close(decode(layer, step, given), decode(layer, step, state))


@pytest.mark.parametrize("preset", ["mha", "skv", "mqa"])
def test_saved_keys_may_be_set_from_outside(preset):
    # as a decoder does with the self-attention state it was given
    layer, x, state = make(preset, self_attention=True), inputs(3, 2, 12), {}
    decode(layer, x[:2], state)
    buffer, given = layer._get_input_buffer(state), {}
    layer._set_input_buffer(given, {name: buffer[name] for name in ("prev_key", "prev_value") if name in buffer})
    expected = layer(x, x, x, attn_mask=CAUSAL)[0][2:]
    torch.testing.assert_close(decode(layer, x[2:], given), expected)


def test_saved_padding_of_numbers_becomes_bool():
    # fairseq's own layer keeps its padding as 0.0 and 1.0
    layer, state = make(self_attention=True), {}
    padding = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    buffer = {
        "prev_key": inputs(2, 3, 2, 4),
        "prev_value": inputs(2, 3, 2, 4, seed=4),
        "prev_key_padding_mask": padding,
    }
    layer._set_input_buffer(state, buffer)
    assert torch.equal(layer._get_input_buffer(state)["prev_key_padding_mask"], padding.bool())


def test_joint_projections_of_old_checkpoints_are_split():
    layer, old = make(), {}
    for name, tensor in layer.state_dict().items():
        if name.startswith("out_proj"):
            old[f"self_attn.{name}"] = tensor
    for kind in ("weight", "bias"):
        parts = [layer.state_dict()[f"{name}_proj.{kind}"] for name in "qkv"]
        old[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
    layer.upgrade_state_dict_named(old, "self_attn")
    loaded = make()
    for parameter in loaded.parameters():
        parameter.data.zero_()
    loaded.load_state_dict({name.removeprefix("self_attn."): tensor for name, tensor in old.items()})
    x = inputs(4, 2, 12)
    assert torch.equal(loaded(x, x, x)[0], layer(x, x, x)[0])
