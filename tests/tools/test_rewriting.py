"""Layers with other parts, sizes and projections give the same outputs, or are refused; factors lose what their rank loses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fairseq_lowrank.attention import (
    AXES,
    CAUSAL,
    METHODS,
    AttentionConfig,
    AttentionSpec,
    Method,
    MultiheadAttention,
    build_attention,
    register,
)
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import HeadOutput, parts_of
from fairseq_lowrank.tools.rewriting import expanded, factorize, full_rank, layer_with, reduced, relative_error

SIZE, HEADS = 12, 3
FACTORED = {
    "mla": ("latent", "latent_dim"),
    "collaborative": ("collaborative", "shared_dim"),
    "lrkv": ("low-rank-kv", "factor_rank"),
}


def shaken(preset, bias=True, **axes):
    torch.manual_seed(1)
    layer = build_attention(preset, SIZE, HEADS, self_attention=True, bias=bias, **axes).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def factored(layer, preset, rank):
    target = build_attention(
        preset,
        SIZE,
        HEADS,
        self_attention=True,
        bias=layer.q_proj.bias is not None,
        device="meta",
        **{FACTORED[preset][1]: rank},
    )
    return factorize(layer, target)


def outputs(layer):
    x = torch.randn(7, 2, layer.embed_dim, generator=torch.Generator().manual_seed(5), dtype=torch.double)
    return layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]


@pytest.mark.parametrize("source", ["mha", "mqa", "gain"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("preset", FACTORED)
def test_a_factorisation_of_full_rank_is_exact(preset, bias, source):
    layer = shaken(source, bias)
    result = factored(layer, preset, full_rank(layer, FACTORED[preset][0]))
    assert all(parameter.isfinite().all() for parameter in result.parameters())
    if preset == "mla":
        result.latent_norm = nn.Identity()
    torch.testing.assert_close(outputs(result), outputs(layer), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("preset", FACTORED)
def test_a_factorisation_of_larger_rank_has_zeros(preset):
    layer = shaken("mha")
    exact, wide = (factored(layer, preset, full_rank(layer, FACTORED[preset][0]) + more) for more in (0, 5))
    if preset == "mla":  # the norm divides by the root of the rank
        exact.latent_norm = wide.latent_norm = nn.Identity()
    torch.testing.assert_close(outputs(wide), outputs(exact), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("preset", ["collaborative", "lrkv"])
def test_the_error_of_a_factorisation_falls_with_the_rank(preset):
    layer = shaken("mha")
    full = full_rank(layer, FACTORED[preset][0])
    errors = [relative_error(layer, factored(layer, preset, rank)) for rank in (1, full // 2, full)]
    assert 1 > errors[0] > errors[1] > 1e-3 > 1e-12 > errors[2]


def test_the_latent_of_normalised_inputs_is_nearly_exact():
    layer = shaken("mha")
    result = factored(layer, "mla", SIZE)
    x = nn.functional.layer_norm(torch.randn(7, 2, SIZE, dtype=torch.double), [SIZE])
    torch.testing.assert_close(result(x, x, x)[0], layer(x, x, x)[0], atol=1e-4, rtol=1e-4)


def test_sigsoftmax_keeps_biases_of_keys_and_refuses_to_lose_them():
    layer = shaken("mha", activation="sigsoftmax")
    target = build_attention("lrkv", SIZE, HEADS, self_attention=True, activation="sigsoftmax", device="meta")
    with pytest.raises(UserError, match="sigsoftmax"):
        factorize(layer, target)


@pytest.mark.parametrize("kdim", [2, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("preset", ["collaborative", "lrkv"])
def test_a_factorisation_with_few_inputs_of_keys_is_exact(preset, bias, kdim):
    torch.manual_seed(1)
    sizes = {"kdim": kdim, "vdim": kdim, "bias": bias}
    layer = build_attention("mha", SIZE, HEADS, **sizes).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rank = full_rank(layer, FACTORED[preset][0])
    for has_bias in {bias, True}:  # a layer with biases takes the place of one without
        target = build_attention(
            preset, SIZE, HEADS, device="meta", **{**sizes, "bias": has_bias, FACTORED[preset][1]: rank}
        )
        assert relative_error(layer, factorize(layer, target)) < 1e-12


@pytest.mark.parametrize("preset", FACTORED)
def test_biases_that_the_new_layer_lacks_are_refused(preset):
    target = build_attention(
        preset, SIZE, HEADS, self_attention=True, bias=False, device="meta", **{FACTORED[preset][1]: 4}
    )
    with pytest.raises(UserError, match="no biases"):
        factorize(shaken("mha"), target)


def test_tensors_of_another_layer_are_refused():
    layer = build_attention("mha", SIZE, HEADS, self_attention=True, device="meta")
    with pytest.raises(UserError, match="cannot be loaded"):
        layer_with(layer, shaken("lrkv").state_dict())


def test_the_error_of_layers_whose_outputs_are_zero_is_zero():
    layer = shaken("mha")
    for parameter in layer.out_proj.parameters():
        parameter.data.zero_()
    assert relative_error(layer, layer) == 0


WIDTH = 16


def random_layer(spec, seed=0):
    torch.manual_seed(seed)
    made = MultiheadAttention(AttentionConfig(spec, WIDTH, 4, self_attention=True, max_positions=8)).double().eval()
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.add_(0.3 * torch.randn_like(tensor))
    return made


EXAMPLES = [(name, number) for name, method in METHODS.items() for number in range(len(method.examples))]


def spec_of(name, number):
    method = METHODS[name]
    axes = {axis: part.name for axis, part in method.parts.items()}
    return AttentionSpec(**axes | method.examples[number])


def starts_as_plain(spec):
    """Whether the parts of a spec start as the identity of standard attention with sizes that are no smaller."""
    layer = MultiheadAttention(AttentionConfig(spec, WIDTH, 4, self_attention=True, max_positions=8))
    plain = all(getattr(spec, axis) == AXES[axis].default for axis in ("projection", "score", "activation"))
    return (
        plain
        and all(part.keeps_stock and part.learns for part in parts_of(layer).values())
        and spec.key_value_heads in (None, 4)
        and layer.head_dim >= 4
    )


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_plain_attention_gets_every_part_that_starts_as_the_identity(name, number):
    made, spec = random_layer(AttentionSpec()), spec_of(name, number)
    try:
        other, loss = rewritten(made, spec)
    except UserError:
        assert not starts_as_plain(spec)
        return
    if not loss:
        assert spec == AttentionSpec() or other.spec != made.spec
        torch.testing.assert_close(outputs(other), outputs(made), rtol=1e-12, atol=1e-12)
    assert not (loss and starts_as_plain(spec))


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_a_fresh_part_is_left_out_again(name, number):
    made, spec = random_layer(AttentionSpec()), spec_of(name, number)
    if starts_as_plain(spec) and spec.head_dim is None:
        there, _ = rewritten(made, spec)
        back, loss = rewritten(there, AttentionSpec())
        assert not loss
        torch.testing.assert_close(outputs(back), outputs(made), rtol=1e-12, atol=1e-12)


class PluginGate(HeadOutput):
    name = "plugin-gate"

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(config.num_heads, config.embed_dim))

    def heads(self, heads, context):
        gates = torch.exp(context.inputs @ self.weight.T)
        return heads * gates.mT[..., None]


def test_plain_attention_gets_the_gate_of_a_plugin(plugins_leave):
    register(Method("plugin-gated", "A gate", "O_i exp(x w_i)", {"head_output": PluginGate}))
    made = random_layer(AttentionSpec())
    other, loss = rewritten(made, AttentionSpec(head_output="plugin-gate"))
    assert not loss and isinstance(other.head_output, PluginGate)
    torch.testing.assert_close(outputs(other), outputs(made), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        other.head_output.weight.fill_(0.1)
    with pytest.raises(UserError, match="head_output='plugin-gate': it depends on the input"):
        rewritten(other, AttentionSpec())


def rewritten(made, spec):
    """A layer with other choices, and why its outputs may differ."""
    target = MultiheadAttention(replace(made.config, spec=spec))
    found, loss = expanded(reduced(made, spec), target)
    other = random_layer(spec, seed=9)
    other.load_state_dict(found.state_dict())  # strict: no tensor is missing or left
    return other, loss


def converted(made, mixing):
    other, loss = rewritten(made, made.spec.replace(mixing=mixing))
    assert not loss
    return other


ACTIVATIONS = ["softmax", pytest.param("sigsoftmax", marks=pytest.mark.grid)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "projection", ["independent", "shared-kv", "el", "multi-query", "single", "head-embedding-add"]
)
@pytest.mark.parametrize(
    "before, after",
    [
        ("none", "static"),
        ("none", "positionwise"),
        ("static", "positionwise"),
        ("random", "static"),
        ("average", "positionwise"),
        ("none", "diagonal"),
        ("diagonal", "static"),
        ("diagonal", "positionwise"),
    ],
)
def test_a_richer_mixing_gives_the_same_outputs(projection, activation, before, after):
    made = random_layer(AttentionSpec(projection=projection, activation=activation, mixing=before))
    torch.testing.assert_close(outputs(converted(made, after)), outputs(made), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", ["multi-query", "single", "head-embedding-mul"])
@pytest.mark.parametrize("before", ["static", "random", "average"])
def test_any_mixing_over_one_value_folds_into_the_output_projection(projection, before):
    made = random_layer(AttentionSpec(projection=projection, mixing=before))
    assert not torch.equal(made.mixing.weight, made.mixing.weight.diag().diag())
    torch.testing.assert_close(outputs(converted(made, "none")), outputs(made), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("projection", ["independent", "shared-kv", "el", "head-embedding-add", "head-embedding-mul"])
@pytest.mark.parametrize("before", ["static", "diagonal"])
def test_diagonal_mixing_folds_whatever_the_projection(projection, before):
    made = random_layer(AttentionSpec(projection=projection, mixing=before))
    if before == "static":
        with torch.no_grad():
            made.mixing.weight.mul_(torch.eye(4))
        torch.testing.assert_close(outputs(converted(made, "diagonal")), outputs(made), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs(converted(made, "none")), outputs(made), rtol=1e-12, atol=1e-12)


def test_positionwise_mixing_that_ignores_the_query_becomes_static():
    made = random_layer(AttentionSpec(mixing="positionwise"))
    with pytest.raises(UserError, match="depends on the query"):
        converted(made, "static")
    with torch.no_grad():
        made.mixing.query_weight.zero_()
    torch.testing.assert_close(outputs(converted(made, "static")), outputs(made), rtol=1e-12, atol=1e-12)


def test_mixing_that_stayed_at_the_identity_is_left_out_without_rounding():
    made = random_layer(AttentionSpec(mixing="static"))
    with torch.no_grad():
        made.mixing.weight.copy_(torch.eye(4))
    assert torch.equal(converted(made, "none").out_proj.weight, made.out_proj.weight)


@pytest.mark.parametrize(
    "projection, before, after, message",
    [
        ("independent", "static", "none", "separate values"),
        ("independent", "average", "none", "separate values"),
        ("head-embedding-add", "static", "none", "separate values"),
        ("single", "positionwise", "none", "depends on the query"),
        ("independent", "static", "average", "'average' is fixed"),
        ("independent", "static", "diagonal", "cannot have this M"),
    ],
)
def test_what_would_compute_something_else_is_refused(projection, before, after, message):
    with pytest.raises(UserError, match=message):
        converted(random_layer(AttentionSpec(projection=projection, mixing=before)), after)


def resized(made, **sizes):
    """A layer of other sizes with the weights of another one, and whether that is exact."""
    other, loss = rewritten(made, made.spec.replace(**sizes))
    return other, not loss


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mixing", ["none", "static", "positionwise"])
@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {"head_dim": 7}),
        ({}, {"head_dim": 4, "value_dim": 6}),
        ({"key_value_heads": 2}, {"key_value_heads": None}),
        ({"key_value_heads": 1}, {"key_value_heads": 2}),
        ({"key_value_heads": 2}, {"key_value_heads": 4, "head_dim": 9, "value_dim": 5}),
    ],
)
def test_larger_sizes_give_the_same_outputs(before, after, mixing, activation):
    made = random_layer(AttentionSpec(mixing=mixing, activation=activation, **before))
    other, exact = resized(made, **after)
    assert exact and other.spec != made.spec
    torch.testing.assert_close(outputs(other), outputs(made), rtol=0, atol=1e-12)


def test_larger_heads_can_learn():
    other, _ = resized(random_layer(AttentionSpec()), head_dim=7)
    outputs(other).square().sum().backward()
    new = other.q_proj.weight.grad.unflatten(0, (4, 7))[:, 4:]
    assert new.abs().amin(-1).min() > 0 and other.out_proj.weight.grad.unflatten(1, (4, 7))[:, :, 4:].abs().min() > 0


def test_new_rows_of_keys_and_values_have_the_deviation_of_the_old_ones():
    made = random_layer(AttentionSpec())
    for scale, name in ((0.1, "k_proj"), (3.0, "v_proj")):
        getattr(made, name).weight.data *= scale
    other, _ = resized(made, head_dim=400, value_dim=400)
    for name in ("k_proj", "v_proj"):
        old, new = getattr(made, name).weight, getattr(other, name).weight.unflatten(0, (4, 400))[:, 4:]
        assert new.std().item() == pytest.approx(old.std().item(), rel=0.03)
        assert abs(new.mean().item()) < 0.03 * old.std().item()


def test_fewer_key_and_value_heads_are_means_of_neighbours():
    made = random_layer(AttentionSpec())
    other, exact = resized(made, key_value_heads=2)
    assert not exact
    for name in ("k_proj", "v_proj"):
        heads = getattr(made, name).weight.unflatten(0, (2, 2, 4))
        torch.testing.assert_close(getattr(other, name).weight.unflatten(0, (2, 4)), heads.mean(1))
    torch.testing.assert_close(other.q_proj.weight, made.q_proj.weight)


def test_heads_that_are_alike_are_joined_without_a_difference():
    made, _ = resized(random_layer(AttentionSpec(key_value_heads=2)), key_value_heads=4)
    other, _ = resized(made, key_value_heads=2)
    torch.testing.assert_close(outputs(other), outputs(made), rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["head_map", "head_output"])
def test_a_resize_refuses_methods_that_it_does_not_know(part):
    choices = {"head_map": ("features", "heads"), "head_output": ("exclusive", "gate", "head-gate")}[part]
    for choice in choices:
        made = random_layer(AttentionSpec(**{part: choice}))
        with pytest.raises(UserError, match=f"{part.replace('_', ' ')} {choice}"):
            resized(made, head_dim=16)
