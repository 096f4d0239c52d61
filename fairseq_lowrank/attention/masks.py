"""Masks by name, and conversion of all that users pass as a mask to :class:`~fairseq_lowrank.ops.AttentionMask`.

First the names (:data:`CAUSAL`, :func:`SlidingWindow`, …), then :func:`core_mask` for a core and :func:`attention_mask` for a layer.
Only this module recognises causal tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.ops.attention.mask import MaskRule, hides
from fairseq_lowrank.ops.attention.padding import about_values
from fairseq_lowrank.ops.attention.tree import hides_values

CAUSAL = AttentionMask(causal=True)
"""An ``attn_mask`` that stands for a causal one without a T×T tensor."""
_NOTHING_HIDDEN = AttentionMask()


def SlidingWindow(size: int) -> AttentionMask:
    """Return a causal ``attn_mask`` under which a query sees the last ``size`` keys up to its own position, without a T×T tensor.

    Raises:
        ValueError: a size that is not a positive integer.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"SlidingWindow({size!r}): expected a positive integer, the number of keys that a query sees")
    return AttentionMask(causal=True, window=size)


def PackedDocuments(
    *, cu_seqlens: Tensor | Sequence[int] | None = None, ids: Tensor | Sequence | None = None, causal: bool = True
) -> AttentionMask:
    """Return an ``attn_mask`` under which a query sees the keys of the same document alone, without a T×T tensor.

    Give ``cu_seqlens`` or ``ids``. Outputs are those of the documents one by one, if scores depend on distances and not on absolute
    positions.

    Args:
        cu_seqlens: ``[N + 1]``, where each of N documents begins in a row of S positions, and S at the end: 0 ≤ … ≤ S. All rows of
            a batch have these documents.
        ids: ``[S]`` or ``[B, S]`` integers, the document of each position, cached keys too.
        causal: a query sees no later key.

    Raises:
        ValueError: both or none are given, or they have another shape, dtype or order.
    """
    if (cu_seqlens is None) == (ids is None):
        raise ValueError("PackedDocuments: give one of cu_seqlens and ids.")
    if ids is None:
        starts = _integers("cu_seqlens", cu_seqlens, "[N + 1]")
        if starts.dim() != 1 or len(starts) < 2:
            raise ValueError(f"cu_seqlens of shape {list(starts.shape)}: expected [N + 1]")
        lengths = starts.diff()
        if int(starts[0]) != 0 or bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens={starts.tolist()}: expected numbers from 0 that do not fall")
        ids = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
    ids = _integers("ids", ids, "[S] or [B, S]")
    if ids.dim() not in (1, 2):
        raise ValueError(f"ids of shape {list(ids.shape)}: expected [S] or [B, S]")
    return AttentionMask(causal=causal, documents=ids if ids.dim() == 2 else ids[None])


