"""Plain attention factored: layers give the same outputs at full rank, and an error that falls with the rank."""

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq")

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.rewriting import factorize, full_rank, layer_with, relative_error

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
    x = torch.randn(7, 2, SIZE, generator=torch.Generator().manual_seed(5), dtype=torch.double)
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
