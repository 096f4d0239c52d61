"""Perplexity of the Brown corpus under a bigram model, the measure of how much context a language model uses there.

    python examples/brown/bigram.py FOLDER          FOLDER: what scripts/prepare.sh brown prints, without /bin

Interpolated Kneser-Ney (Ney, Essen and Kneser 1994) with discount 0.75 over the words of the dictionary, all others <unk>,
each line's end a word: the words that fairseq-eval-lm scores.
"""

import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

DISCOUNT = 0.75


def words(path: Path, vocabulary: set[str]) -> list[str]:
    """The words of a text, ``</s>`` at the end of each line, those outside the vocabulary as ``<unk>``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    known = vocabulary | {"</s>"}
    return [word if word in known else "<unk>" for line in lines for word in [*line.split(), "</s>"]]


def perplexity(train: list[str], test: list[str], size: int) -> float:
    """exp of the mean −log p(word | word before) over ``test``, with counts of ``train`` and a vocabulary of ``size``."""
    counts, pairs = Counter(train), Counter(pairwise(train))
    endings, followers = Counter(second for _, second in pairs), Counter(first for first, _ in pairs)

    def probability(first: str, second: str) -> float:
        lower = (max(endings[second] - DISCOUNT, 0) + DISCOUNT * len(endings) / size) / len(pairs)
        if not counts[first]:
            return lower
        return (max(pairs[first, second] - DISCOUNT, 0) + DISCOUNT * followers[first] * lower) / counts[first]

    return math.exp(-sum(math.log(probability(*pair)) for pair in pairwise(["</s>", *test])) / len(test))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    vocabulary = {line.split()[0] for line in (folder / "bin/dict.txt").read_text(encoding="utf-8").splitlines()}
    text = {split: words(folder / f"tok/{split}.txt", vocabulary) for split in ("train", "valid", "test")}
    for split in ("valid", "test"):
        print(f"{split}: {perplexity(text['train'], text[split], len(vocabulary) + 2):.1f}")
