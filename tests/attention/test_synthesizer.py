"""Synthesizers: scores that no key takes part in, of at most so many positions."""

import itertools

import brute_force
import pytest
import torch
from needed_axes import AXES

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.messages import StateDictMismatch

SCORES = ("synthesizer-dense", "synthesizer-random")
POSITIONS = 6
LEFT = ((1, 1, 0, 0), (0, 0, 0, 0))
RIGHT = ((0, 0, 0, 0), (0, 0, 0, 1))


def compositions():
    projections, mixings = ("independent", "multi-query", "single"), AXES["mixing"]
    for score, projection, activation, mixing in itertools.product(SCORES, projections, AXES["activation"], mixings):
        if (score, mixing) != ("synthesizer-random", "positionwise"):
            yield {"score": score, "projection": projection, "activation": activation, "mixing": mixing}
    yield {"score": "synthesizer-dense", "synthesizer_heads": 1}
    yield {"score": "synthesizer-dense", "synthesizer_heads": 1, "unused_key_projection": True, "bias": False}
    yield {"score": "synthesizer-dense", "synthesizer_heads": 1, "score_mixing": "static", "mixing": "positionwise"}
    yield {"score": "synthesizer-dense", "score_mixing": "static", "value_dim": 2, "head_dim": 5}
    yield {"score": "synthesizer-random", "score_mixing": "static", "value_dim": 2, "mixing": "static"}
    yield {"score": "synthesizer-random", "key_value_heads": 1, "bias": False}


def synthesizer(make, **axes):
    return make(**{"self_attention": True, "max_positions": POSITIONS} | axes)


def check(layer, x, *, causal, padding):
    padding = torch.tensor(padding, dtype=torch.bool, device=x.device)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    hidden = hidden | padding.cpu()[:, None, None, :]
    expected = brute_force.synthesizer(layer, x, hidden=hidden, padding=padding)
    real = ~padding.cpu().t()  # what stands at padding, nobody reads
    mask = {"attn_mask": CAUSAL if causal else None, "key_padding_mask": padding}
    output, weights = layer(x, x, x, need_head_weights=True, **mask)
    fast, _ = layer(x, x, x, need_weights=False, **mask)
    scores, _ = layer(x, x, x, before_softmax=True, **mask)
    for found, wanted in (
        (output.cpu(), expected[0]),
        (fast.cpu(), expected[0]),
        (weights.cpu().permute(2, 1, 0, 3), expected[1].permute(2, 0, 1, 3)),
        (scores.cpu().unflatten(0, (2, -1)).permute(2, 0, 1, 3), expected[2].permute(2, 0, 1, 3)),
    ):
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("axes", compositions(), ids=lambda axes: "-".join(map(str, axes.values())))
def test_every_composition_computes_its_formula(axes, make, inputs):
    layer, x = synthesizer(make, **axes), inputs(4, 2, 12)
    check(layer, x, causal=True, padding=LEFT)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("padding", [LEFT, RIGHT])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_moves_no_position(score, padding, causal, make, inputs):
    check(synthesizer(make, score=score), inputs(4, 2, 12), causal=causal, padding=padding)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("padding", [None, LEFT])
def test_backends_agree_on_values_and_gradients(score, activation, padding, make, inputs):
    mask = None if padding is None else torch.tensor(padding, dtype=torch.bool)
    results = {}
    for backend in (
        "reference",
        "blocked",
        "auto",
        *(["sdpa"] if (score, activation) == (SCORES[0], "softmax") else []),
    ):
        layer = synthesizer(make, score=score, activation=activation, backend=backend)
        x = inputs(4, 2, 12).requires_grad_()
        output, _ = layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=mask, need_weights=False)
        results[backend] = [output, *torch.autograd.grad(output.pow(2).sum(), [x, *layer.parameters()])]
    for found in results.values():
        for one, exact in zip(found, results["reference"], strict=True):
            torch.testing.assert_close(one, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "axes",
    [axes for axes in compositions() if axes.get("projection", "independent") == "independent"],
    ids=lambda axes: "-".join(map(str, axes.values())),
)
@pytest.mark.parametrize("recording", [True, False])
def test_decoding_keeps_values_alone_and_equals_the_full_pass_when_beams_are_reordered(axes, recording, make, inputs):
    layer = synthesizer(make, **axes)
    x, state, order = inputs(5, 3, 12), {}, torch.tensor([2, 0, 0])
    with torch.set_grad_enabled(recording):
        layer(x[:2], x[:2], x[:2], incremental_state=state, attn_mask=CAUSAL)  # a prefix at once
        layer(x[2:3], x[2:3], x[2:3], incremental_state=state)
        layer.reorder_incremental_state(state, order)
        whole = torch.cat((x[:3, order], x[3:]))
        steps = [layer(step, step, step, incremental_state=state)[0] for step in x[3:].split(1)]
    torch.testing.assert_close(torch.cat(steps), layer(whole, whole, whole, attn_mask=CAUSAL)[0][3:])
    assert list(layer.cache.get(state).tensors) == ["value"]


