"""Whether the kernels of the triton backend compute on this device what the formula says: nobody has tried every GPU.

The first call of a composition (a kind of score, mixing, mask …, of these sizes, on this device) is preceded by one of the same
composition on a small random problem, values and gradients, against the reference in float64. Where they differ, ``blocked``
computes this composition from then on, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention import reference
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.launch import Launch
from fairseq_lowrank.ops.attention.mask import AttentionMask
from fairseq_lowrank.ops.attention.mixing import DiagonalMixing, HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.scores import DotProduct

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of ‖x − reference‖ / ‖reference‖."""
# float32 products in tf32, where torch is allowed them
_TF32 = 1e-2
_DRAWN = 24

_results: dict[tuple, str | None] = {}


def trusted(call: AttentionCall) -> bool:
    """Whether the kernels may compute ``call``: tried once for each composition."""
    if call.v.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # nothing can be compared while a graph is recorded: its warm-up has been
    key = _composition(call)
    if key not in _results:
        _results[key] = mismatch(_like(call))
        if _results[key] is not None:
            warnings.warn(
                f"the triton backend of attention is wrong here ({_results[key]}): "
                f"'blocked' computes {describe(call)} from now on",
                RuntimeWarning,
                stacklevel=2,
            )
    return _results[key] is None


def mismatch(call: AttentionCall) -> str | None:
    """What differs from the reference, and by how much, or why the kernels do not run; ``None`` where nothing does."""
    try:
        found = errors(call)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    tolerance = TOLERANCE[call.v.dtype]
    if call.v.dtype == torch.float32 and call.v.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        tolerance = _TF32
    wrong = {name: error for name, error in found.items() if not error <= tolerance}
    return ", ".join(f"{name} by {error:.1g}" for name, error in wrong.items()) or None


def errors(call: AttentionCall) -> dict[str, float]:
    """‖x − reference‖ / ‖reference‖ of the heads and of the gradient of every float tensor of ``call`` (no dropout)."""
    with torch.inference_mode(False), torch.enable_grad():
        ours = call.changed(lambda tensor: _leaf(tensor, tensor.dtype))
        exact = call.changed(lambda tensor: _leaf(tensor, torch.float64))
        expected, _ = reference.compute(exact)
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(expected).to(call.v.dtype)
        with torch.no_grad():
            launch = Launch(ours, 0)
            heads, kept = launch.forward()
            gradients = launch.backward(cotangent, *kept)
        sources = _differentiable(exact)
        wanted = torch.autograd.grad(expected, list(sources.values()), cotangent.double())
    pairs = {
        "heads": (heads, expected.detach()),
        **dict(zip(sources, zip(_given(gradients), wanted, strict=True), strict=True)),
    }
    return {name: _distance(one, other) for name, (one, other) in pairs.items()}


