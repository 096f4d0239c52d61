"""Comparison of results with the papers' published values, separately for each table of a paper.

Tables are never joined: by Mixhead's section 4.4, its ablation tables (7 to 10) use different batching and evaluation, and are
comparable only within themselves. A run at another scale than the paper's is marked.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path

from experiments.papers.values import canonical_paper, canonical_row, canonical_table, split_row
from fairseq_lowrank.attention import AXES
from fairseq_lowrank.files import say
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.records.lines import changed_data, listed, lower_is_better, scores_of, untrained, way_of
from fairseq_lowrank.records.results import RECORDED, read_results, results_files

# Means of scores, and their parts: GLUE's tasks with and without WNLI (most papers leave it out), with one of the two MNLI scores;
# and the tasks of SuperGLUE that are prepared here.
AVERAGES = {
    "glue": ("cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli-m", "qnli", "rte", "wnli"),
    "glue-8": ("cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli-m", "qnli", "rte"),
    "superglue-5": ("boolq", "cb", "multirc", "superglue-rte", "wic"),
}
# The paper of the lines of `examples/own/compare.sh`.
OWN = "own"
# The fields of `way_of`, with what is said of rows that differ in them.
WAY = {"scoring": "were scored in different ways", "signature": "have different signatures of BLEU"}
WAY |= {"text": "were scored on different texts", "corpus": "are of different corpora"}
WAY |= {"tokens": "were scored on different numbers of tokens"}
# Flags that end a training, and their units.
ENDS = {"max-update": "updates", "max-epoch": "epochs"}
# Printed parameter counts are rounded, and may leave out biases and positions.
PARAMETER_TOLERANCE = 0.02


BASELINES = ("mha", "sha")
"""What PRR and PEoP compare with."""


def prr(score: float, mha_score: float) -> float:
    """Return the performance retention ratio, 100 · score / score_MHA, for scores where higher is better.

    The MHE poster prints values without a formula; this formula gives its values.
    """
    if mha_score <= 0:
        raise ValueError(f"mha_score={mha_score}: expected a positive score")
    return 100 * score / mha_score


def peop(score: float, sha_score: float, parameters: int, sha_parameters: int) -> float:
    """Return the performance elasticity of parameters: relative gain in score per relative gain in parameters, over SHA.

    It is (score/score_SHA − 1) / (parameters/parameters_SHA − 1). Parameters are exact counts of attention parameters, with the
    output projection and without biases. Then the poster's printed scores give its PEoP, up to rounding.
    """
    if sha_score <= 0 or parameters == sha_parameters:
        raise ValueError(
            f"sha_score={sha_score}, sha_parameters={sha_parameters}: expected a positive score, and a count other than "
            f"parameters={parameters}"
        )
    return (score / sha_score - 1) / (parameters / sha_parameters - 1)


def load_results(paths: Iterable[Path]) -> list[dict]:
    """Return the lines of `.jsonl` files, or of those in folders; broken lines are reported and left out."""
    lines: list[dict] = []
    broken: list[str] = []
    for file in results_files(paths):
        lines += read_results(file, broken.append, recorded=True)
    if broken and not lines:
        raise UserError(broken[0])
    for complaint in broken:
        say(f"{complaint.removesuffix('.')}. The line is left out.")
    return lines


def flags_of(line: dict) -> list[tuple[str, str]]:
    """Return fairseq-train's flags in their order, as names without dashes and values; a repeated flag has several entries."""
    words = line["flags"]
    if isinstance(words, str):
        try:
            words = shlex.split(words)
        except ValueError:  # a quotation mark is missing
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
    if not flags and not line.get("architecture"):  # the name of a recorded row is all that is known
        return {"preset": preset} if (preset := split_row(line["row"])[1]) else None
    if "attention" not in flags and not axes and not line.get("architecture", "").startswith("lowrank_"):
        return None
    return {"preset": flags.get("attention", PLAIN), **axes}


def other_settings(line: dict) -> dict[str, str]:
    """Return a run's flags except its architecture, its seed, and those of its attention."""
    apart = {"arch", "seed", "attention", *(flag for name in AXES for flag in _flags_of_axis(name))}
    return {name: value for name, value in flags_of(line) if name not in apart}


def _flags_of_axis(name: str) -> tuple[str, str]:
    return name.replace("_", "-"), AXES[name].flag.replace("_", "-")


def extent(line: dict) -> tuple[int, int, str] | None:
    """Return a run's updates or epochs, the recipe's number, and the unit; ``None`` if the flags have neither."""
    ends = [(name, int(value)) for name, value in flags_of(line) if name in ENDS and value.isdigit()]
    if not ends:
        return None
    # A user's flags come after the recipe's. So the first flag has the recipe's unit, and the largest number is the full length.
    end = ends[0][0]
    wanted = max(value for name, value in ends if name == end)
    done = line["updates"] if end == "max-update" else len(line.get("curve") or []) or wanted
    return done, wanted, ENDS[end]


