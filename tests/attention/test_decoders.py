"""What decoders of today need: rotary positions, normalised queries and keys, sliding windows."""

import copy
import itertools
import pickle

import brute_force
import pytest
import torch
from attention_problems import LargestTensor
from needed_axes import PRESETS as FREE_PRESETS
from torch import nn

from fairseq_lowrank.attention import (
    CAUSAL,
    METHODS,
    PRESETS,
    RotaryPositions,
    SlidingWindow,
    build_attention,
    decoding,
)
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import StateDictMismatch, UserError

REFUSED = {
    "mhe-add": "head embeddings of keys are folded",
    "mhe-mul": "head embeddings of keys are folded",
    "skv": "its cached keys are its values too",
    "el": "its cached keys are its values too",
    "lrkv": "absorbed into queries",
    "tpa": "caches factors of keys",
    "collaborative": "keys are no head's own",
}
TAKEN = [preset for preset in PRESETS if getattr(METHODS[preset].parts.get("projection"), "keys_reason", None) is None]
EXPRESSIBLE = ("mha", "gain", "sha", "mqa", "gqa", "mfa", "knocking-linear", "mea")
OPTIONS = {"self_attention": True, "rotary": RotaryPositions(100.0), "qk_norm": True}
FURTHER = {"mla": {"rotary_dim": 2}}
"""What a method needs to have rotary positions."""


def window_mask(length, size, device="cpu"):
    """True where a key is hidden, entry by entry."""
    return torch.tensor([[not t - size < s <= t for s in range(length)] for t in range(length)], device=device)


def turned(heads, base):
    """The rotation by complex numbers: feature i and i + D/2 are one, which is multiplied by exp(i p / base^(2i / D))."""
    size = heads.size(-1)
    angles = torch.tensor(
        [[p / base ** (2 * i / size) for i in range(size // 2)] for p in range(heads.size(2))], dtype=torch.float64
    )
    numbers = torch.complex(*heads.unflatten(-1, (2, -1)).unbind(dim=-2)) * torch.polar(
        torch.ones_like(angles), angles
    ).to(heads.device)
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def formula(layer, x, hidden):
    """The output ``[T, B, C]`` of a layer with plain projections, from its weights; ``hidden`` is ``[B, 1, T, T]``."""

    def heads_of(projection, size):
        return projection(x).transpose(0, 1).unflatten(-1, (-1, size)).transpose(1, 2)

    def normalised(heads, norm):
        return heads / (heads.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight if norm else heads

    size, count = layer.head_dim, layer.num_heads
    q = normalised(heads_of(layer.q_proj, size), layer.q_norm).expand(-1, count, -1, -1)
    k = normalised(heads_of(layer.k_proj, size), layer.k_norm)
    v = heads_of(layer.v_proj, layer.config.value_dim)
    turn = (lambda heads: turned(heads, layer.rotary.base)) if layer.rotary else (lambda heads: heads)
    k, v = (tensor.repeat_interleave(count // tensor.size(1), dim=1) for tensor in (turn(k), v))
    scores = turn(q) @ k.mT / size**0.5
    if layer.score_mixing is not None:
        scores = torch.einsum("ji,bjts->bits", layer.score_mixing.weight, scores)
    empty = hidden.all(dim=-1, keepdim=True)
    weights = scores.masked_fill(hidden & ~empty, -torch.inf).softmax(dim=-1).masked_fill(empty, 0)
    if layer.mixing is not None:
        matrix = layer.mixing.weight
        if layer.mixing.query_weight is not None:
            matrix = q.transpose(1, 2) @ layer.mixing.query_weight + matrix  # of queries that are not turned
            weights = torch.einsum("btji,bjts->bits", matrix, weights)
        else:
            weights = torch.einsum("ji,bjts->bits", matrix.diag() if matrix.dim() == 1 else matrix, weights)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)).transpose(0, 1)


def gradients(output, layer, x):
    return torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"rotary": RotaryPositions(100.0)}, OPTIONS], ids=["norm", "rotary", "both"]
)
@pytest.mark.parametrize("preset", ["mha", "fixedhead", "gqa", "mqa", "sha", "mixhead-a", "mixhead-b", "talking-heads"])
def test_values_and_gradients_are_the_formulas(preset, options, backend, make, inputs, device):
    layer = make(preset, **{"self_attention": True, "head_dim": 4, "backend": backend} | options)
    x = inputs(7, 2, 12).requires_grad_()
    padding = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool, device=device)
    masks = ((None, None), (CAUSAL, window_mask(7, 7, device)), (SlidingWindow(3), window_mask(7, 3, device)))
    for (mask, hidden), padded in itertools.product(masks, (None, padding)):
        hidden = (
            torch.zeros(2, 1, 7, 7, dtype=torch.bool, device=device) if hidden is None else hidden.expand(2, 1, 7, 7)
        )
        hidden = hidden if padded is None else hidden | padded[:, None, None, :]
        output, _ = layer(x, x, x, attn_mask=mask, key_padding_mask=padded, need_weights=False)
        expected = formula(layer, x, hidden)
        torch.testing.assert_close(output, expected)
        for found, wanted in zip(gradients(output, layer, x), gradients(expected, layer, x), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("turning", [None, 2], ids=["without rotary features", "rotary features"])
def test_mla_normalises_and_turns_the_keys_of_each_head(turning, make, inputs):
    rotary = None if turning is None else RotaryPositions(100.0)
    layer = make("mla", self_attention=True, qk_norm=True, rotary=rotary, rotary_dim=turning)
    x, size = inputs(6, 2, 12), layer.head_dim
    latent = layer.latent_norm(layer.latent_proj(x))
    q, k, v = (
        projected.transpose(0, 1).unflatten(-1, (3, -1)).transpose(1, 2)
        for projected in (layer.q_proj(x), layer.k_proj(latent), layer.v_proj(latent))
    )
    if turning is not None:
        k = torch.cat([k, layer.rotary_key_proj(x).transpose(0, 1)[:, None].expand(-1, 3, -1, -1)], dim=-1)
    width = size + (turning or 0)
    q, k = (
        heads / (heads.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        for heads, norm in ((q, layer.q_norm), (k, layer.k_norm))
    )
    assert layer.q_norm.weight.shape == layer.k_norm.weight.shape == (width,)
    if turning is not None:
        q, k = (torch.cat([heads[..., :size], turned(heads[..., size:], 100.0)], dim=-1) for heads in (q, k))
    scores = (q @ k.mT / width**0.5).masked_fill(
        torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1), -torch.inf
    )
    expected = layer.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)).transpose(0, 1)
    output, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    torch.testing.assert_close(output, expected)
    state = {}
    steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x.split(1)]
    torch.testing.assert_close(torch.cat(steps), expected)
    (cache,) = state.values()
    sizes = {"latent": 6} if turning is None else {"latent": 6, "rotary_key": 2}
    assert {name: tensor.size(3) for name, tensor in cache.tensors.items()} == sizes
    assert layer.cached_numbers == sum(sizes.values())


