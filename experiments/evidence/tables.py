"""Build the tables of an experiment: its set-up, every row by seed, contrasts and predictions, from the lines in `results/`.

`python -m experiments tables NAME` prints them. Set-ups and numbers without lines are in ``results/notes.json``.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, median

from experiments.controlled import regression
from experiments.controlled.runs import geometric_mean
from experiments.equivalence import equivalence_p
from experiments.evidence import documents, measure, pages, predictions, published_models, slowdown
from experiments.evidence.lines import PLANNED, RESULTS, ROOT, differences, lines, values
from experiments.papers import comparison, complexity
from experiments.papers.tables import as_markdown
from experiments.papers.values import load_papers
from fairseq_lowrank.records import contrasts
from fairseq_lowrank.records.statistics import holm, student

LOSSES = {"training loss": "fit", "validation": "valid", "test": "test"}
METHODS = r"mixhead-[ab]|gain|common-mode|column-sums|small-start|gated-head|score-mixing|score-gain|fixedhead|headmix|mhe-mul|sha|qk\d+|ffn\d+|mha"
UNPLANNED = {
    "fast-start": [
        ("h4-gain-x4-2e-3", "h4-mixhead-a-x2-2e-3"),
        ("h4-mixhead-a-x2-2e-3", "h4-gain-x8-2e-3"),
        ("h32-gain-x32-2e-3", "h32-mixhead-a-x2-2e-3"),
        ("h32-gain-x64-2e-3", "h32-mixhead-a-x2-2e-3"),
        ("h4-mixhead-a-2e-3", "h4-mixhead-a-x2-2e-3"),
        ("h32-mixhead-a-2e-3", "h32-mixhead-a-x2-2e-3"),
        ("h4-mixhead-a-x0.5-2e-3", "h4-mixhead-a-2e-3"),
        ("h32-mixhead-a-x0.5-2e-3", "h32-mixhead-a-2e-3"),
        ("h4-gain-4e-3", "h4-mixhead-a-4e-3"),
        ("h4-gated-head-half-2e-3", "h4-small-start-2e-3"),
        ("h4-gated-head-2e-3", "h4-small-start-2e-3"),
        ("h4-gated-head-2e-3", "h4-gated-head-half-2e-3"),
        ("h32-mha-2e-3", "h4-mha-2e-3"),
    ],
    "above-head-size": [
        ("h32-small-start", "h32-mixhead-a"),
        ("h32-mixhead-a-small-start", "h32-small-start"),
        ("h4-mha", "h4-mha-narrow"),
        ("h32-mha-wide", "h32-mha"),
        ("h4-sha", "h4-mhe-mul"),
    ],
    "joined-by-ten": [("mha-2e-3", "mixhead-a-2e-3")],
    "language-model": [
        ("h4-mha", "h4-mixhead-a"),
        ("h4-mha", "h4-score-mixing"),
        ("h4-mha", "h4-qk128"),
        ("h32-mha", "h32-qk32"),
        ("h32-mha", "h32-ffn1404"),
        ("h32-score-gain-x32", "h32-score-mixing"),
        ("h32-score-mixing", "h4-mha"),
        ("h32-score-mixing", "h32-mha-equal-time"),
        ("h32-score-mixing-6000", "h32-mha-9600"),
        ("h32-mha-1e-3", "h4-mha-1e-3"),
    ],
    "head-maps": [
        ("h4-mha", "h4-headmix"),
        ("h32-mha", "h32-headmix"),
        ("h32-mha-values-x32", "h32-headmix"),
    ],
}
"""Pairs of rows whose differences pages of docs/evidence cite. They were not planned, unless a prediction names them."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def number(value: float, digits: int = 3) -> str:
    """Return a number with so many decimals and a real minus."""
    return f"{value:z.{digits}f}".replace("-", "−")


def small(value: float) -> str:
    """Return two digits of a number below 0.001, in powers of ten; other numbers with three decimals."""
    return f"{value:.1e}".replace("e-0", "e-") if 0 < value < 1e-3 else number(value)


