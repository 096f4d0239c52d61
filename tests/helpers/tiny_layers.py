"""Tiny layers of every method in float64, away from their start, and inputs for them."""

import torch

from fairseq_lowrank.attention import METHODS, build_attention
from fairseq_lowrank.parts import MODULE_AXES

SIZE, HEADS, BATCH, LONGEST = 8, 2, 2, 8
WITHOUT_CROSS = [
    name
    for name, method in METHODS.items()
    if "score" in method.axes
    or any(part.needs_self_attention() for axis, part in method.parts.items() if axis in MODULE_AXES)
]
"""Methods of self-attention alone."""


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def build(name, example=0, noise=0.4, **options):
    """A layer of a method with the sizes of its example, and no parameter at its start."""
    torch.manual_seed(1)
    method = METHODS[name]
    axes = {**(method.axes if not method.preset else {}), **method.examples[example]}
    sizes = {"self_attention": True, "max_positions": LONGEST}
    layer = build_attention(name if method.preset else "mha", SIZE, HEADS, **sizes | axes | options).double()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.add_(noise * normal(*parameter.shape, seed=index))
    return layer.eval()


def hidden_keys(keys):
    """Padding that hides the last two keys of the second sentence, or the last one of two."""
    hidden = torch.zeros(BATCH, keys, dtype=torch.bool)
    hidden[1, -min(2, keys - 1) :] = True
    return hidden


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)
