"""Spans of paragraphs: the subwords of an answer, windows with a stride, and the best span of a window's scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class SubwordOffsets:
    """The positions of a text's subwords in the text.

    Args:
        words: begin and end of each word, in characters.
        counts: the number of subwords of each word.
    """

    def __init__(self, words: Sequence[Sequence[int]], counts: Sequence[int]):
        self.words, self.ends = words, list(accumulate(counts))
        self.word_of = [word for word, count in enumerate(counts) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.word_of)

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and last subword of the words with a character from `start` to before `end`; None if none."""
        inside = [
            word
            for word, (begin, stop) in enumerate(self.words)
            if begin < end and stop > start and self.ends[word] > (self.ends[word - 1] if word else 0)
        ]
        if not inside:
            return None
        first, last = inside[0], inside[-1]
        return (self.ends[first - 1] if first else 0), self.ends[last] - 1

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """Return the first character of the word of subword `first`, and the end of the word of subword `last`."""
        return self.words[self.word_of[first]][0], self.words[self.word_of[last]][1]


def windows(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return begin and end of windows of at most `room` subwords, `stride` apart, that cover `length`, as in BERT's code."""
    found, begin = [], 0
    while True:
        end = min(begin + room, length)
        found.append((begin, end))
        if end == length:
            return found
        begin += min(room, stride)


def has_most_context(spans: Sequence[tuple[int, int]]) -> list[list[bool]]:
    """Return for each subword of each window True if no other window gives the subword more context.

    The context is the smaller of the numbers of subwords before and after it, plus a hundredth of the window's length, as in
    BERT's code.
    """

    def context(span: tuple[int, int], piece: int) -> float:
        return min(piece - span[0], span[1] - 1 - piece) + 0.01 * (span[1] - span[0])

    best: dict[int, tuple[float, int]] = {}
    for number, span in enumerate(spans):
        for piece in range(*span):
            score = context(span, piece)
            if piece not in best or score > best[piece][0]:
                best[piece] = score, number
    return [[best[piece][1] == number for piece in range(*span)] for number, span in enumerate(spans)]


def best_span(start: Tensor, end: Tensor, begins: Tensor, longest: int) -> tuple[float, int, int] | None:
    """Return score, first and last subword of the span with the highest start + end score; None if no span is allowed.

    Args:
        start, end: scores of each subword, [T].
        begins: True for subwords at which a span may begin, [T].
        longest: the greatest number of subwords of a span.
    """
    if not begins.any():
        return None
    size = len(start)
    scores = start[:, None] + end[None, :]
    allowed = torch.ones(size, size, dtype=torch.bool, device=start.device).triu().tril(longest - 1) & begins[:, None]
    place = int(scores.masked_fill(~allowed, float("-inf")).argmax())
    first, last = divmod(place, size)
    return float(scores[first, last]), first, last
