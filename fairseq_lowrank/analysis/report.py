"""Results of runs beside the values that the papers publish, one paper's table at a time.

Tables are never joined: Mixhead's section 4.4 says that its ablation tables (7 to 10) use different batching and
evaluation and compare only within themselves, and a run at another scale than the paper's is marked as such.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from fairseq_lowrank.attention import PRESETS
from fairseq_lowrank.data.results import read_results, read_training_log

# Metrics that answer for one value in a paper: the papers name no BLEU scorer.
FAMILIES = {"sacrebleu": "bleu", "tokenised_bleu": "bleu"}
# Scores that stand in a line beside its own: their metric and split, None for the line's split.
ADDED_SCORES = {
    "tokenised_bleu": None,
    "valid_tokenised_bleu": ("tokenised_bleu", "valid"),
    "valid_perplexity": ("perplexity", "valid"),
}
LOWER_IS_BETTER = {"perplexity", "loss"}
NAMES = {"bleu": "BLEU", "sacrebleu": "BLEU (sacrebleu)", "tokenised_bleu": "BLEU (tokenised)"}
# Flags that end a training, and what they count.
ENDS = {"max-update": "updates", "max-epoch": "epochs"}
# Printed parameter counts are rounded, and leave out or count biases and positions differently.
PARAMETER_TOLERANCE = 0.02


def prr(score: float, mha_score: float) -> float:
    """Performance retention ratio, 100 · score / score_MHA (MHE poster), for scores where higher is better."""
    if mha_score <= 0:
        raise ValueError(f"PRR needs a positive MHA score, got {mha_score}")
    return 100 * score / mha_score


def peop(score: float, sha_score: float, parameters: int, sha_parameters: int) -> float:
    """Performance elasticity of parameters: relative gain in score for each relative gain in parameters, over SHA.

    (score/score_SHA − 1) / (parameters/parameters_SHA − 1), with exact counts of attention parameters, the output
    projection included, without biases; the poster's printed scores then give its PEoP up to their rounding.
    """
    if sha_score <= 0 or parameters == sha_parameters:
        raise ValueError("PEoP needs a positive SHA score and a parameter count that differs from SHA's")
    return (score / sha_score - 1) / (parameters / sha_parameters - 1)


def load_papers() -> dict:
    """The papers' published values, by paper and table, with their sources."""
    return json.loads(resources.files(__package__).joinpath("papers.json").read_text(encoding="utf-8"))


def load_results(paths: Iterable[Path]) -> list[dict]:
    """The lines of every `.jsonl` file given or lying in a folder given."""
    lines = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} holds no .jsonl file")
        for file in files:
            lines += read_results(file)
    return lines


def canonical_paper(name: str) -> str:
    return name.lower().replace("-", "_")


def canonical_table(name: str | int) -> str:
    """`4`, `Table 4` and `table4` are one table."""
    name = re.sub(r"[\s_]+", "", str(name).lower())
    return f"table{name}" if name[:1].isdigit() else name


def canonical_row(name: str) -> tuple[str, ...]:
    """`h4-mixhead-a` and `mixhead-a-h4` are one row."""
    return tuple(sorted(re.split(r"[-_\s]+", name.lower())))


def split_row(name: str) -> tuple[str, str | None]:
    """What a row has beside its preset, and the preset (None if it names none): ("h4", "mixhead-a")."""
    for preset in sorted(PRESETS, key=len, reverse=True):
        rest, count = re.subn(rf"(?:^|(?<=-)){re.escape(preset)}(?:-|$)", "", name.lower(), count=1)
        if count:
            return rest.strip("-"), preset
    return name.lower(), None


def flags_of(line: dict) -> list[tuple[str, str]]:
    """fairseq-train's flags, name without dashes and value, in their order; of a flag given twice the last counts."""
    words = line["flags"]
    words = shlex.split(words) if isinstance(words, str) else [str(word) for word in words]
    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found.append((name, value or ("" if following.startswith("--") else following)))
    return found


