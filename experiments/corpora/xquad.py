"""XQuAD's English part: 240 paragraphs of SQuAD 1.1's development set, small enough for trials."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.squad import QuestionTask, read_paragraphs, write_question_data

URLS = {"https://raw.githubusercontent.com/google-deepmind/xquad/master/xquad.en.json": None}


def unanswerable(paragraphs: list[dict]) -> list[dict]:
    """Return the paragraphs, with each third question moved to the next paragraph that does not contain its answer."""
    asked = [{"context": paragraph["context"], "qas": []} for paragraph in paragraphs]
    number = 0
    for place, paragraph in enumerate(paragraphs):
        for question in paragraph["qas"]:
            number += 1
            others = [*range(place + 1, len(paragraphs)), *range(place)]
            texts = [answer["text"] for answer in question["answers"]]
            other = next((o for o in others if not any(text in asked[o]["context"] for text in texts)), None)
            if number % 3 or other is None:
                asked[place]["qas"].append(question)
            else:
                asked[other]["qas"].append({**question, "answers": [], "is_impossible": True})
    return asked


def xquad(args: argparse.Namespace) -> Path:
    """Prepare XQuAD (Artetxe et al., 2020), English, for trials: every fifth paragraph is for validation.

    With --unanswerable, as in SQuAD 2.0, every third question has a paragraph that does not answer it.
    """
    [file] = gather(args, ["xquad.en.json"], URLS)
    paragraphs = list(read_paragraphs(file))
    splits = {"train": [one for place, one in enumerate(paragraphs) if place % 5 != 4], "valid": paragraphs[4::5]}
    if args.unanswerable:
        splits = {split: unanswerable(part) for split, part in splits.items()}
    return write_question_data(args, QuestionTask("xquad", args.unanswerable), splits)


CORPUS = Corpus(
    name="xquad",
    prepare=xquad,
    arguments=(
        Argument(
            "--unanswerable", action="store_true", part="-unanswerable", help="include questions without an answer"
        ),
        PIECES_OF,
        BERT,
    ),
    smoke_values={},
    training=lambda values: QuestionTask("xquad").training,
    download=1,
)
