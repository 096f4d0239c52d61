"""Masks that are formulas of positions: prefixes, and functions of FlexAttention."""

import pytest
import torch
from attention_problems import call_of
from torch.nn.attention.flex_attention import create_block_mask

from fairseq_lowrank.attention import (
    DecodingCache,
    PackedDocuments,
    Prefix,
    SlidingWindow,
    Visible,
    build_attention,
    build_core,
)
from fairseq_lowrank.ops.attention import BACKENDS, check_backend

WIDTH, HEADS, LENGTH = 16, 2, 6
LENGTHS = torch.tensor([5, 0, 3])  # the first reaches into padding
PADDING = torch.arange(LENGTH) >= torch.tensor([[4], [LENGTH], [5]])


def formula(length):
    """Return where queries see keys under a prefix, ``[T, S]``, entry by entry."""
    return torch.tensor([[s <= t or s < length for s in range(LENGTH)] for t in range(LENGTH)])


def by_rows(b, h, q, kv):
    """Show even keys of one head, and every key that a list has: a function may reduce tensors that it makes."""
    return ((kv % 2 == 0) & (h == 0)) | (kv == torch.tensor([1, 3])).any(-1) | (q == kv)


def layer_of(preset="mixhead-a", backend="auto"):
    torch.manual_seed(0)
    layer = build_attention(preset, WIDTH, HEADS, self_attention=True, batch_first=True, backend=backend).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked", "sdpa"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_prefixes_of_a_layer_are_their_tensor(backend, need_weights):
    layer, x = layer_of(backend=backend), torch.randn(3, LENGTH, WIDTH)
    hidden = ~torch.stack([formula(length) for length in LENGTHS.tolist()])[:, None].expand(-1, HEADS, -1, -1)
    keywords = {"key_padding_mask": PADDING, "need_weights": need_weights}
    expected, _ = layer(x, x, x, attn_mask=hidden, **keywords)
    result, _ = layer(x, x, x, attn_mask=Prefix(LENGTHS), **keywords)
    torch.testing.assert_close(result[~PADDING], expected[~PADDING])


def test_prefixes_with_a_cache_equal_one_pass():
    layer, x, cache = layer_of("mixhead-b"), torch.randn(2, LENGTH, WIDTH), DecodingCache()
    whole, _ = layer(x, x, x, attn_mask=Prefix(3), need_weights=False)
    steps = [
        layer(part, part, part, attn_mask=Prefix(3), incremental_state=cache, need_weights=False)[0]
        for part in x.split((3, 1, 2), dim=1)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


@pytest.mark.parametrize("preset", ["mha", "mixhead-a", "talking-heads", "diff"])
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_a_function_is_its_tensor_with_gradients(preset, backend):
    core = build_core(preset, HEADS, 4, backend=backend).eval()
    tensors = [torch.randn(3, HEADS * 2 ** (preset == "diff"), LENGTH, 4, requires_grad=True) for _ in range(2)]
    q, k, v = *tensors, torch.randn(3, HEADS, LENGTH, 4, requires_grad=True)
    seen = torch.tensor(
        [
            [[bool(by_rows(0, h, t, torch.tensor(s))) for s in range(LENGTH)] for t in range(LENGTH)]
            for h in range(HEADS)
        ]
    )
    seen = seen[None].repeat(3, 1, 1, 1)
    results = []
    for mask in (by_rows, create_block_mask(by_rows, None, None, LENGTH, LENGTH, device="cpu"), Visible(seen)):
        heads = core(q, k, v, mask, inputs=torch.ones(3, LENGTH, 4 * HEADS))
        results.append((heads, *torch.autograd.grad(heads.square().sum(), (q, k, v))))
    for result in results[:2]:
        torch.testing.assert_close(result, results[2])


def test_a_function_counts_queries_from_query_start():
    core, q = build_core("mixhead-a", HEADS, 4), torch.randn(2, HEADS, LENGTH, 4)

    def band(b, h, q, kv):
        return (q - kv).abs() <= 1 + b

    whole = core(q, q, q, band)
    for start in (1, torch.tensor([1])):
        torch.testing.assert_close(core(q[:, :, 1:3], q, q, band, query_start=start), whole[:, :, 1:3])
    torch.testing.assert_close(core(q[:, :, 4:], q, q, band), whole[:, :, 4:])


@pytest.mark.parametrize("preset", ["mixhead-a", "diff"])  # diff repeats heads
def test_a_function_compiles_as_one_graph(preset):
    torch._dynamo.reset()
    core = build_core(preset, HEADS, 4)
    q, v = torch.randn(2, HEADS * 2 ** (preset == "diff"), LENGTH, 4), torch.randn(2, HEADS, LENGTH, 4)
    x = torch.randn(2, LENGTH, HEADS * 4)

    def band(b, h, q, kv):
        return (q - kv).abs() <= 1

    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    for mask in (band, Prefix(2)):
        torch.testing.assert_close(compiled(q, q, v, mask, inputs=x), core(q, q, v, mask, inputs=x))


@pytest.mark.parametrize("preset", ["mixhead-a", "alibi"])
def test_masks_compile_with_symbolic_numbers(preset):
    torch._dynamo.reset()
    core = build_core(preset, HEADS, 4)
    compiled = torch.compile(core, fullgraph=True, dynamic=True, backend="aot_eager")
    documents = PackedDocuments(ids=torch.arange(LENGTH)[None] // 3)
    for mask in (SlidingWindow(2), SlidingWindow(4), Prefix(2), documents):
        for length in (LENGTH, LENGTH + 3) if mask is not documents else (LENGTH,):
            q = torch.randn(2, HEADS, length, 4)
            torch.testing.assert_close(compiled(q, q, q, mask), core(q, q, q, mask))


def test_kernels_refuse_rules_and_auto_takes_another_backend():
    q = torch.randn(1, HEADS, LENGTH, 4)
    for backend in ("triton", "tiled"):
        assert backend in BACKENDS
        with pytest.raises(ValueError, match="a mask of"):
            check_backend(backend, call_of(q, q, mask=Prefix(2)))


def test_impossible_rules_are_named():
    layer = build_attention("mha", WIDTH, HEADS, encoder_decoder_attention=True)
    x = torch.randn(LENGTH, 1, WIDTH)
    with pytest.raises(ValueError, match="cross attention"):
        layer(x, x, x, attn_mask=Prefix(2))
    for length in (-1, True, 1.5, torch.zeros(2), torch.zeros(2, 2).long()):
        with pytest.raises(ValueError, match="expected"):
            Prefix(length)
