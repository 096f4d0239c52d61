"""The need, the verdicts, the figure, and the flags of the command measure."""

import json

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.cli import _data
from fairseq_lowrank.tools.measuring.figure import plot_cuts
from fairseq_lowrank.tools.measuring.measurement import least_rank, ranks_below
from fairseq_lowrank.tools.measuring.verdict import LIMIT, judge, sequences_needed, verdicts


def test_need_is_the_least_rank_above_which_every_cut_is_cheap():
    costs = {1: 0.5, 2: 0.005, 4: 0.02, 8: 0.009, 16: 0.0}
    assert least_rank(costs.get, costs, 0.01) == 8
    assert least_rank(costs.get, costs, 0.001) == 16
    assert least_rank(costs.get, costs, 0.9) == 1


@pytest.mark.parametrize(
    "size, ranks",
    [
        (1, []),
        (4, [1, 2, 3]),
        (8, [1, 2, 4, 7]),
        (20, [1, 2, 4, 8, 10, 12, 16, 17, 19]),
        (32, [1, 2, 4, 8, 12, 16, 24, 28, 31]),
    ],
)
def test_ranks_of_the_grid(size, ranks):
    assert ranks_below(size) == ranks


def curve(need, interval, size=32, worth=0.5):
    ranks = [{"rank": rank, "value": 2.0, "cost": 0.0 if rank >= need else 0.2} for rank in range(size + 1)]
    needs = [[0.002, need], [0.01, need], [0.05, need]]
    return {"size": size, "need": need, "needs": needs, "interval": interval, "worth_share": worth, "ranks": ranks}


def judged(found, tokens=10_000, own=3):
    result = {
        "cuts": {"scores": {"all": found, "sites": {}}, "own": {"all": {"need": own}}},
        "layers": [{"head_size": 32}],
        "tokens_of_basis": tokens,
        "sequences_of_basis": 24,
        "sequences_held_out": 24,
        "metric": "bits per token",
        "value": 4.0,
        "never_ran": ["layers.3"],
    }
    first, last = verdicts(result)
    assert last["verdict"] == "not measured"
    return first


def test_verdict_needs_both_ends_of_the_interval():
    assert judged(curve(12, [10, 16]))["verdict"] == "few"
    assert judged(curve(18, [17, 28]))["verdict"] == "most"
    found = judged(curve(18, [12, 20]))
    assert found["verdict"] == "between few and most"
    # 6 below the need, and the bound is 1.5 below it: the interval must become four times as narrow
    assert sequences_needed(18, (12, 20), 32, 24) == 24 * 16
    assert f"measure more sequences, about {48 * 16} in all" in found["text"]
    assert judged(curve(16, [10, 31]))["verdict"] == "between few and all"


def test_at_least_twice_as_many_sequences_are_needed():
    assert sequences_needed(12, (12, 17), 32, 24) == 2 * 24


def test_verdict_says_at_most_and_the_bracket():
    found = judged(curve(12, [10, 16]), own=5)
    assert found["bracket"] == [5, 12]
    assert "At most 12 of 32 are needed (95 % interval 10 to 16): rank 12 costs 0 %" in found["text"]
    assert "The need is between 5 and 12 of 32: 5 if each sequence may choose its directions" in found["text"]
    assert (
        "By tolerance it is at most 12 (0.2 %), 12 (1 %), 12 (5 %)" in found["text"] and "10000 tokens" in found["text"]
    )


def test_no_verdict_if_attention_hardly_matters_or_the_basis_is_small():
    found = judged(curve(1, [1, 1], worth=0.009))
    assert found["verdict"] == "no verdict"
    assert "attention patterns hardly matter here: no verdict" in found["text"] and "0.9 %" in found["text"]
    assert judged(curve(1, [1, 1], worth=-0.2))["verdict"] == "no verdict"
    assert judged(curve(12, [12, 12]), tokens=320)["verdict"] == "few"
    found = judged(curve(12, [12, 12]), tokens=319)
    assert found["verdict"] == "no verdict" and "32 directions need 320" in found["text"]


@pytest.mark.parametrize(
    "need, size, verdict", [(16, 32, "few"), (17, 32, "most"), (28, 32, "most"), (29, 32, "all"), (4, 4, "all")]
)
def test_verdict_follows_the_share_of_directions(need, size, verdict):
    assert judge(need, size) == verdict


def test_two_checkpoints_share_a_figure(trained, tmp_path, capsys):
    command = ["measure", str(trained("stock")), "--compare", str(trained("mhe")), "--sequences", "4", "--json"]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert "different sequences" not in printed.err
    assert json.loads((tmp_path / "out" / "measure.json").read_text()) == results
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"measure.csv", "measure.json", "measure.pdf", "measure.png"}
    (axes,) = plot_cuts(results).axes
    thick = [line for line in axes.lines if line.get_linewidth() == 3]
    thin = [line for line in axes.lines if line.get_linewidth() == 1]
    own = [line for line in axes.lines if line.get_linewidth() == 2 and line.get_linestyle() == "--"]
    assert (len(thick), len(thin), len(own)) == (2, 12, 2)
    assert axes.get_ylabel() == "bits per token"
    assert thick[0].get_ydata()[-1] == pytest.approx(results[0]["value"])
    assert thick[0].get_xdata()[0] == 0
    assert thick[0].get_ydata()[0] == pytest.approx(results[0]["cuts"]["scores"]["all"]["ranks"][0]["value"])
    assert {text.get_text() for text in axes.texts} == {"head size 4"}


def test_models_that_read_different_sequences_are_named(capsys):
    found = {"label": "a", "sequences_held_out": 4, "mean_length": 8.5}
    _data.name_other_sequences([found, found | {"label": "b"}], "sequences_held_out")
    assert not capsys.readouterr().err
    _data.name_other_sequences([found, found | {"label": "b", "mean_length": 9}], "sequences_held_out")
    assert "different sequences (a 4 of 8.5 tokens, b 4 of 9 tokens), so compare them" in capsys.readouterr().err


def test_table_says_verdict_numbers_and_what_a_cut_cannot_show(trained, capsys):
    assert cli.main(["measure", str(trained("stock")), "--sequences", "4"]) == 0
    text = capsys.readouterr().out
    assert "all heads, the scores: " in text and "cross, the scores: " in text and LIMIT in text
    assert "bits per token" in text and "decoder 1" in text


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "no model given"),
        (["a.pt", "--sequences", "1"], "--sequences 1: one half gives bases"),
        (["a.pt", "--tolerance", "1"], "--tolerance 1.0: expected a share"),
        (["a.pt", "--target", "{text}"], "Add --text FILE"),
        (["a.pt", "--text", "none.txt"], "--text none.txt: there is no such file"),
        (["a.pt", "--transformers", "b", "--text", "{text}"], "error: a.pt works only with models of fairseq"),
        (["--transformers", "b"], "there is no text to measure on"),
        (["--transformers", "b", "--text", "{text}", "--subset", "test"], "--subset works only with models of fairseq"),
        (["--transformers", "b", "--text", "{text}"], "no config.json here"),
    ],
)
def test_wrong_flags_are_named(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a")
    (tmp_path / "a.pt").touch()
    assert cli.main(["measure", *(flag.format(text=tmp_path / "text") for flag in flags)]) == 2
    assert message in capsys.readouterr().err
