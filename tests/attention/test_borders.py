"""What other libraries do to a layer: half precision with empty rows, float masks, adapters, hooks, quantised projections."""

import copy

import pytest
import torch
from torch import nn

from fairseq_lowrank.attention import PRESETS, RotaryPositions, build_attention, replace_attention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import UserError

SIZE, HEADS = 16, 4
NEEDED = {"fixedhead": {"head_dim": 4}, "gqa": {"key_value_heads": 2}}


def build(preset, **options):
    torch.manual_seed(1)
    return build_attention(
        preset, SIZE, HEADS, self_attention=True, batch_first=True, **NEEDED.get(preset, {}), **options
    )


def shaken(preset, **options):
    layer = build(preset, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_of_zeros_stays_finite(preset, dtype):
    layer = shaken(preset, bias=False).to(dtype)
    x = torch.randn(2, 5, SIZE, dtype=dtype)
    x[1, 3:] = 0
    x.requires_grad_()
    output, weights = layer(x, x, x)
    assert output.isfinite().all() and weights.isfinite().all()
    output.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_of_zeros_stays_finite_under_autocast(preset, dtype):
    layer = shaken(preset, bias=False)
    x = torch.randn(2, 5, SIZE)
    x[1, 3:] = 0
    with torch.autocast("cpu", dtype):
        output, _ = layer(x, x, x, need_weights=False)
        again, _ = layer(output, output, output, need_weights=False)
    assert output.isfinite().all() and again.isfinite().all()


# --- float masks


@pytest.mark.parametrize("attn_mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
def test_a_float_padding_mask_is_added_as_torch_adds_it(appended, attn_mask):
    torch.manual_seed(2)
    stock = nn.MultiheadAttention(SIZE, HEADS, batch_first=True, add_bias_kv=appended, add_zero_attn=appended).double()
    ours = replace_attention(copy.deepcopy(stock), "mha")
    x, padding = torch.randn(3, 6, SIZE, dtype=torch.double), torch.randn(3, 6, dtype=torch.double)
    padding[1, 4:] = float("-inf")
    mask = {
        "none": None,
        "causal": torch.full((6, 6), float("-inf"), dtype=torch.double).triu(1),
        "bool": torch.ones(6, 6).triu(3).bool(),
        "float": torch.randn(6, 6, dtype=torch.double),
    }[attn_mask]
    theirs_mask = mask
    if attn_mask == "bool":
        theirs_mask = torch.zeros(6, 6, dtype=torch.double).masked_fill(mask, float("-inf"))
    expected, weights = stock(x, x, x, key_padding_mask=padding, attn_mask=theirs_mask)
    output, found = ours(x, x, x, key_padding_mask=padding, attn_mask=mask)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, weights)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_float_padding_mask_of_infinities_hides(preset):
    layer, x = shaken(preset).eval(), torch.randn(2, 5, SIZE)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected, _ = layer(x, x, x, key_padding_mask=hidden, need_weights=False)
    as_float = torch.zeros(2, 5).masked_fill(hidden, float("-inf"))
    found, _ = layer(x, x, x, key_padding_mask=as_float, need_weights=False)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_float_padding_mask_is_a_mask_of_each_head(preset):
    layer, x, padding = shaken(preset).eval(), torch.randn(3, 5, SIZE), torch.randn(3, 5)
    padding[1, 3:] = float("-inf")
    of_heads = padding[:, None, None].expand(3, HEADS, 5, 5)
    found, weights = layer(x, x, x, key_padding_mask=padding)
    for mask in (of_heads, of_heads.flatten(0, 1)):
        expected, expected_weights = layer(x, x, x, attn_mask=mask)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(weights, expected_weights)


def test_a_mask_of_each_head_holds_for_both_patterns_of_diff():
    layer, x = shaken("diff").eval(), torch.randn(2, 5, SIZE)
    mask = torch.zeros(2, HEADS, 5, 5, dtype=torch.bool)
    mask[:, 1, :, 3:] = True
    _, weights = layer(x, x, x, attn_mask=mask, average_attn_weights=False)
    assert torch.equal(weights == 0, mask)


def test_what_a_float_padding_mask_adds_is_not_cached():
    layer, x = build("mha"), torch.randn(1, 1, SIZE)
    with pytest.raises(ValueError, match="float key_padding_mask"):
        layer(x, x, x, key_padding_mask=torch.ones(1, 1), incremental_state={})


# --- what replace_attention cannot keep


class Derived(nn.MultiheadAttention):
    pass


def with_hook():
    attention = nn.MultiheadAttention(SIZE, HEADS)
    attention.register_forward_hook(lambda module, inputs, output: output)
    return attention


def with_inner_hook():
    attention = nn.MultiheadAttention(SIZE, HEADS)
    attention.out_proj.register_forward_pre_hook(lambda module, inputs: None)
    return attention


def with_hook_of_a_parameter():
    attention = nn.MultiheadAttention(SIZE, HEADS)
    attention.in_proj_weight.register_hook(lambda gradient: 2 * gradient)
    return attention


def with_shared_weight():
    attention, other = nn.MultiheadAttention(SIZE, HEADS), nn.MultiheadAttention(SIZE, HEADS)
    other.in_proj_weight = attention.in_proj_weight
    return nn.ModuleList([attention, other])


class OtherTensor(torch.Tensor):
    pass


def with_a_tensor_of_another_class():
    attention = nn.MultiheadAttention(SIZE, HEADS)
    attention.out_proj.weight = nn.Parameter(torch.zeros(SIZE, SIZE).as_subclass(OtherTensor))
    return attention


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (with_hook_of_a_parameter, "its in_proj_weight has hooks"),
        (with_shared_weight, "shares its in_proj_weight"),
        (with_a_tensor_of_another_class, "OtherTensor"),
        (with_hook, "attention has hooks"),
        (with_inner_hook, "its out_proj has hooks"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(SIZE, HEADS), "in_proj_weight"),
            "in_proj_weight",
        ),
        (lambda: Derived(SIZE, HEADS), "Derived"),
    ],
    ids=["hook of a parameter", "shared", "tensor of another class", "hook", "inner hook", "weight_norm", "subclass"],
)
def test_what_a_replacement_would_lose_is_refused(made, said):
    model = nn.ModuleDict({"attention": made(), "other": nn.MultiheadAttention(SIZE, HEADS)})
    with pytest.raises(UserError, match=said):
        replace_attention(model, "mixhead-a")
    assert type(model["other"]) is nn.MultiheadAttention


