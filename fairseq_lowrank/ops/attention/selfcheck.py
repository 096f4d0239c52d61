"""Whether the kernels of the backends ``triton`` and ``tiled`` compute on this device what the formula says: nobody has tried every GPU.

The first call of a composition (a kind of score, mixing, mask …, of these sizes, on this device) is preceded by one of the same
composition on a small random problem, values and gradients, against the reference in float64. Where they differ, a warning says so,
and another backend computes this composition from then on. Where shared memory does not hold the kernels, ``auto`` takes the next
backend without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import OutOfResources

from fairseq_lowrank.ops.attention import reference
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.launch import Kernel, Launch
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import DiagonalMixing, HeadMixing, StaticMixing
from fairseq_lowrank.ops.attention.scores import DotProduct
from fairseq_lowrank.ops.attention.tiled_launch import TiledLaunch, has_few_programs

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of ‖x − reference‖ / ‖reference‖."""
# float32 products in tf32, where torch is allowed them
_TF32 = 1e-2


class SelfCheckResult(NamedTuple):
    """What came of launching the kernels of a composition."""

    error: str | None
    """What differs from the reference, and by how much, or why the kernels do not run."""
    fits: bool = True
    """False if the device lacks shared memory for them, so that nothing was computed."""

    def __str__(self) -> str:
        if not self.fits:
            return f"does not fit ({self.error})"
        return "equals the reference" if self.error is None else f"is wrong ({self.error})"


LAUNCHES: dict[str, type[Launch]] = {"triton": Launch, "tiled": TiledLaunch}
"""The backends whose kernels are checked."""

_results: dict[tuple, SelfCheckResult] = {}
_warned: set[tuple] = set()


def is_verified(call: AttentionCall, backend: str, fallback: str) -> bool:
    """Return True if the kernels compute ``call`` correctly here. Warn once if they do not, and name what does."""
    key, error = _composition(call, backend), checked(call, backend).error
    if error is not None and key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"the {backend} kernels cannot be used on this GPU ({error}). "
            f"From now on, {fallback!r} computes {describe(call)}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return error is None


def _is_recorded(call: AttentionCall) -> bool:
    """Return True if a graph is being recorded, in which nothing can be compared."""
    return call.v.is_cuda and torch.cuda.is_current_stream_capturing()


def checked(call: AttentionCall, backend: str = "triton") -> SelfCheckResult:
    """Return the result of the self-check of the call's composition, which runs once.

    While a graph is recorded, a composition that its warm-up did not check counts as correct.
    """
    key = _composition(call, backend)
    if key not in _results:
        if _is_recorded(call):
            return SelfCheckResult(None)
        with ThreadPoolExecutor(1) as thread:
            _results[key] = thread.submit(_check_like, call, backend).result()
    return _results[key]


# A separate thread has no modes of the call: autocast, hooks on saved tensors (activation checkpointing), dispatch modes.
def _check_like(call: AttentionCall, backend: str) -> SelfCheckResult:
    options = {"few": has_few_programs(call)} if backend == "tiled" else {}
    with torch.cuda.device_of(call.v):
        return self_check(_like(call), backend, **options)


