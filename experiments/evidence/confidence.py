"""How sure the evidence is of an answer, computed from seeds, settings and intervals.

*Strong*: at least three seeds in more than one setting, and a t interval on one side of 0 in each.
*Moderate*: the same in one setting. *Weak*: anything else.

    python -m experiments.evidence.confidence
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.evidence.lines import differences, values
from fairseq_lowrank.records.statistics import student


def label(settings: Mapping[str, Sequence[float]]) -> str:
    """Return the label of an answer.

    Args:
        settings: by setting, the differences of two rows by seed. A setting is one corpus or task and one number of heads.
    """
    sure = sum(len(found) >= 3 and one_sided(found) for found in settings.values())
    return "strong" if sure >= 2 and sure == len(settings) else "moderate" if sure else "weak"


def one_sided(differences: Sequence[float]) -> bool:
    """Return True if the t interval of the mean lies on one side of 0."""
    low, high = student(differences)[:2]
    return low is not None and high is not None and low * high > 0


def trained(table: str, worse: str, better: str, split: str = "test") -> list[float]:
    """Return by seed the bits that one row of trained models is behind another."""
    return differences([worse, better], table=table, split=split)


def controlled(file: str, table: str, worse: str, better: str) -> list[float]:
    """Return by seed log(error) of one row of a controlled task minus that of another."""
    one, other = (values(table, row, file=file) for row in (worse, better))
    return [math.log(one[seed] / other[seed]) for seed in sorted(one.keys() & other)]


def scored(file: str, table: str, better: str, worse: str) -> list[float]:
    """Return by seed the BLEU or accuracy that one row is ahead of another."""
    return differences([better, worse], table=table, file=file)


def answers() -> dict[str, str]:
    """Return the label of each question of docs/evidence.md, by its number and what it is about.

    A label is computed from the contrast that the answer states, and from no other.
    """
    matrices, points, decoding = "evidence-matrices.jsonl.gz", "evidence-nearest-point.jsonl", "evidence-decoding.jsonl"
    bert = "published-bert-all-MiniLM-L6-v2/sentence-polarity"
    return {
        "1": label(
            {
                f"{target}, {heads} heads": controlled(
                    matrices, "matrices", f"n16-{target}-h{heads}-mha", f"n16-{target}-h{heads}-fixedhead"
                )
                for target in ("shared", "own")
                for heads in (8, 16)
            }
        ),
        "2, before the softmax": label({"8 heads": controlled(points, "nearest-point", "h8-mha", "h8-score-mixing")}),
        "2, after the softmax": label(
            {
                f"one pattern, {heads} heads": controlled(
                    matrices, "matrices", f"n16-shared-h{heads}-mha", f"n16-shared-h{heads}-mixhead-a"
                )
                for heads in (8, 16, 32)
            }
        ),
        "3": label({"32 heads of 4": trained("language-model", "h32-mha-3e-3", "h4-mha-6e-3")}),
        "4, 4 heads": label({"4 heads of 32": trained("fast-start", "h4-mixhead-a-2e-3", "h4-gain-x4-2e-3", "fit")}),
        "4, 32 heads": label(
            {"32 heads of 4": trained("fast-start", "h32-mixhead-a-2e-3", "h32-gain-x32-2e-3", "fit")}
        ),
        "5": label({"polarity": scored("evidence.jsonl", bert, "mixhead-b", "mha")}),
        "6, decoding": label(
            {
                "4 heads": scored(
                    decoding,
                    "fast-start-decoding",
                    "h4-mixhead-a-self-2e-3",
                    "h4-mixhead-a-self-2e-3-decoder-unmixed",
                )
            }
        ),
        "6, ten sentences": label({"paper's rate": trained("joined-by-ten", "mha-paper", "mixhead-a-paper")}),
    }


if __name__ == "__main__":
    for question, found in answers().items():
        print(f"{question}: {found}")
