"""What each preset can add to plain attention, proven: weights in both directions, ranks, and outputs that no projection gives."""

import pytest
import torch
from torch import nn

from fairseq_lowrank.attention import CAUSAL, METHODS, PRESETS, build_attention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import CLASSES

SIZE, HEADS = 8, 2
HEAD = SIZE // HEADS


def of_class(*names):
    return [preset for preset in PRESETS if METHODS[preset].kind in names]


def build(preset, bias=True, **axes):
    """A layer in float64 with no parameter at its start."""
    torch.manual_seed(3)
    layer = build_attention(
        preset, SIZE, HEADS, self_attention=True, bias=bias, **METHODS[preset].examples[0] | axes
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return layer.eval()


def without_norms(layer):
    """Remove norms, which depend on the input: apart from its norm, a layer may be plain."""
    for name, child in layer.named_children():
        if isinstance(child, nn.RMSNorm):
            setattr(layer, name, nn.Identity())


def inputs(count=6, batch=4):
    return torch.randn(count, batch, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.double)


def test_every_preset_has_a_class():
    assert {METHODS[preset].kind for preset in PRESETS} == CLASSES.keys()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("preset", of_class("restricted", "equal"))
def test_plain_weights_give_the_same_outputs(preset, bias):
    layer, x = build(preset, bias), inputs()
    without_norms(layer)
    plain = plain_attention(layer)
    assert plain.spec.projection == "independent" and plain.head_dim == layer.head_dim
    for mask in (None, CAUSAL):
        torch.testing.assert_close(
            plain(x, x, x, attn_mask=mask)[0], layer(x, x, x, attn_mask=mask)[0], atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("bias", [True, False])
def test_thin_keys_are_plain_attention_with_rows_of_zeros(bias):
    """Queries and keys of 2 of 4 numbers: the rest is 0, and queries get the factor √2, because plain scores are divided by √4."""
    thin, x = build("mha", bias, head_dim=2, value_dim=HEAD), inputs()
    plain = build("mha", bias)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            given = thin.get_parameter(name)
            if name.startswith(("q_proj", "k_proj")):
                parameter.zero_()
                rows = parameter.unflatten(0, (HEADS, HEAD))[:, :2]
                rows.copy_(given.unflatten(0, (HEADS, 2)) * (2**0.5 if name.startswith("q") else 1))
            else:
                parameter.copy_(given)
    for mask in (None, CAUSAL):
        torch.testing.assert_close(
            plain(x, x, x, attn_mask=mask)[0], thin(x, x, x, attn_mask=mask)[0], atol=1e-12, rtol=1e-12
        )


def test_the_norm_of_mla_has_no_plain_weights():
    with pytest.raises(UserError, match="latent"):
        plain_attention(build("mla"))


@pytest.mark.parametrize("preset", of_class("equal"))
def test_every_plain_layer_is_one_of_an_equal_method(preset):
    plain, x = build("mha"), inputs()
    layer = build_attention(preset, SIZE, HEADS, self_attention=True).double()
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0], atol=1e-12, rtol=1e-12)


def test_difference_with_a_constant_factor_is_plain_attention_of_twice_the_heads():
    layer, x = build("diff"), inputs()
    with torch.no_grad():
        layer.head_output.weight.zero_()
    plain = build_attention("mha", SIZE, 2 * HEADS, head_dim=HEAD).double()
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                heads = getattr(getattr(layer, name), kind).unflatten(0, (-1, HEAD))
                getattr(getattr(plain, name), kind).copy_(
                    heads.repeat_interleave(2 * HEADS // len(heads), dim=0).flatten(0, 1)
                )
        out = layer.out_proj.weight.unflatten(1, (HEADS, HEAD))
        plain.out_proj.weight.copy_(torch.stack([out, -0.5 * out], dim=2).flatten(1))
        plain.out_proj.bias.copy_(layer.out_proj.bias)
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0], atol=1e-12, rtol=1e-12)


