import json
import re
import sys

import pytest

from experiments.__main__ import main
from experiments.papers import comparison, values
from experiments.papers.curves import by_plot
from experiments.papers.tables import as_markdown, columns
from fairseq_lowrank.records import formats

PAPERS = values.load_papers()
ARCHITECTURE = "lowrank_transformer_iwslt_de_en"


def line(row, value, *, paper="mixhead", table="table4", metric="sacrebleu", split="test", **changes):
    return {
        "paper": paper,
        "table": table,
        "row": row,
        "architecture": ARCHITECTURE,
        "flags": "",
        "seed": 1,
        "updates": 1000,
        "parameters": 40_000_000,
        "metric": metric,
        "value": value,
        "split": split,
        "tokens_per_second": 3000,
        "versions": {},
        "smoke": False,
        "date": "2026-01-01",
        **changes,
    }


def test_scores_of_other_searches_are_not_averaged_and_rows_that_differ_in_them_are_said():
    lines = [
        line("h4-mha", 20.0),  # older lines do not say
        line("h4-mha", 30.0, seed=2, scoring="--beam 1"),
        line("h4-mha", 24.0, seed=3, scoring="--beam 5"),
        line("h4-mixhead-b", 25.0, scoring="--beam 5"),
    ]
    [table] = comparison.build_report(lines, values.load_papers())
    [score] = rows_of(table)["h4-mha"]["ours"]["scores"]
    assert score["mean"] == 22 and not any("scored" in note for note in table["notes"])
    assert rows_of(table)["h4-mha"]["ours"]["left_out"] == ["scored with --beam 1: seed 2"]
    header, cells = columns(table)
    assert "scored with --beam 1: seed 2" in cells[0][header.index("left out")]
    [table] = comparison.build_report([*lines, line("h4-mixhead-b", 25.0, seed=2, scoring="")], values.load_papers())
    assert "Rows were scored in different ways: h4-mha with --beam 5; h4-mixhead-b with no flags" in table["notes"]


def test_models_that_learned_nothing_yet_are_named_below_the_table():
    lines = [line("h4-mha", 0.3), line("h4-mixhead-b", 25.0, flags="--warmup-updates 4000", updates=4000)]
    tables_of_report = comparison.build_report(lines, values.load_papers())
    text = as_markdown(tables_of_report, {})
    below = text[text.rindex("|") :]
    assert (
        "less than 1 BLEU, so nothing is compared: h4-mha." in below
        and "warm-up, so nothing is compared: h4-mixhead-b" in below
    )
    trained = comparison.build_report([line("h4-mha", 30.0)], values.load_papers())
    assert trained[0]["below"] == []


def test_rows_of_the_same_words_in_another_order_stay_apart():
    names = ["enc-6-dec-2-mha", "enc-2-dec-6-mha", "mha-enc-6-dec-2"]
    lines = [line(name, 10.0 * place, table="t", seed=place) for place, name in enumerate(names)]
    [table] = comparison.build_report(lines, PAPERS)
    assert {name: row["ours"]["seeds"] for name, row in rows_of(table).items()} == {names[1]: [1], names[2]: [0, 2]}


def test_rows_of_a_user_that_differ_in_case_or_a_sign_stay_apart():
    names = ["base-A", "base-a", "base_a"]
    [table] = comparison.build_report([line(name, 1.0, table="t") for name in names], PAPERS)
    assert list(rows_of(table)) == names


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("accuracy", [0.91234, 0.5], ["0.912", "0.500"]),
        ("mse", [0.00012, 3.0], ["0.000120", "3.000000"]),
        ("mse", [0.0], ["0.00"]),
        ("perplexity", [12.345], ["12.35"]),
        ("sacrebleu", [0.5], ["0.50"]),
    ],
)
def test_values_below_one_have_three_digits(metric, values, shown):
    lines = [line(f"row{place}", value, table="t", metric=metric) for place, value in enumerate(values)]
    header, rows = columns(comparison.build_report(lines, PAPERS)[0])
    column = next(place for place, name in enumerate(header) if name.startswith("test "))
    assert [row[column] for row in rows] == shown


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"signature": "tok:13a|version:1"}, {"signature": "tok:zh|version:1"}, "have different signatures of BLEU"),
        ({"text": "tokenised"}, {"text": "detokenised"}, "were scored on different texts"),
        ({"corpus": "x"}, {"corpus": "y"}, "are of different corpora"),
        (
            {"tokens": 1, "metric": "perplexity"},
            {"tokens": 2, "metric": "perplexity"},
            "on different numbers of tokens",
        ),
    ],
)
def test_scores_that_came_about_otherwise_are_neither_averaged_nor_compared(first, second, words):
    lines = [line("h4-mha", 20.0, **first), line("h4-mha", 30.0, seed=2, **first), line("h4-mixhead-b", 25.0, **first)]
    [table] = comparison.build_report(lines, values.load_papers())
    assert not any("Rows" in note for note in table["notes"]) and not rows_of(table)["h4-mha"]["ours"]["left_out"]
    assert first.get("metric") or rows_of(table)["h4-mixhead-b"]["ours"]["scores"][0]["prr"] == 125
    lines[1:] = [lines[1] | second, lines[2] | first]
    [table] = comparison.build_report(lines, values.load_papers())
    [score] = rows_of(table)["h4-mha"]["ours"]["scores"]
    assert score["mean"] == 30 and len(rows_of(table)["h4-mha"]["ours"]["left_out"]) == 1
    assert any(words in note for note in table["notes"])
    assert "prr" not in rows_of(table)["h4-mixhead-b"]["ours"]["scores"][0]


