"""The command that compares rows of a user's results."""

import json
import sys
from pathlib import Path

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.cli import compare
from fairseq_lowrank.records.contrasts import compare_rows, resolution_of
from fairseq_lowrank.records.lines import lower_is_better
from fairseq_lowrank.records.statistics import VERDICTS

SCORES = {"mha": {1: 10.0, 2: 11.0, 3: 12.0}, "mixhead-a": {1: 11.0, 2: 13.0, 3: 15.0}, "gain": {2: 11.0, 4: 9.0}}


REST = {
    "architecture": "own",
    "flags": "",
    "updates": 1,
    "parameters": 1,
    "tokens_per_second": 1,
    "versions": {},
    "date": "",
}


def write(path, scores=SCORES, **fields):
    with open(path, "a") as file:
        for row, by_seed in scores.items():
            for seed, value in by_seed.items():
                line = REST | {"paper": "own", "table": "t", "row": row, "seed": seed, "metric": "loss", "value": value}
                file.write(json.dumps(line | {"split": "test", "smoke": False} | fields) + "\n")
    return str(path)


def compared(capsys, *arguments):
    assert cli.main(["compare", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_pair_is_compared_by_seed(tmp_path, capsys):
    (row,) = compared(capsys, write(tmp_path / "a.jsonl"), "--pair", "mixhead-a", "mha")
    assert (row["contrast"], row["mean"], row["seed_means"]) == ("mixhead-a − mha", 2, [1, 2, 3])
    assert row["t"] == pytest.approx(3.4641, abs=1e-4)
    assert row["signs_p"] == 0.25
    assert row["t_holm"] == row["t_p"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"flags": "--warmup-updates 40 --warmup-updates 400", "updates": 400}, "still in warm-up"),
        ({"flags": ["--warmup-updates=9"], "updates": 9}, "still in warm-up"),
        ({"flags": "--warmup-updates 400", "updates": 401}, None),
        ({"metric": "sacrebleu", "value": 0.9}, "less than 1 BLEU"),
        ({"metric": "sacrebleu", "value": 1.0}, None),
        ({"metric": "loss", "value": 0.9}, None),
    ],
)
def test_models_that_learned_nothing_yet_get_no_verdict(tmp_path, capsys, fields, reason):
    scores = {"mha": SCORES["mha"], "mixhead-a": SCORES["mixhead-a"]}
    (row,) = compared(capsys, write(tmp_path / "a.jsonl", scores, **fields), "--pair", "mixhead-a", "mha")
    assert any(f"{reason}, so nothing is compared: mha, mixhead-a." in note for note in row["notes"]) == bool(reason)
    values = [row[name] for name in VERDICTS]
    assert set(values) == {None} if reason else any(value is not None for value in values)


def test_several_contrasts_are_corrected_together_and_seeds_left_out_are_named(tmp_path, capsys):
    arguments = [write(tmp_path / "a.jsonl"), "--pair", "mixhead-a", "mha", "--pair", "mha", "gain"]
    first, second = compared(capsys, *arguments)
    # of the second contrast one seed is left: it has no p, and was named all the same
    assert first["t_holm"] == 2 * first["t_p"]
    assert [second[key] for key in ("seeds", "mean", "t", "low", "t_holm", "better")] == [1, 0, *[None] * 4]
    third = write(tmp_path / "b.jsonl", {"sha": {1: 1.0, 2: 0.0, 3: 3.0}})
    first, _, last = compared(capsys, third, *arguments, "--pair", "mha", "sha")
    assert last["t_p"] < first["t_p"]
    assert (last["t_holm"], first["t_holm"]) == (3 * last["t_p"], 2 * first["t_p"])
    assert any("left out: 1, 3, 4" in note for note in second["notes"])
    assert any("one seed" in note for note in second["notes"])