def cut_short(line: dict) -> list[str]:
    """How much of its recipe's updates or epochs a run has, if it has fewer."""
    ends = [(name, int(value)) for name, value in flags_of(line) if name in ENDS and value.isdigit()]
    if not ends:
        return []
    # What a user adds stands behind the recipe's flags: the first is of the recipe's kind, the largest is not shortened.
    end = ends[0][0]
    wanted = max(value for name, value in ends if name == end)
    done = line["updates"] if end == "max-update" else len(line.get("curve") or []) or wanted
    return [f"{done} of {wanted} {ENDS[end]}"] if done < wanted else []


def other_scale(line: dict, published: dict | None) -> list[str]:
    """In what a run differs from the paper's row; empty where nothing known differs."""
    marks = ["smoke run"] if line["smoke"] else []
    if published is None:
        return marks if line["smoke"] else cut_short(line)
    if published.get("architecture", line["architecture"]) != line["architecture"]:
        marks.append(f"{line['architecture']} (paper: {published['architecture']})")
    flags = dict(flags_of(line)) | {"max-update": str(line["updates"])}
    preset = split_row(line["row"])[1]
    if preset and flags.get("attention", preset) != preset:
        marks.append(f"attention {flags['attention']} (row: {preset})")
    settings = published.get("settings", {})
    for name, wanted in settings.items():
        if (value := flags.get(name)) is not None and value != str(wanted):
            marks.append(f"{name} {value} (paper {wanted})")
    if "max-update" not in settings:
        marks += cut_short(line)
    for key in ("parameters", "attention_parameters"):
        wanted, ours = read_count(published.get(key)), line.get(key)
        if key == "parameters" and wanted:
            wanted += published.get("extra_parameters", 0)
        if wanted and ours is not None and abs(ours / wanted - 1) > PARAMETER_TOLERANCE:
            marks.append(f"{short_count(ours)} {key.replace('_', ' ')} (paper {published[key]})")
    return marks


def read_count(text: str | None) -> float | None:
    """A printed count such as `8.85M` as a number."""
    return None if text is None else float(text.removesuffix("M")) * 1e6


def short_count(count: float) -> str:
    return f"{count / 1e6:.2f}M" if count < 1e8 else f"{count / 1e6:.1f}M"


def scores_of(line: dict) -> dict[tuple[str, str], float]:
    """Every score a line carries, by metric and split."""
    scores = {(line["metric"], line["split"]): line["value"]}
    for name, where in ADDED_SCORES.items():
        if line.get(name) is not None:
            scores[where or ("tokenised_bleu", line["split"])] = line[name]
    return scores


def family(metric: str) -> str:
    return FAMILIES.get(metric, metric)


def collect(lines: list[dict], published: dict | None) -> dict:
    """One row of a report from the lines of one row of a table: mean and spread over seeds.

    Runs at the paper's scale win over others, those over smoke runs, and runs of different scales are not averaged: the
    scale of the last one counts. Of lines of the same seed, metric and split the last one counts.
    """
    lines = [line for line in lines if not line["smoke"]] or lines
    marks = [other_scale(line, published) for line in lines]
    scale = [] if [] in marks else marks[-1]
    lines = [line for line, found in zip(lines, marks, strict=True) if found == scale]
    latest = {(line["seed"], line["metric"], line["split"]): line for line in lines}
    values: dict[tuple[str, str], list[float]] = {}
    for line in latest.values():
        for where, value in scores_of(line).items():
            values.setdefault(where, []).append(value)
    speeds = [line["tokens_per_second"] for line in latest.values() if line["tokens_per_second"]]
    last = list(latest.values())[-1]
    return {
        "architecture": last["architecture"],
        "smoke": last["smoke"],
        "seeds": sorted({line["seed"] for line in latest.values()}),
        "parameters": last["parameters"],
        "attention_parameters": last.get("attention_parameters"),
        "updates": last["updates"],
        "tokens_per_second": round(statistics.fmean(speeds)) if speeds else None,
        "scores": [
            {
                "metric": metric,
                "split": split,
                "mean": statistics.fmean(found),
                "spread": statistics.stdev(found) if len(found) > 1 else None,
            }
            for (metric, split), found in values.items()
        ],
        "other_scale": scale,
        "curves": [{"seed": line["seed"], "points": line["curve"]} for line in latest.values() if line.get("curve")],
    }