def test_another_version_of_sacrebleu_is_no_other_way():
    lines = [line("h4-mha", 20.0 + seed, seed=seed, signature=f"tok:13a|version:{seed}") for seed in (1, 2)]
    [table] = comparison.build_report(lines, values.load_papers())
    assert rows_of(table)["h4-mha"]["ours"]["seeds"] == [1, 2] and not rows_of(table)["h4-mha"]["ours"]["left_out"]


def rows_of(table):
    return {row["row"]: row for row in table["rows"]}


def only(lines, **chosen):
    (table,) = comparison.build_report(lines, PAPERS, **chosen)
    return rows_of(table)


ENCODER = {"sha": 8_847_360, "mhe-add": 8_875_008, "mhe-mul": 8_875_008, "mqa": 15_335_424, "mha": 28_311_552}


@pytest.mark.parametrize(
    "preset, task, expected",
    [("mhe-mul", "squad1.1", 13.19), ("mhe-mul", "squad2.0", 22.25), ("mqa", "squad1.1", 0.07)],
)
def test_peop_of_the_posters_scores_is_the_posters_peop(preset, task, expected):
    published = rows_of(PAPERS["mhe"]["tables"]["encoder"])
    score, sha = (published[row]["values"][task]["valid"] for row in (preset, "sha"))
    assert (
        round(comparison.peop(score, sha, ENCODER[preset], ENCODER["sha"]), 2)
        == expected
        == published[preset]["peop"][task]
    )


def test_every_peop_of_the_poster_follows_from_scores_within_their_rounding():
    published = rows_of(PAPERS["mhe"]["tables"]["encoder"])
    for preset in ("mhe-add", "mhe-mul"):
        for task, printed in published[preset]["peop"].items():
            score, sha = (published[row]["values"][task]["valid"] for row in (preset, "sha"))
            low, high = (
                comparison.peop(score + change, sha - change, ENCODER[preset], ENCODER["sha"])
                for change in (-0.05, 0.05)
            )
            assert low - 0.01 <= printed <= high + 0.01, (preset, task)


@pytest.mark.parametrize("table", ["encoder", "wmt14"])
def test_every_prr_of_the_poster_follows_from_its_scores_within_their_rounding(table):
    published = rows_of(PAPERS["mhe"]["tables"][table])
    checked = 0
    for name, row in published.items():
        rest, _ = values.split_row(name)
        baseline = published[f"{rest}-mha".strip("-")]
        for metric, printed in row.get("prr", {}).items():
            (split,) = row["values"][metric]
            score, mha = row["values"][metric][split], baseline["values"][metric][split]
            assert abs(comparison.prr(score, mha) - printed) < 100 * 0.1 / mha + 0.05, (name, metric)
            checked += 1
    assert checked == {"encoder": 28, "wmt14": 7}[table]


def test_prr_and_peop_refuse_scores_they_are_not_made_for():
    with pytest.raises(ValueError, match="expected a positive score"):
        comparison.prr(3.0, 0.0)
    with pytest.raises(ValueError, match="a count other than parameters=5"):
        comparison.peop(80.0, 79.0, 5, 5)