@pytest.mark.parametrize("score", SCORES)
def test_decoding_counts_positions_from_the_first_token_of_a_padded_prefix(score, make, inputs):
    layer, x = synthesizer(make, score=score), inputs(5, 2, 12)
    padding = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=padding)[0]
    alone = layer(x[2:, :1], x[2:, :1], x[2:, :1], attn_mask=CAUSAL)[0]
    torch.testing.assert_close(expected[2:, :1], alone)
    state = {}
    steps = [
        layer(
            x[t : t + 1], x[t : t + 1], x[t : t + 1], key_padding_mask=padding[:, t : t + 1], incremental_state=state
        )[0]
        for t in range(5)
    ]
    torch.testing.assert_close(torch.cat(steps)[2:], expected[2:])


@pytest.mark.parametrize("score", SCORES)
def test_a_longer_sentence_is_refused_whole_or_step_by_step(score, make, inputs):
    layer, x, state = synthesizer(make, score=score), inputs(POSITIONS + 1, 2, 12), {}
    message = f"a sentence of 7 positions, and score '{score}' was built for up to 6"
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, attn_mask=CAUSAL)
    for step in x[:POSITIONS].split(1):
        layer(step, step, step, incremental_state=state)
    with pytest.raises(ValueError, match=message):
        layer(x[-1:], x[-1:], x[-1:], incremental_state=state)


def test_a_dense_synthesizer_is_attention_to_a_learned_key_for_each_position(make, inputs):
    """Its columns as keys of standard attention, which has their features as queries: the same scores."""
    layer = synthesizer(make, score="synthesizer-dense", bias=False, synthesizer_heads=1)
    x = inputs(4, 2, 12)
    scores, _ = layer(x, x, x, before_softmax=True)
    features = layer.q_proj(x).relu().unflatten(-1, (3, 4))
    keys = layer.synthesizer.weight[:4]
    torch.testing.assert_close(scores.unflatten(0, (2, 3)), torch.einsum("tbhf,sf->bhts", features, keys))


def test_an_unused_key_projection_changes_nothing_and_has_a_gradient_of_zeros(make, inputs):
    layer = synthesizer(make, score="synthesizer-dense", unused_key_projection=True)
    x = inputs(4, 2, 12)
    output = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    output.sum().backward()
    for parameter in layer.k_proj.parameters():
        assert parameter.grad is not None and not parameter.grad.any()
        parameter.data.fill_(float("inf"))
    assert layer.synthesizer.weight.grad.any()
    assert torch.equal(layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0], output)


@pytest.fixture
def one_worker():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "axes",
    [
        {"score": "synthesizer-dense"},
        {"score": "synthesizer-random"},
        {"score": "synthesizer-dense", "unused_key_projection": True},
    ],
    ids=lambda axes: "-".join(map(str, axes.values())),
)
def test_distributed_training_gets_the_gradient_of_every_parameter(axes, make, inputs, one_worker):
    layer, x = synthesizer(make, **axes), inputs(4, 2, 12)

    def train(layer):
        distributed = torch.nn.parallel.DistributedDataParallel(layer)
        for _ in range(2):  # what is still awaited is told at the second step
            distributed(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].sum().backward()

    train(layer)
    layer.unused = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        train(layer)


def number(**options):
    layer = build_attention("mha", 12, 3, self_attention=True, bias=False, max_positions=POSITIONS, **options)
    return sum(parameter.numel() for parameter in layer.parameters())


