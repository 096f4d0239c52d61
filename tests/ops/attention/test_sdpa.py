"""Head mixing by PyTorch's own kernels: linear memory, narrow dtypes. Its values are compared in test_backends.py."""

import pytest
import torch
from attention_problems import LargestTensor, attend, call_of, leaves, mixing_of

from fairseq_lowrank.ops import AttentionMask, StaticMixing, attention
from fairseq_lowrank.ops.attention import sdpa

LENGTH = 1024


def problem(
    device, *, prob_mixing="static", heads=4, groups=(4, 4), dims=(8, 8), length=LENGTH, batch=1, dtype=torch.float32
):
    generator = torch.Generator().manual_seed(6)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    return {
        "q": normal(batch, heads, length, dims[0]),
        "k": normal(batch, groups[0], length, dims[0]),
        "v": normal(batch, groups[1], length, dims[1]),
        "mask": AttentionMask(causal=True),
        "prob_mixing": mixing_of(prob_mixing, normal, (batch, heads, length, length)),
    }


def gradients(heads, built):
    return torch.autograd.grad(heads.float().pow(2).sum(), list(leaves(built).values()))


@pytest.mark.parametrize(
    "options",
    [
        {"prob_mixing": "positionwise"},
        {"groups": (2, 4)},
        {"groups": (1, 1)},
        {"dims": (4, 6)},
        {"dims": (6, 3)},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_no_tensor_grows_with_the_square_of_the_length(options):
    built = problem("cpu", **options)
    with LargestTensor() as largest:
        gradients(attend(**built, backend="sdpa")[0], built)
    assert largest.bytes <= 4 * LENGTH * 4 * 8 < LENGTH**2  # the heads once, in float32, and no larger than one value's


def test_each_value_is_attended_to_once(device, monkeypatch):
    """However many heads share it."""
    calls, fused = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((q.size(-1), k.size(-1), v.size(-1)))
        return fused(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attend(**problem(device, heads=6, groups=(3, 2), dims=(5, 9), length=7), backend="sdpa")
    assert calls == [(16, 16, 16)] * 2  # a size that every fused kernel takes


@pytest.mark.parametrize("autocast", [False, True])
def test_m_stays_in_float32_beside_half_precision(autocast, device):
    """1 + 2⁻¹², which is 1 in bfloat16, shows in a sum of two heads that nearly cancel."""
    dtype = torch.float32 if autocast else torch.bfloat16
    built = problem(device, heads=2, groups=(1, 1), length=5, dtype=dtype)
    built["q"] = built["q"].detach()[:, :1].expand(-1, 2, -1, -1)  # both heads have the same probabilities
    near = torch.tensor([[1 + 2**-12, 1.0], [-1.0, -1.0]], device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        heads, _ = attend(**built | {"prob_mixing": StaticMixing(near)}, backend="sdpa")
        plain, _ = attend(**built | {"prob_mixing": None}, backend="sdpa")
    assert heads.dtype == torch.bfloat16
    torch.testing.assert_close(heads[:, 0], plain[:, 0] * 2**-12)
    assert not heads[:, 1].any()


@pytest.mark.parametrize("mixing", ["static", "positionwise"])
def test_under_autocast_values_and_gradients_stay_near_float32(mixing, device):
    built = problem(device, prob_mixing=mixing, length=90)
    expected, _ = attend(**built, backend="reference")
    expected_gradients = gradients(expected, built)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        heads, _ = attend(**built, backend="sdpa")
        found = gradients(heads, built)
    assert heads.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in found] == [torch.float32] * len(found)
    assert (heads - expected).norm() <= 0.01 * expected.norm()
    for gradient, exact in zip(found, expected_gradients, strict=True):
        assert (gradient - exact).norm() <= 0.03 * exact.norm()


def test_pytorch_tells_whether_it_has_a_fused_kernel(device, monkeypatch):
    call = call_of(**problem(device, dtype=torch.float16, dims=(5, 9)))
    assert sdpa.is_fused(call) == device.startswith("cuda")
    asked = []
    monkeypatch.setattr(sdpa, "can_use_efficient_attention", lambda params: asked.append(params) or True)
    monkeypatch.setattr(sdpa, "can_use_flash_attention", lambda params: False)
    assert sdpa.is_fused(call)
    sizes = {(tensor.size(-1), tensor.dtype, tensor.requires_grad) for tensor in (asked[0].query, asked[0].value)}
    assert sizes == {(16, torch.float16, True)} and asked[0].is_causal


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_to_attend_from_or_to_gives_nothing(device, batch, queries, keys):
    q, k, v = (torch.randn(batch, 2, size, 4, device=device, requires_grad=True) for size in (queries, keys, keys))
    heads, _ = attend(q, k, v, prob_mixing=StaticMixing(torch.eye(2, device=device)), backend="sdpa")
    assert heads.shape == (batch, 2, queries, 4)
    assert keys or not heads.any()
    heads.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scores_turned_round_are_left_to_another_backend(scale, device):
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 2, 70, 4, generator=generator).to(device) for _ in range(3))
    problem = {"q": q, "k": k, "v": v, "mask": AttentionMask(causal=True), "scale": scale}
    expected, _ = attend(**problem, backend="reference")
    torch.testing.assert_close(attend(**problem, backend="auto")[0], expected)
    with pytest.raises(ValueError, match="which is not above 0"):
        attend(**problem, backend="sdpa")


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(True, num_appended_keys=1),
        AttentionMask(additive=torch.arange(32).view(2, 1, 4, 4) % 5 == 0),
        AttentionMask(additive=torch.arange(128).view(2, 4, 4, 4) % 5 == 0),
    ],
    ids=["appended", "by-entry", "by-head"],
)
def test_masks_of_shared_keys_are_those_of_the_reference(mask, device):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 4, 8, generator=generator).to(device) for heads in (4, 2, 2))
    call = call_of(q, k, v, mask=mask.map_tensors(lambda tensor: tensor.to(device)))
    torch.testing.assert_close(attention(call, "sdpa")[0], attention(call, "reference")[0])