def test_values_read_from_the_papers_agree_with_their_text():
    table4 = rows_of(PAPERS["mixhead"]["tables"]["table4"])
    test = {name: row["values"]["bleu"]["test"] for name, row in table4.items()}
    # section 4.2.4: the gap narrows from 0.92/0.51 to 0.02/0.25
    for heads, gaps in (("h4", (0.92, 0.51)), ("h32", (0.02, 0.25))):
        found = [test[f"{heads}-mha"] - test[f"{heads}-mixhead-{kind}"] for kind in "ab"]
        assert found == pytest.approx(gaps)
    for table, best in (("table1", 19.47), ("table2", 61.88), ("table3", 29.51), ("table7", 20.18), ("table10", 19.22)):
        rows = PAPERS["mixhead"]["tables"][table]["rows"]
        assert min(row["values"]["perplexity"]["test"] for row in rows) == best


def test_extra_parameters_in_the_papers_follow_from_their_sizes():
    checked = 0
    for table in PAPERS["mixhead"]["tables"].values():
        for row in table["rows"]:
            if extra := row.get("extra_parameters"):
                size = row["settings"]
                layers, heads, head_dim = (
                    size[key] for key in ("decoder-layers", "decoder-attention-heads", "head-dim")
                )
                per_layer = heads * heads + (head_dim * heads if "mixhead-b" in row["row"] else 0)
                assert extra == layers * per_layer, row["row"]
                checked += 1
    assert checked == 30


def test_a_row_stands_beside_the_papers_value_whichever_way_its_name_is_ordered():
    rows = only([line("mixhead-a-h64", 31.0, table="4")])
    assert rows["h64-mixhead-a"]["ours"]["scores"][0]["mean"] == 31.0
    assert rows["h64-mixhead-a"]["published"]["values"]["bleu"]["test"] == 31.32
    assert rows["h64-mha"]["ours"] is None


def test_seeds_give_mean_and_spread_and_a_repeated_run_counts_once():
    rows = only([line("h4-mha", 10.0), line("h4-mha", 34.0), line("h4-mha", 36.0, seed=2)])
    (score,) = rows["h4-mha"]["ours"]["scores"]
    assert score["mean"] == 35.0
    assert score["spread"] == pytest.approx(2**0.5)
    assert rows["h4-mha"]["ours"]["seeds"] == [1, 2]


def test_runs_at_another_scale_say_in_what_they_differ():
    flags = "--encoder-attention-heads 4 --encoder-layers 6 --encoder-layers 2 --share-all-embeddings"
    marks = only([line("h4-mha", 20.0, flags=flags, smoke=True)])["h4-mha"]["ours"]["other_scale"]
    assert marks == ["smoke run", "encoder-layers 2 (paper 6)"]
    sizes = only([line("vanilla-mha", 30.0, table="table1", metric="perplexity", parameters=9_000_000)])
    assert sizes["vanilla-mha"]["ours"]["other_scale"] == [
        f"{ARCHITECTURE} (paper: lowrank_transformer_lm_wiki103_vanilla)",
        "9.00M parameters (paper 156M)",
    ]
    updates = only([line("base-mha", 24.0, paper="mhe", table="wmt14", flags="--encoder-layers=6")])
    assert updates["base-mha"]["ours"]["other_scale"] == ["max-update 1000 (paper 100000)"]


def test_a_run_with_another_size_of_attention_than_the_papers_is_marked():
    row = {"paper": "mhe", "table": "wmt14", "updates": 100_000}
    for count, marks in ((99_999_999, ["100.00M attention parameters (paper 6.52M)"]), (6_515_712, [])):
        rows = only([line("base-mhe-mul", 23.0, attention_parameters=count, **row)])
        assert rows["base-mhe-mul"]["ours"]["other_scale"] == marks
    assert only([line("base-mhe-mul", 23.0, **row)])["base-mhe-mul"]["ours"]["other_scale"] == []


def test_attention_parameters_stand_beside_the_papers():
    lines = [line("base-mha", 24.0, paper="mhe", table="wmt14", parameters=60_000_000, attention_parameters=18_874_368)]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    assert header[1:4] == ["parameters", "attention parameters", "attention parameters, paper"]
    assert cells[0][1:4] == ["60.00M", "18.87M", "18.87M"]
    assert cells[1][1:4] == ["", "", "6.52M"]


