"""One attention operation with one contract, computed by interchangeable backends.

::

    q·kᵀ·scale (+ score_bias) → mask → activation → mixing → dropout → ·v
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.ops.attention import blocked, operator, reference, sdpa  # noqa: F401 (registers the operator)
from fairseq_lowrank.ops.attention.contract import AttentionInputs, AttentionMask, HeadMixing, is_traced

__all__ = ["BACKENDS", "AttentionMask", "HeadMixing", "attention"]

_BACKENDS = {"reference": reference, "sdpa": sdpa, "blocked": blocked}
BACKENDS = ("auto", *_BACKENDS)

# Below so many scores, over the heads of a batch entry, fewer and simpler steps win over fewer bytes ...
_REFERENCE_SCORES = 4096
# ... and up to so many of one head, SDPA with a mask that is a tensor over blocks that need none.
_MASK_SCORES = 1024


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    activation: str = "softmax",
    mixing: HeadMixing | None = None,
    mixing_query: Tensor | None = None,
    score_bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention over projected heads, with a choice of activation and of head mixing.

    With P_j = activation(scale · q_j k_jᵀ + score_bias, masked), head i of the output is dropout(P̄_i) v_i, where
    P̄_i = Σ_j M[j, i] P_j (Mixhead paper, eq. 12), P̄_i = w_i P_i for a diagonal M, and P̄_i = P_i without mixing.

    Args:
        q: ``[B, H, T, D]`` queries.
        k: ``[B, G, S, D]`` keys, with G = H, or G = 1 for one key shared by all heads (never expanded by the caller).
        v: ``[B, G, S, Dv]`` values.
        mask: which keys each query may see; ``None`` means all. A query that may see none gives zeros.
        activation: ``softmax`` or ``sigsoftmax``.
        mixing: weights that mix the heads' probabilities, or ``None``.
        mixing_query: ``[B, H, T, D]`` queries that position-wise mixing reads (required there, else unused): after
            any head embedding, before the scale and before anything is folded into ``q``.
        score_bias: added to the scaled scores, broadcastable to ``[B, H, T, S]``. It is no mask: of its values −inf alone hides.
        scale: factor of the scores, by default 1/√D.
        dropout_p: probability of zeroing a mixed attention weight.
        need_weights: also return the weights the values were averaged with, after mixing and before dropout.
        backend: one of :data:`BACKENDS`; ``auto`` takes the fastest that can compute what is asked for.

    Returns:
        ``[B, H, T, Dv]`` heads in the dtype of ``v``, and the weights ``[B, H, T, S]`` (float32 or better) or ``None``.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown choice, or a backend that cannot compute what is asked for.
    """
    inputs = AttentionInputs(
        q,
        k,
        v,
        mask or AttentionMask(),
        activation,
        mixing,
        mixing_query,
        score_bias,
        scale if scale is not None else max(q.size(-1), 1) ** -0.5,
        dropout_p,
        need_weights,
    )
    inputs.check(ACTIVATIONS)
    return choose_backend(backend, inputs).compute(inputs)


def choose_backend(backend: str, inputs: AttentionInputs) -> ModuleType:
    """The backend of this name, or with ``auto`` the fastest that can compute ``inputs``.

    Raises:
        ValueError: an unknown name, or a backend that cannot compute ``inputs``.
    """
    if backend == "auto":
        return next(candidate for candidate in _preference(inputs) if candidate.refusal(inputs) is None)
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    reason = _BACKENDS[backend].refusal(inputs)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot compute {reason}; use backend='auto' or 'reference'")
    return _BACKENDS[backend]


def _preference(inputs: AttentionInputs) -> tuple[ModuleType, ...]:
    """The backends from the fastest on, as measured; "auto" takes the first that can compute what is asked for."""
    heads, queries, keys = inputs.q.size(1), inputs.q.size(2), inputs.k.size(2)
    shared = inputs.k.size(1) < heads
    if is_traced(inputs.q):
        # One choice for all lengths.
        avoid = inputs.dropout_p or sdpa.needs_causal_tensor(inputs)
        return (blocked, reference) if avoid else (sdpa, blocked, reference)
    few = heads * queries * keys < _REFERENCE_SCORES and not shared
    others = (reference, blocked) if few else (blocked, reference)
    cpu = inputs.q.device.type == "cpu"
    if (cpu and inputs.dropout_p) or (sdpa.needs_causal_tensor(inputs) and queries * keys > _MASK_SCORES):
        # SDPA would build a T×S tensor: all weights, to drop some of them, or the mask.
        return others
    if cpu and shared and inputs.mask.causal and 256 <= keys < 1024:
        return blocked, sdpa, reference
    return sdpa, *others
