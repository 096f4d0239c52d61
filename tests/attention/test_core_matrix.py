"""Every method of a core × masks × layouts × groups × decoding × dtypes, against formulas in float64 and against the layer."""

import pytest
import torch
from formula import load

from fairseq_lowrank.attention import Hidden, PackedDocuments, Prefix, SlidingWindow, build_attention, build_core
from fairseq_lowrank.attention.core import core_presets
from fairseq_lowrank.ops import AttentionMask

BATCH, HEADS, SIZE, LENGTH = 2, 4, 3, 5
WIDTH = HEADS * SIZE
POSITIONS = torch.arange(LENGTH)
LATER = POSITIONS[:, None] < POSITIONS
PADDING = torch.tensor([[LENGTH], [3]]) <= POSITIONS
MIXED = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4
MASKS = {  # the mask, and what it hides: [B, T, S]
    "none": (None, torch.zeros(LENGTH, LENGTH).bool()),
    "causal": ("causal", LATER),
    "window": (SlidingWindow(2), LATER | (POSITIONS[:, None] - 2 >= POSITIONS)),
    "documents": (PackedDocuments(cu_seqlens=[0, 2, LENGTH]), LATER | ((POSITIONS >= 2) != (POSITIONS[:, None] >= 2))),
    "prefix": (Prefix(3), LATER & (POSITIONS >= 3)),
    "function": (lambda b, h, q, kv: (q - kv) % 2 == 0, (POSITIONS - POSITIONS[:, None]) % 2 != 0),
    "tensor": (Hidden(MIXED), MIXED),  # a row may see no key
    "padding": (AttentionMask(key_padding=PADDING), PADDING[:, None].expand(-1, LENGTH, -1)),
}
PRESETS = core_presets()
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.1}


def layer_of(preset, dtype=torch.float64):
    torch.manual_seed(0)
    layer = build_attention(preset, WIDTH, HEADS, self_attention=True).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return layer


def core_of(preset, layer, layout="BHTD", backend="auto"):
    core = build_core(preset, HEADS, SIZE, layout=layout, backend=backend).to(layer.out_proj.weight.dtype).eval()
    core.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if name in core.state_dict()})
    return core


def projected(layer, x):
    """Return q, k, v ``[B, H, T, D]`` of ``x [T, B, d]``."""
    linears = layer.q_proj, layer.k_proj, layer.v_proj
    return (linear(x).unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for linear in linears)


def finished(layer, heads):
    """Return the output ``[T, B, d]`` for heads ``[B, H, T, D]``."""
    return layer.out_proj(heads.permute(2, 0, 1, 3).flatten(2))


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_it_equals_the_formula(preset, mask, backend):
    layer, x = layer_of(preset), torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    given, hidden = MASKS[mask]
    expected = load(preset)(layer)(x, x, hidden.expand(BATCH, -1, -1))
    core = core_of(preset, layer, backend=backend)
    output = finished(layer, core(*projected(layer, x), given, inputs=x.transpose(0, 1)))
    torch.testing.assert_close(output, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_narrow_dtypes_equal_the_formula(preset, dtype):
    layer, x = layer_of(preset, dtype), torch.randn(LENGTH, BATCH, WIDTH).to(dtype)
    expected = load(preset)(layer)(x, x, LATER.expand(BATCH, -1, -1))
    output = finished(layer, core_of(preset, layer)(*projected(layer, x), "causal", inputs=x.transpose(0, 1)))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_layouts_groups_and_decoding_equal_one_pass(preset, mask):
    layer, x = layer_of(preset), torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    q, k, v = projected(layer, x)
    core, other = (core_of(preset, layer, layout=layout) for layout in ("BHTD", "BTHD"))
    given, inputs = MASKS[mask][0], x.transpose(0, 1)
    for groups in (1, 2, HEADS):
        own_k, own_v = k[:, :groups], v[:, :groups]
        repeated = (tensor.repeat_interleave(HEADS // groups, dim=1) for tensor in (own_k, own_v))
        whole = core(q, *repeated, given, inputs=inputs)
        for result in (
            core(q, own_k, own_v, given, inputs=inputs),
            other(*(t.transpose(1, 2) for t in (q, own_k, own_v)), given, inputs=inputs).transpose(1, 2),
        ):
            torch.testing.assert_close(result, whole, atol=1e-12, rtol=1e-12)
        if mask == "tensor":
            continue  # a tensor of all queries is not one of the last queries
        for start, stop in ((0, 1), (2, 4), (3, LENGTH)):
            now = slice(start, stop)
            step = core(q[:, :, now], own_k, own_v, given, inputs=inputs[:, now], query_start=start)
            torch.testing.assert_close(step, whole[:, :, now], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_those_of_the_layer(preset):
    layer, x = layer_of(preset), torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    core = core_of(preset, layer)
    output = finished(layer, core(*projected(layer, x), "causal", inputs=x.transpose(0, 1)))
    expected, _ = layer(x, x, x, is_causal=True, need_weights=False)
    weight = torch.randn_like(output)
    own = dict(layer.named_parameters())
    for name, parameter in core.named_parameters():
        (there,) = torch.autograd.grad((expected * weight).sum(), own[name], retain_graph=True)
        (here,) = torch.autograd.grad((output * weight).sum(), parameter, retain_graph=True)
        torch.testing.assert_close(here, there, atol=1e-10, rtol=1e-10)
