"""What a recipe says that it costs."""

from dataclasses import replace

import pytest

from experiments.recipes import cost
from experiments.recipes.sizes import sizes


def test_a_training_costs_six_operations_a_token_and_weight(recipe, settings):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    found, counts = cost.cost(run), sizes(run, cost.SUBWORDS)
    weights = counts["total"] - counts["embeddings"] + cost.SUBWORDS * 16  # width 16
    assert found.tokens == 3 * 100  # --max-update 3 --max-tokens 100
    assert found.cpu_hours == pytest.approx(6 * weights * 300 / cost.CPU_RATE / 3600)
    assert found.gpu_hours == pytest.approx(3 * cost.H100_UPDATE / 3600)  # so small a model waits for launches
    assert found.disk == pytest.approx(2 * 12 * counts["total"] / 1e9)
    more = replace(run, flags=(*run.flags, "--update-freq", "4", "--keep-interval-updates", "3"))
    assert cost.cost(more).tokens == 4 * found.tokens and cost.cost(more).disk == pytest.approx(found.disk * 5 / 2)


def test_epochs_count_the_tokens_of_a_known_corpus_and_others_are_said(recipe, settings):
    own = recipe(mha="--attention mha --max-epoch 2")
    run = own.run(own.rows["mha"], settings())
    run = replace(run, flags=tuple(flag for flag in run.flags if flag not in ("--max-update", "3")))
    assert cost.cost(run).tokens == 2 * cost.EPOCH_TOKENS["iwslt14"]
    other, total = cost.lines([replace(run, corpus="wmt14")])
    assert "the number of tokens of wmt14 is not known" in other and "without 1 trainings" in total
    assert "1,700 MB of downloads" in total


def test_what_rows_share_is_counted_once(recipe, settings):
    own = recipe(mha="--attention mha", gain="--attention gain")
    base = own.run(own.rows["mha"], settings(seed=7))
    runs = [replace(own.run(own.rows[name], settings()), base=base) for name in ("mha", "gain")]
    assert [one.row for one in cost.trainings(runs)] == ["mha", "mha", "gain"]
    *_, total = cost.lines(runs)
    assert total.startswith("3 trainings (estimates): 900 ") or total.startswith(
        "3 trainings (estimates): 0.0009 million"
    )


def test_models_of_a_recipes_own_plugin_cost_something(recipe, engine, settings, plugins_leave, capsys):
    own = recipe(mha="--attention mha")
    own.plugin = "examples/evidence/controls"
    arch = {"lowrank_transformer": "transformer_small_start_iwslt_de_en"}
    own.common = tuple(arch.get(flag, flag) for flag in own.common)
    engine(own, settings()).cost()
    assert "1 trainings (estimates): " in capsys.readouterr().out
