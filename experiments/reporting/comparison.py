"""Results of runs next to the values that the papers publish, one paper's table at a time.

Tables are never joined: Mixhead's section 4.4 says that its ablation tables (7 to 10) use different batching and
evaluation and compare only within themselves, and a run at another scale than the paper's is marked as such.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path

from experiments.recipes.results import read_results, results_files
from experiments.reporting.papers import canonical_paper, canonical_row, canonical_table, split_row
from fairseq_lowrank.attention import AXES
from fairseq_lowrank.files import say
from fairseq_lowrank.messages import UserError

# Metrics that answer for one value in a paper: the papers name no BLEU scorer.
FAMILIES = {"sacrebleu": "bleu", "tokenised_bleu": "bleu"}
# Further scores of a line: their metric and split, None for the line's split.
ADDED_SCORES = {
    "tokenised_bleu": None,
    "valid_tokenised_bleu": ("tokenised_bleu", "valid"),
    "valid_perplexity": ("perplexity", "valid"),
}
# Scores that are means of others, and those others: GLUE's nine tasks, its two of MNLI one, and without WNLI, as most papers have it; of
# SuperGLUE what is prepared here.
AVERAGES = {
    "glue": ("cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli-m", "qnli", "rte", "wnli"),
    "glue-8": ("cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli-m", "qnli", "rte"),
    "superglue-5": ("boolq", "cb", "multirc", "superglue-rte", "wic"),
}
LOWER_IS_BETTER = {"perplexity", "loss", "bits"}
# Flags that end a training, and what they count.
ENDS = {"max-update": "updates", "max-epoch": "epochs"}
# Printed parameter counts are rounded, and leave out or count biases and positions differently.
PARAMETER_TOLERANCE = 0.02


def prr(score: float, mha_score: float) -> float:
    """Performance retention ratio, 100 · score / score_MHA, for scores where higher is better.

    The MHE poster prints its values and not the formula; this one gives them.
    """
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


def load_results(paths: Iterable[Path]) -> list[dict]:
    """The lines of every `.jsonl` file given or lying in a folder given; broken lines among others are said and left out."""
    lines, broken = [], []
    for file in results_files(paths):
        lines += read_results(file, broken.append)
    if broken and not lines:
        raise UserError(broken[0])
    for complaint in broken:
        say(f"{complaint}; left out")
    return lines


def flags_of(line: dict) -> list[tuple[str, str]]:
    """fairseq-train's flags, name without dashes and value, in their order; of a flag given twice the last counts."""
    words = line["flags"]
    if isinstance(words, str):
        try:
            words = shlex.split(words)
        except ValueError:  # a quotation that does not end
            words = words.split()
    words = [str(word) for word in words]
    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found.append((name, value or ("" if following.startswith("--") else following)))
    return found


def attention_flags(line: dict) -> dict[str, str] | None:
    """Return the preset and the axes that a run's flags choose; ``None`` for fairseq's own attention.

    Lines of controlled tasks call an axis by its name, such as `--activation` for `--attention-activation`.
    """
    flags = dict(flags_of(line))
    axes = {name: flags[flag] for name in AXES for flag in _flags_of_axis(name) if flag in flags}
    if "attention" not in flags and not axes and not line.get("architecture", "").startswith("lowrank_"):
        return None
    return {"preset": flags.get("attention", "mha"), **axes}


def other_settings(line: dict) -> dict[str, str]:
    """Return a run's flags except its architecture, its seed, and those of its attention."""
    apart = {"arch", "seed", "attention", *(flag for name in AXES for flag in _flags_of_axis(name))}
    return {name: value for name, value in flags_of(line) if name not in apart}


def _flags_of_axis(name: str) -> tuple[str, str]:
    return name.replace("_", "-"), AXES[name].flag.replace("_", "-")


def extent(line: dict) -> tuple[int, int, str] | None:
    """Return a run's updates or epochs, its recipe's, and which of the two these are; ``None`` where its flags set no end."""
    ends = [(name, int(value)) for name, value in flags_of(line) if name in ENDS and value.isdigit()]
    if not ends:
        return None
    # What a user adds stands behind the recipe's flags: the first is of the recipe's kind, the largest is not shortened.
    end = ends[0][0]
    wanted = max(value for name, value in ends if name == end)
    done = line["updates"] if end == "max-update" else len(line.get("curve") or []) or wanted
    return done, wanted, ENDS[end]


def cut_short(line: dict) -> list[str]:
    """Say how much of its recipe's updates or epochs a run has, if it has fewer."""
    done, wanted, unit = extent(line) or (0, 0, "")
    return [f"{done} of {wanted} {unit}"] if done < wanted else []