def cut_short(line: dict) -> list[str]:
    """Return a note with the run's and its recipe's updates or epochs, if the run has fewer."""
    done, wanted, unit = extent(line) or (0, 0, "")
    return [f"{done} of {wanted} {unit}"] if done < wanted else []


def completed(line: dict, published: dict | None) -> float:
    """Return the share of the paper's updates, or else of its recipe's updates or epochs, that a run has."""
    if wanted := (published or {}).get("settings", {}).get("max-update"):
        return line["updates"] / int(wanted)
    done, wanted, _ = extent(line) or (1, 1, "")
    return min(1.0, done / wanted) if wanted else 1.0


def other_scale(line: dict, published: dict | None) -> list[str]:
    """Return the differences between a run and the paper's row; empty if no difference is known."""
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
    """Convert a printed count such as `8.85M` to a number."""
    return None if text is None else float(text.removesuffix("M")) * 1e6


def short_count(count: float) -> str:
    if count < 1e5:
        return f"{count:,.0f}"
    return f"{count / 1e6:.2f}M" if count < 1e8 else f"{count / 1e6:.1f}M"


def train_perplexity(line: dict, published: dict | None) -> dict[tuple[str, str], float]:
    """Return the perplexity of a line's last epoch of training, if the paper prints one."""
    printed = (published or {}).get("values", {}).get("perplexity", {})
    last = (line.get("curve") or [{}])[-1].get("train_loss")
    # the loss is in base 2, averaged over the updates of the last epoch
    return {("perplexity", "train"): 2**last} if "train" in printed and last is not None else {}


def collect(lines: list[dict], published: dict | None) -> dict:
    """Return one row of a report, mean and spread over seeds, from the lines of one row of a table.

    Runs at the paper's scale replace others, and those replace smoke runs. Runs of different scales are not averaged: the last
    run decides, for each fine-tuned task. The last run also decides how scores come about, see :func:`way_of`. Of lines with the same seed, metric and
    split, the last one is used.
    """
    lines, scale = at_one_scale([line for line in lines if not line["smoke"]] or lines, published)
    ways: dict[str | None, dict[str, str]] = {}
    for line in lines:  # of each task
        ways[line.get("task")] = ways.get(line.get("task"), {}) | way_of(line)
    apart: list[tuple[int, str]] = []
    kept = []
    for line in lines:
        way = ways[line.get("task")]
        differing = [(name, value) for name, value in way_of(line).items() if way[name] != value]
        apart += [
            (line["seed"], f"{'scored with' if name == 'scoring' else name} {value}") for name, value in differing
        ]
        kept += [] if differing else [line]
    lines = kept
    latest = {(line["seed"], line["metric"], line["split"]): line for line in lines}
    by_seed: dict[tuple[str, str], dict[int, float]] = {}
    for line in latest.values():
        for where, value in (scores_of(line) | train_perplexity(line, published)).items():
            by_seed.setdefault(where, {})[line["seed"]] = value
    # both are of the best validation; only the one of the kind of the line's own score is shown
    if {("perplexity", "valid"), ("bits", "valid")} <= by_seed.keys() and "losses" not in lines[-1]:
        del by_seed["bits" if lines[-1]["metric"] in ("perplexity", "loss") else "perplexity", "valid"]
    add_averages(by_seed)
    # Speeds are comparable only if no other program used the machine.
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
        "corpora": sorted({line["corpus"] for line in latest.values() if line.get("corpus")}),
        "updates": sorted({line["updates"] for line in latest.values() if line["updates"]}),
        "way": {
            name: listed(dict.fromkeys(way[name] for way in ways.values() if name in way))
            for name in WAY
            if any(name in way for way in ways.values())
        },
        "left_out": [f"{what}: seed {seed}" for seed, what in apart],
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
    """Return each task's lines at the paper's scale, or else at the last line's scale, and their differences."""
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
    """Return the name of the plot of a table's learning curves; each task has a plot, because losses differ in kind."""
    return "-".join(filter(None, (table["paper"], table["table"], task)))


def add_averages(by_seed: dict[tuple[str, str], dict[int, float]]) -> None:
    """Add for each seed the means of scores, if all parts exist with the same seeds."""
    for split in sorted({split for _, split in by_seed}):
        for name, parts in AVERAGES.items():
            found = [by_seed.get((part, split), {}) for part in parts]
            if all(found) and all(part.keys() == found[0].keys() for part in found):
                by_seed[name, split] = {seed: statistics.fmean(part[seed] for part in found) for seed in found[0]}


