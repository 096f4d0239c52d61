"""The need, the verdicts, the figure, and the flags of the command measure."""

import json

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.tools.measuring.figure import plot_cuts
from fairseq_lowrank.tools.measuring.measurement import least_rank, ranks_below
from fairseq_lowrank.tools.measuring.verdict import LIMIT, judge


def test_need_is_the_least_rank_above_which_every_cut_is_cheap():
    costs = {1: 0.5, 2: 0.005, 4: 0.02, 8: 0.009, 16: 0.0}
    assert least_rank(costs.get, costs, 0.01) == 8
    assert least_rank(costs.get, costs, 0.001) == 16
    assert least_rank(costs.get, costs, 0.9) == 1


@pytest.mark.parametrize(
    "size, ranks", [(1, []), (4, [1, 2, 3]), (8, [1, 2, 4, 7]), (32, [1, 2, 4, 8, 12, 16, 24, 31])]
)
def test_ranks_of_the_grid(size, ranks):
    assert ranks_below(size) == ranks


@pytest.mark.parametrize(
    "need, size, verdict", [(16, 32, "few"), (17, 32, "most"), (28, 32, "most"), (29, 32, "all"), (4, 4, "all")]
)
def test_verdict_follows_the_share_of_directions(need, size, verdict):
    assert judge(need, size) == verdict


def test_two_checkpoints_share_a_figure(trained, tmp_path, capsys):
    command = ["measure", str(trained("stock")), "--compare", str(trained("mhe")), "--sequences", "4", "--json"]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 0
    results = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "measure.json").read_text()) == results
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"measure.csv", "measure.json", "measure.pdf", "measure.png"}
    (axes,) = plot_cuts(results).axes
    thick = [line for line in axes.lines if line.get_linewidth() == 3]
    thin = [line for line in axes.lines if line.get_linewidth() == 1]
    assert (len(thick), len(thin)) == (2, 12)
    assert axes.get_ylabel() == "bits per token"
    assert thick[0].get_ydata()[-1] == pytest.approx(results[0]["value"])
    assert {text.get_text() for text in axes.texts} == {"head size 4"}


def test_table_says_verdict_numbers_and_what_a_cut_cannot_show(trained, capsys):
    assert cli.main(["measure", str(trained("stock")), "--sequences", "4"]) == 0
    text = capsys.readouterr().out
    assert "all heads, the scores: uses" in text and "cross, the scores: uses" in text and LIMIT in text
    assert "bits per token" in text and "decoder 1" in text


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "no model given"),
        (["a.pt", "--sequences", "1"], "--sequences 1: one half gives bases"),
        (["a.pt", "--tolerance", "1"], "--tolerance 1.0: expected a share"),
        (["a.pt", "--target", "{text}"], "Add --text FILE"),
        (["a.pt", "--text", "none.txt"], "--text none.txt: there is no such file"),
        (["a.pt", "--transformers", "b", "--text", "{text}"], "works only with models of fairseq"),
        (["--transformers", "b"], "there is no text to measure on"),
        (["--transformers", "b", "--text", "{text}", "--subset", "test"], "--subset works only with models of fairseq"),
        (["--transformers", "b", "--text", "{text}"], "no config.json here"),
    ],
)
def test_wrong_flags_are_named(flags, message, tmp_path, capsys):
    (tmp_path / "text").write_text("a")
    assert cli.main(["measure", *(flag.format(text=tmp_path / "text") for flag in flags)]) == 2
    assert message in capsys.readouterr().err
