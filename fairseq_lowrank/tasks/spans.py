"""Spans of paragraphs: the subwords of an answer, and windows with a stride."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
