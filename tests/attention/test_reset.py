"""Layers that are made on the meta device get their values by ``to_empty`` and ``reset_parameters``, for every method."""

import pytest
import torch
from tiny_layers import SIZE, build, normal

from fairseq_lowrank.attention import METHODS, build_attention
from fairseq_lowrank.messages import UserError

CASES = [(name, example) for name, method in METHODS.items() for example in range(len(method.examples))]


def emptied(layer):
    """The layer, with what was in memory in each of its tensors."""
    layer.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(7.0)
    return layer


@pytest.mark.parametrize(("name", "example"), CASES, ids=str)
def test_reset_gives_every_tensor_its_initial_values(name, example):
    layer, expected = build(name, example, noise=0.0), build(name, example, noise=0.0).state_dict()
    emptied(layer).reset_parameters()
    for tensor, value in layer.state_dict().items():
        # drawn values differ; their size and everything else do not
        ratio = value.abs().max() / expected[tensor].abs().max()
        random_sums = name == "mixhead-random" and tensor == "mixing.weight"
        assert value.eq(expected[tensor]).all() or 0.3 < ratio < 3 or random_sums, tensor
        assert not value.eq(7.0).any(), tensor


@pytest.mark.parametrize("name", ["mha", "mixhead-b", "talking-heads", "gain", "headmix", "gated", "dcmha", "xsa"])
def test_the_reset_of_each_module_gives_the_identity(name):
    """As torchtitan does: every module that has the method is called, and its children after it."""
    layer = emptied(build_attention(name, SIZE, 4, self_attention=True))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    plain, x = build_attention("mha", SIZE, 4, self_attention=True), normal(4, 2, SIZE, seed=7).float()
    plain.load_state_dict({key: layer.state_dict()[key] for key in plain.state_dict()})
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("name", ["mha", "mixhead-b", "gated", "structured"])
def test_a_layer_that_was_never_made_real_is_refused_by_name(name):
    layer, x = build_attention(name, SIZE, 4, self_attention=True, device="meta"), torch.randn(4, 2, SIZE)
    with pytest.raises(
        UserError, match=r"(query_first|_proj\.weight) is on the meta device, so it has no values. Call to_empty"
    ):
        layer(x, x, x)