def self_check(call: AttentionCall, backend: str = "triton", **options: Any) -> SelfCheckResult:
    """Launch all kernels of ``call`` and compare them with the reference. ``options`` are those of the backend's launches."""
    try:
        found = errors(call, Kernel.run, backend, **options)
    except OutOfResources as error:
        return SelfCheckResult(f"OutOfResources: {error}", fits=False)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:
        return SelfCheckResult(
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
    tolerance = TOLERANCE[call.v.dtype]
    if call.v.dtype == torch.float32 and call.v.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        tolerance = _TF32
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    return SelfCheckResult(", ".join(f"{name} by {error:.1g}" for name, error in wrong.items()) or None)


def errors(
    call: AttentionCall, run: Callable[[Kernel], object] = Kernel.run, backend: str = "triton", **options: Any
) -> dict[str, float]:
    """Compute ‖x − reference‖ / ‖reference‖ of the heads and of the gradient of every float tensor of ``call`` without dropout.

    With dropout, whose random masks no reference has, the kernels are launched too.
    """
    plain = call.replace(dropout_p=0.0)
    with torch.inference_mode(False), torch.enable_grad():
        ours = plain.map_tensors(lambda tensor: _leaf(tensor, tensor.dtype))
        exact = plain.map_tensors(lambda tensor: _leaf(tensor, torch.float64))
        expected, _ = reference.compute(exact)
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(expected).to(call.v.dtype)
        heads, gradients = _launched(ours, run, backend, cotangent, **options)
        if call.dropout_p:
            _launched(ours.replace(dropout_p=call.dropout_p), run, backend, **options)
        sources = _differentiable(exact)
        wanted = torch.autograd.grad(expected, list(sources.values()), cotangent.double())
    pairs = {
        "heads": (heads, expected.detach()),
        **dict(zip(sources, zip(_given(gradients), wanted, strict=True), strict=True)),
    }
    # Of one visible key the gradient of scores is 0, but for the rounding of do · v, over all queries, and heads that share a key.
    _, num_heads, queries, _ = call.scores.shape
    rounding = 2 * torch.finfo(call.v.dtype).eps * (queries * call.v.size(3)) ** 0.5
    of_queries, sharing = rounding * abs(call.dot_product.factor), num_heads // call.dot_product.k.size(1)
    nothing = {"q": of_queries, "k": of_queries * sharing**0.5, "score mixing": rounding}
    return {name: _distance(one, other, nothing.get(name, 0.0)) for name, (one, other) in pairs.items()}


def _launched(
    call: AttentionCall, run: Callable[[Kernel], object], backend: str, grad: Tensor | None = None, **options: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """Return heads and gradients of ``call``; the gradient of the heads is ``grad``, or the heads."""
    with torch.no_grad():
        launch = LAUNCHES[backend](call, 0, run, **options)
        heads, kept = launch.forward()
        return heads, launch.backward(heads if grad is None else grad, *kept)


def describe(call: AttentionCall) -> str:
    """Describe a composition in a few words."""
    kinds = [type(mixing).__name__ if mixing else "no mixing" for mixing in (call.score_mixing, call.prob_mixing)]
    batch, heads, queries, keys = call.scores.shape
    return (
        f"{call.activation} attention ({kinds[0]} before, {kinds[1]} after; {heads} heads of {call.dot_product.q.size(3)} and "
        f"{call.v.size(3)}, {str(call.v.dtype).removeprefix('torch.')}, {batch} × {queries} queries, {keys} keys)"
    )


def _composition(call: AttentionCall, backend: str = "triton") -> tuple:
    mask, (_, heads, queries, keys) = call.mask, call.scores.shape
    kinds = tuple((type(mixing), mixing and mixing.weight.dtype) for mixing in (call.score_mixing, call.prob_mixing))
    groups = call.dot_product.k.size(1), call.v.size(1)
    additive = None if mask.additive is None else (mask.additive.dtype, mask.differs_by_head)
    masked = mask.causal, mask.key_padding is not None, additive, bool(mask.num_appended_keys), mask.query_repeats > 1
    lengths = _alike(queries), _alike(keys), queries == keys
    of_tiles = (mask.window is not None, has_few_programs(call)) if backend == "tiled" else ()
    return (
        backend,
        of_tiles,
        call.v.device,
        call.v.dtype,
        call.activation,
        bool(call.dropout_p),
        kinds,
        heads,
        groups,
        call.dot_product.q.size(3),
        call.v.size(3),
        masked,
        lengths,
    )


def _alike(length: int) -> int:
    """Return a short length with the same compiled kernels: the compiler tells apart 1, multiples of 16, and the others."""
    return 1 if length == 1 else 20 if length % 16 else 48


def _like(call: AttentionCall) -> AttentionCall:
    """Return a small random call of the same composition."""
    generator = torch.Generator().manual_seed(0)
    mask, (_, heads, queries, keys) = call.mask, call.scores.shape
    appended, repeats = min(mask.num_appended_keys, 3), min(mask.query_repeats, 3)
    positions = _alike(queries // mask.query_repeats)
    keys = (positions if queries == keys else _alike(keys) + 16) + appended
    queries = positions * repeats
    padding = torch.rand(1, keys, generator=generator) < 0.3 if mask.key_padding is not None else None
    additive = None
    if mask.additive is not None:
        additive = torch.randn(1, heads if mask.differs_by_head else 1, queries, keys, generator=generator)
        additive = additive < -1 if mask.additive.dtype == torch.bool else additive.to(mask.additive.dtype)
    window = None if mask.window is None else min(mask.window, 11)
    small = AttentionMask(mask.causal, padding, additive, appended, repeats, window)
    sizes = call.dot_product.k.size(1), call.v.size(1), queries, keys, call.dot_product.q.size(3), call.v.size(3)
    rules = tuple(type(mixing) if mixing else None for mixing in (call.score_mixing, call.prob_mixing))
    like = random_call(
        generator, call.v.device, call.v.dtype, 1, heads, sizes, rules, small, call.activation, call.dot_product.factor
    )
    return like.replace(
        score_mixing=_narrowed(like.score_mixing, call.score_mixing),
        prob_mixing=_narrowed(like.prob_mixing, call.prob_mixing),
        dropout_p=call.dropout_p,
    )


def _narrowed(mixing: HeadMixing | None, like: HeadMixing | None) -> HeadMixing | None:
    if mixing is None or like is None:
        return None
    return mixing.replace(weight=mixing.weight.to(like.weight.dtype))


def random_call(
    generator: torch.Generator,
    device: torch.device | str,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    sizes: tuple[int, int, int, int, int, int],
    rules: Any,
    mask: AttentionMask,
    activation: str,
    scale: float | None,
) -> AttentionCall:
    key_groups, value_groups, queries, keys, dim, value_dim = sizes

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def mixing(rule: Any) -> HeadMixing | None:
        if rule is None:
            return None
        shape = {StaticMixing: (heads, heads), DiagonalMixing: (heads,)}.get(rule, (batch, queries, heads, heads))
        return rule(normal(*shape, dtype=torch.float32) / heads**0.5)

    q, k = normal(batch, heads, queries, dim), normal(batch, key_groups, keys, dim)
    if scale is not None:
        # scores of about 1 for every scale
        scale = scale / max(abs(scale) * dim**0.5, 1e-6)
    v = normal(batch, value_groups, keys, value_dim)
    score_mixing, prob_mixing = map(mixing, rules)
    mask = mask.map_tensors(lambda tensor: tensor.to(device))
    return AttentionCall(
        DotProduct(q, k, scale), v, mask, score_mixing=score_mixing, prob_mixing=prob_mixing, activation=activation
    )


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_() if tensor.is_floating_point() else tensor


def _differentiable(call: AttentionCall) -> dict[str, Tensor]:
    """Return the tensors that the kernels differentiate, by name, in the order of their gradients."""
    mixings = {"score mixing": call.score_mixing, "mixing": call.prob_mixing}
    weights = {name: mixing.weight for name, mixing in mixings.items() if mixing}
    return {"q": call.dot_product.q, "k": call.dot_product.k, "v": call.v, **weights}


def _given(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _distance(tensor: Tensor, exact: Tensor, nothing: float) -> float:
    """Compute ‖x − exact‖ / ‖exact‖, or 0 where both are at most the number ``nothing``."""
    norms, one = torch.stack((tensor.double().norm(), exact.norm())), exact.numel() ** 0.5
    if bool((norms <= nothing * one).all()):
        return 0.0
    return ((tensor.double() - exact).norm() / norms[1].clamp(min=0.01 * one)).item()
