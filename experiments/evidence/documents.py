"""Byte language models for the headline claims of the documents: which trainings are next, and what the recorded ones say.

Each row has three learning rates under seed 1. While the best on the validation set is at an end of those tried, one more is
trained. Seeds 2 to 6 at the best rate are tested, so no tested seed chose a rate. Losses are bits per byte.

    python -m experiments.evidence.documents           the next trainings of examples/evidence/documents.sh: SEED ROW ROW …
    python -m experiments tables documents             the table of contrasts
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from experiments.engine import finished
from experiments.equivalence import equivalence_p
from experiments.evidence import confidence
from experiments.evidence.lines import RESULTS, differences, values
from fairseq_lowrank.records.statistics import student

FILE = RESULTS / "evidence-documents.jsonl"
TIMES = RESULTS.parent / "benchmarks" / "results" / "documents.json"
"""What benchmarks/documents.py wrote: the time of an update of each row, over that of ``width-a``."""
RATES = ("7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2", "2.4e-2", "4.8e-2")
FIRST_RATES = RATES[2:5]
RATE_SEED, SEEDS = 1, (2, 3, 4, 5, 6)
LONG = {"width-a": (2, 3), "width-b": (2, 3)}
"""Rows that are also trained for 6,000 updates, and the seeds."""
MARGIN = 0.04
"""Bits below which nothing is claimed; the margin of equivalence tests."""

GROUPS = {
    "width": ("a", "b", "8-heads", "e"),
    "depth": ("wide-r4", "deep-r4", "wide-rfull", "deep-rfull"),
    "sharing": tuple(
        f"h{heads}-{name}" for heads in (4, 16) for name in ("mha", "mhe-mul", "sha", "narrow", "mhe-add")
    ),
    "width more": ("2-heads", "4-heads", "16-heads"),
    "depth more": ("wide-r16", "deep-r16"),
    "sharing more": ("h4-mqa", "h4-skv", "h4-el"),
}
"""Rows in the order of their value: all trainings of a group come before the next one."""

Losses = Mapping[str, Mapping[int, dict]]
"""The recorded lines by row and seed."""


class Contrast(NamedTuple):
    """A weighted sum of rows at their best rates, by seed: what it is, its weights, and what follows on either side of 0."""

    text: str
    weights: Mapping[str, int]
    above: str
    below: str
    end: str = ""


CONTRASTS = (
    Contrast(
        "d 64, 8 × 32 − d 92, 4 × 23",
        {"width-a": 1, "width-b": -1},
        "weights are better spent on width",
        "h·d_k above the width is better",
    ),
    Contrast(
        "the same after 6,000 updates",
        {"width-a": 1, "width-b": -1},
        "weights are better spent on width",
        "h·d_k above the width is better",
        "-6000",
    ),
    Contrast(
        "d 64: 8 × 8 and feed-forward 640 − 8 × 32",
        {"width-8-heads": 1, "width-a": -1},
        "larger heads are better than more feed-forward",
        "feed-forward is better than larger heads",
    ),
    Contrast(
        "d 64, 8 × 32 − d 128, 4 × 32 of twice the weights",
        {"width-a": 1, "width-e": -1},
        "a small width does not match a large one",
        "a small width matches a large one",
    ),
    *(
        Contrast(
            f"d 64: {heads} × {64 // heads} − 4 × 16",
            {f"width-{heads}-heads": 1, "width-4-heads": -1},
            f"{heads} heads are worse",
            f"{heads} heads are better",
        )
        for heads in (2, 8, 16)
    ),
    *(
        Contrast(
            f"(wide − deep at rank {rank}) − (wide − deep at full rank)",
            {
                f"depth-wide-r{rank}": 1,
                f"depth-deep-r{rank}": -1,
                "depth-wide-rfull": -1,
                "depth-deep-rfull": 1,
            },
            "a low rank hurts width more than depth",
            "a low rank hurts depth more than width",
        )
        for rank in (4, 16)
    ),
    *(
        Contrast(
            f"{shape}: rank 4 − full",
            {f"depth-{shape}-r4": 1, f"depth-{shape}-rfull": -1},
            "a low rank costs",
            "a low rank helps",
        )
        for shape in ("wide", "deep")
    ),
    *(
        Contrast(
            f"{heads} heads: `{first}` − `{second}`",
            {f"sharing-h{heads}-{first}": 1, f"sharing-h{heads}-{second}": -1},
            f"`{second}` is better",
            f"`{first}` is better",
        )
        for heads in (4, 16)
        for first, second in (("sha", "mhe-mul"), ("mhe-mul", "narrow"), ("mhe-mul", "mha"), ("mhe-add", "mhe-mul"))
    ),
)


def read(results: Path = FILE) -> Losses:
    """Return the lines of the table by row and seed."""
    found: dict[str, dict[int, dict]] = {}
    for (row, seed, smoke), line in finished(results, "evidence-documents", "documents").items():
        if not smoke:
            found.setdefault(row, {})[seed] = line
    return found


def choose_rate(name: str, found: Losses) -> tuple[str, list[str]]:
    """Return the best rate of a row under seed 1 on validation so far, and the rates that must be tried before it counts."""
    losses = {
        rate: found[f"{name}-{rate}"][RATE_SEED].get("valid_loss", math.inf)
        for rate in RATES
        if RATE_SEED in found.get(f"{name}-{rate}", {})
    }
    if missing := [rate for rate in FIRST_RATES if rate not in losses]:
        return "", missing
    best = min(losses, key=lambda rate: losses[rate])
    place = RATES.index(best)
    around = RATES[max(0, place - 1) : place + 2]
    return best, [rate for rate in around if rate not in losses]


def next_trainings(found: Losses) -> tuple[int, list[str]] | None:
    """Return the seed and the rows to train next, or None if every training is done."""
    for group, names in GROUPS.items():
        rows = [f"{group.split()[0]}-{name}" for name in names]
        chosen = {row: choose_rate(row, found) for row in rows}
        if missing := [f"{row}-{rate}" for row, (_, rates) in chosen.items() for rate in rates]:
            return RATE_SEED, missing
        for end, seeds in (("", dict.fromkeys(rows, SEEDS)), ("-6000", LONG)):
            for seed in SEEDS:
                wanted = [f"{row}-{chosen[row][0]}{end}" for row in rows if seed in seeds.get(row, ())]
                if missing := [row for row in wanted if seed not in found.get(row, {})]:
                    return seed, missing
    return None


def bits(name: str, found: Losses, end: str = "") -> dict[int, float]:
    """Return the test losses of a row at its best rate, in bits per byte, by tested seed; empty while its rate is not chosen."""
    rate, missing = choose_rate(name, found)
    lines = {} if missing else found.get(f"{name}-{rate}{end}", {})
    return {seed: lines[seed]["value"] / math.log(2) for seed in SEEDS if seed in lines}


def by_seed(contrast: Contrast, found: Losses) -> list[float]:
    """Return a contrast by tested seed, for the seeds that all of its rows have."""
    rows = {name: bits(name, found, contrast.end) for name in contrast.weights}
    common = set.intersection(*(set(row) for row in rows.values()))
    return [sum(weight * rows[name][seed] for name, weight in contrast.weights.items()) for seed in sorted(common)]


def verdict(contrast: Contrast, measured: list[float]) -> str:
    """Return what follows from a contrast: a side of 0 above the margin, equality within it, or nothing."""
    low, high = student(measured)[:2]
    if low is None or high is None:
        return "not tested" if not measured else "one seed"
    if low * high > 0 and abs(fmean(measured)) >= MARGIN:
        return contrast.above if low > 0 else contrast.below
    if (equivalence_p(measured, MARGIN) or 0) < 0.05:
        return f"equal within {MARGIN}"
    return f"no claim below {MARGIN}" if low * high > 0 else "not decided"


MATRICES = "evidence-matrices.jsonl.gz"
SMALL = "byte model, 4 layers, d 128, 2,000 updates"
NOT_TESTED = "*not tested*"


class Claim(NamedTuple):
    """A headline claim: the document, its words with its numbers, what was compared here, in what size, and the differences.

    ``settings`` has the differences by seed of each setting; the first is shown, and all give the label. With ``ratio`` they are
    logarithms, and the ratio is shown.
    """

    document: str
    says: str
    here: str = ""
    size: str = ""
    settings: Mapping[str, list[float]] = {}
    ratio: bool = False
    contrast: Contrast | None = None

    def outcome(self) -> str:
        """Return what follows here: the verdict of a planned contrast, or the side of 0, where above 0 is as the document says."""
        measured = next(iter(self.settings.values()), [])
        if self.contrast is not None:
            return verdict(self.contrast, measured) if measured else "–"
        low, high = student(measured)[:2]
        if low is None or high is None:
            return "–"
        if "bits" in self.here and abs(fmean(measured)) < MARGIN:
            return f"no claim below {MARGIN}"
        return "no difference seen" if low * high <= 0 else "as it says" if low > 0 else "the opposite"


def claims(found: Losses) -> list[Claim]:
    """Return the claims of the five documents."""
    planned = {contrast.text: contrast for contrast in CONTRASTS}

    def byte_model(text: str, size: str) -> dict:
        contrast = planned[text]
        return {"here": text, "size": size, "settings": {text: by_seed(contrast, found)}, "contrast": contrast}

    def errors(worse: str, better: str, *heads: int, length: int = 16) -> dict[str, list[float]]:
        rows = {count: [f"n{length}-shared-h{count}-{name}" for name in (worse, better)] for count in heads}
        return {f"{count} heads": log_ratio(*pair) for count, pair in rows.items()}

    primer, fixedhead, vocabulary = "Primer", "FixedHead (2020)", "Vocabulary bottleneck (2021)"
    mixhead, mhe = "Mixhead (2022)", "MHE (poster)"
    width, depth, sharing = "4 layers, 398,000 weights", "395,000 weights", "4 layers, d 64"
    translation = "3+3 layers, d 128, post-norm, one rate"
    bert = "published-bert-all-MiniLM-L6-v2/sentence-polarity"
    return [
        Claim(primer, "heads learn different relations"),
        Claim(fixedhead, "the scores of LM1B, SQuAD and MNLI"),
        Claim(
            fixedhead,
            "a head smaller than n cannot represent every pattern (theorem 1)",
            "error of heads of 8 ÷ heads of 16",
            "one layer, n 16",
            errors("mha", "fixedhead", 8, 16),
            True,
        ),
        Claim(
            fixedhead,
            "more heads of the same d are worse (SQuAD 90.89 F1 with 8, 90.45 with 32)",
            "32 heads of 4 − 4 of 32, bits, each at its best rate",
            SMALL,
            {"": confidence.trained("language-model", "h32-mha-3e-3", "h4-mha-6e-3")},
        ),
        Claim(fixedhead, "d 512 with large heads matches d 1024", **byte_model(CONTRASTS[3].text, width)),
        Claim(fixedhead, "it is not the number of weights", **byte_model(CONTRASTS[2].text, width)),
        Claim(vocabulary, "the losses of figures 1 to 4"),
        Claim(vocabulary, "h·d_k above d wastes weights (T5-11B: 45 %)", **byte_model(CONTRASTS[0].text, width)),
        Claim(
            vocabulary, "a rank below d costs (ALBERT: 25 % of the size)", **byte_model("wide: rank 4 − full", depth)
        ),
        Claim(
            vocabulary,
            "a low rank favours depth over width",
            **byte_model("(wide − deep at rank 4) − (wide − deep at full rank)", depth),
        ),
        Claim(mixhead, "the scores of tables 1 to 10"),
        Claim(
            mixhead,
            "mixing after the softmax breaks the low-rank bottleneck",
            "squared error of mixing before the softmax − `mixhead-a`, task of rank 32 (`mha` 0.818, `mixhead-a` 0.736)",
            "one layer, 8 heads of 4",
            {"": _plain("nearest-point", "h8-score-mixing", "h8-mixhead-a", "evidence-nearest-point.jsonl")},
        ),
        Claim(
            mixhead,
            "lower perplexity of language models (WikiText-103: 29.78 to 28.86)",
            "`mha` − `mixhead-a`, bits, 32 heads of 4, one rate",
            SMALL,
            {"": confidence.trained("language-model", "h32-mha", "h32-mixhead-a")},
        ),
        Claim(
            mixhead,
            "sigsoftmax is better than softmax (29.61 and 29.78)",
            "error of softmax ÷ sigsoftmax, heads of n/4",
            "one layer, n 32, 8 heads of 8",
            errors("mha", "sigsoftmax", 8, length=32),
            True,
        ),
        Claim(
            mixhead,
            "sigsoftmax with Mixhead A (28.93) is no better than Mixhead A (28.86)",
            "the same, both with `mixhead-a`",
            "one layer, n 32, 8 heads of 8",
            errors("mixhead-a", "sigsoftmax-mixhead-a", 8, length=32),
            True,
        ),
        Claim(
            mixhead,
            "translation trains faster",
            "`mha` − `mixhead-a`, bits of training loss, 4 heads",
            translation,
            {"": confidence.trained("fast-start", "h4-mha-2e-3", "h4-mixhead-a-2e-3", "fit")},
        ),
        Claim(
            mixhead,
            "because heads are mixed (a conjecture)",
            "the same bits, `gain` at 4 times the rate, which cannot mix, − `mixhead-a`",
            translation,
            {"": confidence.trained("fast-start", "h4-gain-x4-2e-3", "h4-mixhead-a-2e-3", "fit")},
        ),
        Claim(
            mixhead,
            "ten joined sentences: BLEU 34.5, baseline below 1",
            "`mixhead-a` − `mha`, BLEU",
            "3+3 layers, d 128",
            {"": _plain("joined-by-ten", "mixhead-a-paper", "mha-paper", "evidence.jsonl")},
        ),
        Claim(
            mixhead,
            "a fine-tuned BERT gains on GLUE",
            "`mixhead-b` − `mha`, points of polarity",
            "MiniLM, 6 layers, d 384",
            {"": _plain(bert, "mixhead-b", "mha", "evidence.jsonl")},
        ),
        Claim(mhe, "the scores of GLUE, SQuAD and WMT'14"),
        Claim(
            mhe,
            "head embeddings beat a single shared head (PRR 98.3 and 96.7)",
            **byte_model("4 heads: `sha` − `mhe-mul`", sharing),
        ),
        Claim(mhe, "and use weights well (PEoP 5.53)", **byte_model("4 heads: `mhe-mul` − `narrow`", sharing)),
    ]


def log_ratio(first: str, second: str) -> list[float]:
    """Return by seed the logarithm of the error of one row of known matrices over that of another."""
    one, other = (
        values("matrices", row, file=MATRICES) | values("matrices", row, file=FILE.name) for row in (first, second)
    )
    return [math.log(one[seed] / other[seed]) for seed in sorted(one.keys() & other.keys())]


def _plain(table: str, first: str, second: str, file: str) -> list[float]:
    return differences([first, second], table=table, file=file)


def claims_table(found: Losses) -> Iterable[list[str]]:
    """Yield the cells of each claim: document, its words, what was compared, in what size, the interval, what follows, the label."""
    for claim in claims(found):
        shown = next(iter(claim.settings.values()), [])
        label = confidence.label(claim.settings) if len(shown) > 1 else NOT_TESTED
        yield [
            claim.document,
            claim.says,
            claim.here or "–",
            claim.size or "–",
            mean_and_interval(shown, ratio=claim.ratio),
            claim.outcome(),
            label,
        ]


def mean_and_interval(measured: list[float], *, ratio: bool = False) -> str:
    """Return the mean with the 95 % t interval; with ``ratio`` the numbers are logarithms, and ratios are shown."""
    if not measured:
        return "–"
    low, high = student(measured)[:2]
    shown = [fmean(measured), *(() if low is None or high is None else (low, high))]
    if ratio:
        mean, *ends = (f"{one:,.0f}" if one >= 10 else f"{one:.2f}" for one in map(math.exp, shown))
    else:
        mean, *ends = (f"{value:z.3f}".replace("-", "−") for value in shown)
    return f"{mean} ({' … '.join(ends)})" if ends else mean


def losses_table(found: Losses) -> Iterable[list[str]]:
    """Yield the cells of each row that is begun: name, best rate, bits after 2,000 and 6,000 updates, seeds, weights, time."""
    times = json.loads(TIMES.read_text())["results"] if TIMES.exists() else {}
    for group, names in GROUPS.items():
        for name in (f"{group.split()[0]}-{one}" for one in names):
            rate, missing = choose_rate(name, found)
            if missing:
                if any(f"{name}-{one}" in found for one in RATES):
                    yield [f"`{name}`", f"{rate or 'none'} so far", *["–"] * 5]
                continue
            row = found[f"{name}-{rate}"]
            tested, longer = bits(name, found), bits(name, found, "-6000")
            yield [
                f"`{name}`",
                rate + ", the end of the grid" * (rate in (RATES[0], RATES[-1])),
                f"{fmean(tested.values()):.3f}" if tested else "–",
                f"{fmean(longer.values()):.3f}" if longer else "–",
                str(len(tested)),
                f"{row[RATE_SEED]['parameters']:,}",
                f"{times[name]['ratio']:.2f}" if name in times else "–",
            ]


def contrasts_table(found: Losses) -> Iterable[list[str]]:
    """Yield the cells of each contrast with a seed: text, seeds, mean with the 95 % t interval, p of equality, and the verdict."""
    for contrast in CONTRASTS:
        measured = by_seed(contrast, found)
        if not measured:
            continue
        p = equivalence_p(measured, MARGIN)
        shown = "–" if p is None else f"{p:.3f}"
        yield [contrast.text, str(len(measured)), mean_and_interval(measured), shown, verdict(contrast, measured)]


def sigsoftmax_table(found: Losses) -> Iterable[list[str]]:
    """Yield for each size of known matrices the errors of softmax, and the ratios of sigsoftmax to softmax."""
    for length in (16, 32):
        for heads in (2, 4, 8):
            at = f"n{length}-shared-h{heads}"
            pairs = [(f"{at}-sigsoftmax{end}", at + (end or "-mha")) for end in ("", "-mixhead-a")]
            ratios = [mean_and_interval(log_ratio(*pair), ratio=True) for pair in pairs]
            size = f"n {length}, {heads} × {64 // heads}"
            yield [size, "yes" if 64 // heads < length - 1 else "no", *ratios, str(len(log_ratio(*pairs[0])))]


TABLES = {
    ("document", "it says", "compared here", "size", "result", "here", "label"): claims_table,
    ("heads × size", "too small", "sigsoftmax ÷ softmax", "both with `mixhead-a`", "seeds"): sigsoftmax_table,
    ("row", "best rate", "2,000 updates", "6,000 updates", "seeds", "weights", "time"): losses_table,
    ("contrast", "seeds", "bits", "p of equality", "verdict"): contrasts_table,
}
"""The tables of docs/evidence/documents.md by their columns."""


def markdown(columns: tuple[str, ...]) -> str:
    """Return one of :data:`TABLES` in Markdown."""
    rows = (columns, ["---"] * len(columns), *TABLES[columns](read()))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FILE, help="the file of lines")
    if found := next_trainings(read(parser.parse_args().results)):
        print(found[0], *found[1])


if __name__ == "__main__":
    main()
