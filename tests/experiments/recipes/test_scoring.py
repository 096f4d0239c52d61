"""Scores and learning curves, read from fairseq's own output."""

import re

import pytest

from experiments.recipes import scoring
from experiments.recipes.recipe import Run
from experiments.recipes.settings import Settings
from fairseq_lowrank.files import write_lines

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
    run = scoring.read_training_log(tmp_path / "log")
    assert run["parameters"] == 1234567 and run["updates"] == 200
    assert run["tokens_per_second"] == round((1000 * 100 + 1100 * 100) / 150)
    assert run["epochs"] == [
        {"updates": 100, "train_loss": 9.5, "valid_loss": 8.5},
        {"updates": 200, "train_loss": 8.0, "valid_loss": 7.5},
    ]
    assert run["valid_perplexity"] == 120


def test_a_validation_that_came_to_no_number_hides_no_best_one(tmp_path):
    for gone, best in ((256, 120), (120, 128)):
        (tmp_path / "log").write_text(re.sub(rf"(valid on .* ppl ){gone}\b", r"\1nan", LOG))
        assert scoring.read_training_log(tmp_path / "log")["valid_perplexity"] == best


def test_a_log_without_a_finished_epoch_is_refused(tmp_path):
    (tmp_path / "log").write_text("\n".join(LOG.splitlines()[:2]))
    with pytest.raises(ValueError, match="no finished epoch"):
        scoring.read_training_log(tmp_path / "log")


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
    assert scoring.read_hypotheses(tmp_path / "out") == ["", "two words"]
    write_lines(tmp_path / "out", [*lines[:3], "H-1\t-0.9\tthe second best", *lines[3:], "H-0\t-0.2\tthe other"])
    assert scoring.read_hypotheses(tmp_path / "out") == ["", "two words"]
    write_lines(tmp_path / "out", lines[:5])
    with pytest.raises(ValueError, match="not those numbered 0 to 0"):
        scoring.read_hypotheses(tmp_path / "out")


REFERENCES = ["a man isn &apos;t riding a brown horse , slowly .", "two dogs run through the deep snow ."]


def test_bleu_of_the_references_is_100_and_its_signatures_say_what_was_scored():
    score = scoring.bleu(REFERENCES, REFERENCES)
    assert score["value"] == score["tokenised_bleu"] == 100
    assert "tok:13a" in score["signature"] and "tok:none" in score["tokenised_signature"]
    assert score["text"] == "tokenised"


def test_bleu_against_the_publishers_text_detokenises_and_ignores_case_where_hypotheses_have_none():
    raw = ["A man isn't riding a brown horse, slowly.", "Two dogs run through the deep snow."]
    score = scoring.bleu(REFERENCES, REFERENCES, raw)
    assert score["value"] == 100 and "case:lc" in score["signature"] and score["text"] == "detokenised"
    cased = [line.capitalize() for line in REFERENCES]
    assert "case:mixed" in scoring.bleu(cased, REFERENCES, raw)["signature"]
    worse = scoring.bleu([REFERENCES[0], "two dogs run"], REFERENCES, raw)
    assert worse["value"] < 90 and worse["tokenised_bleu"] < 90
    with pytest.raises(ValueError, match="2 hypotheses for 1 references"):
        scoring.bleu(REFERENCES, REFERENCES, raw[:1])


def test_perplexity_is_read_with_the_tokens_it_was_measured_on(tmp_path):
    write_lines(
        tmp_path / "out",
        ["… | Evaluated 58,034 tokens in 9.1s (6377.36 tokens/s)", "… | Loss (base 2): 8.1000, Perplexity: 274.37"],
    )
    assert scoring.read_perplexity(tmp_path / "out") == {"metric": "perplexity", "value": 274.37, "tokens": 58034}
    loss = scoring.read_perplexity(tmp_path / "out", "loss")
    assert loss == {"metric": "loss", "value": 5.6145, "tokens": 58034}  # ln 274.37 = 8.1 ln 2, nats a token
    write_lines(tmp_path / "out", ["nothing"])
    with pytest.raises(ValueError, match="no perplexity"):
        scoring.read_perplexity(tmp_path / "out")


def test_what_is_said_of_the_test_set_is_read_of_masked_words_and_next_sentences(tmp_path):
    line = "… | INFO | valid | valid on '{}' subset | loss 11.596 | mlm_loss 10.611 | {}ppl 1563.79 | wps 3772.7 | num_updates 10"
    write_lines(
        tmp_path / "out", [line.format("valid", ""), line.format("test", "nsp_loss 0.9 | nsp_accuracy 60.2 | ")]
    )
    found = {"metric": "perplexity", "value": 1563.79, "next_sentence_accuracy": 60.2}
    assert scoring.read_validation(tmp_path / "out") == found
    write_lines(tmp_path / "out", [line.format("test", "")])
    assert scoring.read_validation(tmp_path / "out") == {"metric": "perplexity", "value": 1563.79}
    write_lines(tmp_path / "out", [line.format("valid", "")])
    with pytest.raises(ValueError, match="no perplexity of fairseq-validate"):
        scoring.read_validation(tmp_path / "out")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_perplexity_that_is_no_number_is_read_as_such(tmp_path, value):
    write_lines(tmp_path / "out", ["| Evaluated 58 tokens in 9.1s", f"| Loss (base 2): {value}, Perplexity: {value}"])
    assert str(scoring.read_perplexity(tmp_path / "out")["value"]) == value


def test_blocks_are_scored_with_a_window_and_segments_that_follow_each_other_with_memory(tmp_path):
    called = []
    for task in ("language_modeling", "segment_lm"):
        flags = ("--task", task, "--tokens-per-sample", "64")
        run = Run("row", 1, "brown", flags, tmp_path, tmp_path, tmp_path)
        scoring.score(
            "language-model", run, Settings(work=tmp_path, dry_run=True), lambda words, log: called.append(words)
        )
    blocks, segments = called
    assert blocks[blocks.index("--context-window") + 1] == "50" and "--task" not in blocks
    assert segments[segments.index("--task") + 1] == "segment_lm" and "--context-window" not in segments