def test_parameters():
    """d² of the first layer, of values and of the output; d·n of the second layer, as the Synthesizer paper counts, or d·n/h where
    heads share it; h·n² where there are no layers."""
    assert number(score="synthesizer-dense") == 3 * 12**2 + 12 * POSITIONS
    assert number(score="synthesizer-dense", synthesizer_heads=1) == 3 * 12**2 + 4 * POSITIONS
    assert number(score="synthesizer-dense", unused_key_projection=True) == 4 * 12**2 + 12 * POSITIONS
    assert number(score="synthesizer-random") == 2 * 12**2 + 3 * POSITIONS**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"encoder_decoder_attention": True},
            "cross attention has two",
        ),
        ({"add_bias_kv": True}, r"add_bias_kv or add_zero_attn"),
        ({"add_zero_attn": True}, r"add_bias_kv or add_zero_attn"),
        (
            {"projection": "shared-kv"},
            "projection 'shared-kv' needs keys.*independent",
        ),
        ({"projection": "el"}, "projection 'el' needs keys.*independent"),
        ({"projection": "head-embedding-add"}, "projection 'head-embedding-add' needs keys"),
        ({"projection": "head-embedding-mul"}, "projection 'head-embedding-mul' needs keys"),
        ({"max_positions": None}, r"max_positions=N"),
        ({"max_positions": 0}, "max_positions=0: expected a positive integer"),
        ({"max_positions": 10**9}, "max_positions=1000000000: .* expected sizes that make at most"),
    ],
)
@pytest.mark.parametrize("score", SCORES)
def test_what_has_no_meaning_is_refused(score, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_attention("mha", 12, 3, **{"score": score, "max_positions": POSITIONS} | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"score": "synthesizer-random", "mixing": "positionwise"},
            "mixing 'positionwise'",
        ),
        (
            {"score": "synthesizer-random", "synthesizer_heads": 1},
            "synthesizer_heads=1 has no effect with score 'synthesizer-random'",
        ),
        ({"score": "synthesizer-dense", "unused_key_projection": 1}, "unused_key_projection=1: expected True or False"),
        ({"synthesizer_heads": 1}, "synthesizer_heads=1 has no effect with score 'dot-product'"),
        (
            {"score": "synthesizer-dense", "synthesizer_heads": 2},
            "synthesizer_heads=2: expected a divisor of num_heads=3",
        ),
        ({"unused_key_projection": True}, "unused_key_projection=True has no effect with score 'dot-product'"),
        (
            {"score": "synthesizer-random", "unused_key_projection": True},
            "unused_key_projection=True has no effect with score 'synthesizer-random'",
        ),
    ],
)
def test_what_belongs_to_one_synthesizer_is_refused_elsewhere(axes, message):
    with pytest.raises(ValueError, match=message):
        build_attention("mha", 12, 3, max_positions=POSITIONS, **axes)


def test_more_queries_than_keys_are_refused(make, inputs):
    layer = synthesizer(make, score="synthesizer-dense")
    with pytest.raises(
        ValueError, match="4 queries of 3 keys: score 'synthesizer-dense' expected both of one sentence"
    ):
        layer(inputs(4, 2, 12), inputs(3, 2, 12), inputs(3, 2, 12))


def build(score, **options):
    return build_attention("mha", 12, 3, **{"score": score, "max_positions": POSITIONS} | options)


@pytest.mark.parametrize("score", SCORES)
def test_a_state_says_what_it_means(score):
    state = build(score).state_dict()
    build(score).load_state_dict(state)
    mixing = build(score, mixing="static")
    mixing.load_state_dict(state)  # it starts as the identity
    assert torch.equal(mixing.mixing.weight, torch.eye(3))
    other = SCORES[1 - SCORES.index(score)]
    for layer, name, saved, current in (
        (build(other), "score", score, other),
        (build(score, max_positions=7), "max_positions", 6, 7),
        (build_attention("mha", 12, 3), "score", score, "dot-product"),
    ):
        with pytest.raises(StateDictMismatch) as error:
            layer.load_state_dict(state)
        assert (error.value.saved[name], error.value.current[name]) == (saved, current)


def test_a_state_says_how_many_second_layers_it_has():
    state = build(SCORES[0], max_positions=6, synthesizer_heads=1).state_dict()
    with pytest.raises(StateDictMismatch) as error:
        build(SCORES[0], max_positions=2).load_state_dict(state)
    assert (error.value.saved["synthesizer_heads"], error.value.current["synthesizer_heads"]) == (1, 3)


def test_stock_attention_has_nothing_to_load_into_a_synthesizer():
    state = build_attention("mha", 12, 3).state_dict()
    with pytest.raises(StateDictMismatch) as error:
        build("synthesizer-dense").load_state_dict(state)
    assert error.value.saved["score"] == "dot-product"
