"""M_t made from queries: what autograd keeps of them in half precision, and that nothing else changes by it."""

import pytest
import torch

from fairseq_lowrank.ops import PositionwiseMixing

BATCH, HEADS, LENGTH, DIM = 2, 3, 40, 16


def of_queries(query, weight, base):
    return PositionwiseMixing.of_queries(query, weight, base).weight


def formula(query, weight, base):
    """M_t[j, i] = Σ_d q_{t,j,d} W^M[d, i] + B[j, i], every factor in float32."""
    return (query.permute(2, 0, 1, 3).float() @ weight.float() + base.float()).transpose(0, 1)


def problem(device, dtype, weights=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape, dtype):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    query = normal(LENGTH, BATCH, HEADS, DIM, dtype=dtype)
    query = query.detach().permute(1, 2, 0, 3).requires_grad_()  # as a layer projects it
    return query, normal(DIM, HEADS, dtype=weights), normal(HEADS, HEADS, dtype=weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_wide_copy_of_the_queries_is_kept(dtype, device):
    query, weight, base = problem(device, dtype, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        of_queries(query, weight, base)
    assert query.data_ptr() in {tensor.data_ptr() for tensor in kept}
    assert not [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.numel() >= query.numel()]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [(), (0,), (1,)], ids=str)
def test_values_and_gradients_are_the_formulas_to_the_bit(weights, frozen, device):
    tensors = problem(device, torch.bfloat16, weights)
    for index in frozen:
        tensors[index].requires_grad_(False)
    free = [tensor for tensor in tensors if tensor.requires_grad]
    found, expected = of_queries(*tensors), formula(*tensors)
    assert torch.equal(found, expected)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found)
    pairs = zip(
        torch.autograd.grad(found, free, cotangent), torch.autograd.grad(expected, free, cotangent), strict=True
    )
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


def test_second_derivatives_and_transforms_are_the_formulas(device):
    query, weight, base = (tensor.detach() for tensor in problem(device, torch.bfloat16))
    tangents = tuple(torch.ones_like(tensor) for tensor in (query, weight, base))

    def results(matrices):
        def loss(query, weight):
            return matrices(query, weight, base).pow(2).sum()

        return (
            torch.func.jvp(matrices, (query, weight, base), tangents)[1],
            torch.func.grad(lambda weight: torch.func.grad(loss, 0)(query, weight).float().sum())(weight),
            torch.func.vmap(matrices, (0, None, None))(query[:, None], weight, base),
        )

    for one, other in zip(results(of_queries), results(formula), strict=True):
        torch.testing.assert_close(one, other)


def test_a_compiler_sees_the_formula(device):
    tensors = problem(device, torch.bfloat16)
    compiled = torch.compile(of_queries, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), of_queries(*tensors))
