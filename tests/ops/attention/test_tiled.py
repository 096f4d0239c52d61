"""The tiled backend: on a GPU (--device cuda), or interpreted on the CPU (TRITON_INTERPRET=1, see test_triton_here.py)."""

import pytest
import torch
from attention_problems import attend, leaves
from rounded_attention import heads_and_gradients

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention import selfcheck, tiled
from fairseq_lowrank.ops.attention.tiled_launch import TiledLaunch, has_few_programs

LENGTH = 36


def padding(*hidden):
    """Two rows of keys, with these hidden ones."""
    rows = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, keys in enumerate(hidden):
        rows[row, keys] = True
    return rows


# Rules before and after the softmax, heads, sizes of keys and values, and changes of a causal call.
PROBLEMS = {
    "one matrix": ((None, StaticMixing), 4, (16, 16), {"few": False}),
    "one matrix, small tiles": ((None, StaticMixing), 8, (16, 16), {}),
    "padded heads and sizes": ((None, StaticMixing), 3, (10, 20), {"activation": "sigsoftmax"}),
    "descriptors": ((None, StaticMixing), 16, (16, 16), {"descriptors": True}),
    "32 heads, more keys": ((None, StaticMixing), 32, (16, 16), {"queries": 16, "keys": 20}),
    "matrices of queries": ((None, PositionwiseMixing), 4, (16, 16), {"queries": 20}),
    "talking heads, window": ((StaticMixing, StaticMixing), 4, (16, 16), {"mask": AttentionMask(True, window=9)}),
    "mixed scores, more queries": ((StaticMixing, None), 4, (16, 16), {"keys": 20}),
    "right padding": (
        (None, StaticMixing),
        2,
        (16, 16),
        {"batch": 2, "mask": AttentionMask(True, padding(slice(20, None)))},
    ),
    "padding anywhere": (
        (None, PositionwiseMixing),
        2,
        (16, 16),
        {"batch": 2, "queries": 17, "mask": AttentionMask(False, padding([0, 17], slice(0, 36)))},
    ),
    "beams, appended": (
        (None, StaticMixing),
        2,
        (16, 16),
        {"mask": AttentionMask(True, num_appended_keys=2, query_repeats=2)},
    ),
    "unmixed, groups, window": (
        (None, None),
        4,
        (16, 16),
        {"groups": (2, 1), "queries": 90, "keys": 90, "mask": AttentionMask(True, window=20)},
    ),
    "unmixed sigsoftmax, padding": (
        (None, None),
        2,
        (16, 8),
        {"batch": 2, "activation": "sigsoftmax", "mask": AttentionMask(True, padding([0, 17], slice(30, 36)))},
    ),
}


def problem(device, rules, heads, dims, *, dtype=torch.float16, batch=1, groups=None, queries=LENGTH, keys=LENGTH, mask=None, activation="softmax", **options):  # fmt: skip
    sizes = (*(groups or (heads, heads)), queries, keys, *dims)
    generator, mask = torch.Generator().manual_seed(0), mask or AttentionMask(True)
    call = selfcheck.random_call(generator, device, dtype, batch, heads, sizes, rules, mask, activation, None)
    return call, options


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients_are_the_references(name, device):
    rules, heads, dims, changes = PROBLEMS[name]
    call, options = problem(device, rules, heads, dims, **changes)
    for part, distance in selfcheck.errors(call, backend="tiled", **options).items():
        assert distance < 1.5e-3, f"{part}: {distance:.1e}"


@pytest.mark.parametrize(
    "rules",
    [(None, StaticMixing), (None, PositionwiseMixing), (StaticMixing, StaticMixing), (StaticMixing, None)],
    ids=str,
)
def test_bfloat16_is_the_formula_rounded_where_the_kernels_round(rules, device):
    call, _ = problem(device, rules, 4, (16, 16), dtype=torch.bfloat16, queries=20, keys=20)
    call = call.map_tensors(lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    cotangent = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
    with torch.no_grad():
        heads, kept = TiledLaunch(call, 0).forward()
        found = [heads, *TiledLaunch(call, 0).backward(cotangent, *kept)]
    for one, other in zip(found, heads_and_gradients(call, cotangent, merged=True), strict=True):
        assert (one.double() - other).norm() < 2e-3 * other.norm()
