import pytest
import torch
from needed_axes import needed_axes

from fairseq_lowrank.attention import build_attention


@pytest.fixture
def make(device):
    """``make(preset, **options)``: a layer of 3 heads and size 12 in float64, for evaluation, away from its start."""

    def make(preset="mha", embed_dim=12, num_heads=3, dtype=torch.float64, **options):
        torch.manual_seed(1)
        layer = build_attention(preset, embed_dim, num_heads, **needed_axes(preset) | options)
        # zeros and identities would hide terms
        generator = torch.Generator().manual_seed(5)
        for parameter in layer.parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator) / 2
        return layer.to(device, dtype).eval()

    return make


@pytest.fixture
def inputs(device):
    """``inputs(*shape, seed=2)``: normal numbers in float64."""

    def inputs(*shape, seed=2, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return inputs
