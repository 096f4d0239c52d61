"""Derivatives of layers for each sample, with masks, under the transforms of ``torch.func``."""

import pytest
import torch
from tiny_layers import BATCH, SIZE, WITHOUT_CROSS, build, hidden_keys, normal

from fairseq_lowrank.attention import CAUSAL, PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_each_sample_with_padding_under_causality(preset):
    layer, x = build(preset, noise=0.1), normal(2, 4, BATCH, SIZE, seed=7)
    parameters = {name: tensor.detach() for name, tensor in layer.named_parameters()}
    padding = torch.stack([hidden_keys(4), torch.zeros(BATCH, 4, dtype=torch.bool)])
    options = {"need_weights": False, "attn_mask": CAUSAL}

    def loss(parameters, query, key, value, padding):
        inputs = query, key, value
        call = {**options, "key_padding_mask": padding}
        output, _ = torch.func.functional_call(layer, parameters, inputs, call)
        # outputs at padding mean nothing
        return output.masked_fill(padding.mT[..., None], 0.0).square().sum()

    def of_one_input(parameters, x, padding):
        return loss(parameters, x, x, x, padding)

    found = torch.func.vmap(torch.func.grad(of_one_input), (None, 0, 0))(parameters, x, padding)
    apart = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0, 0))(parameters, x, x, x, padding)
    for index in range(2):
        loss_of_one = loss(dict(layer.named_parameters()), *[x[index]] * 3, padding[index])
        expected = torch.autograd.grad(loss_of_one, [*layer.parameters()], allow_unused=True, materialize_grads=True)
        for (name, _), gradient in zip(layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(found[name][index], gradient, msg=name)
            torch.testing.assert_close(apart[name][index], gradient, msg=name)


@pytest.mark.parametrize("preset", PRESETS)
def test_layers_are_stacked_into_an_ensemble(preset):
    layers, x = [build(preset, noise=noise) for noise in (0.1, 0.3)], normal(4, BATCH, SIZE, seed=7)
    states = torch.func.stack_module_state(layers)

    def output(parameters, buffers, x):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x, x, x), {"need_weights": False})[0]

    found = torch.func.vmap(output, (0, 0, None))(*states, x)
    torch.testing.assert_close(found, torch.stack([layer(x, x, x)[0] for layer in layers]))
    of_each = torch.func.vmap(output)(*states, torch.stack([x, x]))
    torch.testing.assert_close(of_each, found)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("site", ["self_attention", "encoder_decoder_attention"])
def test_a_wrapper_may_copy_each_input(preset, site):
    if site != "self_attention" and preset in WITHOUT_CROSS:
        pytest.skip("it has no cross attention")
    layer, x = build(preset, **{"self_attention": False, site: True}), normal(4, BATCH, SIZE, seed=7)
    assert torch.equal(layer(x, x.clone(), x.clone())[0], layer(x, x, x)[0])


@pytest.mark.parametrize("preset", ["mla", "skv"])
def test_a_layer_of_no_place_needs_one_tensor_as_key_and_value(preset):
    layer, x = build(preset, self_attention=False), normal(4, BATCH, SIZE, seed=7)
    layer(x, x, x)
    with pytest.raises(
        ValueError, match="Pass the same tensor as key and value, or build the layer with self_attention"
    ):
        layer(x, x, x.clone())
    with pytest.raises(ValueError, match="Pass the same tensor as key and value"):
        torch.func.vmap(lambda value: layer(x, x, value)[0])(x[None])
