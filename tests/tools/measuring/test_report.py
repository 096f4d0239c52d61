"""The need, the verdicts, the figure, and the flags of the command measure."""

import json

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.cli import _data
from fairseq_lowrank.tools.measuring.curve import least_rank
from fairseq_lowrank.tools.measuring.figure import plot_cuts, plot_heads
from fairseq_lowrank.tools.measuring.measurement import ranks_below
from fairseq_lowrank.tools.measuring.verdict import UNSETTLED, answer, judge, sequences_needed, verdicts


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
    ranks = [
        {"rank": rank, "value": 2.0, "added": added, "of_loss": added / 4, "cost": added / (4 * worth)}
        for rank in range(size + 1)
        for added in [0.0 if rank >= need else 0.4]
    ]
    needs = [[0.002, need], [0.01, need], [0.05, need]]
    return {"size": size, "need": need, "needs": needs, "interval": interval, "worth_share": worth, "ranks": ranks}


def measured(found, tokens=10_000, own=3, available=None, constant=9.0, value=4.0, label="model", **cuts):
    result = {
        "label": label,
        "cuts": {"scores": {"all": found, "sites": {}, **cuts}, "own": {"all": {"need": own}}},
        "layers": [{"head_size": 32, "heads": 12, "site": "encoder"}] * 6,
        "tokens_of_basis": tokens,
        "sequences_of_basis": 24,
        "sequences_held_out": 24,
        "sequences_available": available,
        "metric": "bits per token",
        "unit": "bits",
        "less_is_better": True,
        "ignorance": "the frequency of words",
        "constant": constant,
        "value": value,
        "never_ran": ["layers.3"],
    }
    return result | {"verdicts": verdicts(result)}


def judged(found, **facts):
    first, last = measured(found, **facts)["verdicts"]
    assert last["verdict"] == "not measured"
    return first


def test_verdict_needs_both_ends_of_the_interval():
    found = judged(curve(12, [10, 16]))
    assert (found["verdict"], found["text"]) == ("few", "some head of the 72 needs 12 of 32 directions: few are used")
    assert judged(curve(18, [17, 28]))["text"].endswith("needs 18 of 32 directions: most are used")
    assert judged(curve(29, [29, 30]))["text"].endswith("needs 29 of 32 directions: the head size may bind")
    found = judged(curve(18, [12, 20]))
    assert found["verdict"] == "between few and most"
    # 6 below the need, and the bound is 1.5 below it: the interval must become four times as narrow
    assert sequences_needed(18, (12, 20), 32, 24) == 24 * 16
    assert found["text"].endswith(f"needs 12 to 20 of 32 directions: measure about {48 * 16} sequences")
    assert judged(curve(16, [10, 31]))["verdict"] == "between few and all"


def test_more_sequences_than_the_data_has_are_never_wanted():
    assert UNSETTLED not in judged(curve(18, [12, 20]), available=48 * 16)["text"]
    assert judged(curve(18, [12, 20]), available=48 * 16 - 1)["text"].endswith(UNSETTLED)
    # 160 tokens in 24 sequences: 320 need 96 sequences
    assert judged(curve(12, [12, 12]), tokens=160, available=96)["text"].endswith("measure about 96 sequences")
    assert judged(curve(12, [12, 12]), tokens=160, available=95)["text"].endswith(UNSETTLED)


def test_at_least_twice_as_many_sequences_are_needed():
    assert sequences_needed(12, (12, 17), 32, 24) == 2 * 24


HEADS = [{"need": need, "size": 32} for need in (0, 16, 17)]


def test_answer_has_at_most_eight_short_lines():
    lines = answer(measured(curve(12, [10, 16]), own=5, heads=HEADS))
    assert lines == [
        "model: bits per token 4; the frequency of words alone: 9",
        "Some head of the 72 needs 12 of 32 directions: few are used",
        "need: at most 12 of 32, 95 % interval 10 to 16",
        "rank 12 costs 0 bits: 0 % of the loss, 0 % of the worth",
        "rank 11 costs 0.4 bits: 10 % of the loss, 20 % of the worth",
        "from below: 5 of 32, if each sequence may choose its directions",
        "1 of 3 heads needs more than half of its directions; 1 do nothing alone",
        "basis: 24 sequences, 10,000 tokens; 24 others are held out",
    ]
    long = measured(curve(18, [12, 20]), label="l" * 200, tokens=10**7, available=100) | {
        "metric": "bits per decision of the uncut model",
        "ignorance": "the mean of all decisions",
    }
    assert max(map(len, answer(long))) == 100 and len(answer(long)) <= 8


def test_no_verdict_if_the_model_is_hardly_trained():
    assert judged(curve(12, [10, 16]), value=8.5)["verdict"] == "few"
    found = measured(curve(12, [10, 16]), value=8.6, heads=HEADS)
    assert answer(found) == [
        "model: bits per token 8.6; the frequency of words alone: 9",
        "No verdict: hardly trained, the frequency of words alone is about as good",
        "basis: 24 sequences, 10,000 tokens; 24 others are held out",
    ]
    assert judged(curve(12, [10, 16]), value=8.6, constant=None)["verdict"] == "few"


def test_no_verdict_if_attention_hardly_matters_or_the_basis_is_small():
    found = judged(curve(1, [1, 1], worth=0.009))
    assert found["verdict"] == "no verdict"
    assert found["text"] == "no verdict: patterns hardly matter here: to make all keys alike costs 0.9 % of the loss"
    assert judged(curve(1, [1, 1], worth=-0.2))["verdict"] == "no verdict"
    assert judged(curve(12, [12, 12]), tokens=320)["verdict"] == "few"
    found = judged(curve(12, [12, 12]), tokens=319)
    assert found["verdict"] == "no verdict" and "the basis has 319 tokens and needs 320" in found["text"]


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


def test_answer_is_short_and_the_tables_are_under_all(trained, capsys):
    assert cli.main(["measure", str(trained("stock")), "--sequences", "4"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 8 and "bits per token" in short[0]
    assert cli.main(["measure", str(trained("stock")), "--sequences", "4", "--all"]) == 0
    long = capsys.readouterr().out.splitlines()
    assert long[: len(short)] == short
    assert any(line.startswith("Cross: ") for line in long) and any("decoder 1" in line for line in long)
    assert max(map(len, short + long)) <= 100


def test_heads_get_a_picture_and_rows(trained, tmp_path, capsys):
    command = ["measure", str(trained("stock")), "--sequences", "8", "--quick", "--heads", "--json"]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    heads = result["cuts"]["scores"]["heads"]
    assert len(heads) == sum(layer["heads"] for layer in result["layers"])
    assert (tmp_path / "out" / "heads.png").is_file()
    assert (tmp_path / "out" / "measure.csv").read_text().count("need") == len(heads)
    axes, _ = plot_heads([result])["heads"].axes
    shown = [text.get_text() for text in axes.texts]
    assert shown == [str(head["need"] or "×") for head in heads]


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