def test_rotary_positions_of_mla_need_features_that_turn(make):
    with pytest.raises(ValueError, match=r"rotary with projection 'latent': .* rotary_dim=N"):
        make("mla", self_attention=True, rotary=RotaryPositions())
    with pytest.raises(ValueError, match="rotary_dim=3: rotary positions turn pairs"):
        make("mla", self_attention=True, rotary_dim=3)
    with pytest.raises(ValueError, match="rotary needs queries and keys of one sequence"):
        make("mla", encoder_decoder_attention=True, rotary_dim=2)
    assert make("mla", self_attention=True, rotary_dim=2).rotary.base == 10000


@pytest.mark.parametrize("preset", EXPRESSIBLE)
def test_a_plain_layer_with_the_same_options_gives_the_same(preset, make, inputs):
    """Keys are whole when they are normalised and turned, in each projection that takes the options."""
    layer, without = make(preset, **OPTIONS), make(preset, self_attention=True)
    plain, x = make(head_dim=layer.head_dim, **OPTIONS), inputs(6, 2, 12)
    norms = {k: v for k, v in layer.state_dict().items() if "_norm" in k or k == "rotary_true"}
    without.load_state_dict({k: v for k, v in layer.state_dict().items() if k not in norms})
    plain.load_state_dict(dict(plain_attention(without).state_dict()) | norms)
    for mask in (CAUSAL, SlidingWindow(2)):
        torch.testing.assert_close(layer(x, x, x, attn_mask=mask)[0], plain(x, x, x, attn_mask=mask)[0])
    with pytest.raises(UserError, match="qk_norm or rotary: plain attention has neither"):
        plain_attention(layer)


@pytest.mark.parametrize("small", [0, 10**9], ids=["in place", "concatenated"])
@pytest.mark.parametrize("preset", TAKEN)
def test_decoding_equals_the_full_pass(preset, small, make, inputs, device, monkeypatch):
    monkeypatch.setattr(decoding, "SMALL_CACHE", small)
    layer, x = make(preset, **OPTIONS, **FURTHER.get(preset, {})), inputs(9, 2, 12)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
    padding[0, :2] = True
    for mask, padded in itertools.product((CAUSAL, SlidingWindow(3), SlidingWindow(100)), (None, padding)):
        full, _ = layer(x, x, x, attn_mask=mask, key_padding_mask=padded, need_weights=False)
        for sizes in ([1] * 9, [4, 1, 1, 3]):
            state, steps = {}, []
            parts = [None] * len(sizes) if padded is None else padded.split(sizes, dim=1)
            with torch.no_grad():
                for step, part in zip(x.split(sizes), parts, strict=True):
                    steps += layer(step, step, step, part, state, attn_mask=mask, need_weights=False)[:1]
            torch.testing.assert_close(torch.cat(steps), full)


