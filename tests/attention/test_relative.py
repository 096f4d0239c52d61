"""Transformer-XL's scores in the layer: with every projection and mixing, with a memory, step by step, saved, refused."""

import brute_force
import pytest
import torch
from needed_axes import AXES, PRESETS, needed_axes

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.messages import StateDictMismatch
from fairseq_lowrank.methods.relative import sinusoids

HEADS, SIZE = 3, 12
TIME, KEYS = 3, 5
WITHOUT_EL = [preset for preset in PRESETS if preset != "el"]


@pytest.fixture
def relative(make):
    return lambda preset="mha", **options: make(preset, score="relative", self_attention=True, **options)


def assert_computes(layer, x, hidden=None, queries=TIME, **forward):
    """The last queries of ``x`` over all of it."""
    expected = brute_force.layer(layer, x[-queries:], x, x, hidden=hidden)
    output, weights = layer(x[-queries:], x, x, need_head_weights=True, **forward)
    torch.testing.assert_close(output.cpu(), expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(weights.cpu(), expected[1].transpose(0, 1), rtol=1e-9, atol=1e-9)
    output, _ = layer(x[-queries:], x, x, need_weights=False, **forward)
    torch.testing.assert_close(output.cpu(), expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("projection", [projection for projection in AXES["projection"] if projection != "el"])
@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("mixing", AXES["mixing"])
def test_a_segment_and_its_memory_are_the_formula(projection, activation, mixing, relative, inputs):
    layer = relative(projection=projection, activation=activation, mixing=mixing)
    future = torch.ones(TIME, KEYS, dtype=torch.bool).triu(1 + KEYS - TIME)
    for backend in ("auto", "reference", "blocked"):
        layer.backend = backend
        assert_computes(layer, inputs(KEYS, 2, SIZE), hidden=future, attn_mask=CAUSAL)


@pytest.mark.parametrize("preset", WITHOUT_EL)
def test_every_preset_sees_keys_before_and_after_a_query(preset, relative, inputs, device):
    layer, x = relative(preset, head_dim=5), inputs(KEYS, 2, SIZE)
    padding = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    hidden = padding[:, None, None, :]
    assert_computes(layer, x, hidden, queries=KEYS, key_padding_mask=padding.to(device))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_positions_have_as_many_heads_as_keys(groups, relative, inputs):
    layer = relative("gqa", num_heads=4, key_value_heads=groups, score_mixing="static", embed_dim=SIZE)
    assert layer.pos_proj.weight.shape == (groups * 3, SIZE)
    future = torch.ones(TIME, KEYS, dtype=torch.bool).triu(1 + KEYS - TIME)
    assert_computes(layer, inputs(KEYS, 2, SIZE), hidden=future, attn_mask=CAUSAL)


@pytest.mark.parametrize("preset", WITHOUT_EL)
def test_it_adds_a_position_projection_and_two_vectors_a_head(preset):
    def count(**axes):
        layer = build_attention(preset, SIZE, HEADS, device="meta", **needed_axes(preset) | axes)
        return layer, sum(parameter.numel() for parameter in layer.parameters())

    layer, numbers = count(score="relative", head_dim=5)
    groups = layer.projection.state_heads
    assert numbers - count(head_dim=5)[1] == SIZE * groups * 5 + 2 * HEADS * 5
    assert {"pos_proj.weight", "pos_bias_u", "pos_bias_v"} <= set(layer.state_dict())
    assert layer.pos_proj.bias is None


def test_the_same_seed_draws_the_same_weights_with_and_without():
    torch.manual_seed(3)
    plain = build_attention("mhe-mul", SIZE, HEADS).state_dict()
    torch.manual_seed(3)
    relative = build_attention("mhe-mul", SIZE, HEADS, score="relative").state_dict()
    assert all(torch.equal(relative[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("preset", ["mha", "mixhead-b", "mhe-mul", "mhe-add", "sha", "skv", "gqa"])
@pytest.mark.parametrize("recording", [True, False])
def test_steps_give_what_the_whole_gives_when_beams_are_reordered(preset, recording, relative, inputs, device):
    layer, x, state = relative(preset), inputs(3, 3, SIZE), {}
    rest, order = inputs(12, 3, SIZE, seed=3), torch.tensor([2, 0, 0], device=device)
    with torch.set_grad_enabled(recording):
        for step in x.split(1):
            layer(step, step, step, incremental_state=state, need_weights=False)
        layer.reorder_incremental_state(state, order)
        steps = [layer(s, s, s, incremental_state=state, need_weights=False)[0] for s in rest.split(1)]
    whole = torch.cat((x[:, order], rest))
    torch.testing.assert_close(torch.cat(steps), layer(whole, whole, whole, attn_mask=CAUSAL)[0][3:])


def test_distances_alone_count(relative, inputs, device):
    layer, x = relative(), inputs(4, 2, SIZE)
    padded = torch.cat((inputs(3, 2, SIZE, seed=3), x))
    padding = torch.zeros(2, 7, dtype=torch.bool, device=device)
    padding[:, :3] = True
    expected = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    output = layer(padded, padded, padded, attn_mask=CAUSAL, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(output[3:], expected)


def test_scores_before_the_softmax_hold_positions(relative, inputs):
    layer, x = relative("mixhead-b"), inputs(4, 2, SIZE)
    scores, values = layer(x, x, x, attn_mask=CAUSAL, before_softmax=True)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    _, _, expected, expected_values = brute_force.layer(layer, x, x, x, hidden=future)
    torch.testing.assert_close(scores.cpu(), expected.flatten(0, 1))
    torch.testing.assert_close(values.cpu(), expected_values.flatten(0, 1))


@pytest.mark.parametrize("preset", WITHOUT_EL)
def test_every_parameter_learns(preset, relative, inputs):
    layer, x = relative(preset), inputs(4, 2, SIZE)
    layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].square().sum().backward()
    for name in ("pos_proj.weight", "pos_bias_u", "pos_bias_v"):
        assert layer.get_parameter(name).grad.abs().sum() > 0


def test_a_state_says_that_it_is_relative(relative):
    state = relative().state_dict()
    relative().load_state_dict(state)
    plain = build_attention("mha", SIZE, HEADS, dtype=torch.float64)
    with pytest.raises(StateDictMismatch) as error:
        plain.load_state_dict(state, strict=False)
    assert (error.value.saved, error.value.current) == ({"score": "relative"}, {"score": "dot-product"})
    with pytest.raises(StateDictMismatch) as error:
        relative().load_state_dict(plain.state_dict())
    assert (error.value.saved, error.value.current) == ({"score": "dot-product"}, {"score": "relative"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"preset": "el"},
            "projection 'el' projects no keys",
        ),
        (
            {"encoder_decoder_attention": True},
            "score 'relative' needs queries and keys of one sequence, which cross attention",
        ),
        ({"add_bias_kv": True}, r"add_bias_kv or add_zero_attn"),
        ({"add_zero_attn": True}, "add_bias_kv or add_zero_attn"),
        ({"backend": "sdpa"}, "backend='sdpa' cannot compute scores other than dot products"),
    ],
)
def test_what_has_no_positions_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(**{"preset": "mha", "embed_dim": SIZE, "num_heads": HEADS, "score": "relative"} | options)


def test_sinusoids_of_odd_sizes_and_negative_distances():
    table = sinusoids(torch.tensor([2.0, -1.0]), 3)
    expected = [
        [torch.sin(torch.tensor(x)), torch.sin(torch.tensor(x / 10000 ** (2 / 3))), torch.cos(torch.tensor(x))]
        for x in (2.0, -1.0)
    ]
    torch.testing.assert_close(table, torch.tensor(expected))


def test_it_compiles_as_one_graph_for_lengths_that_differ(inputs):
    layer = build_attention("mixhead-b", SIZE, HEADS, score="relative", self_attention=True)
    torch.compiler.reset()
    run = torch.compile(
        lambda x: layer(x[-70:], x, x, attn_mask=CAUSAL, need_weights=False)[0],
        backend="aot_eager",
        fullgraph=True,
    )
    for keys in (90, 140):
        x = inputs(keys, 2, SIZE, dtype=torch.float32)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), layer(x[-70:], x, x, attn_mask=CAUSAL, need_weights=False)[0])