def build_report(lines: list[dict], papers: dict, *, paper: str | None = None, table: str | None = None) -> list[dict]:
    """Return the report: a dict for every table with results, and for `table`; rows are in the paper's order.

    Args:
        lines: results.
        papers: see :func:`load_papers`.
        paper: if given, use only this paper's tables.
        table: if given, use only tables of this name.

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
        raise UserError(f"no results and no published values for {asked}. Choose from {listed(map(' '.join, known))}.")
    if table is None:
        chosen = [key for key in chosen if key in groups]
    return [build_table(*key, groups.get(key, []), papers) for key in chosen]


def build_table(paper: str, table: str, lines: list[dict], papers: dict) -> dict:
    """Return one table of the report."""
    about = papers.get(paper, {})
    published = about.get("tables", {}).get(table, {})
    rows, rest = [], lines
    for known in published.get("rows", []):
        key = canonical_row(known["row"])
        found = [line for line in rest if canonical_row(line["row"]) == key]
        rest = [line for line in rest if canonical_row(line["row"]) != key]
        rows.append({"row": known["row"], "label": known["label"], "published": known})
        rows[-1]["ours"] = collect(found, known) if found else None
    by_row: dict[tuple[str, str | None], list[dict]] = {}
    for line in rest:  # rows of a user may differ in case, or in "-" and "_"
        by_row.setdefault(split_row(line["row"]), []).append(line)
    for found in in_order(by_row):
        name = found[-1]["row"]
        rows.append({"row": name, "label": name, "published": None, "ours": collect(found, None)})
    if published:
        add_ratios(rows)
    notes = [published["note"]] if "note" in published else []
    for name, words in WAY.items():
        ways = {row["row"]: row["ours"]["way"][name] for row in rows if row["ours"] and name in row["ours"]["way"]}
        if len(kinds := dict.fromkeys(ways.values())) > 1:
            named = (f"{', '.join(row for row in ways if ways[row] == way)} with {way}" for way in kinds)
            notes.append(f"Rows {words}: {'; '.join(named)}")
    notes += changed_data(line for line in lines if not line["smoke"])
    if published.get("comparable_only_within"):
        notes.append(
            "By the paper (§4.4), this table is comparable only within itself: batching and evaluation differ from the other "
            "ablation tables."
        )
    return {
        "paper": paper,
        "paper_title": about.get("title"),
        "source": f"{about['authors']}, {about['published']}, {about['url']}" if about else None,
        "table": table,
        "title": published.get("title", table if paper in (RECORDED, OWN) else f"{paper}: {table}"),
        "notes": notes,
        "below": untrained(line for line in lines if not line["smoke"]),
        "rows": rows,
    }


def in_order(by_row: dict[tuple[str, str | None], list[dict]]) -> list[list[dict]]:
    """Return the rows in the order of their recipes, by the position in their lines.

    If several rows have one position, they are from several recipes, which follow in the order of their first rows. Rows
    without a position come last, in the order of the results file.
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
    """Add PRR and PEoP to our rows, relative to the row with another preset, about the same length of training,
    and scores that came about in the same way.

    They are computed over common seeds; the row's `left_out` lists other seeds.
    """
    by_name = {(canonical_row(row["row"]), row["ours"]["smoke"]): row["ours"] for row in rows if row["ours"]}

    for row in rows:
        rest, preset = split_row(row["row"])
        if not row["ours"] or preset is None:
            continue

        def partner(name: str, rest: str = rest, ours: dict = row["ours"]) -> dict | None:
            other = by_name.get((canonical_row(f"{rest}-{name}".strip("-")), ours["smoke"]))
            return other if other and about_as_long(other, ours) and alike(other["way"], ours["way"]) else None

        mha, sha = (partner(name) for name in BASELINES)
        for score in row["ours"]["scores"]:
            if lower_is_better(score["metric"]):
                continue
            if preset != BASELINES[0] and (means := means_of_common_seeds("PRR", row["ours"], score, mha)):
                score["prr"] = prr(*means)
            count, count_sha = (one["attention_parameters"] or 0 if one else 0 for one in (row["ours"], sha))
            comparable = count and count_sha and count != count_sha
            if comparable and (means := means_of_common_seeds("PEoP", row["ours"], score, sha)):
                score["peop"] = peop(*means, count, count_sha)


def alike(one: dict[str, str], other: dict[str, str]) -> bool:
    """Return True if two ways agree in the fields that both have."""
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def about_as_long(one: dict, other: dict) -> bool:
    """Return True if two rows have about the same share of their updates or epochs."""
    return 2 / 3 * other["completed"] < one["completed"] < 1.5 * other["completed"]


def means_of_common_seeds(ratio: str, ours: dict, score: dict, other: dict | None) -> tuple[float, float] | None:
    """Return the means of a score and of the same score of another row, over common seeds.

    Return None if there is no common seed, or the other mean is not above 0. Seeds that are left out are noted in ``ours``.
    """
    key = score["metric"], score["split"]
    found: dict[int, float] = next(
        (one["by_seed"] for one in (other or {}).get("scores", ()) if (one["metric"], one["split"]) == key), {}
    )
    common = score["by_seed"].keys() & found.keys()
    apart = score["by_seed"].keys() ^ found.keys()
    if found and apart:
        note = f"of {ratio}, because not both rows have it: seed {', '.join(map(str, sorted(apart)))}"
        ours["left_out"] += [] if note in ours["left_out"] else [note]
    if not common:
        return None
    ours_mean, other_mean = (statistics.fmean(one[seed] for seed in common) for one in (score["by_seed"], found))
    return (ours_mean, other_mean) if other_mean > 0 else None