@pytest.mark.parametrize(
    "flags, updates, epochs, marks",
    [
        ("--max-update 286000", 1000, 1, ["1000 of 286000 updates"]),
        ("--max-update 286000", 286_000, 9, []),
        ("--max-update 50000 --max-update 300000", 300_000, 9, []),
        ("--max-update=286000 --max-update 1000", 1000, 1, ["1000 of 286000 updates"]),
        ("--max-update 286000 --max-epoch 1", 1000, 1, ["1000 of 286000 updates"]),
        ("--max-update 2000 --max-epoch 50", 2000, 1, []),
        ("--max-epoch 50", 1000, 50, []),
        ("--max-epoch 50 --max-update 1000", 1000, 2, ["2 of 50 epochs"]),
        ("--max-epoch 50", 1000, 0, []),
    ],
)
def test_a_run_that_ended_before_its_recipes_end_is_marked(flags, updates, epochs, marks):
    curve = [{"updates": updates, "train_loss": 2.0, "valid_loss": 2.0}] * epochs
    rows = only([line("h4-mha", 34.0, flags=flags, updates=updates, curve=curve)])
    assert rows["h4-mha"]["ours"]["other_scale"] == marks


def test_runs_in_the_blocks_of_the_papers_text_stand_beside_table_3():
    gbw = {"architecture": "lowrank_transformer_lm_gbw", "parameters": 330_500_000}
    flags = "--tokens-per-sample 512"
    lines = [line("baevski-mha", 38.0, table="table3-n512", metric="perplexity", flags=flags, **gbw)]
    (table,) = comparison.build_report(lines, PAPERS)
    assert table["title"].endswith("n 512, as the text says")
    assert rows_of(table)["baevski-mha"]["ours"]["other_scale"] == []
    same = rows_of(PAPERS["mixhead"]["tables"]["table3"])
    for name, row in rows_of(table).items():
        assert row["published"]["values"] == same[name]["values"]


def test_a_run_at_the_papers_scale_carries_no_mark():
    flags = "--encoder-attention-heads 4 --encoder-layers 6 --decoder-ffn-embed-dim=1024"
    assert only([line("h4-mha", 34.0, flags=flags)])["h4-mha"]["ours"]["other_scale"] == []


def test_a_smoke_run_gives_way_to_a_real_one():
    rows = only([line("h4-mha", 34.0), line("h4-mha", 1.0, smoke=True, seed=3)])
    assert rows["h4-mha"]["ours"]["scores"][0]["mean"] == 34.0


def test_runs_of_another_scale_are_not_averaged_with_the_papers():
    short = {"flags": "--max-update 50000 --max-update 500", "updates": 500}
    rows = only([line("h4-mha", 34.0), line("h4-mha", 9.0, seed=2, **short)])["h4-mha"]["ours"]
    assert (rows["scores"][0]["mean"], rows["other_scale"], rows["seeds"]) == (34.0, [], [1])
    rows = only([line("h4-mha", 9.0, seed=2, **short), line("h4-mha", 8.0, seed=3, **short)])["h4-mha"]["ours"]
    assert (rows["scores"][0]["mean"], rows["other_scale"]) == (8.5, ["500 of 50000 updates"])
    (own,) = only([line("mha", 9.0, paper="ours", table="any", **short)]).values()
    assert own["ours"]["other_scale"] == ["500 of 50000 updates"]


FLAGS = "--max-update 100"


def fine_tuned(row, task, value, metric, **changes):
    flags = {"table": "table5", "metric": metric, "split": "valid", "flags": FLAGS, "updates": 100}
    point = {"updates": changes.get("updates", 100), "train_loss": 1.0, "valid_loss": value / 50}
    return line(row, value, task=task, curve=[point | {"updates": 1}, point], **flags | changes)


def test_tasks_of_a_row_stand_side_by_side_whatever_the_scale_of_each():
    lines = [
        fine_tuned("mha", "mnli", 80.0, "mnli-m"),
        fine_tuned("mha", "cola", 50.0, "cola", updates=60),
        fine_tuned("mha", "rte", 60.0, "rte", updates=70, smoke=False),
    ]
    ours = only(lines)["mha"]["ours"]
    assert {score["metric"]: score["mean"] for score in ours["scores"]} == {"mnli-m": 80.0, "cola": 50.0, "rte": 60.0}
    assert ours["other_scale"] == ["cola: 60 of 100 updates", "rte: 70 of 100 updates"]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    shown = {cell[0]: dict(zip(header, cell, strict=True)) for cell in cells}["BERT-base, the authors' run"]
    assert shown["updates"] == "60 to 100"
    # within a task the rule is that of rows: the paper's scale wins, and what is the same everywhere is said once
    again = fine_tuned("mha", "cola", 52.0, "cola", seed=2)
    assert only([*lines, again])["mha"]["ours"]["other_scale"] == ["rte: 70 of 100 updates"]
    smoke = [{**one, "smoke": True, "updates": 10} for one in lines]
    assert only(smoke)["mha"]["ours"]["other_scale"] == ["smoke run", "10 of 100 updates"]