def build(lines: list[dict], papers: dict, *, paper: str | None = None, table: str | None = None) -> list[dict]:
    """The report: a dict for every table that has results (or was asked for), its rows in the paper's order.

    Args:
        lines: results.
        papers: see :func:`load_papers`.
        paper: only this paper's tables.
        table: only tables of this name.

    Raises:
        ValueError: the paper or table is neither published nor in the results.
    """
    groups: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        groups.setdefault((canonical_paper(line["paper"]), canonical_table(line["table"])), []).append(line)
    known = list(dict.fromkeys([*((p, t) for p in papers for t in papers[p]["tables"]), *groups]))
    chosen = [
        (p, t)
        for p, t in known
        if (paper is None or p == canonical_paper(paper)) and (table is None or t == canonical_table(table))
    ]
    if not chosen:
        asked = " ".join(str(name) for name in (paper, table) if name is not None)
        raise ValueError(f"no results and no published values for {asked}; known: {', '.join(map(' '.join, known))}")
    if table is None:
        chosen = [key for key in chosen if key in groups]
    return [build_table(*key, groups.get(key, []), papers) for key in chosen]


def build_table(paper: str, table: str, lines: list[dict], papers: dict) -> dict:
    """One table's part of the report."""
    about = papers.get(paper, {})
    published = about.get("tables", {}).get(table, {})
    by_row: dict[tuple[str, ...], list[dict]] = {}
    for line in lines:
        by_row.setdefault(canonical_row(line["row"]), []).append(line)
    rows = []
    for known in published.get("rows", []):
        found = by_row.pop(canonical_row(known["row"]), None)
        rows.append({"row": known["row"], "label": known["label"], "published": known})
        rows[-1]["ours"] = collect(found, known) if found else None
    for found in by_row.values():
        name = found[-1]["row"]
        rows.append({"row": name, "label": name, "published": None, "ours": collect(found, None)})
    add_ratios(rows)
    notes = [published["note"]] if "note" in published else []
    if published.get("comparable_only_within"):
        notes.append(
            "The paper calls this table comparable only within itself: batching and evaluation differ from the other "
            "ablation tables (§4.4)."
        )
    return {
        "paper": paper,
        "paper_title": about.get("title"),
        "source": f"{about['authors']}, {about['published']}, {about['url']}" if about else None,
        "table": table,
        "title": published.get("title", f"{paper}: {table}"),
        "notes": notes,
        "rows": rows,
    }


def add_ratios(rows: list[dict]) -> None:
    """PRR and PEoP of our rows, each against the row that differs from it in the preset alone."""
    by_name = {(canonical_row(row["row"]), row["ours"]["smoke"]): row["ours"] for row in rows if row["ours"]}

    for row in rows:
        rest, preset = split_row(row["row"])
        if not row["ours"] or preset is None:
            continue
        mha, sha = (
            by_name.get((canonical_row(f"{rest}-{partner}".strip("-")), row["ours"]["smoke"]))
            for partner in ("mha", "sha")
        )
        for score in row["ours"]["scores"]:
            if family(score["metric"]) in LOWER_IS_BETTER:
                continue
            if (baseline := score_like(mha, score)) is not None and preset != "mha":
                score["prr"] = prr(score["mean"], baseline)
            counts = row["ours"]["attention_parameters"], sha and sha["attention_parameters"]
            if (baseline := score_like(sha, score)) is not None and all(counts) and counts[0] != counts[1]:
                score["peop"] = peop(score["mean"], baseline, *counts)


