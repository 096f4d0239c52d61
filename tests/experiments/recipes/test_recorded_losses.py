"""Losses in the lines of recipes that ask for them, and what compares them; recipes with a plugin of their own."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.recipes.recipe import Recipe
from fairseq_lowrank import cli
from fairseq_lowrank.records.results import read_results

SHORT = {"generate": ("--beam", "1", "--max-len-b", "5")}


def test_a_recipe_with_fit_records_losses_that_are_compared(recipe, settings, engine, capsys, enable):
    enable("whole-validation")  # as recipes do: without it, the last sentences are left out
    own, settings = recipe(mha="--attention mha", gain="--attention gain"), settings(**SHORT)
    own.fit = 50
    engine(own, settings).run_rows()
    lines = {line["row"]: line for line in read_results(settings.results)}
    assert {split: list(found) for split, found in lines["mha"]["losses"].items()} == {
        "fit": ["bits"],
        "valid": ["bits"],
        "test": ["bits"],
    }
    # the log says the loss of all of the validation set, in bits a token, with label smoothing or without
    assert lines["mha"]["losses"]["valid"]["bits"] == pytest.approx(lines["mha"]["curve"][-1]["valid_loss"], abs=2e-3)
    capsys.readouterr()
    asked = ["--pair", "mha", "gain", "--metric", "bits", "--split", "fit", "--json"]
    assert cli.main(["compare", str(settings.results), *asked]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    losses = [lines[name]["losses"]["fit"]["bits"] for name in ("mha", "gain")]
    assert row["notes"][0] == "one seed: other seeds may differ"
    assert row["mean"] == pytest.approx(losses[0] - losses[1], abs=1e-3) and row["mean"] != 0


@pytest.mark.parametrize(("results", "smoke", "kept"), [(None, False, False), (None, True, True), ("own", False, True)])
def test_only_results_of_the_repository_lose_values_of_sentences(settings, results, smoke, kept):
    from experiments.recipes.engine import as_kept

    line = {"row": "mha", "value": 30.0, "sentence_counts": [[1] * 10]}
    found = as_kept(line, replace(settings(smoke=smoke), results=results))
    assert found == (line if kept else {"row": "mha", "value": 30.0})


def test_a_trial_of_a_recipe_with_fit_takes_few_pairs(recipe, settings, engine, monkeypatch):
    from experiments.recipes import engine as engines

    asked = []
    monkeypatch.setattr(engines, "losses", lambda run, fit: asked.append(fit) or {})
    own = recipe(mha="--attention mha")
    own.fit = 2000
    runs = [engine(own, settings(smoke=smoke)) for smoke in (True, False)]
    for one in runs:
        one.losses_of(None)
    assert asked == [100, 2000]


def test_losses_are_computed_with_the_threads_of_the_commands(recipe, settings, engine, monkeypatch):
    from experiments.recipes import engine as engines

    before, used = torch.get_num_threads(), []
    monkeypatch.setattr(engines, "losses", lambda run, fit: used.append(torch.get_num_threads()) or {})
    own = recipe(mha="--attention mha")
    own.fit = 10
    for threads in (1, 2):
        engine(own, settings(threads=threads)).losses_of(None)
    assert used == [1, 2] and torch.get_num_threads() == before


def test_fairseq_gets_the_plugin_of_the_recipe_and_what_it_registers_is_there(
    recipe, settings, engine, commands, plugins_leave
):
    own, settings = recipe(row="--attention mha --head-mixing column-sums"), settings(**SHORT)
    own.plugin = "examples/evidence/controls"
    engine(own, settings).run_rows()
    [line] = read_results(settings.results)
    # 3 layers of 2 heads
    assert line["attention_parameters"] == 3 * (4 * 16 * 16 + 4) and "controls" not in line["flags"]


def test_how_many_pairs_must_be_a_number(request):
    records = [
        ["paper", "own"],
        ["table", "tiny"],
        ["fit", "many"],
        ["row", "mha", "iwslt14", "", "", "--attention", "mha"],
    ]
    with pytest.raises(ValueError, match=r"^FIT=many: expected a number of training pairs"):
        Recipe.read("translation", request.config.rootpath, records)


@pytest.mark.parametrize("record", [["root", "/"], ["rows", "mha"], ["paper", "a", "b"], ["row", "mha"]])
def test_a_record_that_is_none_of_a_recipe_is_refused(request, record):
    with pytest.raises(ValueError, match=rf"^{' '.join(record)}: is not a record of a recipe\. Use paper, table"):
        Recipe.read("translation", request.config.rootpath, [["paper", "own"], record])