def test_sentences_are_paired_where_lines_have_them(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 0.0}}, sentence_values=[1, 2, 3, 4])
    write(path, {"b": {1: 0.0}}, sentence_values=[0, 0, 0, 0])
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert (row["sentences"], row["mean"]) == (4, 2.5)
    assert 1 < row["sentences_low"] < 2.5 < row["sentences_high"] < 4
    assert (row["low"], row["high"]) == (None, None)  # one seed says nothing of other seeds


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"table": "t"}, {"table": "u"}, "a and b: their sentences differ in table (t, u)"),
        ({"table": "t", "corpus": "x"}, {"table": "t", "corpus": "y"}, "sentences differ in corpus (x, y)"),
        ({"corpus": "x"}, {"corpus": "x", "split": "valid"}, "sentences differ in split (test, valid)"),
        ({"table": "t", "corpus": "x"}, {"table": "u", "corpus": "x"}, None),
    ],
)
def test_sentences_of_one_corpus_alone_are_paired(first, second, message, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 0.0}}, sentence_values=[1, 2], **first)
    write(path, {"b": {1: 0.0}}, sentence_values=[0, 0], **second)
    if message is None:
        assert compared(capsys, str(path), "--pair", "a", "b")[0]["mean"] == 1.5
    else:
        assert cli.main(["compare", str(path), "--pair", "a", "b"]) == 2
        assert message in capsys.readouterr().err


def test_an_interaction_and_logarithms(tmp_path, capsys):
    path = write(
        tmp_path / "a.jsonl",
        {"a": {1: 8.0, 2: 8.0}, "b": {1: 2.0, 2: 4.0}, "c": {1: 3.0, 2: 3.0}, "d": {1: 1.0, 2: 2.0}},
    )
    (row,) = compared(capsys, path, "--interaction", "a", "b", "c", "d")
    assert row["seed_means"] == [4, 3]
    (row,) = compared(capsys, path, "--pair", "a", "b", "--logarithm")
    assert row["seed_means"] == pytest.approx([1.3863, 0.6931], abs=1e-4)


def test_trials_are_left_out_and_the_last_line_of_a_seed_counts(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 5.0, 2: 5.0}, "b": {1: 0.0, 2: 0.0}})
    write(path, {"a": {1: 7.0}})
    write(path, {"a": {2: 100.0}}, smoke=True)
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert row["seed_means"] == [7, 5]
    assert row["notes"] == ["of lines of one row and seed, only the last is used: 1 left out"]


def test_lines_of_several_commits_are_said_to_be(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 5.0}}, commit="1" * 40)
    write(path, {"b": {1: 4.0}}, commit="2" * 40)
    assert cli.main(["compare", str(path), "--pair", "a", "b"]) == 0
    assert "lines of several commits: 1111111111, 2222222222" in capsys.readouterr().out


def test_lines_of_different_patches_are_said_to_be(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 5.0}}, patches={"LOWRANK_ENABLE": "last-update,whole-validation"})
    write(path, {"b": {1: 4.0}}, patches={"LOWRANK_ENABLE": "whole-validation"})
    write(path, {"c": {1: 4.0}})  # an older line
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    lists = "last-update,whole-validation: a (seed 1); whole-validation: b (seed 1)"
    assert f"lines were made with different patches of fairseq: {lists}" in row["notes"]
    (row,) = compared(capsys, str(path), "--pair", "a", "c")
    assert not any("patches" in note for note in row["notes"])