def test_scores_of_development_parts_stand_beside_the_papers_of_the_test_server():
    header, (_, cells, _) = columns(comparison.build_report([fine_tuned("mha", "cola", 51.0, "cola")], PAPERS)[0])
    place = header.index("valid cola")
    assert header[place + 1] == "test cola, paper" and cells[place : place + 2] == ["51.00", "52.6"]
    assert cells[header.index("test rte, paper")] == "68.0"  # as printed


def test_ratios_stand_behind_the_score_and_beside_the_papers():
    counts = {"table": "encoder", "paper": "mhe", "metric": "squad1.1", "split": "valid"}
    rows = {"sha": (80.0, 9_000_000), "mha": (88.0, 28_000_000), "mhe-mul": (84.0, 9_100_000)}
    lines = [line(row, value, attention_parameters=count, **counts) for row, (value, count) in rows.items()]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    place = header.index("valid squad1.1")
    own = ["valid squad1.1", "PRR squad1.1", "PEoP squad1.1"]
    assert header[place : place + 6] == own + [f"{name}, paper" for name in own]
    assert cells[-1][place : place + 6] == ["84.00", "95.45", "4.50", "85.9", "97.0", "13.19"]
    assert header.count("PRR squad1.1, paper") == 1


def test_each_task_has_a_plot_of_its_own():
    lines = [fine_tuned(row, task, 60.0, task) for row in ("mha", "mixhead-b") for task in ("rte", "cola")]
    tables = comparison.build_report(lines, PAPERS)
    plots = by_plot(tables)
    assert {name: len(plot) for name, plot in plots.items()} == {"mixhead-table5-rte": 2, "mixhead-table5-cola": 2}
    text = as_markdown(tables, {"mixhead-table5-rte": "rte.png", "mixhead-table5-cola": "cola.png"})
    assert "![Learning curves](rte.png)" in text and "![Learning curves](cola.png)" in text


def test_a_row_run_with_another_attention_than_its_name_says_is_marked():
    for attention, marks in (("mixhead-b", ["attention mixhead-b (row: mixhead-a)"]), ("mixhead-a", [])):
        rows = only([line("h4-mixhead-a", 34.0, flags=f"--attention {attention}")])
        assert rows["h4-mixhead-a"]["ours"]["other_scale"] == marks


def test_ratios_compare_rows_that_differ_in_the_preset_alone():
    lines = [line("h4-mha", 40.0), line("h4-mixhead-a", 38.0), line("h32-mixhead-a", 30.0)]
    rows = only(lines)
    assert rows["h4-mixhead-a"]["ours"]["scores"][0]["prr"] == pytest.approx(95.0)
    assert "prr" not in rows["h32-mixhead-a"]["ours"]["scores"][0]
    smoke = only([line("h4-mha", 40.0), line("h4-mixhead-a", 2.0, smoke=True)])
    assert "prr" not in smoke["h4-mixhead-a"]["ours"]["scores"][0]


def test_ratios_are_of_the_seeds_that_both_rows_have():
    lines = [line("h4-mha", 30.0), line("h4-mha", 20.0, seed=2), line("h4-mixhead-a", 29.0)]
    ours = only(lines)["h4-mixhead-a"]["ours"]
    assert ours["scores"][0]["prr"] == pytest.approx(100 * 29 / 30)
    assert ours["left_out"] == ["of PRR, because not both rows have it: seed 2"]
    apart = only([line("h4-mha", 30.0), line("h4-mixhead-a", 29.0, seed=2)])["h4-mixhead-a"]["ours"]
    assert "prr" not in apart["scores"][0]
    assert only([line("h4-mha", 30.0), line("h4-mixhead-a", 29.0)])["h4-mixhead-a"]["ours"]["left_out"] == []


