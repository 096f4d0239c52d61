"""Attention in linear memory on a GPU by larger tiles than those of :mod:`.triton`, in 16 bits.

These kernels differ from those of :mod:`.triton` in five ways:

1. A program takes as many queries as registers hold: 32 for 16 heads of 64. Each byte of keys and values serves all of them.
   The matrix of 4 or 8 heads is repeated on a diagonal, because a product needs 16 rows, and nothing is padded.
2. Exponentials have base 2, with the scale folded in. Only tiles at the diagonal, at a window's edge and at the end are masked.
3. The backward pass needs no separate pass for D_j = Σ_s P_j dP_j. Since dq_j = Σ_s P_j dP_j k_s − D_j C_j with C_j = Σ_s P_j k_s,
   one pass gives D, dM and dq. The pass of log-sum-exps in the forward pass computes C.
4. Dropout takes 16 bits of random numbers a weight.
5. Unmixed heads take one pass forward and two passes back, a head a program.

::

                      one head a program      all heads of a tile in a program
    forward           statistics: lse, C      attend: P̄ V
    backward                                  query_pass: dq, D, dM      key_pass: dk      key_pass: dv

Mixing of scores has its statistics over all heads. Together with mixing after the softmax it takes one more pass for D and dM.
No two programs add to the same number: the same call gives the same bits. What a program computes is in :mod:`.tiled_kernels`,
and how large its tiles are in :mod:`.tiled_launch`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fairseq_lowrank.ops.attention import recomputing, triton
from fairseq_lowrank.ops.attention.call import AttentionCall
from fairseq_lowrank.ops.attention.recomputing import RecomputeBackend

DTYPES = (torch.bfloat16, torch.float16)
MOST_COLUMNS = 2048
"""Heads times their size, each padded to a power of two, whose mixing fits into the shared memory of an H100."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return what this backend cannot compute of ``call``, in words, or ``None``."""
    if (reason := triton.unsupported_reason(call.replace(mask=call.mask.replace(window=None)))) is not None:
        return reason
    heads, sizes = call.scores.shape[1], (call.dot_product.q.size(3), call.v.size(3))
    if call.score_mixing is None and not call.mixes_weights:
        # Triton 3.6 on an H200: heads of 53 and 4 gave wrong values. The compiled code of all sizes that are no multiples of 16 is
        # the same but for two bounds; remove when a GPU computes them right.
        odd = [size for size in sizes if size % 16]
        return f"unmixed heads of size {odd[0]} (of multiples of 16 alone)" if odd else None
    if _padded(heads) * _padded(max(sizes)) > MOST_COLUMNS:
        return (
            f"mixing of {heads} heads of {max(sizes)}, because shared memory does not hold 16 queries and 16 keys of all heads"
            f" (of {MOST_COLUMNS} columns together at most)"
        )
    return None


def _padded(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def device_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this backend does not run on a device in a dtype, or ``None``."""
    if dtype not in DTYPES:
        return "its kernels compute only in bfloat16 and float16"
    return triton.device_unsupported_reason(device, dtype)


def compute(call: AttentionCall) -> tuple[Tensor, None]:
    return recomputing.compute(triton.with_score_matrix(call), BACKEND), None


BACKEND = RecomputeBackend(
    "tiled", partial(triton.attend, backend="tiled"), partial(triton.input_gradients, backend="tiled")
)