def interval(found: Sequence[float]) -> str:
    """Return the t interval of a mean, nothing for one value."""
    low, high = student(found)[:2]
    return "" if low is None or high is None else f"{number(low)} … {number(high)}"


def processor(line: dict) -> str:
    """Return the processor of a line, as far as it has one."""
    machine = line.get("machine", "")
    if isinstance(machine, str):
        return machine
    return ", ".join(machine.get("gpus", [re.sub(r"\(R\)| Processor| CPU", "", machine.get("cpu", ""))]))


def commit(line: dict) -> str:
    """Return the start of a line's commit, with its mark of uncommitted changes."""
    return line["commit"][:8] + "-dirty" * line["commit"].endswith("-dirty")


def plain_of(row: str, rows: Iterable[str]) -> str | None:
    """Return the row of plain attention that a row is compared with: its heads, norm, updates and rate."""
    head, rest = re.fullmatch(rf"(h\d+-)?(?:{METHODS})(.*)", row).groups(default="")
    ends = [
        end
        for end in ("-pre-norm-2e-3", "-2e-3", "-4e-3", "-1e-3", "-8e-3", "-paper", "-6000", "")
        if rest.endswith(end)
    ]
    return next((name for end in ends if (name := f"{head}mha{end}") in rows and name != row), None)


def by_seed(name: str) -> list[str]:
    """Return the rows of a training table by seed, their leads over plain attention, and contrasts."""
    rows = {row: seeds for (of, row), seeds in lines("evidence.jsonl").items() if of == name}
    source = {
        row: seeds for (of, row), seeds in lines("evidence-source-use.jsonl").items() if of == f"{name}-source-use"
    }
    translation = any(line["metric"] == "sacrebleu" for seeds in rows.values() for line in seeds.values())
    head = [
        "row",
        "seed",
        *LOSSES,
        *["BLEU"] * translation,
        *["shuffled source"] * bool(source),
        "updates",
        "processor",
        "commit",
    ]
    cells = []
    for row, seeds in rows.items():
        for seed, line in seeds.items():
            losses = [number(line["losses"][split]["bits"], 4) for split in LOSSES.values()]
            found = source.get(row, {}).get(seed)
            cost = [number(found["value"], 2) if found else "not kept"] * bool(source)
            origin = [f"{line['updates']:,}", processor(line), commit(line)]
            cells.append([f"`{row}`", str(seed), *losses, *[f"{line['value']:.2f}"] * translation, *cost, *origin])
    averages = [
        [f"`{row}`", str(len(seeds))]
        + [number(fmean(line["losses"][split]["bits"] for line in seeds.values()), 4) for split in LOSSES.values()]
        + [f"{fmean(line['value'] for line in seeds.values()):.1f}"] * translation
        for row, seeds in rows.items()
    ]
    note = "*Shuffled source*: bits per token that the source of another text costs." if source else ""
    leads = []
    for row in rows:
        if plain := plain_of(row, rows):
            found = {split: differences([plain, row], table=name, split=split) for split in ("fit", "valid", "test")}
            if not found["fit"]:
                continue
            means = [
                part
                for split in ("fit", "valid", "test")
                for part in (number(fmean(found[split])), interval(found[split]))
            ]
            leads.append([f"`{row}`", f"`{plain}`", ", ".join(map(number, found["fit"])), *means])
    head_of_leads = [
        "row",
        "plain row",
        "training loss, by seed",
        "mean",
        "interval",
        "validation",
        "interval",
        "test",
        "interval",
    ]
    unit = "token" if translation else "symbol"
    return [
        f"## Rows by seed\n\nLoss in bits per {unit}; less is better. {note}".strip(),
        table(head, cells),
        "## Means over seeds",
        table(["row", "seeds", *LOSSES, *["BLEU"] * translation], averages),
        f"## Leads over plain attention\n\nLoss of the plain row minus that of the row, bits per {unit}, within each seed; above 0 is better. "
        "Intervals are 95 % t intervals over seeds.",
        table(head_of_leads, leads),
    ]


