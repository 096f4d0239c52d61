"""Conversion of a report to Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from experiments.papers.comparison import plot_name, short_count
from fairseq_lowrank.records import formats
from fairseq_lowrank.records.lines import family, lower_is_better

NAMES = {
    "loss": "loss (nats per token)",
    "bits": "loss (bits per token)",
    "bleu": "BLEU",
    "sacrebleu": "BLEU (sacrebleu)",
    "tokenised_bleu": "BLEU (tokenised)",
}
UNITS = {"sacrebleu": "points of 100", "tokenised_bleu": "points of 100"}
RATIOS = {"prr": "PRR", "peop": "PEoP"}
DECIMALS = {"bits": 3}
MOST_DECIMALS = 8


def columns(table: dict) -> tuple[list[str], list[list[str]]]:
    """Return header and text cells of one table."""
    rows = table["rows"]
    ours = [score for row in rows if row["ours"] for score in row["ours"]["scores"]]
    measured = list(dict.fromkeys((score["split"], score["metric"]) for score in ours))
    printed = list(
        dict.fromkeys(
            (split, metric)
            for row in rows
            for metric, splits in (row["published"] or {}).get("values", {}).items()
            for split in splits
        )
    )
    order = list(dict.fromkeys([*((split, family(metric)) for split, metric in measured), *printed]))
    metrics = list(dict.fromkeys(metric for _, metric in order))
    order.sort(key=lambda where: metrics.index(where[1]))  # values on the paper's splits come first
    made: list[tuple[str, Callable[[dict], str]]] = [("", lambda row: row["label"])]
    made.append(("parameters", parameters_cell))
    if any("attention_parameters" in (row["published"] or {}) for row in rows):
        made.append(("attention parameters", attention_cell))
        made.append(
            ("attention parameters, paper", lambda row: (row["published"] or {}).get("attention_parameters", ""))
        )
    elif any("parameters" in (row["published"] or {}) for row in rows):
        made.append(("parameters, paper", lambda row: printed_parameters(row["published"] or {})))
    for split, group in order:
        for metric in [metric for where, metric in measured if (where, family(metric)) == (split, group)]:
            means = [score["mean"] for score in ours if (score["split"], score["metric"]) == (split, metric)]
            made.append(
                (f"{split} {NAMES.get(metric, metric)}", cell(split, metric, "mean", decimals_of(metric, means)))
            )
            for ratio, title in RATIOS.items():
                if any(ratio in score for score in ours if (score["split"], score["metric"]) == (split, metric)):
                    made.append((f"{title} {NAMES.get(metric, metric)}", cell(split, metric, ratio)))
        if (split, group) in printed:
            made.append((f"{split} {NAMES.get(group, group)}, paper", published_cell(split, group)))
            for ratio, title in RATIOS.items():
                made.append((f"{title} {NAMES.get(group, group)}, paper", published_ratio(ratio, group)))
    if ours:
        made.append(("updates", updates_cell))
        made.append(("seeds", lambda row: str(len(row["ours"]["seeds"])) if row["ours"] else ""))
        made.append(("tokens/s", lambda row: str((row["ours"] or {}).get("tokens_per_second") or "")))
    if any(row["ours"] and row["ours"]["other_scale"] for row in rows):
        made.append(("other scale", lambda row: "; ".join(row["ours"]["other_scale"]) if row["ours"] else ""))
    if any(row["ours"] and row["ours"]["left_out"] for row in rows):
        made.append(("left out", lambda row: "; ".join(row["ours"]["left_out"]) if row["ours"] else ""))
    header = [title for title, _ in made]
    cells = [[text(row) for _, text in made] for row in rows]
    filled = [index for index in range(len(header)) if index == 0 or any(row[index] for row in cells)]
    return [header[index] for index in filled], [[row[index] for index in filled] for row in cells]


def parameters_cell(row: dict) -> str:
    count = (row["ours"] or {}).get("parameters")
    return "" if count is None else short_count(count)


def attention_cell(row: dict) -> str:
    count = (row["ours"] or {}).get("attention_parameters")
    return "" if count is None else short_count(count)


def updates_cell(row: dict) -> str:
    """Return the updates of a row's runs, from the fewest to the most."""
    updates = row["ours"]["updates"] if row["ours"] else []
    return " to ".join(f"{number:,}" for number in dict.fromkeys([*updates[:1], *updates[-1:]]))


def plots(table: dict) -> list[str]:
    """Return the names of a table's plots."""
    tasks = [curve["task"] for row in table["rows"] if row["ours"] for curve in row["ours"]["curves"]]
    return [plot_name(table, task) for task in dict.fromkeys(tasks)]


