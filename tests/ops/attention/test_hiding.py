"""Float masks mean the same on every backend: from half of finfo.min down they hide, other finite numbers are added."""

import pytest
import torch
from attention_problems import attend, call_of

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.ops import AttentionMask, StaticMixing
from fairseq_lowrank.ops.attention.mask import narrowed
from fairseq_lowrank.ops.penalties import head_overlap

BACKENDS = ("reference", "blocked", "sdpa")
HEADS, LENGTH, DIM = 2, 70, 4


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, HEADS, LENGTH, DIM, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    return dict(zip("qkv", tensors, strict=True))


def results(built, backend, mask, **options):
    heads, _ = attend(**built, mask=AttentionMask(additive=mask), backend=backend, **options)
    return heads, *torch.autograd.grad(heads.float().pow(2).sum(), list(built.values()))


def mask_of(value, dtype):
    """Hides (or lowers) some keys of all rows, all keys of row 3, and in row 4 all but one."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=dtype)
    mask[:, 10:20] = value
    mask[3] = value
    mask[4, 1:] = value
    return mask


def cases():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        least = torch.finfo(dtype).min
        for value in (least, least / 2, float("-inf")):
            yield pytest.param(value, dtype, id=f"{value:g}-{dtype}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("value", "dtype"), cases())
def test_half_of_the_least_number_hides_as_infinity_does(value, dtype, backend):
    for tensors in {torch.float32, dtype}:
        built = problem(tensors)
        found = results(built, backend, mask_of(value, dtype))
        expected = results(built, backend, mask_of(1.0, torch.float32).bool())
        assert (found[0][:, :, 3] == 0).all() and (found[1][:, :, 3] == 0).all()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-1e8, torch.float32),
        (-1e38, torch.float32),
        (-1e300, torch.float64),
        (-1e4, torch.float16),
        (-32736.0, torch.float16),
        (-1e38, torch.bfloat16),
    ],
)
def test_other_finite_numbers_are_added(value, dtype, backend):
    for tensors in {torch.float32, dtype if dtype != torch.float64 else torch.float32}:
        built = problem(tensors)
        heads, *found = results(built, backend, mask_of(value, dtype))
        hidden = results(built, backend, mask_of(1.0, torch.float32).bool())
        rows = [row for row in range(LENGTH) if row != 3]
        # next to keys that are not lowered nothing is left of the others ...
        torch.testing.assert_close(heads[:, :, rows], hidden[0][:, :, rows])
        # ... and a row of nothing else averages, the scores being lost in so large a number or not
        exact = built["v"].detach().float()
        if abs(value) > 1e5:
            torch.testing.assert_close(
                heads[:, :, 3].float(),
                exact.mean(dim=2),
                **({"rtol": 0, "atol": 2e-3} if tensors != torch.float32 else {}),
            )
        assert (heads[:, :, 3] != 0).all()
        assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_autocast_narrows_stays_added(dtype, backend):
    built, bias = problem(torch.float32), torch.full((LENGTH,), -1e8)
    with torch.autocast("cpu", dtype):
        masked, _ = attend(**built, mask=AttentionMask(additive=mask_of(-1e8, torch.float32)), backend=backend)
        biased, _ = attend(**built, score_bias=bias, backend=backend)
    # float16 has no number in which scores are lost: there SDPA weighs by them, elsewhere all keys count alike
    mean = built["v"].detach().mean(dim=2)
    for heads in (masked[:, :, 3].float(), biased[:, :, 5].float()):
        assert heads.isfinite().all() and (heads.abs() > 1e-4).all()
        if (dtype, backend) != (torch.float16, "sdpa"):
            torch.testing.assert_close(heads, mean, atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrowed_number_stays_finite_next_to_a_score(dtype):
    wide = torch.tensor([float("-inf"), torch.finfo(torch.float64).min / 4, -3.0], dtype=torch.float64)
    hidden, lowest, other = narrowed(wide, dtype) + torch.finfo(dtype).min / 4
    assert hidden == float("-inf") and lowest.isfinite() and other.isfinite()


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_score_bias_is_no_mask(backend):
    built = problem(torch.float32)
    bias = torch.zeros(LENGTH)
    bias[:] = torch.finfo(torch.float32).min / 2
    heads, _ = attend(**built, score_bias=bias, backend=backend)
    torch.testing.assert_close(heads, built["v"].mean(dim=2, keepdim=True).expand_as(heads))
    heads, _ = attend(**built, score_bias=torch.full((LENGTH,), float("-inf")), backend=backend)
    assert (heads == 0).all()


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_mixed_heads_agree_on_masks_of_the_least_number(activation):
    generator = torch.Generator().manual_seed(1)
    mixing = StaticMixing(torch.randn(HEADS, HEADS, generator=generator))
    built, mask = problem(torch.float32), mask_of(torch.finfo(torch.float32).min, torch.float32)
    options = {"prob_mixing": mixing, "activation": activation}
    for one, other in zip(*(results(built, backend, mask, **options) for backend in BACKENDS[:2]), strict=True):
        torch.testing.assert_close(one, other)


def test_a_learned_mask_gets_no_gradient_where_it_hides():
    found = {}
    for backend in BACKENDS:
        mask = mask_of(torch.finfo(torch.float32).min, torch.float32).requires_grad_()
        heads, _ = attend(**problem(torch.float32), mask=AttentionMask(additive=mask), backend=backend)
        (found[backend],) = torch.autograd.grad(heads.pow(2).sum(), [mask])
        assert (found[backend][:, 10:20] == 0).all() and (found[backend][3] == 0).all()
        assert found[backend][0].abs().max() > 0
        torch.testing.assert_close(found[backend], found["reference"])


def test_a_penalty_sees_a_mask_of_the_least_number():
    built = problem(torch.float32)
    values = [
        head_overlap(call_of(built["q"], built["k"], mask=AttentionMask(additive=mask)), ("row", "column"))
        for mask in (mask_of(torch.finfo(torch.float32).min, torch.float32), mask_of(1.0, torch.float32).bool())
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("preset", ["mha", "mhe-add", "mhe-mul"])
def test_a_layer_takes_masks_of_the_least_number(preset, backend):
    layer = build_attention(preset, 8, HEADS, backend=backend)
    torch.nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(LENGTH, 2, 8, generator=torch.Generator().manual_seed(0))
    least = torch.finfo(torch.float32).min
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), least)
    for finite in (causal, mask_of(least, torch.float32)):
        hides = finite == least
        for options in ({"need_weights": False}, {"need_head_weights": True}, {"before_softmax": True}):
            for found, expected in zip(
                layer(x, x, x, attn_mask=finite, **options), layer(x, x, x, attn_mask=hides, **options), strict=True
            ):
                assert (found is None) == (expected is None)
                if found is not None:
                    torch.testing.assert_close(found, expected)
    output = layer(x, x, x, attn_mask=mask_of(least, torch.float32), need_weights=False)[0]
    torch.testing.assert_close(output[3], layer.out_proj.bias.expand(2, -1))