def random_calls(
    count: int, device: torch.device | str, dtype: torch.dtype, seed: int = 0, longest: int = 200
) -> Iterator[AttentionCall]:
    """Calls that the kernels can compute, of all lengths, in turn of :data:`_DRAWN` compositions: each is compiled once."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    drawn = []
    for _ in range(min(count, _DRAWN)):
        heads = one_of(2, 3, 4, 8, 12, 16, 32)
        groups = [divisor for divisor in range(1, heads + 1) if heads % divisor == 0]
        sizes = one_of(*groups), one_of(*groups), number(1, 128), number(1, 128)
        rules = one_of(None, StaticMixing), one_of(None, StaticMixing, PositionwiseMixing)
        masks = one_of(True, False), one_of(True, False), one_of("none", "none", "bool", "float")
        drawn.append((heads, sizes, rules, masks, one_of("softmax", "sigsoftmax")))
    for index in range(count):
        heads, (key_groups, value_groups, dim, value_dim), rules, (causal, padded, kind), activation = drawn[
            index % len(drawn)
        ]
        batch, queries, keys = number(1, 2), number(1, longest), number(1, longest)
        padding = torch.rand(batch, keys, generator=generator) < 0.3 if padded else None
        shape = one_of((queries, keys), (batch, 1, 1, keys), (batch, heads, queries, keys))
        additive = torch.randn(shape, generator=generator)
        additive = {"none": None, "bool": additive < -1, "float": additive.masked_fill(additive < -1, float("-inf"))}[
            kind
        ]
        sizes = key_groups, value_groups, queries, keys, dim, value_dim
        mask = AttentionMask(causal, padding, additive)
        yield _random(generator, device, dtype, batch, heads, sizes, rules, mask, activation, None)


def common_calls(device: torch.device) -> dict[str, AttentionCall]:
    """Mixhead A and B, talking heads and sigsoftmax, with 8 heads of 64 in bfloat16."""
    kinds = {
        "mixhead-a": ((None, StaticMixing), "softmax"),
        "mixhead-b": ((None, PositionwiseMixing), "softmax"),
        "talking-heads": ((StaticMixing, StaticMixing), "softmax"),
        "sigsoftmax": ((None, None), "sigsoftmax"),
    }
    generator, sizes = torch.Generator().manual_seed(0), (8, 8, 40, 40, 64, 64)
    return {
        name: _random(generator, device, torch.bfloat16, 1, 8, sizes, rules, AttentionMask(True), activation, None)
        for name, (rules, activation) in kinds.items()
    }


def describe(call: AttentionCall) -> str:
    """A composition in a few words."""
    kinds = [type(mixing).__name__ if mixing else "no mixing" for mixing in (call.before, call.mixing)]
    batch, heads, queries, keys = call.scores.shape
    return (
        f"{call.activation} attention ({kinds[0]} before, {kinds[1]} after; {heads} heads of {call.scores.q.size(3)} and "
        f"{call.v.size(3)}, {str(call.v.dtype).removeprefix('torch.')}, {batch} × {queries} queries, {keys} keys)"
    )


def _composition(call: AttentionCall) -> tuple:
    mask, (_, heads, queries, keys) = call.mask, call.scores.shape
    kinds = tuple(type(mixing) for mixing in (call.before, call.mixing))
    groups = call.scores.k.size(1), call.v.size(1)
    additive = None if mask.additive is None else mask.additive.dtype
    masked = mask.causal, mask.key_padding is not None, additive, bool(mask.appended), mask.repeats > 1, queries == keys
    return (
        call.v.device,
        call.v.dtype,
        call.activation,
        kinds,
        heads,
        groups,
        call.scores.q.size(3),
        call.v.size(3),
        masked,
    )


def _like(call: AttentionCall) -> AttentionCall:
    """A small random call of the same composition."""
    generator = torch.Generator().manual_seed(0)
    mask, (_, heads, queries, keys) = call.mask, call.scores.shape
    appended, repeats = min(mask.appended, 3), min(mask.repeats, 3)
    queries, keys = 20 * repeats, 20 + (0 if queries == keys else 14) + appended
    padding = torch.rand(1, keys, generator=generator) < 0.3 if mask.key_padding is not None else None
    additive = None
    if mask.additive is not None:
        additive = torch.randn(1, heads, queries, keys, generator=generator)
        additive = additive < -1 if mask.additive.dtype == torch.bool else additive.to(mask.additive.dtype)
    small = AttentionMask(mask.causal, padding, additive, appended, repeats)
    sizes = call.scores.k.size(1), call.v.size(1), queries, keys, call.scores.q.size(3), call.v.size(3)
    rules = tuple(type(mixing) if mixing else None for mixing in (call.before, call.mixing))
    return _random(
        generator, call.v.device, call.v.dtype, 1, heads, sizes, rules, small, call.activation, call.scores.factor
    )


def _random(generator, device, dtype, batch, heads, sizes, rules, mask, activation, scale) -> AttentionCall:
    key_groups, value_groups, queries, keys, dim, value_dim = sizes

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def mixing(rule: type | None) -> HeadMixing | None:
        if rule is None:
            return None
        shape = {StaticMixing: (heads, heads), DiagonalMixing: (heads,)}.get(rule, (batch, queries, heads, heads))
        return rule(normal(*shape, dtype=torch.float32) / heads**0.5)

    q, k = normal(batch, heads, queries, dim), normal(batch, key_groups, keys, dim)
    if scale is not None:
        # scores of about 1 whatever the scale
        scale = scale / max(abs(scale) * dim**0.5, 1e-6)
    v = normal(batch, value_groups, keys, value_dim)
    before, after = map(mixing, rules)
    mask = mask.changed(lambda tensor: tensor.to(device))
    return AttentionCall(DotProduct(q, k, scale), v, mask, before=before, mixing=after, activation=activation)


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_() if tensor.is_floating_point() else tensor


def _differentiable(call: AttentionCall) -> dict[str, Tensor]:
    """The tensors that the kernels differentiate, by name, in the order of their gradients."""
    mixings = {"score mixing": call.before, "mixing": call.mixing}
    weights = {name: mixing.weight for name, mixing in mixings.items() if mixing}
    return {"q": call.scores.q, "k": call.scores.k, "v": call.v, **weights}


def _given(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _distance(tensor: Tensor, exact: Tensor) -> float:
    # Where the formula gives next to nothing, as a gradient through a single key, to numbers of 0.01.
    return ((tensor.double() - exact).norm() / exact.norm().clamp(min=0.01 * exact.numel() ** 0.5)).item()
