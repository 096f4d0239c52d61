"""Which keys each query may see.

A mask answers every question about itself: backends, the layer and the core read none of its fields. A new kind of mask is a
:class:`MaskRule` with one formula, which every backend but the kernels computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_lowrank.ops.attention.tree import TensorTree


class MaskRule(TensorTree):
    """A kind of mask that is a formula of positions, such as :class:`~fairseq_lowrank.attention.Prefix`.

    A subclass is a frozen dataclass with :meth:`visible`. The attributes and :meth:`key_range` may say more: what they leave out costs
    time, and changes no number.
    """

    sees_no_later_key: ClassVar[bool] = False
    """True if no query sees a key after its own position."""
    shows_own_key: ClassVar[bool] = False
    """True if each query sees the key at its own position, so that no row is empty."""
    is_function: ClassVar[bool] = False
    """True if it holds a Python function, which no operator takes while a call is traced."""
    differs_by_head: ClassVar[bool] = False
    """True if heads may see different keys."""

    def visible(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return where queries see keys: bool, broadcastable to ``[B, H, T, S]``.

        Args:
            batch: ``[B, 1, 1, 1]`` indices of batch entries.
            head: ``[1, H, 1, 1]`` indices of heads.
            query: ``[1, 1, T, 1]`` positions of queries among the keys.
            key: ``[1, 1, 1, S]`` positions of keys.
        """
        raise NotImplementedError

    def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Return the first key that a query at one of the positions from ``first`` to ``last`` may see, and the key after the last one."""
        return 0, keys


@dataclass(frozen=True)
class PartOfRule(MaskRule):
    """A rule for the heads from ``head`` and the batch entries from ``batch``. It repeats each head ``repeats`` times."""

    rule: MaskRule
    batch: int = 0
    head: int = 0
    repeats: int = 1

    @property
    def is_function(self) -> bool:  # type: ignore[override]
        return self.rule.is_function

    @property
    def differs_by_head(self) -> bool:  # type: ignore[override]
        return self.rule.differs_by_head

    def visible(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.rule.visible(batch + self.batch, (head + self.head) // self.repeats, query, key)


@dataclass(frozen=True)
class AttentionMask(TensorTree):
    """Which keys each query may see. Each part hides keys, and is optional; a query sees the keys that no part hides.

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
            same document alone. Appended keys are hidden from nobody.
        rule: a formula of positions.
        query_start: the position of the first query among the keys, for documents, a rule and causality. By default the last
            query has the position of the last key that is not appended.
    """

    causal: bool = False
    key_padding: Tensor | None = None
    additive: Tensor | None = None
    num_appended_keys: int = 0
    query_repeats: int = 1
    window: int | None = None
    documents: Tensor | None = None
    rule: MaskRule | None = None
    query_start: int | None = None

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Check that the mask fits scores ``[B, H, T, S]`` of a shape.

        Raises:
            ValueError: shapes, dtypes or numbers that do not fit.
        """
        batch, _, queries, keys = shape
        padding, documents = self.key_padding, self.documents
        if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, keys)):
            raise ValueError(
                f"mask.key_padding of shape {list(padding.shape)} and {padding.dtype}: expected bool [B, S] = [{batch}, {keys}]"
            )
        if self.query_repeats != 1 and (self.query_repeats < 1 or queries % self.query_repeats):
            raise ValueError(
                f"mask.query_repeats={self.query_repeats}: expected a number that divides the {queries} queries"
            )
        if self.num_appended_keys != 0 and not 0 <= self.num_appended_keys <= keys:
            raise ValueError(
                f"mask.num_appended_keys={self.num_appended_keys}: expected 0 to {keys}, the number of keys"
            )
        if self.window is not None and not (self.causal and isinstance(self.window, int) and self.window > 0):
            raise ValueError(f"mask.window={self.window!r}: expected a positive integer, together with causal=True")
        if documents is None and self.query_start is None:
            return
        positions, first = self.visible_prefix(queries, keys)
        own_keys = keys - self.num_appended_keys
        if documents is not None:
            if (
                documents.dim() != 2
                or (documents.size(0) != 1 and documents.size(0) != batch)
                or documents.size(1) != own_keys
            ):
                raise ValueError(
                    f"mask.documents of shape {list(documents.shape)}: expected {[batch, own_keys]}, or 1 in place of {batch}"
                )
            if documents.is_floating_point() or documents.is_complex() or documents.dtype == torch.bool:
                raise ValueError(f"mask.documents of {documents.dtype}: expected integers")
            if positions > own_keys:
                raise ValueError(
                    f"mask.documents for {positions} queries: expected at most {own_keys}, the number of keys, because each query "
                    "has the position of a key"
                )
        if self.query_start is not None and not 0 <= first <= (own_keys - positions if self.reads_own_key else first):
            raise ValueError(
                f"mask.query_start={first} for {positions} queries and {own_keys} keys: expected a number from 0, so that each "
                "query has the position of a key"
            )

    @property
    def reads_own_key(self) -> bool:
        """True if each query needs the position of a key."""
        return self.causal or self.documents is not None

    @property
    def counts_queries(self) -> bool:
        """True if documents or a rule read the positions of queries among the keys, which cross attention does not have."""
        return self.documents is not None or self.rule is not None

    @property
    def sees_no_later_key(self) -> bool:
        """True if no query sees a key after its own position, so that padding on the right hides nothing from real queries."""
        hides = self.causal or (self.rule is not None and self.rule.sees_no_later_key)
        return hides and not self.num_appended_keys

    @property
    def missing_in_kernels(self) -> str | None:
        """What the kernels of this package do not compute, in words, or ``None``."""
        if self.documents is not None:
            return "a mask of documents"
        if self.rule is not None:
            return f"a mask of {type(self.rule).__name__}"
        return None if self.query_start is None else "a mask with query_start"

    def hides_later_keys(self, num_queries: int) -> bool:
        """Return True if causality may hide keys. By default it hides nothing from one query, which sees every key."""
        return self.causal and (num_queries > self.query_repeats or self.query_start is not None)

    @property
    def hides_otherwise(self) -> bool:
        """True if anything but causality hides keys or is added to scores."""
        tensors = self.key_padding is not None or self.additive is not None or self.documents is not None
        return tensors or self.window is not None or self.rule is not None

    @property
    def is_causal_alone(self) -> bool:
        """True if causality of all queries hides keys, and nothing else does: the form that SDPA has if T = S."""
        alone = self.causal and not self.hides_otherwise
        return alone and not self.num_appended_keys and self.query_repeats == 1

    def starting_at(self, start: int | Tensor, shape: tuple[int, int, int, int], device: torch.device) -> AttentionMask:
        """Return the mask for queries whose first has the position ``start``, a number or a tensor ``[1]``.

        A mask cannot count from a tensor, so that the parts that count queries become one tensor, which hides.
        """
        if not (self.causal or self.counts_queries):
            return self
        if not isinstance(start, Tensor):
            return self.replace(query_start=start)
        batch, heads, queries, keys = (torch.arange(size, device=device) for size in shape)
        hidden = self.hidden_by_positions(batch, heads, queries + start.reshape(1), keys)
        if self.additive is not None:
            hidden = hidden | self.additive if self.bias is None else torch.where(hidden, float("-inf"), self.bias)
        return self.replace(causal=False, window=None, documents=None, rule=None, additive=hidden)

    def hidden_by_positions(self, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return where causality, window, documents and rule hide keys: bool, broadcastable to ``[B, H, T, S]``.

        Args:
            batch, heads: ``[B]`` and ``[H]`` indices.
            queries, keys: ``[T]`` and ``[S]`` positions among the keys that are not appended.
        """
        query, key = queries[:, None], keys[None]
        hidden = query.new_zeros((1, 1, 1, 1), dtype=torch.bool)
        if self.causal:
            hidden = hidden | (key > query)
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.documents is not None:
            documents = self.documents if self.documents.size(0) == 1 else self.documents[batch]
            hidden = hidden | (documents[:, None, queries, None] != documents[:, None, None, keys])
        if self.rule is not None:
            indices = batch[:, None, None, None], heads[:, None, None], query, key
            hidden = hidden | ~self.rule.visible(*(index[(None,) * (4 - index.dim())] for index in indices))
        return hidden

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
        """Return the number of positions of queries, and the position of the first query among the keys."""
        positions = queries // self.query_repeats
        bottom_right = keys - self.num_appended_keys - positions
        return positions, bottom_right if self.query_start is None else self.query_start

    def hidden(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        """Return where any part hides keys: bool, broadcastable to ``[B, H, T, S]`` = ``shape``."""
        result = None
        by_position = self.by_position(shape[2], shape[3], True, device)
        for part in (by_position, self.hidden_by_tensors(), self.hidden_by_formulas(shape, device)):
            result = part if result is None else result if part is None else result | part
        return result

    def by_position(self, num_queries: int, num_keys: int, value: float, device: torch.device) -> Tensor | None:
        """Return ``value`` where causality or the window hides a key, and 0 elsewhere: ``[T, S]``, ``None`` if they hide nothing."""
        positions, offset = self.visible_prefix(num_queries, num_keys)
        if not self.causal or (not self.hides_later_keys(num_queries) and offset >= 0 and self.window is None):
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

    def hidden_by_formulas(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        """Return where documents or a rule hide keys: bool, broadcastable to ``[B, H, T, S]`` = ``shape``."""
        if not self.counts_queries:
            return None
        positions, first = self.visible_prefix(*shape[2:])
        batch, heads = (torch.arange(size, device=device) for size in shape[:2])
        queries = torch.arange(first, first + positions, device=device)
        keys = torch.arange(shape[3] - self.num_appended_keys, device=device)
        hidden = self.replace(causal=False, window=None).hidden_by_positions(batch, heads, queries, keys)
        hidden = hidden.expand(-1, -1, positions, len(keys)).repeat(1, 1, self.query_repeats, 1)
        return F.pad(hidden, (0, self.num_appended_keys))

    @property
    def is_empty(self) -> bool:
        """Return True if the mask hides nothing and adds nothing."""
        return not self.causal and not self.hides_otherwise

    def may_hide_rows(self, num_queries: int, num_keys: int) -> bool:
        """Return False if every query sees a key, as far as that is known without reading tensors."""
        if self.key_padding is not None or self.additive is not None:
            return True
        if self.rule is not None and not self.rule.shows_own_key:
            return True
        if not (self.causal or self.rule is not None) or self.num_appended_keys:
            return False
        return self.visible_prefix(num_queries, num_keys)[1] < 0

    @property
    def bias(self) -> Tensor | None:
        """Return the additive mask if it is a float tensor."""
        return self.additive if self.additive is not None and self.additive.dtype != torch.bool else None

    @property
    def differs_by_head(self) -> bool:
        """Return True if the heads may see different keys."""
        if self.rule is not None and self.rule.differs_by_head:
            return True
        return self.additive is not None and self.additive.dim() > 2 and self.additive.size(-3) > 1

    def repeat_heads(self, heads: int, repeats: int) -> AttentionMask:
        """Return the mask for queries that have each of ``heads`` heads ``repeats`` times in a row."""
        additive, rule = self.additive, self.rule
        if repeats == 1:
            return self
        if additive is not None and additive.dim() == 4 and additive.size(1) == heads:
            additive = additive.repeat_interleave(repeats, dim=1)
        return self.replace(additive=additive, rule=None if rule is None else PartOfRule(rule, repeats=repeats))

    def select_head(self, batch: slice, head: int) -> AttentionMask:
        """Return the mask of one head for some batch entries; gradients do not reach it."""
        padding = None if self.key_padding is None else self.key_padding[batch]
        additive = None if self.additive is None else select_head(self.additive.detach(), batch, head)
        documents = self.documents
        if documents is not None and documents.size(0) > 1:
            documents = documents[batch]
        rule = None if self.rule is None else PartOfRule(self.rule, batch.start or 0, head)
        return self.replace(key_padding=padding, additive=additive, documents=documents, rule=rule)

    def has_visible_key(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | bool:
        """Return where a query sees any key: True if every query does, else bool, broadcastable to ``[B, H, T, 1]``."""
        num_queries, num_keys = shape[2:]
        if not self.may_hide_rows(num_queries, num_keys):
            return True
        if self.additive is not None or self.counts_queries or self.query_start is not None:
            hidden = self.hidden(shape, device)
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
        hidden, bias = self.hidden((*q.shape[:3], num_keys), q.device), self.bias
        if hidden is None:
            return None
        base = q.new_zeros((), dtype=dtype) if bias is None else narrowed(bias, dtype)
        return torch.where(hidden, float("-inf"), base)


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
