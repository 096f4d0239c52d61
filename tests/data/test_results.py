"""Lines of results: read from fairseq's own output, written whole."""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor

import pytest

from fairseq_lowrank.data import results
from fairseq_lowrank.data.text import write_lines

LINE = {field: 1 for field in results.FIELDS} | {"paper": "p", "table": "t", "row": "r"}
# As fairseq 0.12 prints with --log-format simple; the run was interrupted in epoch 2 and went on from epoch 1's checkpoint.
LOG = """\
2026-01-01 00:00:01 | INFO | fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1,234,567)
2026-01-01 00:01:00 | INFO | train_inner | epoch 001:     50 / 100 loss=9, nll_loss=9, ppl=512, wps=90, num_updates=50
2026-01-01 00:02:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.5 | nll_loss 8 | ppl 256 | wps 9e+03 | num_updates 100
2026-01-01 00:02:01 | INFO | train | epoch 001 | loss 9.5 | nll_loss 9 | ppl 512 | wps 123 | ups 2 | wpb 1000 | num_updates 100 | lr 1e-05 | train_wall 100 | wall 120
2026-01-01 00:03:00 | INFO | train_inner | epoch 002:     50 / 100 loss=8, nll_loss=8, ppl=256, wps=90, num_updates=150
2026-01-01 00:04:01 | INFO | fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1,234,567)
2026-01-01 00:03:30 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 7 | nll_loss 6.9 | ppl 120 | num_updates 150 | best_loss 7
2026-01-01 00:05:00 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 7.5 | nll_loss 7 | ppl 128 | num_updates 200 | best_loss 7.5
2026-01-01 00:05:01 | INFO | train | epoch 002 | loss 8 | nll_loss 7.5 | ppl 181 | wps 99 | wpb 1100 | num_updates 200 | train_wall 50 | wall 60
"""


def test_a_training_log_gives_size_updates_speed_and_curve(tmp_path):
    (tmp_path / "log").write_text(LOG)
    run = results.read_training_log(tmp_path / "log")
    assert run["parameters"] == 1234567 and run["updates"] == 200
    assert run["tokens_per_second"] == round((1000 * 100 + 1100 * 100) / 150)
    assert run["epochs"] == [
        {"updates": 100, "train_loss": 9.5, "valid_loss": 8.5},
        {"updates": 200, "train_loss": 8.0, "valid_loss": 7.5},
    ]
    assert run["valid_perplexity"] == 120


def test_a_log_without_a_finished_epoch_is_refused(tmp_path):
    (tmp_path / "log").write_text("\n".join(LOG.splitlines()[:2]))
    with pytest.raises(ValueError, match="no finished epoch"):
        results.read_training_log(tmp_path / "log")


def test_hypotheses_come_in_the_order_of_the_corpus(tmp_path):
    lines = [
        "S-1\tb",
        "T-1\tB",
        "H-1\t-0.5\ttwo words",
        "D-1\t-0.5\ttwo words",
        "P-1\t-0.5",
        "H-0\t-0.1\t",
        "W-0\t1\ts",
    ]
    write_lines(tmp_path / "out", lines)
    assert results.read_hypotheses(tmp_path / "out") == ["", "two words"]
    write_lines(tmp_path / "out", lines[:5])
    with pytest.raises(ValueError, match="not those numbered 0 to 0"):
        results.read_hypotheses(tmp_path / "out")


REFERENCES = ["a man isn &apos;t riding a brown horse , slowly .", "two dogs run through the deep snow ."]


def test_bleu_of_the_references_is_100_and_its_signatures_say_what_was_scored():
    score = results.bleu(REFERENCES, REFERENCES)
    assert score["value"] == score["tokenised_bleu"] == 100
    assert "tok:13a" in score["signature"] and "tok:none" in score["tokenised_signature"]
    assert score["text"] == "tokenised"


def test_bleu_against_the_publishers_text_detokenises_and_ignores_case_where_hypotheses_have_none():
    raw = ["A man isn't riding a brown horse, slowly.", "Two dogs run through the deep snow."]
    score = results.bleu(REFERENCES, REFERENCES, raw)
    assert score["value"] == 100 and "case:lc" in score["signature"] and score["text"] == "detokenised"
    cased = [line.capitalize() for line in REFERENCES]
    assert "case:mixed" in results.bleu(cased, REFERENCES, raw)["signature"]
    worse = results.bleu([REFERENCES[0], "two dogs run"], REFERENCES, raw)
    assert worse["value"] < 90 and worse["tokenised_bleu"] < 90
    with pytest.raises(ValueError, match="2 hypotheses for 1 references"):
        results.bleu(REFERENCES, REFERENCES, raw[:1])