@pytest.mark.parametrize("preset", TAKEN)
def test_rotary_positions_count_distances_alone(preset, make, inputs, device):
    layer, x = make(preset, **OPTIONS, **FURTHER.get(preset, {})), inputs(5, 2, 12)
    noise = inputs(3, 2, 12, seed=9)
    expected, _ = layer(x, x, x, attn_mask=CAUSAL)
    for padded, real in ((torch.cat((noise, x)), slice(3, 8)), (torch.cat((x, noise)), slice(0, 5))):
        padding = torch.ones(2, 8, dtype=torch.bool, device=device)
        padding[:, real] = False
        for need_weights in (False, True):
            output, _ = layer(padded, padded, padded, padding, attn_mask=CAUSAL, need_weights=need_weights)
            torch.testing.assert_close(output[real], expected)
    layer.rotary = None
    assert not torch.allclose(layer(x, x, x, attn_mask=CAUSAL)[0][1:], expected[1:])


def test_any_function_of_heads_and_positions_may_turn(make, inputs):
    calls = []

    def rotary(heads, positions):
        calls.append((tuple(heads.shape), positions.tolist()))
        return heads

    layer, x, state = make("gqa", self_attention=True, rotary=rotary), inputs(4, 2, 12), {}
    for step in x.split([3, 1]):
        layer(step, step, step, incremental_state=state, attn_mask=CAUSAL)
    assert calls == [
        ((2, 1, 3, 4), [0, 1, 2]),
        ((2, 3, 3, 4), [0, 1, 2]),
        ((2, 1, 1, 4), [3]),
        ((2, 3, 1, 4), [3]),
    ]


def test_beams_count_positions_from_the_same_key(make, inputs):
    layer, x = make(**OPTIONS), inputs(6, 1, 12)
    keys = x[:4]
    expected, _ = layer(keys, keys, keys, attn_mask=CAUSAL)
    layer.beam_size = 2
    queries = torch.cat((keys, keys), dim=1)
    output, _ = layer(queries, keys, keys, attn_mask=CAUSAL)
    torch.testing.assert_close(output, expected.expand(-1, 2, -1))


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"rotary": RotaryPositions()}], ids=["qk_norm", "rotary"])
def test_projections_without_whole_keys_are_refused_by_name(options):
    name = next(iter(options))
    for preset, reason in REFUSED.items():
        with pytest.raises(ValueError, match=rf"{name} with projection '.*': .*{reason}.* remove {name}\."):
            build_attention(preset, 12, 3, self_attention=True, **options)
    for score in ("synthesizer-dense", "synthesizer-random"):
        with pytest.raises(ValueError, match=f"{name} with score '{score}': it has no keys"):
            build_attention("mha", 12, 3, self_attention=True, score=score, max_positions=9, **options)


def test_rotary_positions_are_refused_where_they_have_no_meaning():
    rotary = RotaryPositions()
    with pytest.raises(ValueError, match="rotary with score 'relative': it has relative positions already"):
        build_attention("mha", 12, 3, self_attention=True, score="relative", rotary=rotary)
    for options in ({}, {"encoder_decoder_attention": True}, {"self_attention": True, "add_bias_kv": True}):
        with pytest.raises(ValueError, match="rotary needs queries and keys of one sequence"):
            build_attention("mha", 12, 3, rotary=rotary, **options)
    with pytest.raises(ValueError, match="head_dim=3: rotary positions turn pairs"):
        layer, x = build_attention("mha", 12, 4, self_attention=True, rotary=rotary), torch.ones(2, 1, 12)
        layer(x, x, x)