def completed(line: dict, published: dict | None) -> float:
    """Return the share of the paper's updates, or else of its recipe's updates or epochs, that a run has."""
    if wanted := (published or {}).get("settings", {}).get("max-update"):
        return line["updates"] / int(wanted)
    done, wanted, _ = extent(line) or (1, 1, "")
    return min(1.0, done / wanted) if wanted else 1.0


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


def scores_of(line: dict, published: dict | None = None) -> dict[tuple[str, str], float]:
    """Every score a line carries, by metric and split; its training perplexity only where the paper prints one."""
    scores = {(line["metric"], line["split"]): line["value"]}
    printed = (published or {}).get("values", {}).get("perplexity", {})
    if "train" in printed and line.get("curve"):
        # the loss is in base 2, of the updates of the last epoch
        scores["perplexity", "train"] = 2 ** line["curve"][-1]["train_loss"]
    for name, where in ADDED_SCORES.items():
        if line.get(name) is not None:
            scores[where or ("tokenised_bleu", line["split"])] = line[name]
    scores |= {("bits", split): found["bits"] for split, found in line.get("losses", {}).items()}
    return scores | {(metric, line["split"]): value for metric, value in line.get("scores", {}).items()}


def family(metric: str) -> str:
    return FAMILIES.get(metric, metric)


def lower_is_better(metric: str) -> bool:
    """Return True for losses, perplexities and errors; all other metrics are scores."""
    return family(metric) in LOWER_IS_BETTER or "error" in metric.split()


def collect(lines: list[dict], published: dict | None) -> dict:
    """One row of a report from the lines of one row of a table: mean and spread over seeds.

    Runs at the paper's scale win over others, those over smoke runs, and runs of different scales are not averaged: the
    scale of the last one counts, of each task that was fine-tuned, and of what they were scored with. Of lines of the same seed,
    metric and split the last one counts.
    """
    lines, scale = at_one_scale([line for line in lines if not line["smoke"]] or lines, published)
    scoring = next((line["scoring"] for line in reversed(lines) if "scoring" in line), None)
    others = [line for line in lines if line.get("scoring", scoring) != scoring]  # older lines do not say
    lines = [line for line in lines if line.get("scoring", scoring) == scoring]
    latest = {(line["seed"], line["metric"], line["split"]): line for line in lines}
    by_seed: dict[tuple[str, str], dict[int, float]] = {}
    for line in latest.values():
        for where, value in scores_of(line, published).items():
            by_seed.setdefault(where, {})[line["seed"]] = value
    add_averages(by_seed)
    # A speed says something only of a training that had the machine to itself.
    speeds = [line["tokens_per_second"] for line in latest.values() if line.get("alone") and line["tokens_per_second"]]
    last = list(latest.values())[-1]
    return {
        "architecture": last["architecture"],
        "attention": attention_flags(last),
        "settings": other_settings(last),
        "smoke": last["smoke"],
        "seeds": sorted({line["seed"] for line in latest.values()}),
        "parameters": last["parameters"],
        "attention_parameters": last.get("attention_parameters"),
        "updates": sorted({line["updates"] for line in latest.values()}),
        "scoring": scoring,
        "left_out": [f"scored with {line['scoring'] or 'no flags'}: seed {line['seed']}" for line in others],
        "tokens_per_second": round(statistics.fmean(speeds)) if speeds else None,
        "scores": [
            {
                "metric": metric,
                "split": split,
                "mean": statistics.fmean(found.values()),
                "spread": statistics.stdev(found.values()) if len(found) > 1 else None,
                "by_seed": found,
            }
            for (metric, split), found in by_seed.items()
        ],
        "other_scale": scale,
        "completed": min(completed(line, published) for line in latest.values()),
        "curves": [
            {"task": line.get("task"), "seed": line["seed"], "points": line["curve"]}
            for line in latest.values()
            if line.get("curve")
        ],
    }


def at_one_scale(lines: list[dict], published: dict | None) -> tuple[list[dict], list[str]]:
    """Of the lines of each task those at the paper's scale, or else at that of the last one; and in what these differ."""
    kept, scales = [], {}
    for task in dict.fromkeys(line.get("task") for line in lines):
        found = [(line, other_scale(line, published)) for line in lines if line.get("task") == task]
        marks = [mark for _, mark in found]
        scales[task] = [] if [] in marks else marks[-1]
        kept += [line for line, mark in found if mark == scales[task]]
    shared = [mark for mark in next(iter(scales.values())) if all(mark in scale for scale in scales.values())]
    further = [f"{task}: {mark}" for task, scale in scales.items() for mark in scale if mark not in shared]
    return kept, shared + further


def plot_name(table: dict, task: str | None) -> str:
    """The name of the plot of a table's learning curves, one for each task: their losses are of different kinds."""
    return "-".join(filter(None, (table["paper"], table["table"], task)))


