"""Attention of other frameworks on the core, against layers with the same weights and against PyTorch's own attention."""

import functools
import itertools
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from examples.frameworks import fairseq2, gpt, torchtitan, zoology
from fairseq_lowrank.attention import PackedDocuments, RotaryPositions, SlidingWindow, build_attention
from fairseq_lowrank.attention.core import core_presets

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"c_q": "q_proj", "c_k": "k_proj", "c_v": "v_proj", "c_proj": "out_proj"}


def moved(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return module


def name_in_layer(name):
    first, _, rest = name.partition(".")
    return rest if first == "core" else f"{NAMES[first]}.{rest}"


@pytest.mark.parametrize("method", sorted(set(core_presets()) - {"diff"}))  # it takes two heads of queries
def test_the_gpt_has_the_attention_of_a_layer(method):
    ours = gpt.CausalSelfAttention(64, 8, 2, 5, method)
    moved(ours.core)
    options = {"qk_norm": True, "rotary": RotaryPositions(), "bias": False}
    layer = build_attention(method, 64, 8, key_value_heads=2, self_attention=True, batch_first=True, **options)
    state = {name_in_layer(name): tensor for name, tensor in ours.state_dict().items()}
    layer.load_state_dict(layer.state_dict() | state)
    x = torch.randn(2, 12, 64)
    output, (expected, _) = ours(x), layer(x, x, x, attn_mask=SlidingWindow(5), need_weights=False)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    for result in (output, expected):
        result.square().sum().backward()
    given = dict(layer.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, given[name_in_layer(name)].grad, atol=1e-3, rtol=1e-4)
    cache = []
    with torch.no_grad():
        steps = torch.cat([ours.eval()(step, cache) for step in x.split([5, 1, 1, 3, 2], dim=1)], dim=1)
        torch.testing.assert_close(steps, ours(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mha", "mixhead-a", "score-mixing"])
def test_the_gpt_learns_and_samples_with_its_cache(method):
    text = (ROOT / "README.md").read_bytes()
    model, losses = gpt.train(text, method, 20, length=64, batch=4)
    assert losses[-1] < losses[0] - 1
    tokens = torch.tensor([list(text[:20])])
    sampled = model.sample(tokens, 5)
    for length in range(20, 25):
        assert sampled[0, length] == model(sampled[:, :length])[0, -1].argmax()


@pytest.mark.parametrize("axes", [{}, {"method": "mixhead-b", "activation": "sigsoftmax"}, {"method": "gated"}])
def test_a_mixer_of_zoology_is_a_layer(axes):
    mixer = moved(zoology.LowrankMixer(64, layer_idx=1, num_heads=4, **axes))
    axes = dict(axes)
    layer = build_attention(axes.pop("method", "mixhead-a"), 64, 4, self_attention=True, batch_first=True, **axes)
    state = {name.removeprefix("core."): tensor for name, tensor in mixer.state_dict().items()}
    for kind in ("weight", "bias"):
        names = ("q_proj", "k_proj", "v_proj")
        state |= {f"{name}.{kind}": part for name, part in zip(names, state.pop(f"wqkv.{kind}").chunk(3), strict=True)}
    layer.load_state_dict(state)
    x = torch.randn(2, 16, 64)
    expected, _ = layer(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(mixer(x), expected, atol=1e-5, rtol=1e-5)
    mixer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in mixer.parameters())


def layer_of(core, method):
    """A layer with the parts of a core. Its outputs are its heads: the output projection is the identity."""
    layer = build_attention(method, 128, 8, key_value_heads=2, self_attention=True, batch_first=True).eval()
    layer.load_state_dict(layer.state_dict() | core.state_dict())
    torch.nn.init.eye_(layer.out_proj.weight)
    return layer


def projected(layer, x):
    """Queries, keys and values ``[B, T, heads, size]`` of a layer."""
    return [map_(x).unflatten(-1, (-1, 16)) for map_ in (layer.q_proj, layer.k_proj, layer.v_proj)]


def same_gradients(layer, output, expected, kept):
    """Both outputs are equal at the rows that are kept, and their gradients."""
    torch.testing.assert_close(output[kept], expected[kept], atol=1e-5, rtol=1e-5)
    names = [name for name, _ in layer.named_parameters() if not name.startswith("out_proj")]
    parameters = [layer.get_parameter(name) for name in names]
    for ours, theirs in zip(
        torch.autograd.grad(output[kept].square().sum(), parameters, allow_unused=True),
        torch.autograd.grad(expected[kept].square().sum(), parameters, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


FRAMEWORK_METHODS = ["mha", "mixhead-a", "mixhead-b", "talking-heads", "sinks"]


@pytest.mark.parametrize("method", FRAMEWORK_METHODS)
def test_an_sdpa_of_fairseq2_is_a_layer(method):
    bias = type("CausalAttentionBias", (), {"attn_window_len": 4})()
    sdpa = functools.partial(fairseq2.LowrankSDPA, method, 8, 16)(bias)
    layer, x = layer_of(moved(sdpa.core), method), torch.randn(2, 9, 128)
    for axis, part in layer.named_children():
        if hasattr(sdpa.core, axis):
            setattr(sdpa.core, axis, part)  # one part in both, so gradients come together
    q, k, v = projected(layer, x)
    layout = SimpleNamespace(packed=False, padded=True, seq_lens=[9, 6])
    padding = torch.arange(9) >= torch.tensor(layout.seq_lens)[:, None]
    expected, _ = layer(x, x, x, key_padding_mask=padding, attn_mask=SlidingWindow(4), need_weights=False)
    same_gradients(layer, sdpa(q, layout, k, layout, v, None)[0].flatten(2), expected, ~padding)


@pytest.mark.parametrize("method", FRAMEWORK_METHODS)
def test_an_inner_attention_of_torchtitan_is_a_layer(method):
    inner = moved(torchtitan.LowrankInnerAttention(method, 8, 16))
    layer, x = layer_of(inner.core, method), torch.randn(1, 13, 128)
    for axis, part in layer.named_children():
        if hasattr(inner.core, axis):
            setattr(inner.core, axis, part)
    starts = torch.tensor([0, 5, 6, 13])
    q, k, v = (heads[0] for heads in projected(layer, x))
    output = inner(q, k, v, attention_metadata=Metadata(starts, starts, 7, 7), enable_gqa=True).flatten(1)[None]
    expected, _ = layer(x, x, x, attn_mask=PackedDocuments(cu_seqlens=starts, causal=True), need_weights=False)
    same_gradients(layer, output, expected, torch.ones(1, 13, dtype=torch.bool))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_an_sdpa_of_fairseq2_is_that_of_torch(causal, window):
    kind = "CausalAttentionBias" if causal else "IdentityBias"
    bias = type(kind, (), {"attn_window_len": window})()
    sdpa = functools.partial(fairseq2.LowrankSDPA, "mixhead-a", 8, 16)(bias, scale=0.3)
    q, k, v = torch.randn(2, 9, 8, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    layout = SimpleNamespace(packed=False, padded=True, seq_lens=[9, 6])
    heads, weights = sdpa(q, layout, k, layout, v, None, needs_weights=True)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (torch.arange(9) < torch.tensor(layout.seq_lens)[:, None])[:, None, None].expand(-1, -1, 9, -1)
    if causal:
        seen = seen & (distance >= 0) & (distance < (window or 9))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    real = seen.any(-1)[:, 0]  # rows that see a key
    torch.testing.assert_close(heads[real], expected[real])
    assert weights.shape == (2, 8, 9, 9)
    assert sdpa(q.transpose(1, 2), layout, k.transpose(1, 2), layout, v.transpose(1, 2), None)[1] is None


Metadata = namedtuple("Metadata", "cu_seq_q cu_seq_k max_q max_k")


@pytest.mark.parametrize("method", ["mha", "mixhead-a", "talking-heads"])
@pytest.mark.parametrize("left", [-1, 2])
def test_an_inner_attention_of_torchtitan_sees_documents(method, left):
    starts = torch.tensor([0, 5, 6, 13])
    q, k, v = torch.randn(13, 8, 16), torch.randn(13, 2, 16), torch.randn(13, 2, 16)
    inner = moved(torchtitan.LowrankInnerAttention(method, 8, 16, (left, 0)))
    together = inner(q, k, v, attention_metadata=Metadata(starts, starts, 7, 7), enable_gqa=True)
    mask = "causal" if left < 0 else SlidingWindow(left + 1)
    alone = [
        inner.core(*(tensor[None, first:last] for tensor in (q, k, v)), mask)[0]
        for first, last in itertools.pairwise(starts)
    ]
    torch.testing.assert_close(together, torch.cat(alone))
    ids = torch.repeat_interleave(torch.arange(3), starts.diff())

    def mask_mod(b, h, q_idx, kv_idx):
        near = q_idx - kv_idx <= left if left >= 0 else True
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx) & near

    torch.testing.assert_close(inner(q, k, v, attention_metadata=mask_mod), together)
