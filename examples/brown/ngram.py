"""n-gram models of the Brown corpus: how much a language model gains from context beyond counting.

    python examples/brown/ngram.py FOLDER                           perplexity of words, order 2
    python examples/brown/ngram.py FOLDER --bits --orders 1 2 3   bits per symbol, such as for brown-bpe257

FOLDER is what `scripts/prepare.sh brown` (or brown-bpe257) prints last. The models are interpolated Kneser-Ney
(Ney, Essen and Kneser 1994) with discount 0.75 over the symbols of the dictionary. Other symbols are <unk>, and the end of each
line is a symbol: these are the symbols that fairseq-eval-lm scores.
"""

import argparse
import math
from collections import Counter
from pathlib import Path

DISCOUNT = 0.75
END, UNKNOWN = "</s>", "<unk>"


class KneserNey:
    """p(w | h) = (max(c(hw) − D, 0) + D · followers(h) · p(w | h without its first symbol)) / c(h).

    Below the highest order c counts the distinct symbols before an n-gram, and order 0 is uniform. Symbols are characters.
    """

    def __init__(self, text: str, order: int, size: int) -> None:
        self.order, self.size = order, size
        grams = Counter(text[start : start + order] for start in range(len(text) - order + 1))
        self.levels = []  # from the highest order: counts of n-grams, then sum and number of the continuations of a context
        while order:
            totals, followers = Counter(), Counter()
            for gram, count in grams.items():
                totals[gram[:-1]] += count
                followers[gram[:-1]] += 1
            self.levels.append((grams, totals, followers))
            grams, order = Counter(gram[1:] for gram in grams), order - 1

    def probability(self, gram: str) -> float:
        """Return the probability of the last symbol of ``gram`` after the ``order − 1`` symbols before it."""
        result = 1 / self.size
        for level in range(self.order - 1, -1, -1):
            grams, totals, followers = self.levels[level]
            own = gram[level:]
            if total := totals[own[:-1]]:
                result = (max(grams[own] - DISCOUNT, 0) + DISCOUNT * followers[own[:-1]] * result) / total
        return result

    def bits(self, text: str, end: str) -> float:
        """Return the mean of −log2 p over the symbols of ``text``, which follows an ``end``."""
        padded = end * (self.order - 1) + text
        grams = Counter(padded[start : start + self.order] for start in range(len(text)))
        return -sum(count * math.log2(self.probability(gram)) for gram, count in grams.items()) / len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--orders", type=int, nargs="+", default=[2], help="orders of the models (default: 2)")
    parser.add_argument("--bits", action="store_true", help="print bits per symbol, not perplexity")
    args = parser.parse_args()
    vocabulary = [line.split()[0] for line in (args.folder / "dict.txt").read_text(encoding="utf-8").splitlines()]
    code = {symbol: chr(256 + number) for number, symbol in enumerate([END, UNKNOWN, *vocabulary])}
    parts = next(folder for name in ("bpe", "tok") if (folder := args.folder.parent / name).is_dir())

    def read(split: str) -> str:
        lines = (parts / f"{split}.txt").read_text(encoding="utf-8").splitlines()
        symbols = (symbol for line in lines for symbol in [*line.split(), END])
        return "".join(code.get(symbol, code[UNKNOWN]) for symbol in symbols)

    text = {split: read(split) for split in ("train", "valid", "test")}
    for order in args.orders:
        model = KneserNey(text["train"], order, len(vocabulary) + 2)
        bits = {split: model.bits(text[split], code[END]) for split in ("valid", "test")}
        shown = (f"{split}: " + (f"{value:.4f}" if args.bits else f"{2**value:.1f}") for split, value in bits.items())
        print(f"order {order}, " + ", ".join(shown))


if __name__ == "__main__":
    main()
