"""Pairs of segments: the second follows the first or is from another document (Devlin et al. 2019, A.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, FairseqDataset
from torch import Tensor


class DocumentText:
    """The words of all lines in one sequence, without the symbol that ends each line; empty lines separate documents.

    Args:
        lines: a dataset of lines, each with its end symbol.
        sizes: the lengths of the lines, their end symbols included.
    """

    def __init__(self, lines: torch.utils.data.Dataset, sizes: Sequence[int]) -> None:
        self.lines = lines
        self.stops = np.cumsum(np.asarray(sizes) - 1)

    def documents(self) -> list[np.ndarray]:
        """Return for each document the position where its first line starts, and then where each line stops."""
        starts = np.concatenate(([0], self.stops[:-1]))
        found: list = []
        current: list = []
        for start, stop in zip(starts, self.stops, strict=True):
            if start < stop:
                current += [stop] if current else [start, stop]
            elif current:
                found.append(np.array(current))
                current = []
        return [*found, np.array(current)] if current else found

    def words(self, start: int, stop: int) -> Tensor:
        """Return the words from position `start` to before `stop`."""
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.stops, stop, side="left"))
        lines = torch.cat([self.lines[index][:-1] for index in range(first, last + 1)])
        begin = int(self.stops[first - 1]) if first else 0
        return lines[start - begin : stop - begin]


@dataclass(frozen=True)
class Pair:
    """Two segments, as positions in a text, and True if the second was drawn at random."""

    first: tuple[int, int]
    second: tuple[int, int]
    random: bool


def sample_pairs(
    documents: list[np.ndarray], longest: int, short: float, random: np.random.Generator
) -> Iterator[Pair]:
    """Yield the pairs of the documents, drawn like in BERT's own program.

    Lines are taken until they have ``longest`` words (with probability ``short``: a random number of words from 2 to that).
    A random number of these lines are the first segment. In half of the cases the other lines are the second segment. Else
    the second segment is from another document, and the other lines are used for the next pair. If a pair is too long, words
    are removed from the longer segment, at its start or its end.

    Args:
        documents: see :meth:`DocumentText.documents`; at least two.
        longest: the greatest number of words of both segments together, at least 2.
    """
    for number, places in enumerate(documents):
        line = 0
        while line < len(places) - 1:
            length = int(random.integers(2, longest + 1)) if random.random() < short else longest
            end = line + 1
            while end < len(places) - 1 and places[end] - places[line] < length:
                end += 1
            middle = line + (int(random.integers(1, end - line)) if end - line > 1 else 1)
            first = places[line], places[middle]
            if middle < end and random.random() < 0.5:
                second, line = (places[middle], places[end]), end
                is_random = False
            else:
                other = documents[(number + int(random.integers(1, len(documents)))) % len(documents)]
                begin = int(random.integers(0, len(other) - 1))
                wanted = other[begin] + max(1, length - (first[1] - first[0]))
                stop = min(max(begin + 1, int(np.searchsorted(other, wanted))), len(other) - 1)
                second, line = (other[begin], other[stop]), middle
                is_random = True
            yield Pair(*_shorten(first, second, longest, random), is_random)


def _shorten(
    first: tuple[int, int], second: tuple[int, int], longest: int, random: np.random.Generator
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shorten two segments to ``longest`` words: remove each word from the longer segment, at a random side."""
    lengths = [int(first[1] - first[0]), int(second[1] - second[0])]
    kept = list(lengths)
    for _ in range(sum(lengths) - longest):
        kept[0 if kept[0] > kept[1] else 1] -= 1
    segments = []
    for (start, _), length, left in zip((first, second), lengths, kept, strict=True):
        begin = int(start) + int(random.binomial(length - left, 0.5))
        segments.append((begin, begin + left))
    return segments[0], segments[1]


class SentencePairs(FairseqDataset):
    """A dataset of the words of both segments of each pair, one after the other."""

    def __init__(self, text: DocumentText, pairs: Sequence[Pair]) -> None:
        self.text, self.pairs = text, pairs
        self.lengths = np.array([[b - a for a, b in (pair.first, pair.second)] for pair in pairs])
        self.sizes = self.lengths.sum(axis=1)

    def __getitem__(self, index: int) -> Tensor:
        pair = self.pairs[index]
        return torch.cat([self.text.words(*pair.first), self.text.words(*pair.second)])

    def __len__(self) -> int:
        return len(self.pairs)


class FrameWithSpecialTokens(BaseWrapperDataset):
    """A wrapper of items of two segments that adds a symbol before the first segment and one after each.

    Args:
        dataset: tensors, the two segments one after the other.
        lengths: ``[N, 2]``, the lengths of the segments.
        before, behind: the symbols before and after.
    """

    def __init__(self, dataset, lengths: np.ndarray, before: int, behind: int) -> None:
        super().__init__(dataset)
        self.lengths, self.before, self.behind = lengths, before, behind

    def __getitem__(self, index: int) -> Tensor:
        item = self.dataset[index]
        first, second = item.split(self.lengths[index].tolist())
        before, behind = item.new_tensor([self.before]), item.new_tensor([self.behind])
        return torch.cat([before, first, behind, second, behind])

    @property
    def sizes(self) -> np.ndarray:
        return self.lengths.sum(axis=1) + 3

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    num_tokens = size


class SegmentLabels(BaseWrapperDataset):
    """A wrapper that returns token types: 0 up to the end symbol of the first segment, then 1."""

    def __init__(self, dataset: FrameWithSpecialTokens) -> None:
        super().__init__(dataset)

    def __getitem__(self, index: int) -> Tensor:
        first, second = self.dataset.lengths[index]
        return torch.cat([torch.zeros(first + 2, dtype=torch.long), torch.ones(second + 1, dtype=torch.long)])