@dataclass(frozen=True)
class _PrefixRule(MaskRule):
    """Shows the keys up to the position of a query, and the first ``length`` ones, a number or ``[B]``."""

    length: int | Tensor
    shows_own_key = True

    def visible(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        length = self.length if isinstance(self.length, int) else self.length[batch]
        return (key <= query) | (key < length)

    def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
        return 0, max(last + 1, self.length) if isinstance(self.length, int) else keys


def Prefix(length: int | Tensor) -> AttentionMask:
    """Return the ``attn_mask`` of a prefix language model: a query sees the first ``length`` keys, and those up to its own position.

    Args:
        length: of the prefix, for all entries of a batch, or integers ``[B]``.

    Raises:
        ValueError: a number below 0, or a tensor of another shape or dtype.
    """
    if isinstance(length, Tensor):
        if _integers("length", length, "[B]").dim() != 1:
            raise ValueError(f"Prefix: length of shape {list(length.shape)}: expected a number or [B]")
    elif not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ValueError(f"Prefix({length!r}): expected the number of keys that all queries see, 0 or more")
    return AttentionMask(rule=_PrefixRule(length))


@dataclass(frozen=True)
class _FunctionRule(MaskRule):
    """Shows keys where a function ``mask_mod(b, h, q, kv)`` of FlexAttention is true."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    is_function = differs_by_head = True

    def visible(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        function: Any = self.function  # gets numbers, as in FlexAttention: it may reduce tensors that it makes
        for index in range(3, -1, -1):
            function = torch.vmap(function, in_dims=tuple(0 if i == index else None for i in range(4)))
        seen = function(batch.flatten(), head.flatten(), query.flatten(), key.flatten())
        for dim in (0, 1):  # what the function does not read is expanded: one entry stands for all
            seen = seen.narrow(dim, 0, 1) if seen.size(dim) > 1 and seen.stride(dim) == 0 else seen
        return seen


def flex_mask(mask: Any) -> AttentionMask | None:
    """Return the mask of a function ``mask_mod(b, h, q, kv)`` or of FlexAttention's ``BlockMask``; ``None`` for anything else.

    A ``BlockMask`` is read by its function, and never by its table of blocks.
    """
    function = getattr(mask, "mask_mod", mask)
    if isinstance(mask, (AttentionMask, Tensor, type)) or not callable(function):
        return None
    return AttentionMask(rule=_FunctionRule(function))


def Visible(mask: Tensor) -> AttentionMask:
    """Return a mask under which a query sees the keys where a bool tensor ``[…, T, S]`` is True, as SDPA reads it.

    Raises:
        ValueError: it is no bool tensor.
    """
    return Hidden(~_bool("Visible", mask))


def Hidden(mask: Tensor) -> AttentionMask:
    """Return a mask that hides the keys where a bool tensor ``[…, T, S]`` is True, as ``nn.MultiheadAttention`` reads it.

    Raises:
        ValueError: it is no bool tensor.
    """
    return AttentionMask(additive=_bool("Hidden", mask))


def _bool(name: str, mask: object) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"{name}: expected a bool tensor, and got {getattr(mask, 'dtype', type(mask).__name__)}")
    return mask


def core_mask(mask: Any) -> AttentionMask:
    """Return the mask of a :class:`~.core.CoreAttention`.

    Raises:
        ValueError: it is a bool tensor, which may mean two things, or something else.
    """
    if mask is None:
        return _NOTHING_HIDDEN
    if isinstance(mask, AttentionMask):
        return mask
    if isinstance(mask, str) and mask == "causal":
        return CAUSAL
    if isinstance(mask, Tensor) and mask.is_floating_point():
        return AttentionMask(additive=mask)
    if (flex := flex_mask(mask)) is not None:
        return flex
    if isinstance(mask, Tensor):
        raise ValueError(
            f"mask of {mask.dtype}: libraries read it in two ways. Pass Visible(mask) if True shows a key, as in "
            "scaled_dot_product_attention, or Hidden(mask) if True hides it, as in nn.MultiheadAttention."
        )
    raise ValueError(
        f"mask={mask!r}: expected 'causal', an AttentionMask such as SlidingWindow(128), a float tensor, a function (b, h, q, kv) or None"
    )


def _integers(name: str, values: object, shape: str) -> Tensor:
    """Return integers as a tensor.

    Raises:
        ValueError: the values are no integers, or rows of different lengths.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={values!r}: expected integers {shape}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} of {tensor.dtype}: expected integers {shape}")
    return tensor


