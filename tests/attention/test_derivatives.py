"""Derivatives of layers for each sample, with masks, under the transforms of ``torch.func``."""

import pytest
import torch
from tiny_layers import BATCH, SIZE, build, hidden_keys, normal

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
