"""The pages of the variants: every preset has one, its formulas hold of built layers, and the files are what the source gives."""

import json
from pathlib import Path

import pytest

from experiments import __main__ as experiments
from experiments import variants
from experiments.variants import VARIANTS, build, cached, count, evaluate, sizes_of
from fairseq_lowrank.attention import PRESETS

PAGES = Path(__file__).parents[2] / "docs" / "variants"
ATTENTION = [name for name, variant in VARIANTS.items() if variant.preset is not None]
AGAIN = "python -m experiments variants --output docs/variants"


def test_every_preset_has_an_entry_of_its_own():
    assert {name for name in VARIANTS if name in PRESETS} == set(PRESETS)
    assert all(VARIANTS[preset].preset == preset for preset in PRESETS)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("embed_dim", "heads"), [(512, 8), (48, 4), (60, 6)])
def test_formulas_count_built_layers(name, embed_dim, heads):
    layer = build(VARIANTS[name], embed_dim, heads)
    assert evaluate(VARIANTS[name].parameters, sizes_of(layer)) == count(layer)
    assert evaluate(VARIANTS[name].cached, sizes_of(layer)) == cached(layer)


def test_the_formula_of_low_rank_embeddings_counts_a_built_model():
    pytest.importorskip("fairseq")
    from fairseq_lowrank.tools import architecture

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
    model = architecture.build(architecture.parse("lowrank_transformer_lm", flags), 100)
    built = sum(model.get_parameter(f"decoder.{name}.weight").numel() for name in ("embed_tokens", "project_in_dim"))
    assert evaluate(VARIANTS["low-rank-embeddings"].parameters, {"V": 100, "r": 8, "d": 32}) == built


@pytest.mark.parametrize(("formula", "value"), [("4·d·h", 24), ("2·d² + h", 20), ("h²·d + 3", 15), ("d·h + d·h", 12)])
def test_formulas_are_sums_of_products(formula, value):
    assert evaluate(formula, {"d": 3, "h": 2}) == value


def test_a_formula_names_sizes_that_there_are():
    with pytest.raises(KeyError, match="x"):
        evaluate("2·x", {"d": 3})


def test_the_pages_of_the_repository_are_what_the_source_gives():
    assert {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()} == variants.pages(), (
        f"call {AGAIN}"
    )


def test_rows_are_means_over_seeds_beside_mha(tmp_path):
    def line(row, seed, value, smoke=False, table="matrices"):
        fixed = {"paper": "evidence", "table": table, "metric": "error", "commit": None}
        return json.dumps(fixed | {"row": row, "seed": seed, "value": value, "smoke": smoke}) + "\n"

    lines = [
        *(line("n16-shared-h16-gain", 1, 0.1), line("n16-shared-h16-gain", 2, 0.001)),
        *(line("n16-shared-h16-mha", 1, 0.5), line("n16-shared-h16-gain", 3, 9.0, smoke=True)),
        line("n16-shared-h16-gain", 4, 7.0, table="another"),
    ]
    (tmp_path / "evidence-matrices.jsonl").write_text("".join(lines))
    (row,) = variants.measured("gain", tmp_path)
    assert (row["value"], row["mha"], row["seeds"]) == ("0.01", "0.5", 2)
    assert "| 0.01 | 0.5 | 2 |" in variants.page("gain", tmp_path)
    assert "None yet." in variants.page("mqa", tmp_path)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mha", "`--attention mha`"),
        ("mixhead-a", "`--attention mixhead-a`, which is `--attention mha --head-mixing static`"),
        ("gqa", "`--attention gqa --key-value-heads N`"),
        ("relative", "`--attention-score relative`, beside any `--attention`"),
        ("sigsoftmax", "`--attention-activation sigsoftmax`, beside any `--attention`"),
    ],
)
def test_flags_are_those_of_preset_and_axes(name, flags):
    assert variants.flags(VARIANTS[name]) == flags


@pytest.mark.parametrize("name", VARIANTS)
def test_code_and_papers_are_there(name):
    assert all((variants.PACKAGE / file).is_file() for file in variants.code(VARIANTS[name]))
    assert variants.citations(VARIANTS[name]).startswith("this project" if name == "gain" else "[")


def test_code_is_the_part_that_differs():
    assert [str(file) for file in variants.code(VARIANTS["el"])] == ["attention/projections/el.py"]
    assert [str(file) for file in variants.code(VARIANTS["relative"])] == ["attention/scores/relative.py"]
    for score in ("synthesizer-dense", "synthesizer-random"):
        assert [str(file) for file in variants.code(VARIANTS[score])] == ["attention/scores/synthesizer.py"]
    assert [str(file) for file in variants.code(VARIANTS["sigsoftmax"])] == ["ops/activation.py"]
    assert [str(file) for file in variants.code(VARIANTS["gain"])] == ["attention/mixing.py", "ops/attention/mixing.py"]


def test_the_command_prints_and_writes(tmp_path, capsys):
    assert experiments.main(["variants", "gain"]) == 0
    assert capsys.readouterr().out == variants.page("gain")
    assert experiments.main(["variants", "gain", "el", "--output", str(tmp_path / "pages")]) == 0
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["el.md", "gain.md"]
    assert experiments.main(["variants", "nope"]) == 2
    assert "variant 'nope': expected one of mha, " in capsys.readouterr().err
    assert experiments.main(["variants", "--results", str(tmp_path / "none")]) == 2
    assert f"--results {tmp_path / 'none'}: is no folder" in capsys.readouterr().err