@pytest.mark.parametrize(("updates", "compared"), [(50_000, True), (40_000, True), (500, False)])
def test_ratios_compare_rows_that_were_trained_about_as_long(updates, compared):
    flags = {"flags": "--max-update 50000"}
    lines = [line("h4-mha", 40.0, updates=50_000, **flags), line("h4-mixhead-a", 38.0, updates=updates, **flags)]
    ours = only(lines)["h4-mixhead-a"]["ours"]
    assert ours["completed"] == updates / 50_000
    assert ("prr" in ours["scores"][0]) == compared


def test_perplexity_has_no_retention_ratio():
    rows = only([line(row, 20.0, table="table7", metric="perplexity") for row in ("mha", "mixhead-a")])
    assert "prr" not in rows["mixhead-a"]["ours"]["scores"][0]


def test_peop_is_reported_where_single_head_attention_was_run_too():
    rows = only(
        [
            line(
                row,
                value,
                paper="mhe",
                table="encoder",
                metric="squad1.1",
                split="valid",
                attention_parameters=ENCODER[row],
            )
            for row, value in (("sha", 82.5), ("mhe-mul", 85.9))
        ]
    )
    assert rows["mhe-mul"]["ours"]["scores"][0]["peop"] == pytest.approx(13.19, abs=0.005)


def test_tables_that_the_paper_calls_incomparable_stay_apart():
    lines = [line("mha", 22.0, table="table7", metric="perplexity"), line("h8-mha", 23.0, table=8, metric="perplexity")]
    tables = comparison.build_report(lines, PAPERS)
    assert [table["table"] for table in tables] == ["table7", "table8"]
    assert all("comparable only within itself" in " ".join(table["notes"]) for table in tables)
    assert [sum(row["ours"] is not None for row in table["rows"]) for table in tables] == [1, 1]
    curves = [{"updates": updates, "train_loss": 2.0, "valid_loss": 2.0} for updates in (1, 2)]
    plots = by_plot(comparison.build_report([{**line, "curve": curves} for line in lines], PAPERS))
    assert {name: len(plot) for name, plot in plots.items()} == {"mixhead-table7": 1, "mixhead-table8": 1}


def test_scores_of_the_validation_set_in_the_same_line_are_shown_beside_the_papers():
    (table,) = comparison.build_report([line("h4-mha", 34.0, tokenised_bleu=34.5, valid_tokenised_bleu=35.0)], PAPERS)
    header, cells = columns(table)
    shown = dict(zip(header, cells[0], strict=True))
    assert shown["test BLEU (sacrebleu)"] == "34.00" and shown["test BLEU (tokenised)"] == "34.50"
    assert (shown["valid BLEU (tokenised)"], shown["valid BLEU, paper"]) == ("35.00", "35.28")
    lines = [line("mha", 21.0, table="table7", metric="perplexity", valid_perplexity=22.0)]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    shown = dict(zip(header, cells[0], strict=True))
    assert (shown["valid perplexity"], shown["valid perplexity, paper"]) == ("22.00", "21.82")


def test_losses_a_sentence_are_shown_in_bits_to_three_decimals_with_their_spread():
    def losses(fit):
        return {"fit": {"bits": fit, "sentence_values": [fit]}, "test": {"bits": 3.0, "sentence_values": [3]}}

    lines = [line("mha", 20.0, losses=losses(2.0)), line("mha", 20.0, seed=2, losses=losses(2.01))]
    header, cells = columns(comparison.build_report([{**one, "table": "own"} for one in lines], PAPERS)[0])
    shown = dict(zip(header, cells[0], strict=True))
    assert shown["fit loss (bits per token)"] == "2.005 ± 0.007"
    assert shown["test loss (bits per token)"] == "3.000 ± 0.000"


def test_perplexities_of_training_stand_beside_those_of_the_papers_text():
    curve = [
        {"updates": 9, "train_loss": 5.0, "valid_loss": 4.5},
        {"updates": 18, "train_loss": 4.25, "valid_loss": 4.4},
    ]
    lines = [line(row, 21.0, table="table8", metric="perplexity", curve=curve) for row in ("h8-mha", "h2-mha")]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    shown = {cell[0]: dict(zip(header, cell, strict=True)) for cell in cells}
    first, last = shown["Baseline, h 8"], shown["Baseline, h 2"]
    assert (first["train perplexity"], first["train perplexity, paper"]) == ("19.03", "19.9")  # 2^4.25
    assert (last["train perplexity"], last["train perplexity, paper"]) == ("", "")
    # section 4.4.3: smaller with 10 heads than with 8, for each of the three
    train = {
        row["row"]: row["values"]["perplexity"]["train"]
        for row in PAPERS["mixhead"]["tables"]["table8"]["rows"]
        if "train" in row["values"]["perplexity"]
    }
    assert len(train) == 6
    assert all(train[f"h10-{kind}"] < train[f"h8-{kind}"] for kind in ("mha", "mixhead-a", "mixhead-b"))