@functools.cache
def trained() -> list[dict]:
    """Return the lines of all trainings, with the losses of sentences."""
    return contrasts.load([RESULTS / "evidence.jsonl"])


def read_planned(file: str, table: str) -> list[dict]:
    """Return a table's contrasts in ``examples/evidence/FILE.json``, each with name, rows (2 or 4), metric, split and prediction."""
    return json.loads((PLANNED / f"{file}.json").read_text(encoding="utf-8"))[table]


def planned(name: str, *files: str) -> list[str]:
    """Return the planned contrasts of a table, over the seeds that their rows have."""
    recorded = [line for line in trained() if line["table"] == name]
    parts = []
    for file in files:
        found = []
        for plan in read_planned(file, name):
            rows, where = plan["rows"], (plan["metric"], plan["split"])
            chosen = [line for line in recorded if (line["metric"], line["split"]) == where]
            pairs, interactions = ([rows], []) if len(rows) == 2 else ([], [rows])
            [contrast] = contrasts.compare_rows(chosen, pairs, interactions, draws=1)
            found.append(dataclasses.replace(contrast, name=f"{plan['name']}, {plan['split']}"))
        cells = []
        for one in contrasts.as_rows(found):
            better = one["better"]
            side = f"{better} by more" if better and " over " in better else better or "neither clearly"
            limits = f"{number(one['low'])} … {number(one['high'])}"
            positive = f"{one['positive']} of {one['seeds']}"
            cells.append(
                [
                    one["contrast"],
                    number(one["mean"]),
                    limits,
                    positive,
                    f"{one['t']:.3g}".replace("-", "−"),
                    small(one["t_holm"]),
                    side,
                ]
            )
        parts.append(
            table(
                ("contrast", "mean", "95 % interval (t)", "seeds above 0", "t", "p (Holm)", "better, by the interval"),
                cells,
            )
        )
    return ["## Planned contrasts\n\nHolm's correction is over the contrasts of a table.", *parts]


def unplanned(name: str, split: str) -> list[str]:
    """Return the differences that pages cite, over the seeds that both rows have."""
    cells = []
    for worse, better in UNPLANNED[name]:
        found = differences([worse, better], table=name, split=split)
        cells.append([f"`{worse}` − `{better}`", ", ".join(map(number, found)), number(fmean(found)), interval(found)])
    return [
        f"## Further differences\n\n{'Training loss' if split == 'fit' else 'Test loss'} of the first row minus that of the second, in bits. They are not corrected for their number.",
        table(("rows", "by seed", "mean", "95 % interval (t)"), cells),
    ]


@functools.cache
def sums() -> dict[str, dict[tuple[str, str], list[float]]]:
    """Return by row, seed and site what the weights of mixed heads sum to."""
    found: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    with (RESULTS / "evidence-damping.csv").open(encoding="utf-8", newline="") as file:
        for layer in csv.DictReader(file):
            for site in ("all", layer["site"]):
                found[layer["row"]][layer["seed"], site] += map(float, layer["sums"].split())
    return found


def damping(prefix: str = "") -> list[str]:
    """Return the medians of the sums of weights of a table's rows, by seed."""
    sites = ("all", "encoder", "decoder", "cross")
    cells = []
    for row, found in sums().items():
        if row.startswith("joined-by-four") == bool(prefix) and row.startswith(prefix):
            for seed in dict.fromkeys(seed for seed, _ in found):
                parts = [f"{median(found[seed, site]):.2f}" if (seed, site) in found else "–" for site in sites]
                below = sum(one < 1 for one in found[seed, "all"])
                cells.append([f"`{row.removeprefix(prefix)}`", seed, *parts, f"{below} of {len(found[seed, 'all'])}"])
    return [
        "## Damping\n\nMedian over heads of what the weights of a mixed head sum to; for `gain`, of its factors. Below 1 means damped.",
        table(("row", "seed", "all layers", *sites[1:], "below 1"), cells),
    ]


