"""What may be asked of derivatives: the first are exact, whatever follows is refused and never silently wrong."""

import pytest
import torch
from attention_problems import attend, call_of
from torch.utils.checkpoint import checkpoint

from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.penalties import head_overlap

REFUSAL = 'choose backend="reference"'


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def problem():
    q, k, v = (normal(1, 2, 70, 4, seed=seed) for seed in range(3))
    mixing, before = PositionwiseMixing(normal(1, 70, 2, 2, seed=3)), StaticMixing(normal(2, 2, seed=4))
    return {"q": q, "k": k, "v": v, "prob_mixing": mixing, "score_mixing": before}


def leaves(built):
    return [built["q"], built["k"], built["v"], built["prob_mixing"].weight, built["score_mixing"].weight]


def gradients(built, backend, **options):
    heads, _ = attend(**built, backend=backend)
    return torch.autograd.grad(heads.pow(3).sum(), leaves(built), **options)


def test_first_derivatives_are_exact_under_create_graph():
    built = problem()
    expected = gradients(built, "reference")
    for found, exact in zip(gradients(built, "blocked", create_graph=True), expected, strict=True):
        torch.testing.assert_close(found, exact)
        assert found.requires_grad


@pytest.mark.parametrize("other_path", [False, True])
@pytest.mark.parametrize("of", range(5))
def test_a_second_derivative_is_refused(of, other_path):
    built = problem()
    gradient = gradients(built, "blocked", create_graph=True)[of]
    # another path to the leaf gives the graph an edge of its own
    total = gradient.pow(2).sum() + (leaves(built)[of].pow(2).sum() if other_path else 0)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        torch.autograd.grad(total, [leaves(built)[of]])


def test_a_second_derivative_by_way_of_the_output_gradient_is_refused():
    built, cotangent = problem(), normal(1, 2, 70, 4, seed=9)
    heads, _ = attend(**built, backend="blocked")
    (gradient,) = torch.autograd.grad(heads, [built["v"]], cotangent, create_graph=True)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        torch.autograd.grad(gradient.sum(), [cotangent])


def test_the_reference_has_second_derivatives():
    built = problem()
    gradient = gradients(built, "reference", create_graph=True)[0]
    assert torch.autograd.grad(gradient.pow(2).sum(), [built["q"]])[0].abs().max() > 0


def heads_of(backend):
    k, v = normal(1, 2, 70, 4, seed=1).detach(), normal(1, 2, 70, 4, seed=2).detach()
    return lambda q: attend(q, k, v, activation="sigsoftmax", backend=backend)[0]


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda q: f(q).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "hessian": lambda f, x: torch.func.hessian(lambda q: f(q).sum())(x[..., :1, :]),
    "functional.hvp": lambda f, x: torch.autograd.functional.hvp(lambda q: f(q).pow(2).sum(), x, x),
    "functional.jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "batched gradients": lambda f, x: torch.autograd.grad(f(x), [x], torch.ones_like(x)[None], is_grads_batched=True),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_functions_are_refused_in_one_line_or_work_with_the_reference(transform):
    x = normal(1, 2, 70, 4)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        TRANSFORMS[transform](heads_of("blocked"), x)
    TRANSFORMS[transform](heads_of("reference"), x)


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad", "vjp", "hessian"])
def test_auto_takes_the_reference_under_transforms_of_functions(transform):
    x = normal(1, 2, 70, 4)
    found, expected = (TRANSFORMS[transform](heads_of(backend), x) for backend in ("auto", "reference"))
    torch.testing.assert_close(found, expected)


def test_forward_mode_is_refused():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(normal(1, 2, 70, 4).detach(), torch.ones(1, 2, 70, 4).double())
        with pytest.raises(NotImplementedError, match=REFUSAL):
            heads_of("blocked")(dual)


def test_the_penalties_of_heads_refuse_second_derivatives():
    q, k = normal(1, 2, 5, 4), normal(1, 2, 5, 4, seed=1)
    (gradient,) = torch.autograd.grad(head_overlap(call_of(q, k), ("row",)).sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="head_overlap has first derivatives"):
        torch.autograd.grad(gradient.sum() + q.sum(), [q])
    with pytest.raises(NotImplementedError, match="head_overlap has first derivatives"):
        torch.func.grad(lambda q: head_overlap(call_of(q, k), ("row",)).sum())(q)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize("part", ["key_padding", "additive"])
def test_a_mask_changed_before_the_backward_pass_is_noticed_or_harmless(backend, part):
    built = problem()
    shape = (1, 70) if part == "key_padding" else (70, 70)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, :5] = True
    built["mask"] = AttentionMask(**{part: mask})
    expected = gradients(built, backend)
    heads, _ = attend(**built, backend=backend)
    mask.zero_()
    try:
        found = torch.autograd.grad(heads.pow(3).sum(), leaves(built))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_padding_changed_before_the_backward_pass_of_a_penalty_is_noticed():
    q, k, padding = normal(1, 2, 5, 4), normal(1, 2, 5, 4, seed=1), torch.zeros(1, 5, dtype=torch.bool)
    masked = call_of(q, k, mask=AttentionMask(key_padding=padding))
    for call, query_padding in ((masked, None), (call_of(q, k), padding)):
        penalty = head_overlap(call, ("row",), query_padding)
        padding[:, 0] = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.sum().backward()


@pytest.mark.parametrize("rate", [0.999993, 0.9999999, 1 - 2**-53])
@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_dropout_of_nearly_everything_is_finite(rate, backend):
    built = problem()
    heads, _ = attend(**built, dropout_p=rate, backend=backend)
    assert heads.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(heads.sum(), leaves(built)))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
def test_a_checkpointed_call_has_the_gradients_of_an_unbroken_one(backend, use_reentrant):
    built = problem() | ({"score_mixing": None} if backend == "sdpa" else {})
    q, k, v = (built[name] for name in ("q", "k", "v"))

    def heads(q, k, v):
        return attend(**built | {"q": q, "k": k, "v": v}, backend=backend)[0]

    expected = torch.autograd.grad(heads(q, k, v).pow(3).sum(), [q, k, v])
    checkpoint(heads, q, k, v, use_reentrant=use_reentrant).pow(3).sum().backward()
    for leaf, gradient in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)
