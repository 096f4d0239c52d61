"""Pairs of segments: what they are made of, how long they are, and which of them follow one another."""

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq_lowrank.tasks.sentence_pairs import (
    DocumentText,
    FrameWithSpecialTokens,
    SegmentLabels,
    SentencePairs,
    sample_pairs,
)

END = 2


def running_text(*documents):
    """Documents given by the numbers of words in their lines; the words count on through all of them from 10."""
    lines, word = [], 10
    for document in documents:
        for length in document:
            lines.append(torch.tensor([*range(word, word + length), END]))
            word += length
        lines.append(torch.tensor([END]))
    return DocumentText(lines, [len(line) for line in lines])


def test_documents_are_parted_by_empty_lines_and_words_are_read_across_lines():
    text = running_text([3, 2], [], [4])
    assert [places.tolist() for places in text.documents()] == [[0, 3, 5], [5, 9]]
    assert text.words(0, 5).tolist() == [10, 11, 12, 13, 14]
    assert text.words(2, 4).tolist() == [12, 13] and text.words(5, 6).tolist() == [15]


def pairs(text, longest=12, short=0.0, seed=1):
    return list(sample_pairs(text.documents(), longest, short, np.random.default_rng(seed)))


LONG = [np.random.default_rng(number).integers(1, 8, 60).tolist() for number in range(5)]


def document_of(text, place):
    return next(index for index, places in enumerate(text.documents()) if places[0] <= place < places[-1])


@pytest.mark.parametrize("short", [0.0, 0.5])
def test_a_next_segment_follows_and_a_random_one_is_of_another_document(short):
    text = running_text(*LONG)
    drawn = pairs(text, short=short)
    for pair in drawn:
        (start, stop), (begin, end) = pair.first, pair.second
        assert start < stop and begin < end and stop - start + end - begin <= 12
        assert document_of(text, start) == document_of(text, stop - 1)
        same = document_of(text, start) == document_of(text, begin)
        assert same != pair.random and document_of(text, begin) == document_of(text, end - 1)
        assert pair.random or stop <= begin
    share = np.mean([pair.random for pair in drawn])
    assert 0.35 < share < (0.7 if short == 0 else 0.95)  # a single line has no next one


def test_some_pairs_are_shorter_where_that_is_asked_for():
    text = running_text(*LONG)
    long, short = (
        np.mean([sum(b - a for a, b in (pair.first, pair.second)) for pair in pairs(text, short=share)])
        for share in (0, 1)
    )
    assert short < long - 1 and long > 11


def test_all_words_are_in_some_pair_where_none_is_too_long():
    text = running_text([2, 2, 2], [2, 2], [2])
    seen = set()
    for pair in pairs(text, longest=20):
        seen |= {*range(*pair.first), *range(*pair.second)}
    assert seen == set(range(12))


def test_pairs_are_those_of_the_seed():
    text = running_text(*LONG)
    assert pairs(text) == pairs(text) != pairs(text, seed=2)


def test_what_is_too_long_loses_words_of_the_longer_segment_at_both_sides():
    text = running_text([100], [100])
    cut = [pairs(text, longest=30, seed=seed)[0] for seed in range(20)]
    assert {(pair.first[1] - pair.first[0], pair.second[1] - pair.second[0]) for pair in cut} == {(15, 15)}
    assert len({pair.first for pair in cut}) > 5


def test_segments_are_framed_and_labelled():
    text = running_text([3, 2], [4])
    dataset = SentencePairs(text, pairs(text, longest=100))
    first, second = dataset.lengths[0]
    framed = FrameWithSpecialTokens(dataset, dataset.lengths, before=0, behind=END)
    tokens, labels = framed[0], SegmentLabels(framed)[0]
    words = dataset[0].tolist()
    assert tokens.tolist() == [0, *words[:first], END, *words[first:], END]
    assert labels.tolist() == [0] * (first + 2) + [1] * (second + 1)
    assert len(tokens) == framed.sizes[0] == framed.size(0) == len(labels)
