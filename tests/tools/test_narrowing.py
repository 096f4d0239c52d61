"""Narrow heads: the best maps against singular values, weights, caches, and refusals."""

import pytest
import torch

from fairseq_lowrank.attention import CAUSAL, RotaryPositions, build_attention
from fairseq_lowrank.attention.watching import changing_calls
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.measuring.layers import LayerSubject
from fairseq_lowrank.tools.measuring.subject import BITS
from fairseq_lowrank.tools.narrowing import best_maps, divergence, fitted, maps_of_data, narrow, narrow_heads

WIDTH, HEADS, SIZE, LENGTH = 24, 4, 6, 30


def layer_of(preset="mha", **options):
    torch.manual_seed(3)
    layer = build_attention(preset, WIDTH, HEADS, self_attention=True, batch_first=True, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        layer.q_proj.weight *= 3
    return layer


def samples_of(count=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    skew = torch.randn(WIDTH, WIDTH, generator=generator).double() / 4
    inputs = (torch.randn(1, LENGTH, WIDTH, generator=generator).double() @ skew for _ in range(count))
    return [{"query": x, "key": x, "value": x, "attn_mask": CAUSAL} for x in inputs]


def projected(layer, samples):
    """Queries and keys of all samples, ``[H, T, d_k]`` and ``[G, T, d_k]``."""
    x = torch.cat([sample["query"][0] for sample in samples])
    return [getattr(layer, name)(x).unflatten(-1, (-1, SIZE)).transpose(0, 1) for name in ("q_proj", "k_proj")]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rank", [1, 3, 6])
@torch.no_grad()
def test_best_maps_truncate_the_logits_of_all_queries_of_a_key(groups, rank):
    layer, samples = layer_of("gqa", key_value_heads=groups), samples_of()
    queries, keys = projected(layer, samples)
    count = keys.size(1)
    maps = best_maps(queries.mT @ queries / count, keys.mT @ keys / count, rank)
    assert maps.queries.shape == (HEADS, SIZE, rank) and maps.keys.shape == (groups, SIZE, rank)
    for group in range(groups):
        of_group = slice(group * HEADS // groups, (group + 1) * HEADS // groups)
        logits = queries[of_group].flatten(0, 1) @ keys[group].mT
        left, values, right = torch.linalg.svd(logits, full_matrices=False)
        expected = (left[:, :rank] * values[:rank]) @ right[:rank]
        found = (queries[of_group] @ maps.queries[of_group]).flatten(0, 1) @ (keys[group] @ maps.keys[group]).mT
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"key_value_heads": 2}, {"value_dim": 5}, {"bias": False}])
@torch.no_grad()
def test_maps_of_the_whole_size_change_nothing(options):
    layer, samples = layer_of(**options), samples_of()
    for given in ((), samples):
        whole = narrow_heads(layer, SIZE, given)
        for sample in samples:
            torch.testing.assert_close(whole(**sample)[0], layer(**sample)[0], rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_narrow_layer_computes_the_mapped_scores_with_the_same_values():
    layer, samples = layer_of("mixhead-a", key_value_heads=2), samples_of()
    subject = LayerSubject("layer", [("layer", "decoder", 0, layer)], samples, lambda one: (layer(**one), 1.0), BITS, 1)
    maps = maps_of_data(subject, 2, steps=0)["layer"]
    result, calls = narrow(layer, maps), {}
    for name, module in (("old", layer), ("new", result)):
        with changing_calls({module: lambda call, name=name: calls.setdefault(name, call)}):
            module(**samples[0])
    old, new = calls["old"], calls["new"]
    assert new.scores.q.shape[-1] == new.scores.k.shape[-1] == 2 and new.scores.k.size(1) == 2
    expected = (old.scores.q @ maps.queries) @ (old.scores.k @ maps.keys).repeat_interleave(2, 1).mT / SIZE**0.5
    torch.testing.assert_close(new.scores.dense(), expected)
    torch.testing.assert_close(new.v, old.v)
    assert result.spec.value_dim == SIZE


@torch.no_grad()
def test_data_and_a_fit_to_patterns_each_lower_the_divergence():
    layer, samples = layer_of(), samples_of(8)
    wanted = [layer(**sample, need_head_weights=True)[1] for sample in samples]

    def error(other):
        found = [other(**sample, need_head_weights=True)[1] for sample in samples]
        tiny = 1e-300
        return sum((a * ((a + tiny) / (b + tiny)).log()).sum().item() for a, b in zip(wanted, found, strict=True))

    weights, best, fit = (narrow_heads(layer, 2, *more) for more in ((), (samples,), (samples,)))
    best = narrow_heads(layer, 2, samples, steps=0)
    assert error(fit) < error(best) < error(weights)


def test_fit_that_does_not_help_keeps_its_start():
    layer, samples = layer_of(), samples_of(2)
    calls = []
    with torch.no_grad(), changing_calls({layer: lambda call: calls.append(call) or call}):
        layer(**samples[0], need_weights=True)
    queries, keys = projected(layer, samples)
    start = best_maps((queries.mT @ queries).detach(), (keys.mT @ keys).detach(), SIZE)  # nothing is lost
    assert divergence(calls, start) < 1e-9
    assert fitted(calls, start, 3) is start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_cache_of_keys_shrinks_and_decoding_agrees(dtype):
    layer = narrow_heads(layer_of(), 2, samples_of()).to(dtype)
    x, state, found = samples_of()[0]["query"].to(dtype), {}, []
    for position in range(5):
        step = x[:, position : position + 1]
        found.append(layer(step, step, step, incremental_state=state)[0])
    expected = layer(x[:, :5], x[:, :5], x[:, :5], attn_mask=CAUSAL)[0]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    assert layer.projection.state_sizes == {"key": 2, "value": SIZE}


def test_training_mode_stays_and_dropout_is_off_in_the_fit():
    layer = layer_of(dropout=0.5).train()
    first, second = (narrow_heads(layer, 2, samples_of(2)) for _ in range(2))
    assert layer.training and first.training
    torch.testing.assert_close(first.q_proj.weight, second.q_proj.weight)


@pytest.mark.parametrize(
    "preset, options, message",
    [
        ("mha", {"rotary": RotaryPositions()}, "rotary positions turn queries and keys after their projections"),
        ("mha", {"qk_norm": True}, "queries and keys are normalised"),
        ("mqa", {}, "projection 'multi-query'"),
        ("talking-heads", {}, "heads mix their scores"),
        ("knocking-linear", {}, "heads mix their scores, queries or keys"),
        ("mixhead-b", {}, "mixing 'positionwise' reads the queries"),
        ("mha", {"head_dim": 1}, "its heads have 1 numbers"),
    ],
)
def test_layers_without_such_maps_are_refused(preset, options, message):
    layer = build_attention(preset, WIDTH, HEADS, self_attention=True, batch_first=True, **options)
    with pytest.raises(UserError, match=message):
        narrow_heads(layer, 2)