def printed_parameters(published: dict) -> str:
    extra = published.get("extra_parameters")
    return published.get("parameters", "") + (f" + {extra:,}" if extra else "")


def decimals_of(metric: str, means: Iterable[float]) -> int:
    """Return the decimals of a column of means: two, three of bits, and as many as show three digits of values below 1."""
    least = min((abs(mean) for mean in means if mean and math.isfinite(mean)), default=1.0)
    fewest = DECIMALS.get(metric, 2)
    return fewest if metric in UNITS else max(fewest, min(MOST_DECIMALS, 2 - math.floor(math.log10(least))))


def cell(split: str, metric: str, key: str, decimals: int = 2):
    """Return a function from a row to the text of our score (`mean`, with the spread over seeds) or of a ratio."""

    def text(row: dict) -> str:
        for score in row["ours"]["scores"] if row["ours"] else []:
            if (score["split"], score["metric"]) == (split, metric) and score.get(key) is not None:
                known = key == "mean" and score["spread"] is not None
                spread = f" ± {score['spread']:.{decimals}f}" if known else ""
                return f"{score[key]:z.{decimals}f}{spread}" if math.isfinite(score[key]) else str(score[key])
        return ""

    return text


def published_cell(split: str, metric: str):
    def text(row: dict) -> str:
        published = row["published"] or {}
        value = published.get("values", {}).get(metric, {}).get(split)
        spread = published.get("spread", {}).get(metric, {}).get(split)
        return "" if value is None else f"{value}" + (f" ± {spread}" if spread is not None else "")

    return text


def published_ratio(ratio: str, metric: str):
    def text(row: dict) -> str:
        value = (row["published"] or {}).get(ratio, {}).get(metric)
        return "" if value is None else str(value)

    return text


def caption(table: dict) -> str:
    """Return sentences that name the seeds, the corpus, and for each score its unit and its better direction."""
    ours = [row["ours"] for row in table["rows"] if row["ours"] and row["ours"]["scores"]]
    if not ours:
        return ""
    by_row = [tuple(one["seeds"]) for one in ours]
    most = max(by_row, key=len)
    seeds = f"seed{'s' * (len(most) > 1)} {', '.join(map(str, most))}"
    if any(set(found) != set(most) for found in by_row):
        seeds = f"at most {len(most)} seeds"
    sentences = [f"Mean ± standard deviation over {seeds}" if len(most) > 1 else f"One run ({seeds})"]
    if corpora := sorted({name for one in ours for name in one["corpora"]}):
        sentences.append(f"Corpus: {', '.join(corpora)}")
    measured = dict.fromkeys((score["split"], score["metric"]) for one in ours for score in one["scores"])
    for split, metric in measured:
        unit = f", {UNITS[metric]}" if metric in UNITS else ""
        better = "less" if lower_is_better(metric) else "more"
        sentences.append(f"{split.capitalize()} {NAMES.get(metric, metric)}{unit}: {better} is better")
    return ". ".join(sentences) + "."


def as_markdown(tables: list[dict], pictures: dict[str, str]) -> str:
    """Return the report as Markdown; `pictures` has the picture file of each plot."""
    parts = []
    for table in tables:
        parts += [f"## {formats.escape(table['title'])}", ""]
        if table["paper_title"]:
            parts += [f"{table['paper']} {table['table']}: *{table['paper_title']}*. {table['source']}", ""]
        if about := caption(table):
            parts += [formats.escape(about), ""]
        parts += [f"> {formats.escape(note)}\n" for note in table["notes"]]
        parts += [formats.markdown(*columns(table)), ""]
        parts += [f"{formats.escape(note)}\n" for note in table["below"]]
        for name in filter(pictures.get, plots(table)):
            parts += [f"![Learning curves]({pictures[name]})", ""]
    return "\n".join(parts)


def as_latex(tables: list[dict]) -> str:
    """Return the tables of a report in LaTeX. A count that is the same in all rows is in the caption."""
    parts = [r"% needs \usepackage{booktabs}"]
    for table in tables:
        header, rows = columns(table)
        about = [f"{table['title']}.", caption(table)]
        for name in ("updates", "seeds"):
            if name in header and len(values := {row[header.index(name)] for row in rows}) == 1:
                place = header.index(name)
                header, *rows = ([*line[:place], *line[place + 1 :]] for line in (header, *rows))
                about += [f"Updates: {values.pop()}."] if name == "updates" else []
        parts.append(formats.latex(header, rows, " ".join(filter(None, (*about, *table["notes"], *table["below"])))))
    return "\n\n".join(parts)
