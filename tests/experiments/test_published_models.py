"""The page of published models follows from its results, and its recipe skips what was measured."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.evidence import published_models as published
from experiments.evidence.measure import append, read
from fairseq_lowrank.records.locks import locked
from fairseq_lowrank.tools.measuring.verdict import TOLERANCE

ROOT = Path(__file__).resolve().parents[2]
LINES = read(ROOT / "results" / "evidence-published-models.jsonl")


def line(model, need, text="wikitext-2", own=10, interval=None, size=32, tolerance=0.01):
    return {
        "model": model,
        "text": text,
        "setting": "64x512",
        "tolerance": tolerance,
        "size": size,
        "need": need,
        "own": own,
        "interval": interval or [need, need],
        "ranks": [[rank, 0.0] for rank in range(size + 1)],
        "by_layer": [],
        "directions_90": 7,
    }


@pytest.mark.parametrize(
    "needs, outcome", [([26, 25], "held"), ([26, 16], "contradicted"), ([26, 20], "unclear"), ([], "not run")]
)
def test_outcome_asks_every_row(needs, outcome):
    assert published.outcomes([line(published.MINILM, need) for need in needs])["P1"] == outcome


def test_outcomes_are_those_of_lines_at_the_tolerance_of_the_predictions():
    lines = [line(published.MINILM, 25), line(published.MINILM, 32, own=32, tolerance=0.002)]
    assert published.outcomes(lines) == published.outcomes(lines[:1])
    other = line(published.SMOLLM2, 60, tolerance=0.002) | {"setting": "14x128"}
    found, before = published.outcomes([*LINES, other]), published.outcomes(LINES)
    assert found == before and before.keys() > published.PREDICTIONS.keys()
    layers = [[[0.002, 8], [0.01, need]] for need in (1, 2, 4)]
    assert published.outcomes([other | {"by_layer": layers}])["P10"] == "held"
    assert published.outcomes([other | {"by_layer": layers[::-1], "tolerance": 0.01}])["P10"] == "contradicted"
    assert published.by_layer(other | {"by_layer": [1, 2, 4]}, 0.01) == [1, 2, 4]


@pytest.mark.parametrize(
    "need, own, at_one_percent, outcomes",
    [
        (31, 17, 27, ("held", "held")),
        (31, 16, 28, ("contradicted", "unclear")),
        (32, 17, 31, ("contradicted", "contradicted")),
    ],
)
def test_later_predictions_are_about_lines_at_the_later_tolerance(need, own, at_one_percent, outcomes):
    needs = [[0.002, need], [0.01, at_one_percent]]
    lines = [line(model, need, own=own, tolerance=0.002) | {"needs": needs} for model in published.MODELS]
    found = published.outcomes(lines)
    assert (found["P14"], found["P15"]) == outcomes
    short = [one | {"setting": "14x128"} for one in lines]
    assert published.outcomes(short)["P15"] == "not run"
    assert published.outcomes([one | {"tolerance": 0.01} for one in lines])["P15"] == "not run"


@pytest.mark.parametrize(
    "verdict, need, own, found",
    [
        ("most", 54, 44, ["held", "contradicted", "held", "held"]),
        ("all", 55, 43, ["contradicted", "contradicted", "unclear", "unclear"]),
        (published.BETWEEN, 57, 51, ["unclear", "held", "contradicted", "contradicted"]),
    ],
)
def test_predictions_about_64_sequences_compare_them_with_16(verdict, need, own, found):
    few = [
        line(model, 54, own=46, size=64, tolerance=0.002)
        | {"setting": "quick16x512", "needs": [[0.002, 54], [0.01, 44]], "verdict": published.BETWEEN}
        for model in (published.SMOLLM2, published.GEMMA)
    ]
    names = list(published.LONGER)
    more = [one | {"setting": "quick64x512", "verdict": verdict, "need": need, "own": own} for one in few]
    for alone in (few, more):
        outcomes = published.outcomes(alone)
        assert [outcomes[name] for name in names] == ["not run"] * 4
    outcomes = published.outcomes([*few, *more])
    assert [outcomes[name] for name in names] == found


@pytest.mark.parametrize(
    "verdict, need, own, energy, found",
    [
        ("all", 30, 27, 8, ["held", "held", "held", "held"]),
        (published.BETWEEN, 28, 29, 16, ["unclear", "unclear", "unclear", "unclear"]),
        ("most", 26, 31, 18, ["contradicted"] * 4),
    ],
)
def test_second_embedder_is_compared_with_the_first(verdict, need, own, energy, found):
    here = {"setting": "quick64x512", "needs": [[0.002, need], [0.01, 20]]}
    first = line(published.MINILM, 29, tolerance=0.002) | here | {"verdict": "all"}
    second = line(published.SMALLER, need, own=own, tolerance=0.002) | here
    second |= {"verdict": verdict, "directions_90": energy}
    outcomes = published.outcomes([first, second])
    assert [outcomes[name] for name in published.SECOND] == found
    alone = published.outcomes([first, second | {"tolerance": 0.01}])
    assert [alone[name] for name in published.SECOND] == ["not run"] * 4


def test_models_are_compared_on_the_same_text():
    lines = [line(published.MINILM, 26), line(published.QUANTISED, 20, "film-reviews")]
    assert published.outcomes(lines)["P8"] == "not run"
    assert published.outcomes([*lines, line(published.QUANTISED, 25)])["P8"] == "held"
    assert published.outcomes([*lines, line(published.QUANTISED, 21)])["P8"] == "contradicted"


def test_texts_agree_if_intervals_overlap():
    def lines(*second):
        pairs = zip(published.MODELS, second, strict=True)
        first = [line(model, 20, interval=[18, 22]) for model in published.MODELS]
        return first + [line(model, 20, "film-reviews", interval=found) for model, found in pairs]

    assert published.texts_agree(lines([22, 24], [10, 18], [19, 20])) == "held"
    assert published.texts_agree(lines([23, 24], [10, 18], [19, 20])) == "unclear"
    assert published.texts_agree(lines([23, 24], [10, 17], [19, 20])) == "contradicted"
    assert published.texts_agree(lines([23, 24], [10, 17], [19, 20])[:-1]) == "not run"


def test_weights_are_rounded_to_sixteen_levels_a_block(tmp_path):
    pytest.importorskip("gguf")
    weights = {"layer.weight": torch.randn(4, 64), "norm.weight": torch.randn(64), "embedding": torch.randn(3, 7)}
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    published.quantise(tmp_path / "model", tmp_path / "rounded")
    found = load_file(tmp_path / "rounded" / "model.safetensors")
    for name in ("norm.weight", "embedding"):
        assert torch.equal(found[name], weights[name])
    rounded = found["layer.weight"]
    assert all(len(block.unique()) <= 16 for block in rounded.view(-1, 32))
    assert 0 < (rounded - weights["layer.weight"]).abs().max() < 0.3


@pytest.mark.usefixtures("quick_starts")
def test_recipe_skips_rows_with_a_line_at_this_tolerance(tmp_path):
    results = tmp_path / "lines.jsonl"
    for text in ("wikitext-2", "film-reviews"):
        append(results, line(published.SMOLLM2, 40, text, size=64, tolerance=TOLERANCE) | {"setting": "65x64"})
        append(results, line("other", 40, text, size=64) | {"setting": "65x64"})
    command = f"""
    python() {{
        if [ "$2" = fairseq_lowrank.cli ]; then echo "MEASURED $*" >>{tmp_path}/calls; mkdir -p "${{@: -1}}"
        elif [ "${{5:-}}" = --has ]; then "$REAL" "$@"
        fi
    }}
    export -f python
    """
    model = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    other = tmp_path / "other"
    (tmp_path / "data" / "wikitext-2").mkdir(parents=True)
    (tmp_path / "data" / "prose").mkdir()
    for name in ("wikitext-2/test.txt.gz", "prose/film-reviews.txt.gz"):
        with gzip.open(tmp_path / "data" / name, "wt") as file:
            file.write("text")
    variables = {
        "REAL": sys.executable,
        "RESULTS": str(results),
        "SETTINGS": "65x64 64x8",
        "LOWRANK_WORK": str(tmp_path / "work"),
        "LOWRANK_DATA": str(tmp_path / "data"),
    }
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'{command} exec bash {ROOT}/examples/evidence/published_models.sh "$@"',
            "recipe",
            model,
            other,
        ],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    long, short = calls[:2], calls[2:]
    assert len(short) == 4 and all(f"--transformers {other} " in call for call in long)
    assert all("--length 64 --sequences 65 --no-layers" in call for call in long)
    assert all("--length 8 --sequences 64 --output" in call for call in short)
    assert all(
        Path(call.split("--text ")[1].split()[0]).is_file() for call in calls
    )  # no copy that a kill could cut short
    shown = subprocess.run(["bash", ROOT / "examples/evidence/published_models.sh"], capture_output=True, text=True)
    assert shown.returncode == 2 and "published_models.sh MODEL" in shown.stdout


@pytest.mark.usefixtures("quick_starts")
def test_recipe_leaves_out_rows_that_another_process_measures(tmp_path):
    made = tmp_path / "work" / "published-models"
    made.mkdir(parents=True)
    variables = {"SETTINGS": "64x8", "TEXTS": "wikitext-2", "LOWRANK_WORK": str(tmp_path / "work")}
    variables |= {"RESULTS": str(tmp_path / "lines.jsonl"), "REAL": sys.executable}
    command = (
        f'python() {{ if [ "$2" = fairseq_lowrank.cli ]; then false; else "$REAL" "$@"; fi; }}; export -f python;'
        f'exec bash {ROOT}/examples/evidence/published_models.sh "$@"'
    )

    def run():
        words = ["bash", "-c", command, "recipe", tmp_path / "model"]
        return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)

    with locked(made / "model-wikitext-2-64x8.lock"):
        done = run()
    assert done.returncode == 0 and done.stderr == "model, wikitext-2, 64x8: another process measures this\n"
    assert run().returncode == 1  # it measures, and a fault ends the recipe


@pytest.mark.parametrize(("name", "value"), [("SETTINGS", "64 x 512"), ("SETTINGS", "0x8"), ("TEXTS", "wikitext-3")])
def test_recipe_refuses_other_settings_and_texts(tmp_path, name, value):
    refused = subprocess.run(
        ["bash", ROOT / "examples/evidence/published_models.sh", tmp_path],
        env=os.environ | {name: value, "LOWRANK_WORK": str(tmp_path / "work")},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and refused.stderr.startswith(f"{name}={value}: ")
