"""Linear layers by oneDNN against torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairseq_lowrank import linear as by_onednn
from fairseq_lowrank.linear import OneDNNLinear, fast_linear, linear


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Give oneDNN products of any size."""
    monkeypatch.setattr(by_onednn, "SMALLEST", 0)


@pytest.fixture
def calls(monkeypatch) -> list:
    """The shapes of all products that oneDNN computes."""
    seen, product = [], by_onednn._product
    monkeypatch.setattr(by_onednn, "_product", lambda *args: (seen.append(args[0].shape), product(*args))[1])
    return seen


def gradients(function, *tensors):
    given = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    output = function(*given)
    wanted = [tensor for tensor in given if tensor.requires_grad]
    torch.manual_seed(1)
    return output, torch.autograd.grad(output, wanted, torch.randn_like(output))


@pytest.mark.parametrize("shape", [(300,), (7, 50), (2, 3, 40)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "input", "weight"])
def test_linear_equals_that_of_torch(shape, bias, frozen, calls):
    x, weight = torch.randn(*shape, 96, requires_grad=frozen != "input"), torch.randn(130, 96) / 10
    weight.requires_grad_(frozen != "weight")
    tensors = [x, weight, *([torch.randn(130, requires_grad=True)] * bias)]
    (ours, of_ours), (theirs, of_theirs) = gradients(linear, *tensors), gradients(F.linear, *tensors)
    assert calls
    for one, other in zip((ours, *of_ours), (theirs, *of_theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_linear_takes_strided_inputs(calls):
    x, weight = torch.randn(40, 6, 64).transpose(0, 1), torch.randn(64, 32).t()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert calls


def test_gradients_of_gradients_equal_those_of_torch(calls):
    tensors = [torch.randn(20, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)]

    def second(function):
        output = function(*tensors).sin().sum()
        first = torch.autograd.grad(output, tensors, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)

    torch.testing.assert_close(second(linear), second(F.linear), rtol=1e-5, atol=1e-4)
    assert calls


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "autocast", "vmap", "meta", "forward-mode", "vector"])
def test_calls_that_onednn_lacks_are_those_of_torch(kind, calls):
    x, weight = torch.randn(30, 16), torch.randn(8, 16)
    if kind in ("float64", "bfloat16"):
        x, weight = x.to(getattr(torch, kind)), weight.to(getattr(torch, kind))
    if kind == "vector":
        x = x[0]
    if kind == "meta":
        assert linear(x.to("meta"), weight.to("meta")).shape == (30, 8)
    elif kind == "vmap":
        found = torch.func.vmap(linear, (0, None))(x[:, None], weight)
        assert torch.equal(found, torch.func.vmap(F.linear, (0, None))(x[:, None], weight))
    elif kind == "forward-mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert torch.equal(linear(dual, weight), F.linear(dual, weight))
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert not calls


def test_small_products_are_those_of_torch(monkeypatch, calls):
    monkeypatch.setattr(by_onednn, "SMALLEST", 30 * 16 * 8 + 1)
    x, weight = torch.randn(30, 16), torch.randn(8, 16)
    assert torch.equal(linear(x, weight), F.linear(x, weight)) and not calls


def test_fast_linear_keeps_what_a_model_has(calls):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight  # tied
    model.double().float()
    before, plain = model.state_dict(), copy.deepcopy(model)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    assert fast_linear(model) is model and all(type(part) is OneDNNLinear for part in model)
    assert list(model.state_dict()) == list(before) and model[1].weight is model[0].weight
    x = torch.randn(9, 6)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    assert seen and calls


def test_compiled_models_are_whole_graphs_of_torch(calls):
    model = fast_linear(nn.Sequential(nn.Linear(6, 4), nn.ReLU()))
    calls.clear()
    x = torch.randn(9, 6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert not calls
    torch.testing.assert_close(compiled, model(x), rtol=1e-5, atol=1e-5)


def test_a_torch_without_the_operator_keeps_its_own(monkeypatch):
    def missing(*_):
        raise AttributeError("_linear_pointwise")

    monkeypatch.setattr(by_onednn, "_product", missing)
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no linear layer by oneDNN"):
        assert type(fast_linear(model)) is nn.Linear
    assert not by_onednn.is_faster(0.001)


@pytest.mark.parametrize(("slowdown", "faster"), [(0.0, True), (0.01, False)])
def test_is_faster_compares_the_two(monkeypatch, slowdown, faster):
    clock = [0.0]
    monkeypatch.setattr(by_onednn.time, "perf_counter", lambda: clock[0])
    product, own = by_onednn._product, by_onednn._torch_linear
    monkeypatch.setattr(by_onednn, "_product", lambda *a: (clock.__setitem__(0, clock[0] + slowdown), product(*a))[1])
    monkeypatch.setattr(by_onednn, "_torch_linear", lambda *a: (clock.__setitem__(0, clock[0] + 0.02), own(*a))[1])
    assert by_onednn.is_faster(0.1) is faster