# --- adapters, hooks and quantised projections


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer; like those of PEFT it shows the weight of the layer as its own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def merged(self):
        result = copy.deepcopy(self.base)
        with torch.no_grad():
            result.weight += self.up.weight @ self.down.weight
        return result


def projections(layer):
    return [name for name, child in layer.named_children() if isinstance(child, nn.Linear)]


def outputs(layer, x):
    """The full pass, and the same by steps with a cache."""
    state = {}
    with torch.no_grad():
        full, _ = layer(x, x, x, is_causal=True, need_weights=False)
        steps = [layer(t, t, t, incremental_state=state, need_weights=False)[0] for t in x.split(1, dim=1)]
    return full, torch.cat(steps, dim=1)


@pytest.mark.parametrize("preset", PRESETS)
def test_adapters_count_in_the_full_pass_and_in_each_step(preset):
    layer, x = shaken(preset).eval(), torch.randn(2, 7, SIZE)
    merged = copy.deepcopy(layer)
    for name in projections(layer):
        adapter = Adapter(getattr(layer, name))
        setattr(layer, name, adapter)
        setattr(merged, name, adapter.merged())
    for found, expected in zip(outputs(layer, x), outputs(merged, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_hooks_count_in_the_full_pass_and_in_each_step(preset):
    layer, x = shaken(preset).eval(), torch.randn(2, 7, SIZE)
    scaled = copy.deepcopy(layer)
    for name in projections(layer):
        getattr(layer, name).register_forward_hook(lambda module, inputs, output: 0.5 * output)
        with torch.no_grad():
            for parameter in getattr(scaled, name).parameters():
                parameter.mul_(0.5)
    for found, expected in zip(outputs(layer, x), outputs(scaled, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Quantised(nn.Module):
    """A linear layer without a float weight."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.abs().amax().item() / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("preset", PRESETS)
def test_quantised_projections_count_in_the_full_pass_and_in_each_step(preset):
    layer, x = shaken(preset).eval(), torch.randn(2, 7, SIZE)
    rounded = copy.deepcopy(layer)
    for name in projections(layer):
        quantised = Quantised(getattr(layer, name))
        setattr(layer, name, quantised)
        with torch.no_grad():
            getattr(rounded, name).weight.copy_(quantised.weight * quantised.scale)
    for found, expected in zip(outputs(layer, x), outputs(rounded, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_in_a_dense_synthesizer_counts():
    options = {"score": "synthesizer-dense", "max_positions": 9}
    layer, x = shaken("mha", **options).eval(), torch.randn(2, 7, SIZE)
    merged = copy.deepcopy(layer)
    layer.synthesizer = Adapter(layer.synthesizer)
    merged.synthesizer = layer.synthesizer.merged()
    for found, expected in zip(outputs(layer, x), outputs(merged, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_of_adapters_are_not_taken_for_all():
    layer = shaken("mqa")
    layer.k_proj = Adapter(layer.k_proj)
    with pytest.raises(UserError, match="k_proj is a Adapter"):
        plain_attention(layer)


def test_rotary_positions_of_an_odd_size_are_refused_when_built():
    with pytest.raises(ValueError, match="head_dim=3"):
        build("mha", head_dim=3, rotary=RotaryPositions())