def test_a_speed_is_shown_only_where_it_was_taken_alone():
    lines = [
        line("mha", 22.0, table="table7", alone=True),
        line("mixhead-a", 21.0, table="table7", alone=False, tokens_per_second=4500),
        line("avghead", 21.0, table="table7", tokens_per_second=4500),
    ]
    header, cells = columns(comparison.build_report(lines, PAPERS)[0])
    assert {row[0]: row[header.index("tokens/s")] for row in cells if row[header.index("updates")]} == {
        "Baseline": "3000",
        "Mixhead A": "",
        "Avghead": "",
    }
    header, _ = columns(comparison.build_report(lines[1:], PAPERS)[0])
    assert "tokens/s" not in header


def test_markdown_shows_hostile_names_as_text():
    lines = [line("<script>alert(1)</script>|x", 3.0, paper="own", table="<b>")]
    tables = comparison.build_report(lines, PAPERS)
    markdown = as_markdown(tables, {})
    assert "<script>" not in markdown and "<b>" not in markdown
    row = next(text for text in markdown.splitlines() if "alert" in text)
    header = next(text for text in markdown.splitlines() if text.startswith("|"))
    assert row.replace("\\|", "").count("|") == header.count("|")


@pytest.mark.parametrize(
    "name, kept",
    [
        ("[text](javascript:1)", "\\[text\\](javascript:1)"),
        ("![x](http://a.invalid)", "!\\[x\\](http&#58;//a.invalid)"),
        ("see https://a.invalid", "see https&#58;//a.invalid"),
        ("WWW.a.invalid", "www&#46;a.invalid"),
        ("`code` *bold* ~no~", "\\`code\\` \\*bold\\* \\~no\\~"),
        ("a\\|b", "a\\\\\\|b"),
        ("\x1b[31mred\u202e", " \\[31mred "),
        ("test_2016_flickr, h32-mixhead-a", "test_2016_flickr, h32-mixhead-a"),
    ],
)
def test_markdown_keeps_names_as_text(name, kept):
    assert formats.escape(name) == kept


def test_rows_without_positions_stand_in_the_order_of_the_file():
    names = ["stock", "mha-h32", "mha", "mixhead-b"]
    lines = [line(name, 30.0, paper="own", table="any") for name in [*names, "stock"]]
    assert list(only([*lines, line("gain", 30.0, paper="own", table="any", position=0)])) == ["gain", *names]


def test_rows_of_two_recipes_in_one_table_do_not_interleave():
    rows = {"a": 0, "other-b": 1, "c": 2, "b": 1, "other-a": 0}
    lines = [line(name, 30.0, paper="own", table="any", position=place) for name, place in rows.items()]
    assert list(only(lines)) == ["a", "other-b", "c", "other-a", "b"]


def test_rows_stand_at_the_positions_that_their_lines_tell():
    names = ["mixhead-b-h32", "gain", "mha", "fixedhead"]
    lines = [
        line(name, 30.0, paper="own", table="any", position=place)
        for name, place in zip(names, (3, 1, 0, 2), strict=True)
    ]
    assert list(only(lines)) == ["mha", "gain", "fixedhead", "mixhead-b-h32"]


def test_flags_with_an_open_quotation_are_read_as_words():
    assert comparison.flags_of({"flags": "--arch x --note 'open"}) == [("arch", "x"), ("note", "'open")]