def test_rows_of_one_seed_from_several_processors_are_said_to_be(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    one, other = ({"cpu": cpu, "cores": 2, "threads": 1} for cpu in ("One", "Other"))
    write(path, {"a": {1: 5.0, 2: 4.0}, "b": {1: 4.0}}, machine=one)
    write(path, {"b": {2: 4.0}}, machine=other)
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    [note] = [note for note in row["notes"] if "processors" in note]
    assert note.endswith("seed 2 (One, Other)")
    write(path, {"a": {1: 3.0}}, machine=one | {"gpus": ["Third", "Third"]})
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    [note] = [note for note in row["notes"] if "processors" in note]
    assert note.endswith("seed 1, 2 (One, Other, Third)")
    alone = tmp_path / "b.jsonl"
    write(alone, {"a": {1: 5.0}, "b": {1: 4.0}}, machine=one)
    write(alone, {"a": {2: 5.0}, "b": {2: 4.0}}, machine=other)
    (row,) = compared(capsys, str(alone), "--pair", "a", "b")
    assert not any("processors" in note for note in row["notes"])


def test_a_training_that_went_on_at_another_commit_and_processor_is_of_both(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    first = {"commit": "1" * 40, "machine": {"cpu": "One"}, "versions": {}}
    write(path, {"a": {1: 5.0}}, commit="2" * 40, machine={"cpu": "Other"})
    write(path, {"b": {1: 4.0}}, commit="2" * 40, machine={"cpu": "Other"}, earlier_starts=[first])
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert "lines of several commits: 1111111111, 2222222222" in row["notes"]
    assert any(note.endswith("seed 1 (One, Other)") for note in row["notes"])


def test_files_are_written(tmp_path):
    path = write(tmp_path / "a.jsonl")
    assert cli.main(["compare", path, "--pair", "mha", "mixhead-a", "--output", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/compare.json").read_text())[0]["mean"] == -2
    assert (tmp_path / "out/compare.csv").read_text().startswith("contrast,unit,rows")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"compare.{end}" for end in ("json", "csv", "png", "pdf")
    }


def test_the_picture_has_a_line_a_contrast_and_one_picture_a_unit(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", {"x": {1: 3.0, 2: 5.0}, "y": {1: 1.0, 2: 2.0}}, metric="bleu")
    asked = [path, "--pair", "mixhead-a", "mha", "--pair", "x", "y", "--pair", "mha", "gain"]
    data = compared(capsys, *asked)
    assert [row["unit"] for row in data] == ["loss", "bleu", "loss"]
    figures = compare.plot_figures(data)
    assert list(figures) == ["compare-loss", "compare-bleu"]
    [axes] = figures["compare-loss"].axes
    labels = [label.get_text().replace("\n", "; ") for label in axes.get_yticklabels()]
    assert labels == [
        "mixhead-a − mha; neither side clearly better; 3 seeds",
        "mha − gain; neither side clearly better; 1 seed",
    ]
    # of each contrast its interval, where it has one, its seeds and its mean; and the line of no difference
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    assert drawn == [[data[0]["low"], data[0]["high"]], [1, 2, 3], [2], [0], [0], [0, 0]]
    (logarithms,) = compared(capsys, path, "--pair", "mixhead-a", "mha", "--logarithm")
    assert logarithms["unit"] == "logarithm of loss"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--pair A B"),
        (["--pair", "mha", "nothing"], "row 'nothing': no line has this row. Choose from gain, mha, mixhead-a"),
        (
            ["--pair", "mha", "mha", "--metric", "bleu"],
            "row 'mha': no line of this row has --metric bleu. Choose from: --metric loss --split test.",
        ),
        (["--pair", "zero", "mha", "--logarithm"], "--logarithm needs values above 0"),
        (["--pair", "two", "mha"], "its lines have several metrics. Choose one with --metric bleu|loss"),
        (["--pair", "mha", "late"], "mha − late: no common seed: [1, 2, 3] and [7]"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, capsys, arguments, message):
    path = tmp_path / "a.jsonl"
    write(path)
    if "two" in arguments:
        write(path, {"two": {1: 1.0}})
        write(path, {"two": {1: 1.0}}, metric="bleu")
    write(path, {"late": {7: 1.0}} if "late" in arguments else {})
    if "zero" in arguments:
        write(path, {"zero": {1: 0.0}})
    assert cli.main(["compare", str(path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_results_of_trials_alone_are_refused_as_trials(tmp_path, capsys):
    path = tmp_path / "trials.jsonl"
    write(path, smoke=True)
    assert cli.main(["compare", str(path), "--pair", "mha", "gain"]) != 0
    assert "only those of trials (SMOKE=1). Give results of full runs." in capsys.readouterr().err


def test_a_long_list_of_rows_says_how_many_are_left_out(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {f"row{number:02}": {1: 1.0} for number in range(76)})
    assert cli.main(["compare", path, "--pair", "row00", "nothing"]) == 2
    assert "Choose from row00, row01, " in (error := capsys.readouterr().err) and "row19 and 56 more." in error


def test_further_scores_of_a_line_are_compared_if_a_metric_is_chosen(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {"a": {1: 20.0, 2: 21.5}, "b": {1: 19.0, 2: 20.0}}, metric="sacrebleu")
    text = Path(path).read_text().splitlines()
    losses = [3.0, 3.1, 3.2, 3.3]
    lines = [json.loads(one) | {"valid_loss": loss} for one, loss in zip(text, losses, strict=True)]
    Path(path).write_text("".join(json.dumps(one) + "\n" for one in lines))
    (row,) = compared(capsys, path, "--pair", "a", "b")
    assert (row["unit"], row["mean"]) == ("sacrebleu", 1.25)
    (row,) = compared(capsys, path, "--pair", "a", "b", "--metric", "bits", "--split", "valid")
    assert row["mean"] == pytest.approx(-0.2) and row["lower_is_better"]


def test_bleu_has_a_test_over_sentences(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    from fairseq_lowrank.records.scores import bleu

    references = [f"the {number} dogs run over the green grass" for number in range(20)]
    path = tmp_path / "a.jsonl"
    for row, kept in (("good", 5), ("bad", 2)):
        for seed in (1, 2):
            hypotheses = [
                text if number % 6 < kept else " ".join(text.split()[seed:]) for number, text in enumerate(references)
            ]
            found = bleu(hypotheses, references)
            with path.open("a") as file:
                file.write(json.dumps({"row": row, "seed": seed, **found}) + "\n")
    (row,) = compared(capsys, str(path), "--pair", "good", "bad")
    assert row["sentences"] == 20 and 0 < row["sentences_low"] < row["mean"] < row["sentences_high"]
    assert row["sentences_p"] < 0.01
    values = [json.loads(line)["value"] for line in path.read_text().splitlines()]
    assert row["seed_means"] == pytest.approx([values[0] - values[2], values[1] - values[3]], abs=0.011)


@pytest.mark.parametrize(
    ("metric", "lower"),
    [(name, True) for name in ("Loss", "valid_loss", "bits", "bits per token", "PPL", "WER", "mse", "word error rate")]
    + [(name, False) for name in ("sacrebleu", "accuracy", "rte", "mrpc-f1", "bits a token that a wrong source costs")],
)
def test_the_better_side_follows_from_the_metric(metric, lower):
    assert lower_is_better(metric) == lower


def test_scores_are_compared_if_only_some_lines_have_sentences():
    line = {"metric": "accuracy", "split": "test"}
    lines = [line | {"row": "a", "seed": seed, "value": 0.5, "sentence_values": [0.0, 1.0]} for seed in (1, 2)]
    lines += [line | {"row": "b", "seed": seed, "value": 0.5 + seed / 4} for seed in (1, 2)]
    (found,) = compare_rows(lines, [("b", "a")], draws=1)
    assert found.comparison.seed_means == (0.25, 0.5) and found.comparison.sentences == 1
    assert "not all lines have values of sentences, so tests over sentences are left out" in found.notes


@pytest.mark.parametrize(("value", "noted"), [(0.5, False), (0.6, False), (50, True)])
def test_sentences_on_another_scale_than_the_scores_are_noted(value, noted):
    line = {"metric": "accuracy", "seed": 1, "value": value, "sentence_values": [0.0, 1.0]}
    (found,) = compare_rows([line | {"row": row} for row in "ab"], [("a", "b")], draws=1)
    assert any("means over sentences differ" in note for note in found.notes) == noted


def test_bleu_of_other_references_is_refused():
    """As of two test sets of equally many sentences, prepared one after the other under one name."""
    counts = [10, 10, 8, 6, 4, 2, 10, 9, 8, 7]
    line = {"metric": "sacrebleu", "value": 30.12, "seed": 1}
    lines = [line | {"row": row, "sentence_counts": [counts, counts]} for row in "abc"]
    lines[2]["sentence_counts"] = [counts, [10, 11, *counts[2:]]]
    assert compare_rows(lines, [("a", "b")], draws=1)
    with pytest.raises(ValueError, match=r"c: the references of their sentences have different lengths"):
        compare_rows(lines, [("a", "c")], draws=1)


def test_the_resolution_is_that_of_the_scores_that_are_compared():
    counts = {"a": [[10, 10, 8, 6, 4, 2, 10, 9, 8, 7]] * 4, "b": [[10, 10, 7, 6, 4, 2, 10, 9, 8, 7]] * 4}
    values = {("a", seed): [1.0] * (50 + seed) + [0.0] * (50 - seed) for seed in (1, 2, 3)}
    values |= {("b", seed): [1.0] * 50 + [0.0] * 50 for seed in (1, 2, 3)}
    line = {"metric": "sacrebleu", "value": 30.12}
    lines = [line | {"row": row, "seed": seed, "sentence_counts": counts[row]} for row, seed in values]
    (bleu,) = compare_rows(lines, [("a", "b")], draws=1)
    # counts of all seeds are equal: interval and note use the last decimal place of BLEU
    assert bleu.resolution == bleu.comparison.mean / bleu.comparison.t == pytest.approx(0.01)
    line = {"metric": "accuracy", "value": 1}
    lines = [line | {"row": row, "seed": seed, "sentence_values": found} for (row, seed), found in values.items()]
    (accuracy,) = compare_rows(lines, [("a", "b")], draws=1)
    # the rounded value of the lines hides the spread of the sentences' means
    assert accuracy.comparison.t == pytest.approx(2 * 3**0.5) and accuracy.resolution == pytest.approx(0.01)


def test_the_resolution_of_logarithms_is_that_of_the_least_value():
    lines = [{"value": 2.25}, {"value": 8.5}, {"value": 4.0}]
    assert resolution_of(lines) == pytest.approx(0.01)
    assert resolution_of(lines, logarithm=True) == pytest.approx(0.01 / 2.25)
    assert resolution_of([{"value": 300.0}, {"value": 20}]) == 1


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_an_interval_over_seeds_and_sentences_needs_three_seeds(tmp_path, capsys, seeds):
    path = tmp_path / "a.jsonl"
    for seed in range(seeds):
        write(path, {"a": {seed: 2.0}}, sentence_values=[1, 2 + seed, 3])
        write(path, {"b": {seed: 1.0}}, sentence_values=[1, 1, 1])
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert (row["both_low"] is None) == (seeds < 3)
    assert cli.main(["compare", str(path), "--pair", "a", "b"]) == 0
    printed = capsys.readouterr().out
    assert (compare.NEITHER in printed) == (seeds < 3) and ("95 % over both" in printed) == (seeds == 3)


def test_lines_without_a_corpus_are_not_said_to_differ_in_it(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: 5.0, 2: 6.0}}, corpus="multi30k")
    write(path, {"b": {1: 4.0, 2: 5.5}})
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert row["notes"] == []


def test_the_heading_names_metric_data_and_seeds_in_every_format(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {"a_1": {1: 5.0, 2: 6.5}, "b": {1: 3.0, 2: 3.5}}, corpus="mine")
    about = "Differences of loss (less is better) on mine test, seeds 1, 2."
    for form in ("text", "markdown", "latex"):
        output = tmp_path / form
        arguments = ["compare", path, "--pair", "a_1", "b", "--format", form, "--output", str(output)]
        assert cli.main(arguments) == 0
        found = capsys.readouterr().out
        assert about in found
        written = {"text": set(), "markdown": {"compare.md"}, "latex": {"compare.tex"}}[form]
        assert {file.name for file in output.iterdir() if file.suffix in (".md", ".tex")} == written
    assert r"a\_1 $-$ b & 2 & 2.5 & $-$3.853 \ldots{} 8.853 &" in found and found.count(r"\\") == 2
    assert (output / "compare.tex").read_text() == found


def test_a_broken_line_is_named_and_left_out(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write(path, {"a": {1: "high"}})
    write(path, {"a": {2: 1.0}})
    assert cli.main(["compare", str(path), "--pair", "a", "a"]) == 0
    assert f'{path}, line 1: value is "high", expected a number' in capsys.readouterr().err


def test_rows_that_were_scored_in_different_ways_are_said_to_be(tmp_path, capsys):
    path, losses = tmp_path / "a.jsonl", {"fit": {"bits": 2, "sentence_values": [1, 3]}}
    write(path, {"a": {1: 30.0, 2: 31.0}}, metric="sacrebleu", scoring="--beam 5", losses=losses)
    write(path, {"b": {1: 29.0}}, metric="sacrebleu", losses=losses)  # of before lines said so
    write(path, {"b": {2: 29.5}}, metric="sacrebleu", scoring="--beam 5", losses=losses)

    def said(metric):
        (row,) = compared(capsys, str(path), "--metric", metric, "--pair", "a", "b")
        return [note for note in row["notes"] if "scored" in note]

    assert said("sacrebleu") == []
    write(path, {"b": {2: 29.5}}, metric="sacrebleu", scoring="", losses=losses)
    assert said("sacrebleu") == ["lines were scored in different ways: --beam 5; no flags"]
    assert said("bits") == []


@pytest.mark.parametrize(
    ("metric", "pair", "interaction"),
    [("loss", "low", "low over high"), ("accuracy", "high", "high over low"), ("error rate", "low", "low over high")],
)
def test_the_better_side_follows_the_metric(tmp_path, capsys, metric, pair, interaction):
    scores = {"high": {1: 8.0, 2: 9.1, 3: 8.9}, "low": {1: 1.0, 2: 2.0, 3: 2.0}, "same": {1: 1.0, 2: 1.0, 3: 1.0}}
    path = write(tmp_path / "a.jsonl", scores, metric=metric)
    asked = ["--pair", "high", "low", "--pair", "low", "high", "--pair", "low", "same"]
    first, turned, even, both = compared(capsys, path, *asked, "--interaction", "high", "low", "same", "same")
    assert (first["better"], turned["better"], even["better"]) == (pair, pair, None)
    assert both["better"] == interaction


def test_lines_need_only_row_seed_metric_and_value(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    for row, values in {"a": [3.0, 4.0], "b": [1.0, 2.01]}.items():
        for seed, value in enumerate(values):
            line = {"row": row, "seed": seed, "metric": "bleu", "value": value, "sentence_values": [value, value + 1]}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    path.write_text(path.read_text() + json.dumps({"row": "a", "seed": 3, "metric": "bleu"}) + "\n")
    (row,) = compared(capsys, str(path), "--pair", "a", "b")
    assert (row["mean"], row["seeds"], row["sentences"], row["better"]) == (1.995, 2, 2, "a")


def test_compare_needs_neither_scipy_nor_matplotlib_for_text(tmp_path, capsys, monkeypatch):
    for package in ("scipy", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    path = write(tmp_path / "a.jsonl", {"a": {1: 5.0, 2: 6.0}, "b": {1: 3.0, 2: 3.5}})
    assert cli.main(["compare", path, "--pair", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:5] == ["a", "−", "b", "2", "2.25"]


def test_losses_a_sentence_of_a_training_are_lines_of_their_own(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    for row, values in {"a": [1, 2, 3], "b": [1, 1, 1]}.items():
        losses = {"fit": {"bits": sum(values) / 3, "sentence_values": values}}
        write(path, {row: {1: 30.0}}, metric="sacrebleu", losses=losses)
    (row,) = compared(capsys, str(path), "--pair", "a", "b", "--metric", "bits", "--split", "fit")
    assert (row["mean"], row["sentences"]) == (1, 3)
    (row,) = compared(capsys, str(path), "--pair", "a", "b", "--metric", "sacrebleu")
    assert (row["mean"], row["sentences"]) == (0, 1)


SIGNED = {"metric": "sacrebleu", "signature": "case:mixed|tok:13a|version:2.6.0", "text": "tokenised"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": "case:lc|tok:13a|version:2.6.0"}, "differ in signature (case:lc|tok:13a; case:mixed|tok:13a)"),
        ({"text": "detokenised"}, "differ in text (detokenised; tokenised)"),
        ({"metric": "perplexity"}, "differ in metric (perplexity; sacrebleu)"),
    ],
)
@pytest.mark.parametrize("asked", [["--pair", "a", "b"], ["--interaction", "a", "a", "b", "b"]])
def test_scores_of_different_units_are_refused(tmp_path, capsys, change, message, asked):
    path = write(tmp_path / "a.jsonl", {"a": {1: 20.0, 2: 21.5}}, **SIGNED)
    write(tmp_path / "a.jsonl", {"b": {1: 19.0, 2: 20.0}}, **SIGNED | change)
    assert cli.main(["compare", path, *asked]) == 2
    assert message in capsys.readouterr().err


def test_what_may_change_a_unit_is_named(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", {"a": {1: 20.0}}, **SIGNED, valid_loss=2.0)
    newer = SIGNED | {"signature": "case:mixed|tok:13a|version:2.7.0"}
    write(tmp_path / "a.jsonl", {"b": {1: 19.0}}, **newer, valid_loss=2.5)
    (row,) = compared(capsys, path, "--pair", "a", "b")
    assert any("several versions of sacrebleu" in note for note in row["notes"])
    (row,) = compared(capsys, path, "--pair", "a", "b", "--metric", "bits", "--split", "valid")
    assert not any("sacrebleu" in note for note in row["notes"])
    path = write(tmp_path / "b.jsonl", {"a": {1: 20.0}}, metric="perplexity", tokens=100)
    write(tmp_path / "b.jsonl", {"b": {1: 19.0}}, metric="perplexity", tokens=300)
    (row,) = compared(capsys, path, "--pair", "a", "b")
    assert "rows were scored on different numbers of tokens, so their units may differ: 100, 300" in row["notes"]
