"""Windows, places of answers, and the best span, against what is counted by hand or tried one by one."""

import itertools

import pytest
import torch

from experiments.bert.predictions import best_span, has_most_context
from fairseq_lowrank.tasks.spans import SubwordOffsets, windows

TEXT = "It cost $37.80 in Atlanta."
#  It  cost  $  37.80  in  Atlanta  .
PIECES = SubwordOffsets([[0, 2], [3, 7], [8, 9], [9, 14], [15, 17], [18, 25], [25, 26]], [1, 1, 1, 3, 1, 2, 1])


def test_an_answer_is_found_in_the_pieces_of_its_words_and_the_words_in_the_text():
    assert len(PIECES) == 10
    assert PIECES.covering(9, 14) == (3, 5)  # 37.80
    assert PIECES.covering(8, 14) == (2, 5)
    assert PIECES.covering(18, 25) == (7, 8)
    assert PIECES.covering(20, 22) == (7, 8)  # a part of a word is the word
    assert PIECES.covering(7, 8) is None  # a blank
    for first, last, text in ((3, 5, "37.80"), (4, 4, "37.80"), (2, 6, "$37.80 in"), (7, 9, "Atlanta.")):
        start, end = PIECES.characters(first, last)
        assert TEXT[start:end] == text


def test_a_word_without_pieces_is_passed_over():
    pieces = SubwordOffsets([[0, 1], [2, 3], [4, 5]], [1, 0, 1])
    assert pieces.covering(2, 3) is None and pieces.covering(2, 5) == (1, 1) and pieces.characters(1, 1) == (4, 5)


@pytest.mark.parametrize(("length", "room", "stride"), itertools.product((1, 5, 12, 13), (1, 5, 12), (1, 3, 9)))
def test_windows_cover_everything_and_no_window_is_longer_than_its_room(length, room, stride):
    spans = windows(length, room, stride)
    assert {piece for span in spans for piece in range(*span)} == set(range(length))
    assert all(end - begin <= room for begin, end in spans) and spans[-1][1] == length
    steps = {after[0] - before[0] for before, after in itertools.pairwise(spans)}
    assert steps <= {min(room, stride)}


def test_each_piece_counts_in_one_window_the_one_with_most_context():
    spans = windows(10, 6, 2)
    assert spans == [(0, 6), (2, 8), (4, 10)]
    chosen = has_most_context(spans)
    # piece 4 has 1 behind it in the first window, 2 before it in the second, 0 before it in the third
    assert [
        [piece for piece, yes in zip(range(*span), one, strict=True) if yes]
        for span, one in zip(spans, chosen, strict=True)
    ] == [
        [0, 1, 2, 3],
        [4, 5],
        [6, 7, 8, 9],
    ]


def test_the_best_span_is_that_of_trying_all():
    generator = torch.Generator().manual_seed(1)
    for longest in (1, 3, 20):
        start, end = torch.randn(2, 9, generator=generator)
        begins = torch.rand(9, generator=generator) < 0.6
        tried = {
            (first, last): float(start[first] + end[last])
            for first in range(9)
            for last in range(first, min(9, first + longest))
            if begins[first]
        }
        score, *span = best_span(start, end, begins, longest)
        assert tuple(span) == max(tried, key=tried.get) and score == pytest.approx(max(tried.values()))
    assert best_span(start, end, torch.zeros(9, dtype=torch.bool), 3) is None