def score_like(ours: dict | None, score: dict) -> float | None:
    """The mean of another row's score of the same metric and split."""
    scores = ours["scores"] if ours else []
    same = [other["mean"] for other in scores if all(other[key] == score[key] for key in ("metric", "split"))]
    return same[0] if same and same[0] > 0 else None


def columns(table: dict) -> tuple[list[str], list[list[str]]]:
    """Header and text cells of one table."""
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
    made = [("", lambda row: row["label"])]
    made.append(("parameters", lambda row: short_count(row["ours"]["parameters"]) if row["ours"] else ""))
    if any("attention_parameters" in (row["published"] or {}) for row in rows):
        made.append(("attention parameters", attention_cell))
        made.append(
            ("attention parameters, paper", lambda row: (row["published"] or {}).get("attention_parameters", ""))
        )
    elif any("parameters" in (row["published"] or {}) for row in rows):
        made.append(("parameters, paper", lambda row: printed_parameters(row["published"] or {})))
    for split, group in order:
        for metric in [metric for where, metric in measured if (where, family(metric)) == (split, group)]:
            made.append((f"{split} {NAMES.get(metric, metric)}", cell(split, metric, "mean")))
            for ratio in ("prr", "peop"):
                if any(ratio in score for score in ours if (score["split"], score["metric"]) == (split, metric)):
                    title = {"prr": "PRR", "peop": "PEoP"}[ratio]
                    made.append((f"{title}, {NAMES.get(metric, metric)}", cell(split, metric, ratio)))
        if (split, group) in printed:
            made.append((f"{split} {NAMES.get(group, group)}, paper", published_cell(split, group)))
    for ratio in ("prr", "peop"):
        for group in dict.fromkeys(name for row in rows for name in (row["published"] or {}).get(ratio, {})):
            title = {"prr": "PRR", "peop": "PEoP"}[ratio]
            made.append(
                (f"{title} {NAMES.get(group, group)}, paper", lambda row, r=ratio, g=group: published_ratio(row, r, g))
            )
    if ours:
        made.append(("updates", lambda row: f"{row['ours']['updates']:,}" if row["ours"] else ""))
        made.append(("seeds", lambda row: str(len(row["ours"]["seeds"])) if row["ours"] else ""))
        made.append(("tokens/s", lambda row: str((row["ours"] or {}).get("tokens_per_second") or "")))
    if any(row["ours"] and row["ours"]["other_scale"] for row in rows):
        made.append(("other scale", lambda row: "; ".join(row["ours"]["other_scale"]) if row["ours"] else ""))
    header = [title for title, _ in made]
    cells = [[text(row) for _, text in made] for row in rows]
    filled = [index for index in range(len(header)) if index == 0 or any(row[index] for row in cells)]
    return [header[index] for index in filled], [[row[index] for index in filled] for row in cells]


def attention_cell(row: dict) -> str:
    count = (row["ours"] or {}).get("attention_parameters")
    return "" if count is None else short_count(count)


def printed_parameters(published: dict) -> str:
    extra = published.get("extra_parameters")
    return published.get("parameters", "") + (f" + {extra:,}" if extra else "")


def cell(split: str, metric: str, key: str):
    """A column of our scores (`mean`, with the spread over seeds) or of a ratio."""

    def text(row: dict) -> str:
        for score in row["ours"]["scores"] if row["ours"] else []:
            if (score["split"], score["metric"]) == (split, metric) and score.get(key) is not None:
                spread = f" ± {score['spread']:.2f}" if key == "mean" and score["spread"] is not None else ""
                return f"{score[key]:.2f}{spread}" if math.isfinite(score[key]) else str(score[key])
        return ""

    return text