def spectra(*stems: str) -> list[str]:
    """Return how far the effective rank of mixed heads lies above that of controls, by seed."""
    controls = {
        "no mixing": ", without mixing",
        "a random M equally far from I": ", random M",
        "random entries off its diagonal": ", random off-diagonal",
        "its entries off the diagonal shuffled": ", shuffled off-diagonal",
    }
    cells = []
    for stem in stems:
        name, seed = stem.rsplit("-seed", 1)
        with gzip.open(RESULTS / "evidence-spectra" / f"{stem}.csv.gz", "rt", newline="", encoding="utf-8") as file:
            layers = [line for line in csv.DictReader(file) if not line["head"]]
        rank = {
            (end, site): fmean(
                float(line["effective_rank"]) for line in layers if (line["label"], line["site"]) == (name + end, site)
            )
            for end in ("", *controls.values())
            for site in ("encoder", "decoder", "cross")
        }
        for words, end in controls.items():
            shown = [
                number(100 * (rank["", site] / rank[end, site] - 1), 1) + " %"
                for site in ("encoder", "decoder", "cross")
            ]
            cells.append([f"`{name}`", seed, words, *shown])
    return [
        "## Effective rank of mixed heads\n\nBy how much the learned M lies above a control.",
        table(("row", "seed", "above", "encoder", "decoder", "cross"), cells),
    ]


def decoding() -> list[str]:
    """Return BLEU as trained, and with the decoder's mixing left out of the search."""
    found, end, cells = lines("evidence-decoding.jsonl"), "-decoder-unmixed", []
    for (name, row), seeds in found.items():
        if not row.endswith(end):
            pairs = [(seeds[seed]["value"], found[name, row + end][seed]["value"]) for seed in seeds]
            lost = [first - second for first, second in pairs]
            for seed, (first, second) in zip(seeds, pairs, strict=True):
                cells.append([f"`{row}`", str(seed), f"{first:.2f}", f"{second:.2f}", f"{first - second:.2f}"])
            cells.append(
                [
                    f"`{row}`",
                    "mean",
                    "",
                    "",
                    f"{fmean(lost):.2f} ({student(lost)[0]:.2f} … {student(lost)[1]:.2f})".replace("-", "−"),
                ]
            )
    return [
        "## Search without the decoder's mixing\n\nBLEU on the test set, beam 5; the last column is what is lost.",
        table(("row", "seed", "as trained", "decoder unmixed", "lost"), cells),
    ]


def matrices() -> list[str]:
    """Return the errors of known matrices: geometric means over seeds, with the least and the greatest."""
    found: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seeds in lines("evidence-matrices.jsonl.gz").values():
        for line in seeds.values():
            key = (
                line["length"],
                line["rank"],
                line["target"],
                line["updates"],
                line["heads"] if line["method"] != "mha-more-heads" else 64 // line["small_head_dim"],
            )
            found[key][line["method"]].append(line["value"])
    names = list(dict.fromkeys(method for row in found.values() for method in row))
    early = {method for (length, *_), row in found.items() if length == 32 for method in row}
    parts = [
        "## Rows\n\nRelative error, geometric mean over seeds (the least to the greatest seed); less is better. n is the number of positions, and their rank is n unless a row says otherwise. Rows have 800 updates unless they say otherwise."
    ]
    for chosen in ([one for one in names if one in early], ["mha", *(one for one in names if one not in early)]):
        cells = []
        for (length, rank, target, updates, heads), row in sorted(found.items()):
            if set(chosen[1:]) & set(row):
                words = (
                    f"{target}, n {length}"
                    + f", rank {rank}" * (rank < length)
                    + f", {updates:,} updates" * (updates != 800)
                )
                cells.append(
                    [
                        f"{words}, {heads} × {64 // heads}",
                        *(_matrix_cell(row[one]) if one in row else "" for one in chosen),
                    ]
                )
        parts.append(table(["", *chosen], cells))
    log = [
        ("mha", "mixhead-a", "n16-shared-h16"),
        ("mha", "mixhead-a", "n32-own-h8"),
        ("mha", "gain", "n16-own-h32"),
        ("mha-more-heads", "fixedhead", "n16-shared-h32"),
        ("mha", "mha-more-heads", "n16-shared-h32"),
        ("mixhead-a", "talking-heads", "n32-own-h8"),
    ]
    return [
        *parts,
        *logarithms(
            "evidence-matrices.jsonl.gz", "matrices", [(f"{at}-{a}", f"{at}-{b}") for a, b, at in log], math.log
        ),
    ]


