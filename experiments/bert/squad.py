"""Exact match and F1 of SQuAD 1.1 and 2.0, computed like the data set's own evaluation scripts."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fairseq_lowrank.messages import UserError


def normalise(answer: str) -> str:
    """Return an answer in lower case, without ASCII punctuation, the articles a, an, the, and unneeded blanks."""
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1.0 if both are equal after normalisation, else 0.0."""
    return float(normalise(prediction) == normalise(answer))


def f1(prediction: str, answer: str, *, unanswerable: bool) -> float:
    """Return 2·P·R / (P + R) over the words of both, normalised.

    If both have no words, SQuAD 2.0 (`unanswerable`) gives 1.0 and SQuAD 1.1 gives 0.0. If one has none, both give 0.0.
    """
    ours, theirs = normalise(prediction).split(), normalise(answer).split()
    if not ours or not theirs:
        return float(unanswerable and ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def evaluate(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]], *, unanswerable: bool
) -> dict[str, float]:
    """Compute scores over all questions, in percent, with the best answer for each prediction.

    Args:
        predictions: a text for each question's name; an empty text means that there is no answer.
        answers: the correct texts; none if the paragraph has no answer.
        unanswerable: if True, the rules of SQuAD 2.0, which has questions without an answer; else those of 1.1 (also for XQuAD).

    Returns:
        `em` and `f1`. If some questions have no answer, also `em_answered` and `f1_answered` over the others, and `unanswered`
        over these, for which both are equal.

    Raises:
        UserError: a question has no prediction.
    """
    if missing := [name for name in answers if name not in predictions]:
        raise UserError(f"{len(missing)} questions have no prediction, such as {missing[0]}. Predict all of them.")
    single = {name: best(predictions[name], right, unanswerable=unanswerable) for name, right in answers.items()}
    answered = [score for name, score in single.items() if answers[name]]
    scores = {"em": mean(em for em, _ in single.values()), "f1": mean(f for _, f in single.values())}
    if answered and len(answered) < len(single):
        scores |= {"em_answered": mean(em for em, _ in answered), "f1_answered": mean(f for _, f in answered)}
        scores["unanswered"] = mean(em for name, (em, _) in single.items() if not answers[name])
    return scores


def best(prediction: str, answers: Sequence[str], *, unanswerable: bool) -> tuple[float, float]:
    """Return exact match and F1, each with the answer that gives the highest score.

    SQuAD 2.0 leaves out answers that consist of articles if there are others. SQuAD 1.1 counts every answer.
    """
    right = [answer for answer in answers if normalise(answer)] if unanswerable else answers
    right = right or [""]
    return (
        max(exact_match(prediction, one) for one in right),
        max(f1(prediction, one, unanswerable=unanswerable) for one in right),
    )


def mean(scores: Iterable[float]) -> float:
    scores = list(scores)
    return 100 * sum(scores) / len(scores) if scores else 0.0