def published_cell(split: str, metric: str):
    def text(row: dict) -> str:
        published = row["published"] or {}
        value = published.get("values", {}).get(metric, {}).get(split)
        spread = published.get("spread", {}).get(metric, {}).get(split)
        return "" if value is None else f"{value:g}" + (f" ± {spread:g}" if spread is not None else "")

    return text


def published_ratio(row: dict, ratio: str, metric: str) -> str:
    value = (row["published"] or {}).get(ratio, {}).get(metric)
    return "" if value is None else f"{value:g}"


def with_logs(tables: list[dict], logs: Iterable[Path]) -> dict[str, list[dict]]:
    """Learning curves by plot: one plot for every table that carries curves, and one for the logs given.

    Args:
        logs: files that fairseq-train wrote, or folders with files named `train.log`.

    Returns:
        Lists of `{"label", "points"}` by the plot's name.
    """
    plots = {}
    for table in tables:
        curves = [
            {"label": f"{row['label']}, seed {curve['seed']}" if len(ours["seeds"]) > 1 else row["label"], **curve}
            for row in table["rows"]
            if (ours := row["ours"])
            for curve in ours["curves"]
        ]
        if curves:
            plots[f"{table['paper']}-{table['table']}"] = curves
    files = [file for path in logs for file in (sorted(path.rglob("train.log")) if path.is_dir() else [path])]
    if logs and not files:
        raise ValueError(f"no train.log in {', '.join(map(str, logs))}")
    if files:
        plots["logs"] = [
            {
                "label": file.parent.name if file.name == "train.log" else file.stem,
                "points": read_training_log(file)["epochs"],
            }
            for file in files
        ]
    return plots


def draw(curves: list[dict], title: str):
    """Validation loss (training loss dotted) against updates, as a matplotlib figure."""
    from fairseq_lowrank.analysis import pictures

    figure, axes = pictures.new_figure()
    for number, curve in enumerate(curves):
        updates = [point["updates"] for point in curve["points"]]
        color = f"C{number % 10}"
        axes.plot(updates, [point["train_loss"] for point in curve["points"]], ":", color=color, linewidth=1)
        valid = [
            (point["updates"], point["valid_loss"]) for point in curve["points"] if point["valid_loss"] is not None
        ]
        axes.plot(*zip(*valid, strict=True) if valid else ([], []), "-", color=color, marker=".", label=curve["label"])
    axes.set(xlabel="updates", ylabel="loss (base 2): line validation, dots training", title=title)
    axes.legend(fontsize=8)
    return figure


def as_markdown(tables: list[dict], pictures: dict[str, str]) -> str:
    """The report as Markdown; `pictures` gives the picture file of a plot."""
    parts = []
    for table in tables:
        header, rows = columns(table)
        parts += [f"## {escape(table['title'])}", ""]
        if table["paper_title"]:
            parts += [f"{table['paper']} {table['table']}: *{table['paper_title']}*. {table['source']}", ""]
        parts += [f"> {escape(note)}\n" for note in table["notes"]]
        parts += ["| " + " | ".join(map(escape, header)) + " |", "|" + " --- |" * len(header)]
        parts += ["| " + " | ".join(map(escape, row)) + " |" for row in rows]
        parts.append("")
        if picture := pictures.get(f"{table['paper']}-{table['table']}"):
            parts += [f"![Learning curves]({picture})", ""]
    if "logs" in pictures:
        parts += ["## Learning curves", "", f"![Learning curves]({pictures['logs']})", ""]
    return "\n".join(parts)


def escape(text: str) -> str:
    """Text that stays text in a Markdown table."""
    for mark, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(mark, safe)
    return text


def as_html(tables: list[dict], figures: dict) -> str:
    """The report as one HTML page, its pictures inside it."""
    import jinja2

    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    images = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        images[name] = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        tables=[{**table, "cells": columns(table)} for table in tables], images=images
    )