def score_ranks(preset):
    """The rank of each head's scores over the unit vectors as positions: of its bilinear form, if it has one."""
    x = torch.eye(SIZE, dtype=torch.double)[:, None]
    layer = build(preset, bias=False)
    without_norms(layer)
    scores, _ = layer(x, x, x, before_softmax=True)
    return [int(torch.linalg.matrix_rank(head, rtol=1e-10)) for head in scores]


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_exceed_the_head_size_only_in_class_qk(preset):
    ranks = score_ranks(preset)
    if METHODS[preset].kind == "QK":
        assert min(ranks) > HEAD
    else:
        assert max(ranks) <= HEAD


def head_outputs(layer, x):
    """What plain attention with this layer's queries, keys and values gives to the output projection, ``[N, H * D]``."""
    state = {
        name: tensor
        for name, tensor in layer.state_dict().items()
        if name.split(".")[0] in ("q_proj", "k_proj", "v_proj")
    }
    heads = HEADS * layer.spec.queries_per_head
    plain = build_attention("mha", SIZE, heads, head_dim=HEAD, key_value_heads=HEADS).double()
    plain.load_state_dict(state, strict=False)
    plain.out_proj = nn.Identity()
    output, weights = plain(x, x, x, need_head_weights=True)
    return output.flatten(0, 1), weights


def left_over(output, features):
    """The part of an output that no projection (and bias) of the features gives, relative to the whole."""
    features = torch.cat([features, torch.ones(len(features), 1, dtype=torch.double)], dim=1)
    fitted = features @ torch.linalg.lstsq(features, output, driver="gelsd").solution
    return float((output - fitted).norm() / output.norm())


@pytest.mark.parametrize("preset", of_class("OV"))
def test_outputs_of_class_ov_come_from_no_output_projection(preset):
    layer, x = build(preset), inputs(8, 30)
    output = layer(x, x, x)[0].flatten(0, 1)
    features, _ = head_outputs(layer, x)
    assert left_over(output, features) > 0.01
    gain = build("gain")
    assert left_over(gain(x, x, x)[0].flatten(0, 1), head_outputs(gain, x)[0]) < 1e-10


@pytest.mark.parametrize("preset", of_class("OV"))
def test_patterns_of_class_ov_are_those_of_plain_attention(preset):
    layer, x = build(preset), inputs()
    _, plain = head_outputs(layer, x)
    layer.mixing = None
    if layer.spec.queries_per_head > 1:
        found = layer(x, x, x, before_softmax=True)[0].softmax(dim=-1).unflatten(0, (x.size(1), -1)).transpose(0, 1)
    else:
        found = layer(x, x, x, need_head_weights=True)[1]
        found = found / found.sum(dim=-1, keepdim=True)  # a part may multiply a row by a number
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=1e-12)


MIXED = [preset for preset in of_class("OV") if "mixing" in METHODS[preset].parts]


@pytest.mark.parametrize("preset", [preset for preset in MIXED if build(preset).mixing.fixed_matrix() is not None])
def test_static_mixing_widens_the_map_of_each_pattern(preset):
    layer = build(preset, bias=False)
    matrix = layer.mixing.fixed_matrix()
    values, out = layer.v_proj.weight.unflatten(0, (HEADS, HEAD)), layer.out_proj.weight.unflatten(1, (HEADS, HEAD))
    for j in range(HEADS):
        whole = sum(matrix[j, i] * out[:, i] @ values[i] for i in range(HEADS))
        assert torch.linalg.matrix_rank(whole, rtol=1e-10) > HEAD


def test_scores_of_tpa_are_not_bilinear():
    x = inputs(5, 1)
    for preset, bilinear in (("mha", True), ("tpa", False)):
        layer = build(preset, bias=False)
        doubled = layer(2 * x, x, x, before_softmax=True)[0]
        assert torch.allclose(doubled, 2 * layer(x, x, x, before_softmax=True)[0], atol=1e-10) == bilinear


@pytest.mark.parametrize("preset", of_class("OV", "patterns"))
def test_more_than_plain_attention_has_no_plain_weights(preset):
    with pytest.raises(UserError):
        plain_attention(build(preset))
