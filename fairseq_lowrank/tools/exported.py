"""A model on its way out of fairseq, and the comparison of what it computes before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.raw_text import TextSettings

TOLERANCE = 1e-4
"""The largest difference of scores that rounding to float32 may make. Scores are means of log-probabilities of tokens."""


@dataclass(frozen=True)
class Hypothesis:
    """What a model makes of a sentence.

    Args:
        tokens: the translation with the end of the sentence; of a language model, the likeliest token after each prefix.
        score: log-probability of the translation by its length; of a language model, the mean over the text's tokens.
    """

    tokens: list[int]
    score: float


class Reader(Protocol):
    """A model in another library.

    Attributes:
        own_search: the library searches by other rules than fairseq, such as at the limit of lengths.
    """

    own_search: bool

    def encode(self, line: str) -> list[int]:
        """Return the numbers of the tokens of a line of raw text."""

    def search(self, sentences: Sequence[list[int]]) -> list[Hypothesis]:
        """Return the best hypothesis for each sentence, which is a list of token numbers."""

    def scores(self, sentences: Sequence[list[int]], translations: Sequence[list[int]]) -> list[float]:
        """Return the scores of given translations, or of the texts of a language model."""


@dataclass(frozen=True)
class Exported:
    """All that another library needs of a model of fairseq.

    Args:
        config: fields of :class:`~fairseq_lowrank.huggingface.exported.LowrankConfig`.
        tensors: the state dict, by fairseq's names.
        source, target: the words of the vocabularies, in the order of their numbers; the same list if they are one.
        special: the words that stand for the beginning, padding, the end and unknown words.
        text: the settings of raw text.
        subwords: the model of the subwords, if words are cut.
        pads_left: whether padding stands before a sentence.
        beam, lenpen: settings of the search.
        longest: the most tokens of a translation, without the end of the sentence.
        card: lines of the model card on the method and its scores.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: list[str]
    target: list[str]
    special: dict[str, str]
    text: TextSettings
    subwords: Path | None
    pads_left: bool
    beam: int
    lenpen: float
    longest: int
    card: list[str] = field(default_factory=list)

    @property
    def translates(self) -> bool:
        return self.config["is_encoder_decoder"]


@dataclass(frozen=True)
class Comparison:
    """How far two searches agree.

    Args:
        count: number of sentences.
        equal: number of sentences with the same tokens.
        difference: the largest difference of scores.
    """

    count: int
    equal: int
    difference: float

    def __str__(self) -> str:
        return f"{self.equal} of {self.count} sentences are equal; scores differ by {self.difference:.1g} at most"


def compare(expected: Sequence[Hypothesis], reader: Reader, sentences: Sequence[list[int]]) -> Comparison:
    """Compare a model in another library with what fairseq found for sentences.

    Scores are those that both models give to fairseq's hypotheses. A search may find other ones: at a near tie rounding decides which
    hypotheses it keeps.

    Raises:
        UserError: a score differs by more than :data:`TOLERANCE`.
    """
    found = reader.search(sentences)
    scores = [best.score for best in found]
    differ = [
        number for number, pair in enumerate(zip(expected, found, strict=True)) if pair[0].tokens != pair[1].tokens
    ]
    equal = len(found) - len(differ)
    if again := list(range(len(found))) if reader.own_search else differ:
        given = reader.scores([sentences[number] for number in again], [expected[number].tokens for number in again])
        for number, score in zip(again, given, strict=True):
            scores[number] = score
    differences = [abs(best.score - score) for best, score in zip(expected, scores, strict=True)]
    largest = torch.tensor(differences, dtype=torch.float64).max()  # not a number if one of them is not
    result = Comparison(len(differences), equal, float(largest))
    if not result.difference <= TOLERANCE:
        raise UserError(
            f"the exported model computes something else: {result}, and rounding explains {TOLERANCE:g}. Nothing is "
            "written. Keep the model in fairseq, and report its flags."
        )
    return result


def scored(logits: Tensor, tokens: Tensor) -> Hypothesis:
    """Return the likeliest tokens after each prefix, and the mean log-probability of the tokens ``[T]``, by logits ``[T, V]``."""
    logprobs = logits[:-1].float().log_softmax(-1)
    score = logprobs.gather(-1, tokens[1:, None]).mean()
    return Hypothesis(logprobs.argmax(-1).tolist(), float(score))
