"""The pages of the variants: every preset has one, its formulas hold of built layers, and the files are what the source gives."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from experiments import __main__ as experiments
from experiments import variants
from experiments.pages import PAGES as TEXTS
from fairseq_lowrank import parts
from fairseq_lowrank.attention import METHODS, PRESETS

PAGES = Path(__file__).parents[2] / "docs" / "variants"
CLASS_TESTS = Path(__file__).parents[1] / "attention" / "test_class.py"
VARIANTS = variants.variants()
AGAIN = "python -m experiments variants --output docs/variants"


def class_tests():
    spec = importlib.util.spec_from_file_location("test_class", CLASS_TESTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_a_text_for_its_page():
    assert TEXTS.keys() == VARIANTS.keys(), "write the text in experiments/pages.py"
    assert all(text.notes and text.advice.endswith(".") for text in TEXTS.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_the_class_of_a_preset_names_a_test_of_that_preset(preset):
    test = getattr(class_tests(), variants.CLASS_TESTS[METHODS[preset].kind])
    covered = [value for mark in getattr(test, "pytestmark", ()) for value in mark.args[1]]
    assert preset in (covered or ["tpa"])
    assert variants.class_of(METHODS[preset]) in (PAGES / "README.md").read_text(encoding="utf-8")


def test_the_formula_of_low_rank_embeddings_counts_a_built_model():
    pytest.importorskip("fairseq")
    from fairseq_lowrank.tools.fairseq import architecture

    flags = [
        "--embed-rank",
        "8",
        "--decoder-embed-dim",
        "32",
        "--decoder-layers",
        "1",
        "--decoder-attention-heads",
        "2",
    ]
    model = architecture.build_model(architecture.parse_architecture("lowrank_transformer_lm", flags), 100)
    built = sum(model.get_parameter(f"decoder.{name}.weight").numel() for name in ("embed_tokens", "project_in_dim"))
    assert parts.evaluate(VARIANTS["low-rank-embeddings"].parameters, {"V": 100, "r": 8, "d": 32}) == built


@pytest.mark.parametrize(
    ("formula", "value"), [("4·d·h", 24), ("2·d² + h", 20), ("h²·d + 3", 15), ("d·h + d·h", 12), ("h·d²/d", 6)]
)
def test_formulas_are_sums_of_products(formula, value):
    assert parts.evaluate(formula, {"d": 3, "h": 2}) == value


def test_a_formula_names_sizes_that_there_are():
    with pytest.raises(KeyError, match="x"):
        parts.evaluate("2·x", {"d": 3})


def test_the_pages_of_the_repository_are_what_the_source_gives():
    assert {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()} == variants.pages(), (
        f"call {AGAIN}"
    )


def results_of(folder, file, table, values, **fields):
    """Write lines of a results file: values by row, under seeds 1, 2, …."""
    with (gzip.open if file.endswith(".gz") else open)(folder / file, "at") as lines:
        for row, found in values.items():
            for seed, value in enumerate(found, 1):
                fixed = {"paper": "evidence", "table": table, "metric": "x", "commit": None, "smoke": False}
                lines.write(json.dumps(fixed | {"row": row, "seed": seed, "value": value} | fields) + "\n")


def test_rows_are_means_with_their_spread_over_common_seeds(tmp_path):
    values = {"n16-shared-h16-gain": [0.1, 0.001], "n16-shared-h16-mha": [0.5, 0.5, 7.0]}
    results_of(tmp_path, "evidence-matrices.jsonl.gz", "matrices", values)
    results_of(tmp_path, "evidence-matrices.jsonl.gz", "matrices", {"n16-shared-h16-gain": [9.0, 9.0, 9.0]}, smoke=True)
    results_of(tmp_path, "evidence-matrices.jsonl.gz", "another", {"n16-shared-h16-gain": [7.0] * 4})
    losses = {"test": {"bits": 3.5, "sentence_values": []}}
    results_of(tmp_path, "evidence.jsonl", "fast-start", {"h4-gain-2e-3": [30.0, 32.0, 31.0]}, losses=losses)
    bleu, loss, error = variants.measured("gain", tmp_path)
    assert (error["value"], error["mha"], error["seeds"]) == ("0.01 (0.001 to 0.1)", "0.5 (0.5 to 0.5)", 2)
    assert (bleu["value"], bleu["mha"], bleu["seeds"]) == ("31.00 ± 1.00", "", 3)
    assert (loss["value"], "bits ↓" in loss["setting"]) == ("3.500 ± 0.000", True)
    assert "| 31.00 ± 1.00 |  |  | 3 |" in variants.page("gain", tmp_path)
    assert "None yet." in variants.page("mqa", tmp_path)


def test_the_best_control_has_the_seeds_of_the_row_and_is_not_the_row(tmp_path):
    values = {
        "h8-mixhead-a": [0.7, 0.5],
        "h8-mha": [0.8, 0.8],
        "h8-gain": [0.6, 0.6],
        "h8-column-sums": [0.9, 0.9],
        "h8-small-start": [0.1],
    }
    results_of(tmp_path, "evidence-nearest-point.jsonl", "nearest-point", values)
    controls = {name: variants.measured(name, tmp_path)[0]["control"] for name in ("mixhead-a", "gain", "mha")}
    assert controls == {
        "mixhead-a": "0.600 ± 0.000: `gain`",
        "gain": "0.900 ± 0.000: column sums",
        "mha": "0.600 ± 0.000: `gain`",
    }


def test_each_table_of_results_is_queried_or_left_out():
    found = {
        (file.name, line["table"], line.get("task"))
        for file in variants.RESULTS.glob("*.jsonl*")
        for line in variants.read_lines(file)
    }
    queried = {(query.file, query.table, query.task) for query in variants.RESULT_QUERIES}
    assert not queried & variants.LEFT_OUT.keys()
    assert found <= queried | variants.LEFT_OUT.keys()


def test_the_command_prints_and_writes(tmp_path, capsys):
    assert experiments.main(["variants", "gain"]) == 0
    assert capsys.readouterr().out == variants.page("gain")
    assert experiments.main(["variants", "gain", "el", "--output", str(tmp_path / "pages")]) == 0
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["el.md", "gain.md"]
    assert experiments.main(["variants", "nope"]) == 2
    assert "VARIANT 'nope': unknown. Use one of mha, " in capsys.readouterr().err
    assert experiments.main(["variants", "--results", str(tmp_path / "none")]) == 2
    assert f"--results {tmp_path / 'none'}: is not a folder" in capsys.readouterr().err