def _matrix_cell(found: list[float]) -> str:
    low, mean, high = (
        f"{value:.2g}" if value >= 0.01 else f"{value:.1e}".replace("e-0", "e-")
        for value in (min(found), geometric_mean(found), max(found))
    )
    return f"{mean} ({low} to {high})"


def logarithms(file: str, name: str, pairs: Iterable[tuple[str, str]], scale: Callable[[float], float]) -> list[str]:
    """Return the planned contrasts of a controlled task, with Holm's correction."""
    found = []
    for first, second in pairs:
        one, other = (values(name, row, file=file) for row in (first, second))
        found.append([scale(one[seed]) - scale(other[seed]) for seed in sorted(one.keys() & other.keys())])
    corrected = holm([student(one)[3] for one in found])
    cells = [
        [
            f"`{a}` − `{b}`",
            number(fmean(one)),
            interval(one),
            f"{sum(value > 0 for value in one)} of {len(one)}",
            small(p),
        ]
        for (a, b), one, p in zip(pairs, found, corrected, strict=True)
    ]
    unit = "differences of logarithms" if scale is math.log else "differences"
    return [
        f"## Planned contrasts\n\nThese are {unit}, paired by seed.",
        table(("rows", "mean", "95 % interval (t)", "seeds above 0", "p (Holm)"), cells),
    ]