def test_the_command_writes_markdown_and_curves(tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    curve = [{"updates": 10 * step, "train_loss": 9.0 - step, "valid_loss": 9.2 - step} for step in range(1, 4)]
    lines = [line("h4-mha", 34.1, tokenised_bleu=34.6, curve=curve), line("h4-mixhead-a", 33.0)]
    (results / "mixhead.jsonl").write_text("".join(json.dumps(text) + "\n" for text in lines))
    output = tmp_path / "report"
    assert main(["report", str(results), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "34.10" in printed and "34.60" in printed and "34.76" in printed
    assert (output / "report.md").read_text() == printed.removesuffix("\n")
    assert not list(output.glob("*.html"))
    assert (output / "curves-mixhead-table4.pdf").read_bytes().startswith(b"%PDF")
    assert len(json.loads((output / "report.json").read_text())) == 1


def recorded(tmp_path, **fields):
    """Lines as `record` writes them, of two rows and two seeds."""
    path = tmp_path / "mine.jsonl"
    with path.open("w") as file:
        for row, values in {"mha": (20.0, 22.0), "mixhead_a-1": (21.0, 21.5)}.items():
            for seed, value in enumerate(values, 1):
                one = {"row": row, "seed": seed, "metric": "sacrebleu", "value": value, "split": "test"}
                one |= {"valid_loss": 3.2, "valid_perplexity": 9.19, "updates": 1500, "corpus": "mine"}
                file.write(json.dumps(one | fields) + "\n")
    return path


def test_recorded_runs_have_means_and_deviations_by_row(tmp_path, capsys):
    assert main(["report", str(recorded(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## mine"
    assert "Mean ± standard deviation over seeds 1, 2. Corpus: mine." in lines[2]
    assert "Test BLEU (sacrebleu), points of 100: more is better." in lines[2]
    assert "Valid loss (bits per token): less is better." in lines[2]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        "",
        "test BLEU (sacrebleu)",
        "valid loss (bits per token)",
        "updates",
        "seeds",
    ]
    assert lines[6].startswith("| mha | 21.00 ± 1.41 | 3.200 ± 0.000 | 1,500 | 2 |")


def test_recorded_perplexities_need_no_further_loss(tmp_path, capsys):
    assert main(["report", str(recorded(tmp_path, metric="perplexity"))]) == 0
    header = capsys.readouterr().out.splitlines()[4]
    assert "valid perplexity" in header and "bits" not in header


def test_a_report_in_latex_can_be_printed(tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["report", str(recorded(tmp_path)), "--format", "latex", "--output", str(output)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (output / "report.tex").read_text() == text and (output / "report.md").exists()
    assert text.startswith("% needs \\usepackage{booktabs}") and "\\toprule" in text
    assert r"mixhead\_a-1 & 21.25 $\pm$ 0.35 & 3.200 $\pm$ 0.000 \\" in text
    assert "Updates: 1,500." in text and "seeds 1, 2" in text


@pytest.mark.parametrize("text", ["a_b & 50 % of $x$ {#} ~^\\", "\\input{/etc/passwd}", "x\ny % z"])
def test_latex_shows_hostile_names_as_text(text):
    found = formats.escape_latex(text)
    for command in (r"\textbackslash{}", r"\textasciitilde{}", r"\textasciicircum{}"):
        found = found.replace(command, "")
    assert not re.search(r"(?<!\\)[&%$#_{}~^]|\\[a-z]|\n", found)


def test_a_report_of_text_needs_neither_matplotlib_nor_scipy(tmp_path, capsys, monkeypatch):
    for package in ("matplotlib", "scipy"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "fairseq_lowrank.tools.pictures", raising=False)
    (tmp_path / "a.jsonl").write_text(json.dumps(line("h4-mha", 34.1)) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "34.10" in capsys.readouterr().out


def test_a_table_can_be_shown_before_anything_was_run(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("")
    assert main(["report", str(tmp_path), "--paper", "mixhead", "--table", "10"]) == 0
    assert "Fixhead" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        (None, [], "does not exist"),
        ("", [], "no results in"),
        ("", ["--table", "table99"], "no results and no published values for table99. Choose from mixhead table1"),
        ("{", [], "line 1: not JSON"),
        ('{"paper": "mixhead"}', [], "line 1: has no row"),
        ("7", [], "line 1: 7 is not a result"),
        (json.dumps(line("mha", None)), [], "line 1: value is null, expected a number"),
        (json.dumps(line("mha", 30.0)), ["--paper", "mhe"], "no results for mhe in"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, content, arguments, message):
    file = tmp_path / "results.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_broken_lines_are_named_and_the_others_reported(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    good, wrong = line("mha", 30.25, table="table7", metric="perplexity"), line("mha", 30.0, versions=3)
    file.write_text("\n".join(["{", json.dumps(good), json.dumps(wrong)]) + "\n")
    assert main(["report", str(file)]) == 0
    said = capsys.readouterr()
    assert "30.25" in said.out
    assert [text.partition(",")[0] + text.partition(",")[2][:8] for text in said.err.splitlines()] == [
        f"{file} line {number}:" for number in (1, 3)
    ]
