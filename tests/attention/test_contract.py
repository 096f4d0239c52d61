"""fairseq's forward contract: weights, scores before the softmax, dropout, refusals."""

import brute_force
import pytest
import torch
from needed_axes import PRESETS
from torch import nn

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.attention.dropout import AttentionDropout
from fairseq_lowrank.parts import PARTS

ACTIVATIONS = ("softmax", "sigsoftmax")


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_come_averaged_by_head_or_not_at_all(preset, make, inputs):
    layer, x = make(preset, head_dim=4), inputs(5, 2, 12)
    output, of_heads = layer(x, x, x, attn_mask=CAUSAL, need_head_weights=True, need_weights=False)
    assert output.shape == (5, 2, 12) and of_heads.shape == (3, 2, 5, 5)
    averaged = layer(x, x, x, attn_mask=CAUSAL)[1]
    assert averaged.shape == (2, 5, 5)
    torch.testing.assert_close(averaged, of_heads.mean(dim=0))
    without, weights = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    assert weights is None
    torch.testing.assert_close(without, output)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
def test_weights_are_served_whatever_the_backend(backend, make, inputs):
    layer, x = make(backend=backend), inputs(5, 2, 12)
    output, weights = layer(x, x, x)
    expected, expected_weights, *_ = brute_force.layer(layer, x, x, x)
    torch.testing.assert_close(output.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights.mean(dim=1))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0].cpu(), expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_mixed_and_not_yet_dropped(preset, make, inputs):
    layer, x = make(preset, head_dim=4, dropout=0.5).train(), inputs(5, 2, 12)
    output, weights = layer(x, x, x, need_head_weights=True)
    expected, expected_weights, *_ = brute_force.layer(layer, x, x, x)
    torch.testing.assert_close(weights.cpu(), expected_weights.transpose(0, 1))
    assert not torch.allclose(output.cpu(), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_before_softmax_returns_masked_scores_and_values(preset, activation, make, inputs, device):
    padding = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    for appended in (False, True):
        layer = make(preset, head_dim=4, activation=activation, add_bias_kv=appended, add_zero_attn=appended)
        query, key = inputs(3, 2, 12), inputs(4, 2, 12, seed=3)
        scores, values = layer(query, key, key, key_padding_mask=padding, before_softmax=True)
        expected = brute_force.layer(layer, query, key, key, hidden=padding.cpu()[:, None, None, :])
        torch.testing.assert_close(scores.cpu(), expected[2].flatten(0, 1))
        torch.testing.assert_close(values.cpu(), expected[3].flatten(0, 1))


@pytest.mark.parametrize("preset", PRESETS)
def test_dropout_acts_in_training_and_where_it_is_retained(preset, make, inputs):
    layer, x = make(preset, head_dim=4, dropout=0.5), inputs(4, 2, 12)

    def outputs():
        return [layer(x, x, x, need_weights=False)[0] for _ in range(2)]

    exact, again = outputs()
    assert torch.equal(exact, again)
    layer.train()
    first, second = outputs()
    assert not torch.allclose(first, second)
    layer.eval()
    layer.dropout_module.apply_during_inference = True
    first, second = outputs()
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("preset", PRESETS)
def test_dropout_keeps_the_mean(preset, make, inputs):
    layer, x = make(preset, head_dim=4, dropout=0.3), inputs(3, 1, 12)
    exact = layer(x, x, x, need_weights=False)[0]
    torch.manual_seed(0)
    many = x.repeat(1, 4000, 1)
    outputs = layer.train()(many, many, many, need_weights=False)[0]
    standard_error = outputs.std(dim=1, keepdim=True) / 4000**0.5
    assert ((outputs.mean(dim=1, keepdim=True) - exact).abs() < 5 * standard_error).all()


def test_a_dropout_module_of_another_make_is_used(make, inputs):
    class Dropout(nn.Module):
        p, apply_during_inference = 0.5, True

    layer, x = make(dropout=Dropout()), inputs(4, 2, 12)
    assert not torch.allclose(layer(x, x, x)[0], layer(x, x, x)[0])


def test_a_dropout_module_of_torch_drops_in_training_alone(make, inputs):
    layer, x = make(dropout=nn.Dropout(0.5)), inputs(4, 2, 12)
    assert not torch.allclose(layer.train()(x, x, x)[0], layer(x, x, x)[0])
    assert torch.equal(layer.train(False)(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_seed_drops_the_same(preset, make, inputs):
    layer, x = make(preset, head_dim=4, dropout=0.5).train(), inputs(4, 2, 12)
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs.append(layer(x, x, x, need_weights=False)[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("preset", ["skv", "el"])
def test_another_value_than_the_key_is_refused(preset, make, inputs):
    layer, x = make(preset), inputs(4, 2, 12)
    assert layer(x, x, x[:])[0].shape == x.shape
    for value in (x + 1, x.flip(0)):
        with pytest.raises(ValueError, match="Pass the same tensor as key and value"):
            layer(x, x, value)


def test_a_query_that_does_not_fit_is_refused(make, inputs):
    x = inputs(4, 2, 12)
    with pytest.raises(ValueError, match="query of size 11: this layer was built with embed_dim=12"):
        make()(x[..., :11], x, x)
    with pytest.raises(ValueError, match="query has 4, key has 2"):
        make()(inputs(5, 4, 12), x, x)


def test_a_key_without_a_value_is_refused_in_every_step(make, inputs):
    layer, x, state = make(self_attention=True).train(False), inputs(1, 2, 12), {}
    with torch.no_grad():
        layer(x, x, x, incremental_state=state)
        for key, value in ((x, None), (None, x)):
            with pytest.raises(ValueError, match=r"key and value may be None only together"):
                layer(x, key, value, incremental_state=state)


def test_missing_keys_are_refused_unless_saved(make, inputs):
    layer, x = make(encoder_decoder_attention=True), inputs(4, 2, 12)
    for state in (None, {}):
        with pytest.raises(
            ValueError, match="key and value may be None only together, and only if incremental_state has saved ones"
        ):
            layer(x, None, None, incremental_state=state)


def test_dropout_out_of_range_is_refused():
    for rate in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"dropout={rate}: expected a number with 0 <= dropout < 1"):
            build_attention("mha", 12, 3, dropout=AttentionDropout(rate))


def test_an_additive_value_embedding_enters_as_often_as_its_row_keeps_weight(make, inputs):
    layer, x = make("mhe-add", dropout=0.25).train(), inputs(4, 50, 12)
    # equal scores, no values but the embedding, heads as they are
    for name in ("q_proj", "v_proj", "out_proj"):
        for parameter in getattr(layer, name).parameters():
            parameter.data.zero_()
    layer.head_embeddings.query.data.zero_()
    layer.out_proj.weight.data += torch.eye(12, device=x.device)
    heads = layer(x, x, x, need_weights=False)[0].unflatten(-1, (3, 4))
    kept = heads / layer.head_embeddings.value * (1 - 0.25) * 4
    torch.testing.assert_close(kept, kept.round())
    assert {2, 3, 4} <= set(kept[..., 0].round().int().flatten().tolist()) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
@pytest.mark.parametrize("axes", [{}, {"score": "synthesizer-dense", "max_positions": 8, "synthesizer_heads": 1}])
def test_dropout_is_drawn_for_each_head_where_heads_are_copies_too(axes, backend):
    layer = build_attention("sha", 8, 4, dropout=0.5, self_attention=True, backend=backend, **axes)
    torch.nn.init.eye_(layer.out_proj.weight)
    x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(1))

    def heads():
        return layer(x, x, x, need_weights=False)[0].unflatten(2, (4, 2)).detach()

    layer.train(False)
    alike = heads()
    torch.testing.assert_close(alike, alike[:, :, :1].expand_as(alike))
    layer.train()
    torch.manual_seed(1)
    first = heads()
    assert all((first[:, :, one] != first[:, :, other]).any() for one in range(4) for other in range(one))
    # so what looks on changes no draw
    layer.regulariser = lambda attended: attended.heads
    torch.manual_seed(1)
    torch.testing.assert_close(heads(), first)


@pytest.mark.parametrize(
    "preset", ["mha", "mixhead-a", "mixhead-b", "talking-heads", "mhe-mul", "mhe-add", "sha", "mqa"]
)
@pytest.mark.parametrize(("queries", "keys", "batch"), [(3, 3, 0), (0, 3, 2), (3, 0, 2), (0, 0, 2)])
def test_nothing_attends_to_nothing(preset, queries, keys, batch, make, inputs, device):
    layer = make(preset, self_attention=queries == keys)
    query, key = inputs(queries, batch, 12), inputs(keys, batch, 12)
    padding = torch.zeros(batch, keys, dtype=torch.bool, device=device)
    for mask in (None, CAUSAL) if queries == keys else (None,):
        for need_weights in (False, True):
            output, weights = layer(query, key, key, padding, attn_mask=mask, need_weights=need_weights)
            assert output.shape == (queries, batch, 12)
            assert weights is None or weights.shape == (batch, queries, keys)
            output.sum().backward()


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
@pytest.mark.parametrize("score", PARTS["score"])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(3, 3, 0), (0, 3, 2), (0, 0, 2)])
def test_every_score_attends_to_nothing(score, queries, keys, batch, backend, make, inputs):
    layer = make("mixhead-a", score=score, max_positions=8, self_attention=True, backend=backend)
    query, key = inputs(queries, batch, 12), inputs(keys, batch, 12)
    for mask in (None, CAUSAL):
        output, _ = layer(query, key, key, attn_mask=mask, need_weights=False)
        assert output.shape == (queries, batch, 12)
        output.sum().backward()
