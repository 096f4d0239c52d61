"""A layer for people who know ``torch.nn.MultiheadAttention``, and in its place in torch's own modules."""

import pytest
import torch
from needed_axes import PRESETS, needed_axes
from torch import nn

from fairseq_lowrank.attention import CAUSAL, build_attention

SIZE, HEADS, TIME, BATCH = 8, 2, 5, 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding():
    mask = torch.zeros(BATCH, TIME, dtype=torch.bool)
    mask[1, 3:] = True
    return mask


def layer(preset="mha", **options):
    torch.manual_seed(0)
    return build_attention(preset, SIZE, HEADS, **needed_axes(preset) | {"head_dim": 4} | options)


@pytest.mark.parametrize("preset", PRESETS)
def test_batch_first_is_time_first_transposed(preset):
    time_first, batch_first = layer(preset), layer(preset, batch_first=True)
    x = normal(TIME, BATCH, SIZE)
    swapped = x.transpose(0, 1).contiguous()
    options = {"key_padding_mask": padding(), "attn_mask": CAUSAL}
    expected, expected_weights = time_first(x, x, x, **options)
    output, weights = batch_first(swapped, swapped, swapped, **options)
    torch.testing.assert_close(output, expected.transpose(0, 1))
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
def test_the_state_of_torchs_module_loads_and_computes_the_same(options, batch_first):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(SIZE, HEADS, batch_first=batch_first, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = build_attention("mha", SIZE, HEADS, batch_first=batch_first, **options)
    state = theirs.state_dict()
    names = set(state)
    ours.load_state_dict(state)
    assert set(state) == names
    sizes = [SIZE, options.get("kdim", SIZE), options.get("vdim", SIZE)]
    shape = (BATCH, TIME) if batch_first else (TIME, BATCH)
    tensors = [normal(*shape, size, seed=size) for size in sizes]
    causal = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    for call in (
        {},
        {"key_padding_mask": padding()},
        {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding()},
        {"average_attn_weights": False},
        {"need_weights": False},
    ):
        for found, expected in zip(ours(*tensors, **call), theirs(*tensors, **call), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected)


def test_a_state_inside_a_model_of_torch_loads():
    theirs, ours = (nn.TransformerEncoderLayer(SIZE, HEADS, 16, 0.0) for _ in range(2))
    ours.self_attn = layer()
    ours.load_state_dict(theirs.state_dict())
    x = normal(TIME, BATCH, SIZE)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("preset", ["mha", "mixhead-b"])
def test_is_causal_is_the_marker(preset):
    built, x = layer(preset), normal(TIME, BATCH, SIZE)
    expected = built(x, x, x, attn_mask=CAUSAL)[0]
    assert torch.equal(built(x, x, x, is_causal=True)[0], expected)
    # with a mask it is only a hint: the mask says everything
    sees_all = torch.zeros(TIME, TIME)
    torch.testing.assert_close(built(x, x, x, attn_mask=sees_all, is_causal=True)[0], built(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_in_an_encoder_of_torch_training_and_evaluation_agree(preset, batch_first):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, 16, 0.0, batch_first=batch_first), 2)
    for block in encoder.layers:
        block.self_attn = layer(preset, batch_first=batch_first, self_attention=True)
    x = normal(BATCH, TIME, SIZE) if batch_first else normal(TIME, BATCH, SIZE)
    causal = nn.Transformer.generate_square_subsequent_mask(TIME)
    for options in ({}, {"src_key_padding_mask": padding()}, {"mask": causal}, {"mask": causal, "is_causal": True}):
        expected = encoder.train()(x, **options)
        torch.testing.assert_close(encoder.eval()(x, **options), expected)
        with torch.no_grad():  # where torch would take its fused path
            torch.testing.assert_close(encoder(x, **options), expected)
            torch.testing.assert_close(encoder.layers[1](encoder.layers[0](x)), encoder(x))
    # built from a layer of ours from the start
    again = nn.TransformerEncoder(encoder.layers[0], 2).eval()
    with torch.no_grad():
        assert again(x, src_key_padding_mask=padding()).shape == x.shape


@pytest.mark.parametrize("preset", ["mha", "mixhead-a", "mixhead-b", "mhe-mul", "el"])
def test_in_a_decoder_of_torch(preset):
    theirs = nn.TransformerDecoderLayer(SIZE, HEADS, 16, 0.0, batch_first=True)
    theirs.self_attn = layer(preset, batch_first=True, self_attention=True)
    theirs.multihead_attn = layer(preset, batch_first=True)
    decoder = nn.TransformerDecoder(theirs, 2)
    target, memory = normal(BATCH, 4, SIZE), normal(BATCH, TIME, SIZE, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    options = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding()}
    expected = decoder.train()(target, memory, **options)
    with torch.no_grad():
        output = decoder.eval()(target, memory, **options)
    torch.testing.assert_close(output, expected)
    target[:, 2:] += 1
    changed = decoder(target, memory, **options)
    torch.testing.assert_close(changed[:, :2], expected[:, :2])


def test_a_query_of_mha_in_torchs_encoder_computes_what_torch_does():
    encoder = nn.TransformerEncoderLayer(SIZE, HEADS, 16, 0.0, batch_first=True).eval()
    x = normal(BATCH, TIME, SIZE)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding())
        ours = layer(batch_first=True)
        ours.load_state_dict(encoder.self_attn.state_dict())
        encoder.self_attn = ours
        output = encoder(x, src_key_padding_mask=padding())
    torch.testing.assert_close(output[~padding()], expected[~padding()])


def test_device_and_dtype():
    built = layer("mixhead-random", device="meta", dtype=torch.bfloat16)
    tensors = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    assert all(tensor.is_meta for tensor in tensors.values())
    # parts are never narrower than float32
    assert {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16} == {"mixing.weight"}
    on_cpu, default = layer("mixhead-b", device="cpu", dtype=torch.float64), layer("mixhead-b")
    for one, other in zip(on_cpu.parameters(), default.parameters(), strict=True):
        assert one.dtype == torch.float64 and torch.equal(one.float(), other)
    assert on_cpu.mixing.weight.optim_overrides == default.mixing.weight.optim_overrides


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_other_layout_is_refused_where_it_can_be_seen(batch_first):
    built = layer(batch_first=batch_first)
    wrong = normal(TIME, BATCH, SIZE) if batch_first else normal(BATCH, TIME, SIZE)
    causal = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    for options in ({"key_padding_mask": padding()}, {"attn_mask": causal}, {"attn_mask": causal.float()}):
        with pytest.raises(ValueError, match=f"build the layer with batch_first={not batch_first}") as caught:
            built(wrong, wrong, wrong, **options)
        assert "\n" not in str(caught.value)


def test_nested_and_unbatched_tensors_are_refused():
    built = layer(batch_first=True)
    nested = torch.nested.nested_tensor([normal(2, SIZE), normal(3, SIZE)], layout=torch.jagged)
    with pytest.raises(ValueError, match="query is a nested tensor: expected a padded one"):
        built(nested, nested, nested)
    x = normal(TIME, SIZE)
    with pytest.raises(ValueError, match=r"query of shape \[5, 8\]: expected \[batch, time, 8\]"):
        built(x, x, x)