def controlled(name: str, pairs: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return the rows of a controlled task by seed."""
    file = f"evidence-{name}.jsonl"
    head = [
        "row",
        "heads × size",
        "by seed",
        "mean",
        *["rank of all heads", "linear attention"] * (name == "regression"),
        "parameters",
        "updates",
        "processor",
        "commits",
    ]
    cells = []
    for (_, row), seeds in lines(file).items():
        found = list(seeds.values())
        known = []
        if name == "regression":
            rank = regression.rank(found[0])
            known = [str(rank), number(regression.linear_error(rank))]
        shown = [number(line["value"]) for line in found]
        cells.append(
            [
                f"`{row}`",
                f"{found[0]['heads']} × {found[0]['head_dim']}",
                ", ".join(shown),
                number(fmean(line["value"] for line in found)),
                *known,
                f"{found[0]['parameters']:,}",
                *(
                    ", ".join(dict.fromkeys(map(of, found)))
                    for of in (lambda line: f"{line['updates']:,}", processor, commit)
                ),
            ]
        )
    metric = found[0]["metric"]
    return [
        f"## Rows by seed\n\n{metric.capitalize()}; less is better.",
        table(head, cells),
        *(logarithms(file, name, pairs, float) if pairs else []),
    ]


def needs() -> list[str]:
    """Return the needs of models whose answer is known, and the loss at each rank."""
    found = measure.read(RESULTS / "evidence-measure.jsonl")
    curves = [
        [
            f"{line['model']}, {line['seed']}",
            number(line["value"], 4),
            ", ".join(f"{rank} → {number(measure.loss_at(line, rank), 4)}" for rank, _ in line["ranks"]),
        ]
        for line in found
    ]
    counts = measure.right_needs(found)
    right = ", ".join(f"{count} at {100 * share:g} %" for share, count in counts.items())
    return [
        "## Needs\n\nNeeds at three tolerances, which are shares of what attention is worth. *Answer*: the needs that are right. In brackets: the 95 % interval over sequences, at the tolerance of the line. *From below* and the need of values are at that tolerance too. *From below*: each sequence chooses its directions. *Last quarter*: the share of the energy in the last quarter of the directions, median of heads.",
        measure.table(found),
        f"Right needs: {right}.",
        "## What a rank costs\n\nThe loss, and what it rises by at each rank.",
        table(("model, seed", "loss", "rank → cost"), curves),
    ]


def bert() -> list[str]:
    """Return the accuracies of a published BERT by seed, and their contrasts."""
    name, metrics = "published-bert-all-MiniLM-L6-v2", ("sentence-polarity", "rte")
    cells, pairs = [], [("mixhead-b", "mha"), ("gain", "mha"), ("mixing-alone", "head-alone")]
    for row in dict.fromkeys(row for of, row in lines("evidence.jsonl") if of.startswith("published-bert")):
        scores = [values(f"{name}/{metric}", row) for metric in metrics]
        cells += [
            [f"`{row}`", str(seed), *(f"{one[seed]:.2f}" if seed in one else "–" for one in scores)]
            for seed in scores[0]
        ]
        cells.append([f"`{row}`", "mean", *(f"{fmean(one.values()):.2f}" for one in scores)])
    found = {(a, b, metric): differences([a, b], table=f"{name}/{metric}") for metric in metrics for a, b in pairs}
    corrected = holm([student(one)[3] for one in found.values()])
    rows = [
        [
            f"{metric}: `{a}` − `{b}`",
            f"{fmean(one):.2f}".replace("-", "−"),
            " to ".join(number(end, 2) for end in student(one)[:2]),
            small(p),
            margin,
        ]
        for ((a, b, metric), one), p in zip(found.items(), corrected, strict=True)
        for margin in [f"p = {small(equivalence_p(one, MARGINS[metric]))}" if b == "mha" or metric == "rte" else ""]
    ]
    return [
        "## Rows by seed\n\nAccuracy on the test parts, per cent; more is better.",
        table(("row", "seed", "polarity", "RTE"), cells),
        "## Planned contrasts\n\nPoints of accuracy. The last column has the p of the equivalence test with a margin of 1 point for polarity and 3 for RTE. These p are not corrected.",
        table(("rows", "mean", "95 % interval (t)", "p (Holm)", "within the margin"), rows),
    ]


def reported() -> list[str]:
    """Return what `python -m experiments report` prints of the results without planned contrasts."""
    found = comparison.load_results([RESULTS / "multi30k.jsonl", RESULTS / "brown.jsonl"])
    return [as_markdown(comparison.build_report(found, load_papers()), {}).strip()]


MARGINS = {"sentence-polarity": 1.0, "rte": 3.0}


def times() -> list[str]:
    """Return the results of the benchmarks whose rows are flat, a table for each file in benchmarks/results."""
    parts = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = found.get("results")
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "kernels" not in row for row in rows):
            continue  # results of several benchmarks on a GPU, or of a compiler
        columns = list(dict.fromkeys(name for row in rows for name in row))
        machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        title = f"## {file.stem}\n\n{machine}. {found.get('note', '')}".strip()
        parts += [title, table(columns, [[str(row.get(name, "")) for name in columns] for row in rows])]
    return parts


SECTIONS: dict[str, tuple[str, list[Callable[[], list[str]]]]] = {
    "complexity": ("the memory complexity of the MHE poster", [complexity.section]),
    "above-head-size": (
        "translation of four concatenated sentences",
        [
            partial(by_seed, "above-head-size"),
            partial(planned, "above-head-size", "contrasts"),
            partial(unplanned, "above-head-size", "fit"),
            partial(damping, "joined-by-four-"),
            partial(spectra, *(f"h32-mixhead-a-seed{seed}" for seed in (1, 2, 3))),
        ],
    ),
    "documents": (
        "claims of five documents, and byte models that test them",
        [lambda: [documents.markdown(columns) for columns in documents.TABLES]],
    ),
    "fast-start": (
        "translation at four rates, with controls and gates",
        [
            partial(by_seed, "fast-start"),
            partial(planned, "fast-start", "contrasts", "contrasts_at_mixings_rate"),
            partial(unplanned, "fast-start", "fit"),
            damping,
            decoding,
            partial(spectra, "h32-mixhead-a-2e-3-seed3"),
        ],
    ),
    "head-maps": (
        "a language model with maps over heads",
        [partial(by_seed, "head-maps"), partial(unplanned, "head-maps", "test")],
    ),
    "joined-by-ten": (
        "translation of ten concatenated sentences",
        [
            partial(by_seed, "joined-by-ten"),
            partial(planned, "joined-by-ten", "contrasts"),
            partial(unplanned, "joined-by-ten", "test"),
        ],
    ),
    "language-model": (
        "the Brown corpus by bytes",
        [
            partial(by_seed, "language-model"),
            partial(unplanned, "language-model", "test"),
            lambda: [
                "## Slow-down\n\nA star marks a factor that is extrapolated.",
                slowdown.table(),
                slowdown.gap(),
                "## Several contrasts\n\nHolm's correction is over these seven.",
                slowdown.contrasts(),
            ],
        ],
    ),
    "matrices": ("one layer learns to average", [matrices]),
    "measure": ("models whose answer is known", [needs]),
    "method": ("coverage of intervals, lines, processors, costs", []),
    "nearest-point": (
        "one score of full rank",
        [
            partial(
                controlled,
                "nearest-point",
                [("h8-mha", f"h8-{one}") for one in ("mixhead-a", "score-mixing", "values-32", "queries-32")],
            )
        ],
    ),
    "published-bert": ("a fine-tuned MiniLM", [bert]),
    "published-models": (
        "cuts of published models",
        [lambda: ["## Needs", published_models.table(measure.read(RESULTS / "evidence-published-models.jsonl"))]],
    ),
    "predictions": ("what was said before the runs, and what came out", [predictions.tables]),
    "real-text": ("recipes on a CPU", [reported]),
    "recall": ("one sparse task", [partial(controlled, "recall")]),
    "regression": (
        "a task in which heads add up",
        [
            partial(
                controlled,
                "regression",
                [("h4-mha", f"h4-{one}") for one in ("queries-32", "structured", "score-mixing", "mixhead-a")],
            )
        ],
    ),
    "times": ("the files of the benchmarks", [times]),
}
"""For each name: what its tables are about, and its sections."""


def page(name: str) -> str:
    """Return the tables of a name in :data:`SECTIONS` with their notes, as Markdown. Set-ups come first."""
    about, sections = SECTIONS[name]
    found = json.loads((RESULTS / "notes.json").read_text(encoding="utf-8")).get(name, {})
    notes = [f"## {title}\n\n{text}" for title, text in found.items()]
    setups = [note for note in notes if note.startswith("## Set-up")]
    parts = [
        *setups,
        *(part for section in sections for part in section()),
        *(one for one in notes if one not in setups),
    ]
    text = "\n\n".join([f"# {name.replace('-', ' ').capitalize()}: {about}", *parts]) + "\n"
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)  # links of pages do not work in a terminal


def as_csv(markdown: str) -> str:
    """Return the tables in a text as CSV, with an empty line between two tables."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", markdown, re.MULTILINE):
        header, _, *rows = (pages.cells(line) for line in block.splitlines())
        found.append(io.StringIO(newline=""))
        csv.writer(found[-1], lineterminator="\n").writerows([header, *rows])
    return "\n".join(file.getvalue() for file in found)