def add_averages(by_seed: dict[tuple[str, str], dict[int, float]]) -> None:
    """Add, seed by seed, the means of scores whose parts are all there, under the same seeds."""
    for split in sorted({split for _, split in by_seed}):
        for name, parts in AVERAGES.items():
            found = [by_seed.get((part, split), {}) for part in parts]
            if all(found) and all(part.keys() == found[0].keys() for part in found):
                by_seed[name, split] = {seed: statistics.fmean(part[seed] for part in found) for seed in found[0]}


def build(lines: list[dict], papers: dict, *, paper: str | None = None, table: str | None = None) -> list[dict]:
    """The report: a dict for every table that has results (or was asked for), its rows in the paper's order.

    Args:
        lines: results.
        papers: see :func:`load_papers`.
        paper: only this paper's tables.
        table: only tables of this name.

    Raises:
        UserError: the paper or table is neither published nor in the results.
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
        raise UserError(f"no results and no published values for {asked}; known: {', '.join(map(' '.join, known))}")
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
    for found in in_order(by_row):
        name = found[-1]["row"]
        rows.append({"row": name, "label": name, "published": None, "ours": collect(found, None)})
    add_ratios(rows)
    scored = {row["row"]: row["ours"]["scoring"] for row in rows if row["ours"] and row["ours"]["scoring"] is not None}
    notes = [published["note"]] if "note" in published else []
    if len(set(scored.values())) > 1:
        ways = {way: ", ".join(row for row in scored if scored[row] == way) for way in dict.fromkeys(scored.values())}
        notes.append(
            "Rows were scored in different ways: "
            + "; ".join(f"{names} with {way or 'no flags'}" for way, names in ways.items())
        )
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


def in_order(by_row: dict[tuple[str, ...], list[dict]]) -> list[list[dict]]:
    """Order rows as their recipes declare them, whichever run ended first: by the position in their lines.

    Rows of one position come from several recipes. These follow each other in the order in which their rows first appear.
    Rows without a position come last, in the order of the results file.
    """
    recipes: list[dict[int, list[dict]]] = []
    rest = []
    for lines in by_row.values():
        position = lines[-1].get("position")
        if position is None:
            rest.append(lines)
            continue
        recipe = next((recipe for recipe in recipes if position not in recipe), None)
        if recipe is None:
            recipes.append(recipe := {})
        recipe[position] = lines
    return [*(recipe[position] for recipe in recipes for position in sorted(recipe)), *rest]


def add_ratios(rows: list[dict]) -> None:
    """PRR and PEoP of our rows, each against the row that differs from it in the preset alone and was trained about as long.

    They are of the seeds that both rows have; where these are not all, the row's `left_out` says so.
    """
    by_name = {(canonical_row(row["row"]), row["ours"]["smoke"]): row["ours"] for row in rows if row["ours"]}

    for row in rows:
        rest, preset = split_row(row["row"])
        if not row["ours"] or preset is None:
            continue
        mha, sha = (
            by_name.get((canonical_row(f"{rest}-{partner}".strip("-")), row["ours"]["smoke"]))
            for partner in ("mha", "sha")
        )
        mha, sha = (other if other and about_as_long(other, row["ours"]) else None for other in (mha, sha))
        for score in row["ours"]["scores"]:
            if lower_is_better(score["metric"]):
                continue
            if preset != "mha" and (means := means_of_common_seeds("PRR", row["ours"], score, mha)):
                score["prr"] = prr(*means)
            counts = row["ours"]["attention_parameters"], sha and sha["attention_parameters"]
            comparable = sha and all(counts) and counts[0] != counts[1]
            if comparable and (means := means_of_common_seeds("PEoP", row["ours"], score, sha)):
                score["peop"] = peop(*means, *counts)


def about_as_long(one: dict, other: dict) -> bool:
    """Return True if two rows have about the same share of their updates or epochs."""
    return 2 / 3 * other["completed"] < one["completed"] < 1.5 * other["completed"]


def means_of_common_seeds(ratio: str, ours: dict, score: dict, other: dict | None) -> tuple[float, float] | None:
    """A score's mean and that of the same metric and split of another row, over the seeds that both have.

    None where there is no such seed, or the other mean is not above 0. What is left out of the ratio is said in ``ours``.
    """
    key = score["metric"], score["split"]
    found = next(
        (one["by_seed"] for one in (other or {}).get("scores", ()) if (one["metric"], one["split"]) == key), {}
    )
    common = score["by_seed"].keys() & found.keys()
    apart = score["by_seed"].keys() ^ found.keys()
    means = (
        [statistics.fmean(values[seed] for seed in common) for values in (score["by_seed"], found)] if common else None
    )
    if found and apart:
        note = f"of {ratio}, for not both rows have it: seed {', '.join(map(str, sorted(apart)))}"
        ours["left_out"] += [] if note in ours["left_out"] else [note]
    return tuple(means) if means and means[1] > 0 else None
