"""Which keys each query may see."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention.tree import TensorTree


@dataclass(frozen=True)
class AttentionMask(TensorTree):
    """Which keys each query may see. The three first parts combine; each is optional.

    Args:
        causal: query t sees keys s ≤ t + S − T: the last query sees every key, as in cached decoding.
        key_padding: ``[B, S]`` bool, True at keys that nobody sees.
        additive: broadcastable to ``[B, H, T, S]``. Bool: hides where it is True. Float: added to the scores, and hides
            where it is −inf or no more than half of the least number of its dtype (``torch.finfo(dtype).min / 2``), so
            that masks filled with ``finfo.min`` hide too. Any other finite number (−1e8, −1e4) is added. So a query whose
            every key has a large one sees them all, with scores that are rounded away; there the fused kernels, which keep
            the logarithm of a sum, are wrong by up to the number of keys (PyTorch's in gradients, Triton's in values too):
            hide with −inf what is to be hidden.
        num_appended_keys: so many of the last keys are hidden from nobody by causality, which counts the others alone.
        query_repeats: causality counts queries from 0 again this many times, each time over T / query_repeats of them.
        window: n of a causal mask: of the keys that causality shows, a query sees the last n alone, its own position among
            them. Padding counts. Appended keys are hidden from nobody.
        documents: ``[B or 1, S]`` integers, the document of each key without the appended ones. A query sees the keys of the
            same document alone. The last query has the position of the last key. Appended keys are hidden from nobody.
    """

    causal: bool = False
    key_padding: Tensor | None = None
    additive: Tensor | None = None
    num_appended_keys: int = 0
    query_repeats: int = 1
    window: int | None = None
    documents: Tensor | None = None

    @property
    def sees_no_later_key(self) -> bool:
        """True if no query sees a key after its own position, so that padding on the right hides nothing from real queries.

        A field that is not in :data:`_ONLY_HIDE` may show later keys: then the answer is False, which costs time alone.
        """
        return (
            self.causal
            and type(self) is AttentionMask
            and all(getattr(self, name) == value for name, value in _MAY_SHOW)
        )

    def of_first_keys(self, keys: int) -> AttentionMask:
        """Return the mask of the first ``keys`` keys."""
        padding, additive, documents = self.key_padding, self.additive, self.documents
        return self.replace(
            key_padding=None if padding is None else padding[:, :keys],
            additive=additive if additive is None or additive.size(-1) == 1 else additive[..., :keys],
            documents=None if documents is None else documents[:, :keys],
        )

    def append_keys(self, keys: int, count: int) -> AttentionMask:
        """Return the mask with ``count`` more keys at the end, which every query sees."""
        padding = None if self.key_padding is None else F.pad(self.key_padding, (0, count))
        additive = self.additive
        if additive is not None:
            additive = F.pad(additive.expand(*additive.shape[:-1], keys), (0, count))
        return self.replace(key_padding=padding, additive=additive, num_appended_keys=self.num_appended_keys + count)

    def repeat_queries(self, times: int) -> AttentionMask:
        """Return the mask for the same queries ``times`` times in a row, as for beams that share their keys."""
        additive = self.additive
        if additive is not None and additive.dim() > 1 and additive.size(-2) > 1:
            additive = torch.cat([additive] * times, dim=-2)
        return self.replace(additive=additive, query_repeats=self.query_repeats * times)

    def visible_prefix(self, queries: int, keys: int) -> tuple[int, int]:
        """Return how many queries causality counts, and how many more keys than its index plus one a query sees."""
        positions = queries // self.query_repeats
        return positions, keys - self.num_appended_keys - positions

    def hidden(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Return where any part hides keys: bool, broadcastable to ``[B, H, T, S]``."""
        result = None
        for part in (
            self.by_position(num_queries, num_keys, True, device),
            self.hidden_by_tensors(),
            self.hidden_by_documents(num_queries),
        ):
            result = part if result is None else result if part is None else result | part
        return result

    def by_position(self, num_queries: int, num_keys: int, value: float, device: torch.device) -> Tensor | None:
        """Return ``value`` where causality or the window hides a key, and 0 elsewhere: ``[T, S]``, ``None`` if they hide nothing."""
        positions, offset = self.visible_prefix(num_queries, num_keys)
        if not self.causal or (positions <= 1 and offset >= 0 and self.window is None):
            return None
        values = torch.full((positions, num_keys - self.num_appended_keys), value, device=device)
        filled = values.triu(1 + offset)
        if self.window is not None:
            filled = filled + values.tril(offset - self.window)
        if self.num_appended_keys:
            filled = F.pad(filled, (0, self.num_appended_keys))
        return filled.repeat(self.query_repeats, 1) if self.query_repeats > 1 else filled

    def hidden_by_tensors(self) -> Tensor | None:
        """Return where ``key_padding`` or ``additive`` hides keys: bool, broadcastable to ``[B, H, T, S]``."""
        padding = None if self.key_padding is None else self.key_padding[:, None, None, :]
        if self.additive is None:
            return padding
        return hides(self.additive) if padding is None else padding | hides(self.additive)

    def hidden_by_documents(self, num_queries: int) -> Tensor | None:
        """Return where keys belong to another document than a query: bool ``[B or 1, 1, T, S]``."""
        if self.documents is None:
            return None
        own = self.documents[:, self.documents.size(1) - num_queries // self.query_repeats :]
        apart = own.repeat(1, self.query_repeats)[:, None, :, None] != self.documents[:, None, None, :]
        return F.pad(apart, (0, self.num_appended_keys))

    @property
    def is_empty(self) -> bool:
        """Return True if the mask hides nothing and adds nothing."""
        return not self.causal and self.key_padding is None and self.additive is None and self.documents is None

    def may_hide_rows(self, num_queries: int, num_keys: int) -> bool:
        """Return False if every query sees a key, as far as that is known without reading tensors."""
        if self.key_padding is not None or self.additive is not None:
            return True
        if not self.causal or self.num_appended_keys:
            return False
        return self.visible_prefix(num_queries, num_keys)[1] < 0

    @property
    def bias(self) -> Tensor | None:
        """Return the additive mask if it is a float tensor."""
        return self.additive if self.additive is not None and self.additive.dtype != torch.bool else None

    @property
    def differs_by_head(self) -> bool:
        """Return True if the heads may see different keys."""
        return self.additive is not None and self.additive.dim() > 2 and self.additive.size(-3) > 1

    def select_head(self, batch: slice, head: int) -> AttentionMask:
        """Return the mask of one head for some batch entries; gradients do not reach it."""
        padding = None if self.key_padding is None else self.key_padding[batch]
        additive = None if self.additive is None else select_head(self.additive.detach(), batch, head)
        documents = self.documents
        if documents is not None and documents.size(0) > 1:
            documents = documents[batch]
        return self.replace(key_padding=padding, additive=additive, documents=documents)

    def has_visible_key(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | bool:
        """Return where a query sees any key: True if every query does, else bool, broadcastable to ``[B, H, T, 1]``."""
        if not self.may_hide_rows(num_queries, num_keys):
            return True
        if self.additive is not None or self.documents is not None:
            hidden = self.hidden(num_queries, num_keys, device)
            return True if hidden is None else ~hidden.all(dim=-1, keepdim=True)
        positions, _ = self.visible_prefix(num_queries, num_keys)
        visible = (
            torch.ones(1, num_keys, device=device, dtype=torch.bool) if self.key_padding is None else ~self.key_padding
        )
        if not self.causal:
            return visible.any(dim=1)[:, None, None, None]
        # The number of visible keys up to that of each query, which lies before the first where T > S, less those before its window.
        counted = visible[:, : num_keys - self.num_appended_keys].cumsum(dim=1)
        window = counted.size(1) if self.window is None else min(self.window, counted.size(1))
        counted = F.pad(counted, (positions + window, 0))
        seen = (
            counted[:, counted.size(1) - positions :]
            > counted[:, counted.size(1) - positions - window :][:, :positions]
        )
        if self.num_appended_keys:
            seen = seen | visible[:, -self.num_appended_keys :].any(dim=1, keepdim=True)
        return seen.repeat(1, self.query_repeats)[:, None, :, None]

    def dense(self, q: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor | None:
        """Return all parts as one additive float tensor for q ``[B, H, T, D]``, in ``dtype``, broadcastable to ``[B, H, T, S]``."""
        hidden, bias = self.hidden(q.size(2), num_keys, q.device), self.bias
        if hidden is None:
            return None
        base = q.new_zeros((), dtype=dtype) if bias is None else narrowed(bias, dtype)
        return torch.where(hidden, float("-inf"), base)


_ONLY_HIDE = frozenset(("causal", "key_padding", "additive", "window", "documents", "query_repeats"))
"""The fields that show no key which causality hides."""
_MAY_SHOW = tuple((field.name, field.default) for field in fields(AttentionMask) if field.name not in _ONLY_HIDE)


def hiding_value(dtype: torch.dtype) -> float:
    """Return the value up to which a float mask of this dtype hides."""
    return torch.finfo(dtype).min / 2


def hides(mask: Tensor) -> Tensor:
    """Return where a mask hides: where a bool mask is True, and where a float mask is at most :func:`hiding_value`."""
    return mask if mask.dtype == torch.bool else mask <= hiding_value(mask.dtype)


def narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``bias`` in ``dtype``: −inf stays, and finite numbers stay finite."""
    if torch.finfo(bias.dtype).min >= torch.finfo(dtype).min:
        return bias.to(dtype)
    return torch.where(bias == float("-inf"), bias, bias.clamp(min=hiding_value(dtype))).to(dtype)


def select_head(tensor: Tensor, batch: slice, head: int) -> Tensor:
    """Return the view of one head and some batch entries of a tensor broadcastable to ``[B, H, ., .]``."""
    if tensor.dim() < 3:
        return tensor
    if tensor.dim() == 4 and tensor.size(0) > 1:
        tensor = tensor[batch]
    return tensor.narrow(-3, head if tensor.size(-3) > 1 else 0, 1)