def test_normalised_queries_and_keys_serve_cross_attention_and_relative_scores(make, inputs):
    query, key = inputs(3, 2, 12), inputs(5, 2, 12, seed=3)
    for options in ({"encoder_decoder_attention": True}, {"score": "relative", "self_attention": True}):
        layer = make(qk_norm=True, **options)
        source = key if "score" not in options else query
        output, _ = layer(query, source, source)
        for name in ("q_proj", "k_proj"):
            getattr(layer, name).weight.data *= 3
            getattr(layer, name).bias.data *= 3
        torch.testing.assert_close(layer(query, source, source)[0], output, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles_compute_the_same(make, inputs):
    layer, x = make("mixhead-b", **OPTIONS), inputs(5, 2, 12)
    expected, _ = layer(x, x, x, attn_mask=SlidingWindow(2))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        mask = pickle.loads(pickle.dumps(SlidingWindow(2)))
        assert torch.equal(other(x, x, x, attn_mask=mask)[0], expected)


def test_states_name_the_gains_and_are_held_to_the_options(make):
    layer, plain = make(**OPTIONS), make()
    state = layer.state_dict()
    assert [(name, tuple(state[name].shape)) for name in state if "norm" in name] == [
        ("q_norm.weight", (4,)),
        ("k_norm.weight", (4,)),
    ]
    make(**OPTIONS).load_state_dict(state)
    old = plain.state_dict()
    for name in ("qk_norm", "rotary"):  # as saved before there were these options
        del old._metadata[""]["attention"][name]
    plain.load_state_dict(old)
    for options in ({"qk_norm": True}, {"rotary": RotaryPositions(), "self_attention": True}):
        with pytest.raises(StateDictMismatch, match=next(iter(options))):
            make(**options).load_state_dict(old)
        with pytest.raises(StateDictMismatch, match=next(iter(options))):
            plain.load_state_dict(make(**options).state_dict())
    with pytest.raises(RuntimeError, match=r"q_norm\.weight"):  # a state of other code says nothing of options
        layer.load_state_dict(dict(old))


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.angles = nn.Parameter(torch.ones(2))

    def forward(self, heads, positions):
        angles = positions[:, None] * self.angles
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )


def test_a_rotary_module_may_learn(make, inputs):
    layer, x = make(self_attention=True, rotary=Learned()), inputs(4, 2, 12)
    assert "rotary.angles" in layer.state_dict()
    layer(x, x, x, attn_mask=CAUSAL)[0].square().sum().backward()
    assert layer.rotary.angles.grad.abs().min() > 0


@pytest.mark.parametrize("preset", FREE_PRESETS)
def test_a_window_is_its_tensor(preset, make, inputs, device):
    """In every projection: also where rows of weights are counted, and keys are appended."""
    padding = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]], dtype=torch.bool)
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}):
        layer, x = make(preset, head_dim=4, self_attention=True, **options), inputs(6, 2, 12)
        for size, padded in itertools.product((1, 2, 5, 6), (None, padding)):
            given = None if padded is None else padded.to(device)
            output, _ = layer(x, x, x, given, attn_mask=SlidingWindow(size), need_weights=False)
            hidden = window_mask(6, size).expand(2, 1, 6, 6)
            hidden = hidden if padded is None else hidden | padded[:, None, None, :]
            expected, weights, *_ = brute_force.layer(layer, x, x, x, hidden=hidden)
            torch.testing.assert_close(output.cpu(), expected)
            found = layer(x, x, x, given, attn_mask=SlidingWindow(size), need_head_weights=True)[1]
            torch.testing.assert_close(found.cpu(), weights.transpose(0, 1))


@pytest.mark.parametrize("score", ["relative", "synthesizer-dense", "synthesizer-random"])
def test_a_window_limits_other_scores(score, make, inputs, device):
    x = inputs(200, 1, 12).requires_grad_()
    results = []
    for backend, mask in (("blocked", SlidingWindow(5)), ("reference", window_mask(200, 5, device))):
        layer = make(score=score, self_attention=True, backend=backend, max_positions=200)
        output, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
        output.square().sum().backward()
        results.append([output, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
        x.grad = None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_window_makes_no_tensor_of_all_scores(make, inputs):
    length = 2048
    layer, x = make(**OPTIONS, dtype=torch.float32), inputs(length, 1, 12, dtype=torch.float32).requires_grad_()
    with LargestTensor() as largest:
        layer(x, x, x, attn_mask=SlidingWindow(64), need_weights=False)[0].sum().backward()
    assert largest.bytes < 4 * length**2 / 8


def test_a_window_that_hides_nothing_is_causality(make, inputs, monkeypatch):
    layer, x, calls = make(), inputs(5, 2, 12), []
    original = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *tensors, **options: calls.append(options["is_causal"]) or original(*tensors, **options),
    )
    expected, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    assert torch.equal(layer(x, x, x, attn_mask=SlidingWindow(5), need_weights=False)[0], expected)
    assert calls == [True, True]


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_a_window_of_no_keys_is_refused(size):
    with pytest.raises(ValueError, match=rf"SlidingWindow\({size}\): expected a positive integer"):
        SlidingWindow(size)


@pytest.mark.parametrize("preset", ["mha", "mixhead-b"])
def test_compiled_layers_give_the_same(preset, make, inputs):
    layer, x = make(preset, **OPTIONS), inputs(40, 2, 12)
    expected, _ = layer(x, x, x, attn_mask=SlidingWindow(7), need_weights=False)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x, attn_mask=SlidingWindow(7), need_weights=False)[0], expected)
