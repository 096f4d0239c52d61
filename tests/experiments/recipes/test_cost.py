"""What a recipe says that it costs."""

from dataclasses import replace

import pytest

from experiments.recipes import cost
from experiments.recipes.sizes import sizes, vocab_size


def test_a_training_costs_six_operations_a_token_and_weight(recipe, settings):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    found, counts, words = cost.cost(run), sizes(run), vocab_size(run)
    assert words == 4 + max(len(path.read_text().splitlines()) for path in run.bin.glob("dict.*.txt"))
    weights = counts["total"] - counts["embeddings"] + words * 16  # width 16
    assert found.tokens == 3 * 100  # --max-update 3 --max-tokens 100
    assert found.cpu_hours == pytest.approx(6 * weights * 300 / cost.CPU_RATE / 3600)
    assert found.gpu_hours == pytest.approx(3 * cost.H100_UPDATE / 3600)  # so small a model waits for launches
    assert found.disk == pytest.approx(2 * 12 * counts["total"] / 1e9)
    more = replace(run, flags=(*run.flags, "--update-freq", "4", "--keep-interval-updates", "3"))
    test = cost.tokens_of_split(run.bin, "test")
    assert test and found.cpu_scoring == pytest.approx(2 * weights * 5 * test / cost.CPU_RATE / 3600)  # a beam of 5
    assert cost.cost(more).tokens == 4 * found.tokens and cost.cost(more).disk == pytest.approx(found.disk * 5 / 2)


def test_epochs_count_the_tokens_of_a_known_corpus_and_others_are_said(recipe, settings):
    own = recipe(mha="--attention mha --max-epoch 2")
    run = own.run(own.rows["mha"], settings())
    run = replace(run, flags=tuple(flag for flag in run.flags if flag not in ("--max-update", "3")))
    assert cost.cost(replace(run, data=run.data / "none")).tokens == 2 * cost.EPOCH_TOKENS["iwslt14"]
    assert cost.cost(run).tokens == 2 * cost.epoch_tokens(run)
    unknown = replace(run, corpus="wmt14", data=run.data / "none")
    other, _, total, alone = list(cost.lines([unknown, own.run(own.rows["mha"], settings(seed=2))]))
    assert "one GPU, 2 seeds. Scoring takes" in alone
    with pytest.raises(ValueError, match="wmt14 is not prepared yet"):
        list(cost.lines([unknown]))
    assert "wmt14 is not prepared yet, so its number of tokens is not known" in other
    assert "without 1 trainings" in total and "1,719 MB of downloads" in total


def test_what_rows_share_is_counted_once(recipe, settings):
    own = recipe(mha="--attention mha", gain="--attention gain")
    base = own.run(own.rows["mha"], settings(seed=7))
    runs = [replace(own.run(own.rows[name], settings()), base=base) for name in ("mha", "gain")]
    assert [one.row for one in cost.trainings(runs)] == ["mha", "mha", "gain"]
    *_, total, _, plain = cost.lines(runs)
    assert total.startswith("3 trainings (estimates): 0.0009 million")
    assert plain == "Never timed on a GPU, and counted like plain attention: gain"


@pytest.mark.parametrize(
    ("flags", "speed"),
    [
        ("--attention mha", 1.0),
        ("--attention mixhead-a --decoder-embed-dim 1024 --decoder-attention-heads 16", 0.66),
        ("--attention mixhead-b --decoder-embed-dim 512 --decoder-attention-heads 8", 0.57),
        ("--attention mixhead-a --decoder-embed-dim 512 --decoder-attention-heads 64", 0.21),
        ("--attention mixhead-a --decoder-embed-dim 512 --decoder-attention-heads 8 --head-dim 32", 0.66),
        ("--attention gain", None),
        ("--attention mha --score-mixing static", None),
    ],
)
def test_hours_on_a_gpu_take_the_speed_of_the_method(recipe, settings, flags, speed):
    own = recipe(mha="--attention mha")
    run = replace(own.run(own.rows["mha"], settings()), flags=tuple(flags.split()))
    assert cost.speed(run) == speed


def test_speed_divides_the_hours_of_large_models(recipe, settings):
    own = recipe(mha="--attention mha", mixed="--attention mixhead-a")
    large = "--encoder-embed-dim 1024 --decoder-embed-dim 1024 --decoder-attention-heads 16 --max-tokens 2000000"
    plain, mixed = (
        cost.cost(replace(run, flags=(*run.flags, *large.split())))
        for run in (own.run(own.rows[name], settings()) for name in ("mha", "mixed"))
    )
    assert plain.gpu_hours > 3 * cost.H100_UPDATE / 3600 and plain.cpu_hours == pytest.approx(mixed.cpu_hours, rel=0.01)
    assert mixed.gpu_hours == pytest.approx(plain.gpu_hours / 0.66, rel=0.01)


def test_many_gpus_divide_hours_and_not_memory(recipe, settings):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    found = cost.Cost(2e9, 80.0, 1001.0, 3.0)
    assert (
        cost._described(found, 8)
        == "2.0 billion tokens, 80 hours on one H100, 10 on 8, not on a CPU, 3.0 GB of checkpoints"
    )
    more = replace(run, flags=(*run.flags, "--max-tokens", "1000"))
    assert cost.memory(run) < cost.memory(more)


def test_tokens_of_a_prepared_corpus_are_counted(recipe, settings):
    own = recipe(mha="--attention mha")
    run = own.run(own.rows["mha"], settings())
    assert cost.epoch_tokens(replace(run, data=run.data / "none")) == cost.EPOCH_TOKENS["iwslt14"]
    found = cost.epoch_tokens(run)
    assert 0 < found < cost.EPOCH_TOKENS["iwslt14"]  # the tiny corpus of the tests
    most = cost.tokens_of_split(run.bin, "train")
    assert most >= found
    assert [cost.warmup(run.bin, epochs, most) for epochs in (1, 30, 9000)] == [1, 3, 400]
    assert cost.warmup(run.data / "none", 5, 10) == 1


def test_models_of_a_recipes_own_plugin_cost_something(recipe, engine, settings, plugins_leave, capsys):
    own = recipe(mha="--attention mha")
    own.plugin = "examples/evidence/controls"
    arch = {"lowrank_transformer": "transformer_small_start_iwslt_de_en"}
    own.common = tuple(arch.get(flag, flag) for flag in own.common)
    engine(own, settings()).cost()
    assert "1 trainings (estimates): " in capsys.readouterr().out