def test_perplexity_is_read_with_the_tokens_it_was_measured_on(tmp_path):
    write_lines(
        tmp_path / "out",
        ["… | Evaluated 58,034 tokens in 9.1s (6377.36 tokens/s)", "… | Loss (base 2): 8.1000, Perplexity: 274.37"],
    )
    assert results.read_perplexity(tmp_path / "out") == {"metric": "perplexity", "value": 274.37, "tokens": 58034}
    write_lines(tmp_path / "out", ["nothing"])
    with pytest.raises(ValueError, match="no perplexity"):
        results.read_perplexity(tmp_path / "out")


def append(path, row):
    results.append_result(path, LINE | {"row": f"{row:05}" * 2000})


def test_lines_from_several_processes_stay_whole(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(append, [path] * 40, range(40)))
    assert sorted(line["row"][:5] for line in results.read_results(path)) == [f"{row:05}" for row in range(40)]


def test_an_incomplete_line_is_neither_written_nor_read(tmp_path):
    path = tmp_path / "results.jsonl"
    with pytest.raises(ValueError, match="needs seed"):
        results.append_result(path, {key: value for key, value in LINE.items() if key != "seed"})
    assert not path.exists() and results.read_results(path) == []
    path.write_text(json.dumps(LINE) + "\n{}\n")
    with pytest.raises(ValueError, match="line 2: lacks paper, table"):
        results.read_results(path)
    path.write_text("{\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        results.read_results(path)


@pytest.fixture
def finished_run(tmp_path):
    """The command that records a run whose files are in `tmp_path`."""
    (tmp_path / "train.log").write_text(LOG)
    write_lines(tmp_path / "generate.out", [f"H-{n}\t-0.1\t{line}" for n, line in enumerate(REFERENCES)])
    write_lines(tmp_path / "test.en", REFERENCES)
    options = {
        "--file": tmp_path / "results.jsonl",
        "--paper": "mixhead",
        "--table": "table4",
        "--row": "h4-mha",
        "--seed": 3,
        "--flags": "--arch lowrank_transformer --attention mha",
        "--log": tmp_path / "train.log",
        "--split": "test",
        "--generated": tmp_path / "generate.out",
        "--references": tmp_path / "test.en",
    }
    return ["bleu", *(str(word) for pair in options.items() for word in pair)]


def test_a_finished_run_becomes_one_line_and_counts_as_finished(finished_run, tmp_path, capsys):
    assert results.main([*finished_run, "--smoke"]) == 0
    [line] = results.read_results(tmp_path / "results.jsonl")
    assert line["architecture"] == "lowrank_transformer" and line["seed"] == 3 and line["smoke"] is True
    assert (line["metric"], line["value"], line["updates"]) == ("sacrebleu", 100.0, 200)
    assert len(line["curve"]) == 2 and all(line["versions"].values())
    capsys.readouterr()
    file = str(tmp_path / "results.jsonl")
    command = ["finished", "--file", file, "--paper", "mixhead", "--table", "table4", "--smoke", "--seed"]
    assert results.main([*command, "3"]) == 0 and capsys.readouterr().out == "h4-mha\n"
    assert results.main([*command, "4"]) == 0 and capsys.readouterr().out == "\n"


@pytest.mark.parametrize("recorded, asked", [(["--smoke"], []), ([], ["--smoke"])])
def test_a_trial_does_not_count_as_a_real_run_nor_a_real_run_as_a_trial(
    finished_run, tmp_path, capsys, recorded, asked
):
    assert results.main([*finished_run, *recorded]) == 0
    capsys.readouterr()
    command = ["finished", *finished_run[1:5], "--table", "table4", "--seed", "3"]
    assert results.main([*command, *asked]) == 0 and capsys.readouterr().out == "\n"
    assert results.main([*command, *recorded]) == 0 and capsys.readouterr().out == "h4-mha\n"


def test_a_run_that_cannot_be_read_leaves_no_line(finished_run, tmp_path, capsys):
    write_lines(tmp_path / "test.en", REFERENCES[:1])
    assert results.main(finished_run) == 2
    assert capsys.readouterr().err == "results bleu: error: 2 hypotheses for 1 references\n"
    assert not (tmp_path / "results.jsonl").exists()


def test_attention_parameters_are_counted_without_biases(tmp_path):
    import torch

    names = {
        "encoder.layers.0.self_attn.q_proj.weight": 16,
        "encoder.layers.0.self_attn.q_proj.bias": 4,
        "decoder.layers.0.encoder_attn.out_proj.weight": 8,
        "decoder.layers.0.self_attn.mixing.query_weight": 2,
        "decoder.layers.0.self_attn.head_embeddings.key": 1,
        "decoder.layers.0.self_attn_layer_norm.weight": 32,
        "decoder.layers.0.fc1.weight": 64,
    }
    model = {name: torch.zeros(size) for name, size in names.items()}
    torch.save({"model": model, "cfg": {"model": argparse.Namespace(arch="transformer")}}, tmp_path / "model.pt")
    assert results.attention_parameters(tmp_path / "model.pt") == 16 + 8 + 2 + 1
