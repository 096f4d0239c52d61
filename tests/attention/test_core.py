"""Core attention against the whole layer: the same weights, projections and norms written out around it."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fairseq_lowrank.attention import (
    CAUSAL,
    DecodingCache,
    Hidden,
    Method,
    PackedDocuments,
    Prefix,
    RotaryPositions,
    SlidingWindow,
    Visible,
    build_attention,
    build_core,
    register,
)
from fairseq_lowrank.attention.core import core_presets
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.parts import METHODS, PARTS, PRESETS, HeadMap

WIDTH, HEADS, SIZE, LENGTH = 32, 4, 8, 7
PAIRS = {"query": 2}


def layer_and_core(preset, layout="BHTD", **axes):
    """Return a layer, a core with its parts, and what projects x as the layer does."""
    torch.manual_seed(0)
    groups = {} if preset == "diff" else {"key_value_heads": 2}
    options = {"qk_norm": True, "rotary": RotaryPositions(), "self_attention": True, "batch_first": True}
    layer = build_attention(preset, WIDTH, HEADS, **groups, **options, **axes).eval()
    core = build_core(preset, HEADS, SIZE, layout=layout, **axes).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    core.load_state_dict({key: value for key, value in layer.state_dict().items() if key in core.state_dict()})

    def project(x, first=0):
        q, k, v = (
            linear(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        own, positions = layer.q_norm(q), torch.arange(first, first + x.size(1))
        return own, layer.rotary(own, positions), layer.rotary(layer.k_norm(k), positions), v

    return layer, core, project


def inputs():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


MASKS = {
    "causal": CAUSAL,
    "window": SlidingWindow(3),
    "documents": PackedDocuments(cu_seqlens=[0, 3, LENGTH]),
    "prefix": Prefix(3),
    "prefixes": Prefix(torch.tensor([0, 5])),
    "function": lambda b, h, q, kv: (kv <= q) & (kv >= q - 2 - h),
    "none": AttentionMask(),
    "padding": AttentionMask(key_padding=torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4]])),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("preset", core_presets())
def test_it_computes_what_the_layer_computes(preset, mask):
    layer, core, project = layer_and_core(preset)
    x = inputs()
    own, q, k, v = project(x)
    heads, weights = core(q, k, v, MASKS[mask], inputs=x, mixing_queries=own, return_weights=True)
    output, expected = layer(x, x, x, attn_mask=MASKS[mask], average_attn_weights=False)
    torch.testing.assert_close(layer.out_proj(heads.transpose(1, 2).flatten(2)), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axes", [{"activation": "sigsoftmax"}, {"score_bias": "t5"}, {"head_output": "gate"}])
def test_axes_override_the_method(axes):
    layer, core, project = layer_and_core("mixhead-b", **axes)
    x = inputs()
    own, q, k, v = project(x)
    heads = core(q, k, v, "causal", inputs=x, mixing_queries=own)
    output, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    torch.testing.assert_close(layer.out_proj(heads.transpose(1, 2).flatten(2)), output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", core_presets())
def test_steps_with_a_cache_that_grows_or_has_empty_slots_equal_one_pass(preset):
    _, core, project = layer_and_core(preset)
    x = inputs()
    own, q, k, v = project(x)
    whole = core(q, k, v, SlidingWindow(4), inputs=x, mixing_queries=own)
    slots = [torch.full((*t.shape[:2], LENGTH + 3, SIZE), 9.0) for t in (k, v)]
    at = 0
    for count in (4, 1, 2):
        now = slice(at, at + count)
        step = {"inputs": x[:, now], "mixing_queries": own[:, :, now]}
        grown = core(q[:, :, now], k[:, :, : at + count], v[:, :, : at + count], SlidingWindow(4), **step)
        for slot, new in zip(slots, (k, v), strict=True):
            slot[:, :, now] = new[:, :, now]
        fixed = core(q[:, :, now], *slots, SlidingWindow(4), query_start=at, **step)
        queries, keys = torch.arange(at, at + count)[:, None], torch.arange(LENGTH + 3)
        seen = Visible((keys <= queries) & (keys > queries - 4))
        start = torch.tensor([at])
        traced = core(q[:, :, now], *slots, seen, query_start=start, **step)
        by_tensor = core(q[:, :, now], *slots, SlidingWindow(4), query_start=start, **step)
        for result in (grown, fixed, traced, by_tensor):
            torch.testing.assert_close(result, whole[:, :, now], atol=1e-5, rtol=1e-5)
        at += count


def test_layouts_differ_by_a_transpose():
    _, first, project = layer_and_core("mixhead-b")
    _, second, _ = layer_and_core("mixhead-b", layout="BTHD")
    own, q, k, v = project(inputs())
    expected = first(q, k, v, "causal", mixing_queries=own).transpose(1, 2)
    turned = (tensor.transpose(1, 2) for tensor in (q, k, v))
    assert torch.equal(second(*turned, "causal", mixing_queries=own.transpose(1, 2)), expected)


def test_plain_attention_is_that_of_torch():
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, SIZE)
    seen, bias = torch.ones(LENGTH, LENGTH).tril().bool(), torch.randn(HEADS, LENGTH, LENGTH)
    core = build_core("mha", HEADS, SIZE)
    for mask, given in (("causal", seen), (Visible(seen), seen), (Hidden(~seen), seen), (bias, bias)):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=given, scale=0.3)
        torch.testing.assert_close(core(q, k, v, mask, scale=0.3), expected, atol=1e-6, rtol=1e-5)


def test_states_are_checked_and_copies_are_equal():
    core = build_core("mixhead-a", HEADS, SIZE, activation="sigsoftmax")
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, SIZE)
    core.mixing.weight.data.normal_()
    again = build_core("mixhead-a", HEADS, SIZE, activation="sigsoftmax")
    again.load_state_dict(core.state_dict())
    for other in (again, copy.deepcopy(core)):
        assert torch.equal(other(q, k, v), core(q, k, v))
    for other in (build_core("mixhead-a", HEADS, SIZE), build_core("mixhead-b", HEADS, SIZE, activation="sigsoftmax")):
        with pytest.raises((RuntimeError, ValueError)):
            other.load_state_dict(core.state_dict())


def test_half_precision_leaves_parts_in_float32():
    core = build_core("mixhead-b", HEADS, SIZE).to(torch.bfloat16)
    assert {parameter.dtype for parameter in core.parameters()} == {torch.float32}
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, SIZE, dtype=torch.bfloat16)
    assert core(q, k, v, "causal").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected one dtype"):
        core(q.float(), k, v, "causal")


@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b", "gated", "xsa", "t5-bias"])
def test_it_compiles_as_one_graph(preset):
    torch._dynamo.reset()
    _, core, project = layer_and_core(preset)
    x = inputs()
    _, q, k, v = project(x)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, "causal", inputs=x), core(q, k, v, "causal", inputs=x))


def test_every_other_method_is_refused_by_name():
    refused = PRESETS.keys() - core_presets() - {"fixedhead"}
    assert refused >= {"mla", "mqa", "headmix", "knocking-linear", "gqa"}
    for preset in refused:
        need = METHODS[preset].needs
        with pytest.raises(ValueError, match=preset):
            build_core(preset, HEADS, SIZE, **({} if need is None else {need.axis: 2}))


def test_mistakes_are_named():
    q = torch.randn(2, LENGTH, HEADS, SIZE)
    core = build_core("mixhead-a", HEADS, SIZE)
    with pytest.raises(ValueError, match="layout"):
        core(q, q, q)
    q = q.transpose(1, 2)
    with pytest.raises(ValueError, match="two ways"):
        core(q, q, q, torch.ones(LENGTH, LENGTH).bool())
    for start in (-1, 1):
        with pytest.raises(ValueError, match="query_start"):
            core(q, q, q, "causal", query_start=start)
    with pytest.raises(ValueError, match=r"gate.*inputs"):
        build_core("gated", HEADS, SIZE)(q, q, q)
    with pytest.raises(ValueError, match="query_start"):
        build_core("alibi", HEADS, SIZE)(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match="self-attention"):
        build_core("xsa", HEADS, SIZE, self_attention=False)


def test_only_masks_that_hide_later_keys_say_so():
    assert CAUSAL.sees_no_later_key and SlidingWindow(3).sees_no_later_key
    assert not AttentionMask().sees_no_later_key
    assert not AttentionMask(causal=True, num_appended_keys=1).sees_no_later_key
    assert not Prefix(2).sees_no_later_key


def test_an_object_as_cache_equals_a_dictionary():
    layer = build_attention("mixhead-b", WIDTH, HEADS, self_attention=True, batch_first=True).eval()
    x, cache, dictionary = inputs(), DecodingCache(), {}
    with torch.no_grad():
        for step in x.split(1, dim=1):
            ours, theirs = (
                layer(step, step, step, incremental_state=state, need_weights=False)[0] for state in (cache, dictionary)
            )
            assert torch.equal(ours, theirs)
    assert cache.length == LENGTH and not isinstance(cache, dict)


def test_a_part_that_scales_queries_is_refused_with_their_norm():
    class Temperature(HeadMap):
        """A factor of the queries of each head."""

        name, before_norm = "temperature", False

        def queries(self, queries, context):
            return 2 * queries

    register(Method("temperature", "Temperature", "2 Q_i", {"head_map": Temperature}))
    try:
        build_attention("temperature", WIDTH, HEADS)
        with pytest.raises(ValueError, match="before_norm"):
            build_attention("temperature", WIDTH, HEADS, qk_norm=True)
        build_attention("headmix", WIDTH, HEADS, qk_norm=True)
    finally:
        del METHODS["temperature"], PRESETS["temperature"], PARTS["head_map"]["temperature"]


@pytest.mark.parametrize("kind", ["padding", "additive", "documents"])
def test_empty_slots_are_hidden_whatever_else_the_mask_says(kind):
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, SIZE)
    bias, start = torch.randn(LENGTH, LENGTH + 3), 3
    fields = {
        "padding": {"key_padding": torch.arange(LENGTH + 3).expand(2, -1) == 1},
        "additive": {"additive": bias[start:]},
        "documents": {"documents": (torch.arange(LENGTH + 3) > 1).long()[None]},
    }[kind]
    mask = AttentionMask(causal=True, **fields)
    first = {name: tensor[..., :LENGTH] for name, tensor in fields.items()}
    core = build_core("talking-heads", HEADS, SIZE)
    expected = core(q[:, :, start:], k, v, AttentionMask(causal=True, **first), score_bias=bias[start:, :LENGTH])
    k, v = (F.pad(tensor, (0, 0, 0, 3), value=9.0) for tensor in (k, v))
    result = core(q[:, :, start:], k, v, mask, score_bias=bias[start:], query_start=start)
    torch.testing.assert_close(result, expected)


def test_weights_are_dropped_in_training_alone():
    q = torch.randn(2, HEADS, LENGTH, SIZE)
    core = build_core("mixhead-a", HEADS, SIZE, dropout=0.5)
    assert not torch.equal(core(q, q, q), core(q, q, q))
    assert torch.equal(core(q, q, q, dropout_p=0.0), core.eval()(q, q, q))


def test_a_part_may_be_replaced_between_two_calls():
    q = torch.randn(2, HEADS, LENGTH, SIZE)
    core, other = build_core("mixhead-a", HEADS, SIZE), build_core("mixhead-random", HEADS, SIZE)
    plain = core(q, q, q)
    core.mixing = other.mixing
    assert torch.equal(core(q, q, q), other(q, q, q))
    core.mixing = None
    torch.testing.assert_close(core(q, q, q), plain)


def test_a_call_that_no_backend_computes_is_refused():
    q = torch.randn(2, HEADS, LENGTH, SIZE)
    core = build_core("mixhead-a", HEADS, SIZE)
    for keywords in ({"mask": torch.randn(3, LENGTH)}, {"softcap": -1.0}, {"mask": PackedDocuments(ids=[0, 1])}):
        with pytest.raises(ValueError, match="expected"):
            core(q, q, q, **keywords)
