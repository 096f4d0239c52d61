"""XQuAD's English part: 240 paragraphs of SQuAD 1.1's development set, small enough for trials."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus
from experiments.corpora.fetch import gather
from experiments.corpora.pieces import BERT, PIECES_OF
from experiments.corpora.squad import QuestionTask, lay_out_questions, read_paragraphs

URLS = {"https://raw.githubusercontent.com/google-deepmind/xquad/master/xquad.en.json": None}


def unanswerable(paragraphs: list[dict]) -> list[dict]:
    """The paragraphs, with each third question asked of the next paragraph that does not hold its answer."""
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
    """XQuAD (Artetxe et al., 2020), English: every fifth paragraph validates, the others train. For trials.

    With --unanswerable as in SQuAD 2.0: every third question comes with a paragraph that does not answer it.
    """
    [file] = gather(args, ["xquad.en.json"], URLS)
    paragraphs = list(read_paragraphs(file))
    splits = {"train": [one for place, one in enumerate(paragraphs) if place % 5 != 4], "valid": paragraphs[4::5]}
    if args.unanswerable:
        splits = {split: unanswerable(part) for split, part in splits.items()}
    return lay_out_questions(args, QuestionTask("xquad", args.unanswerable), splits)


CORPUS = Corpus(
    name="xquad",
    prepare=xquad,
    arguments=(
        Argument("--unanswerable", action="store_true", part="-unanswerable", help="questions without an answer too"),
        PIECES_OF,
        BERT,
    ),
    trial={},
    training=lambda values: QuestionTask("xquad").training,
)