def split_key_padding(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return where a key_padding_mask ``[B, S]`` hides keys (bool), and what it adds to their scores, or None for each.

    Like torch, a bool mask hides where it is true. A float mask is added to the scores; it hides where it is −inf.

    Raises:
        ValueError: a mask without two dimensions, or of integers.
    """
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise ValueError(f"key_padding_mask {kind}: expected a tensor [batch, keys]")
    check_mask_dtype("key_padding_mask", mask)
    if mask.dtype == torch.bool:
        return mask, None
    hidden = hides(mask)
    added = mask.masked_fill(hidden, 0.0)
    if hides_values(mask) or mask.requires_grad or bool(added.any()):
        return hidden, added
    return hidden, None


def check_mask_dtype(name: str, mask: Tensor) -> None:
    """Check that a mask is bool or float. Masks of integers, such as those of tokenizers, have 1 where others hide.

    Raises:
        UserError: it is not.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        what = "padding" if name == "key_padding_mask" else "hidden keys"
        given = "attention_mask" if name == "key_padding_mask" else "mask"
        raise UserError(
            f"{name} of {mask.dtype}: expected bool, true at {what}, or float, which is added to the scores. If it is 1 at visible "
            f"keys, as of a tokenizer, pass `{given} == 0`; if it is 1 at {what}, pass `{given} != 0`."
        )


def attention_mask(
    attn_mask: Any,
    key_padding_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    key_bias: Tensor | None = None,
) -> AttentionMask:
    """Return the mask of scores ``[B, H, T, S]`` = ``shape``.

    Args:
        attn_mask: :data:`CAUSAL` (also as ``"causal"``), :func:`SlidingWindow`, :func:`PackedDocuments`, :func:`Prefix` or another
            mask of their kind, a function or ``BlockMask`` as for :func:`flex_mask`, or a tensor ``[T, S]``, ``[B*H, T, S]`` or
            ``[B, H, T, S]``, bool or float as in :class:`~fairseq_lowrank.ops.AttentionMask`. A causal tensor is recognised.
        key_padding_mask: ``[B, S]`` bool, true at padding.
        key_bias: ``[B, S]``, added to the scores of each key, see :func:`split_key_padding`.

    Raises:
        ValueError: a mask of another shape or dtype.
    """
    if key_bias is not None:
        mask = attention_mask(attn_mask, key_padding_mask, shape)
        added = key_bias[:, None, None, :]
        if mask.bias is not None:
            added = added + mask.bias
        elif mask.additive is not None:
            added = added.masked_fill(mask.additive, float("-inf"))
        return mask.replace(additive=added)
    batch, heads, queries, keys = shape
    if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
        raise ValueError(
            f"key_padding_mask of shape {list(key_padding_mask.shape)}: expected [batch, keys] = [{batch}, {keys}]"
        )
    if attn_mask is None:
        return _NOTHING_HIDDEN if key_padding_mask is None else AttentionMask(False, key_padding_mask)
    if isinstance(attn_mask, str):
        if attn_mask != "causal":
            raise ValueError(f"attn_mask={attn_mask!r}: expected a tensor, None or 'causal'")
        attn_mask = CAUSAL
    attn_mask = flex_mask(attn_mask) or attn_mask if not isinstance(attn_mask, (Tensor, AttentionMask)) else attn_mask
    if isinstance(attn_mask, AttentionMask):
        window = attn_mask.window
        if isinstance(window, int) and window >= keys and not torch.compiler.is_compiling():
            attn_mask = attn_mask.replace(window=None)  # it hides nothing: fused causal kernels take no window
        if attn_mask.key_padding is not None and key_padding_mask is not None:
            key_padding_mask = key_padding_mask | attn_mask.key_padding
        return attn_mask if key_padding_mask is None else attn_mask.replace(key_padding=key_padding_mask)
    if not isinstance(attn_mask, Tensor):
        raise ValueError(f"attn_mask is a {type(attn_mask).__name__}: expected a tensor, None or 'causal'")
    check_mask_dtype("attn_mask", attn_mask)
    if attn_mask.shape == (queries, keys) and not attn_mask.requires_grad and _is_causal(attn_mask):
        return AttentionMask(True, key_padding_mask)
    if attn_mask.shape == (batch * heads, queries, keys):
        attn_mask = attn_mask.view(batch, heads, queries, keys)
    elif attn_mask.dim() not in (2, 4) or attn_mask.shape[-2:] != (queries, keys):
        raise ValueError(
            f"attn_mask of shape {list(attn_mask.shape)}: expected [queries, keys] = [{queries}, {keys}], [batch * heads, queries, "
            f"keys] = [{batch * heads}, {queries}, {keys}] or [batch, heads, queries, keys] = [{batch}, {heads}, {queries}, {keys}]"
        )
    return AttentionMask(False, key_padding_mask, attn_mask)


@about_values
def _is_causal(mask: Tensor) -> bool:
    """Return True if a square mask hides exactly the keys after each query and adds nothing elsewhere."""
    length = mask.size(0)
    if length < 2 or mask.shape != (length, length):
        return False
    if length <= LONGEST_KEPT and torch.equal(mask, _causal_tensor(length, mask.dtype, mask.device)):
        return True
    hidden = hides(mask)
    if not bool(hidden[0, 1]) or bool(hidden[-1, 0]):
        return False
    if not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
        return False
    return mask.dtype == torch.bool or not bool(mask.tril().any())


LONGEST_KEPT = 64
"""Up to this length, comparing with a tensor that is kept takes a third of the time of the other questions."""


@functools.lru_cache(maxsize=64)
def _causal_tensor(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask that hides later keys, as most models make it."""
    with torch.inference_mode(False):
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        if dtype == torch.bool:
            return hidden
        return torch.zeros(length, length, dtype=dtype, device=device).masked_fill(hidden, float("-inf"))
