"""The command that makes lines of results from fairseq's logs."""

import json
import os
import re
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from experiments.packing import read_log
from fairseq_lowrank import __version__, cli
from fairseq_lowrank.records import provenance, scores
from fairseq_lowrank.records.logs import FROM_SCRATCH
from fairseq_lowrank.records.results import read_results
from fairseq_lowrank.versions import commit

RESULTS = Path(__file__).resolve().parents[2] / "results"
END = "Generate test with beam=5: BLEU4 = 9.00\n"
SETTINGS = "2026 | INFO | fairseq_cli.generate | {'generation': {'score_reference': False}}\n"
TRANSLATED = "S-{0}\tein hund\nT-{0}\t{1}\nH-{0}\t-0.5\t{2}\nD-{0}\t-0.5\t{2}\n"


@pytest.fixture
def results(tmp_path):
    return tmp_path / "mine.jsonl"


@pytest.fixture
def train_log(tmp_path):
    path = tmp_path / "train.log"
    path.write_bytes(read_log(RESULTS, "logs/evidence-fast-start/h4-mha-2e-3-seed1.log.gz"))
    return path


def record(results, *words, row="mha", seed=1):
    return cli.main(["record", "--row", row, "--seed", str(seed), "--results", str(results), *map(str, words)])


def line(results):
    return json.loads(results.read_text().splitlines()[-1])


def test_logs_of_fairseq_become_lines_that_compare_reads(results, train_log, tmp_path, capsys):
    output = tmp_path / "generate.out"
    reference = "a dog runs over the green grass"
    for row, hypothesis in (("mha", "a dog runs over green grass"), ("mixhead-a", reference)):
        text = TRANSLATED.format(1, reference, reference) + TRANSLATED.format(0, reference, hypothesis)
        output.write_text(SETTINGS + text + END)
        for seed in (1, 2):
            assert record(results, "--train-log", train_log, "--generate-log", output, row=row, seed=seed) == 0
    found = line(results)
    assert (found["metric"], found["value"], found["split"]) == ("sacrebleu", 100.0, "test")
    assert found["updates"] == found["curve"][-1]["updates"] > 0 and found["tokens_per_second"] > 0
    assert found["versions"]["fairseq_lowrank"] == __version__ and found["commit"] == commit()
    assert found["code"] == provenance.code(provenance.PACKAGE)
    capsys.readouterr()
    assert cli.main(["compare", str(results), "--pair", "mixhead-a", "mha", "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)
    assert pair["seeds"] == 2 and pair["mean"] > 0


def test_a_training_log_alone_gives_its_best_validation_perplexity(results, train_log):
    assert record(results, "--train-log", train_log) == 0
    found = line(results)
    assert (found["metric"], found["split"]) == ("perplexity", "valid") and found["value"] == found["valid_perplexity"]


def test_a_split_without_a_score_is_a_validation_set_of_the_log(results, train_log, capsys):
    train_log.write_text(train_log.read_text().replace("'valid' subset", "'dev' subset"))
    assert record(results, "--train-log", train_log, "--split", "dev") == 0
    assert (line(results)["metric"], line(results)["split"]) == ("perplexity", "dev")
    assert record(results, "--train-log", train_log, "--split", "test") == 2
    assert "has no perplexity of the validation set 'test'. Give its name with --split" in capsys.readouterr().err


def test_perplexity_of_eval_lm_and_a_score_of_ones_own_are_recorded(results, tmp_path):
    log, score = tmp_path / "eval.log", tmp_path / "score.json"
    log.write_text("Evaluated 1,200 tokens in 1.0s\nLoss (base 2): 5.0000, Perplexity: 32.00\n")
    score.write_text('{"metric": "accuracy", "value": 50, "sentence_values": [0, 1]}')
    assert record(results, "--eval-log", log, "--table", "lm") == 0
    assert {"metric": "perplexity", "value": 32.0, "tokens": 1200, "table": "lm"}.items() <= line(results).items()
    assert record(results, "--score", score) == 0
    assert line(results)["sentences"] == 2
    assert read_results(results, scores=True, sentences=True)[-1]["sentence_values"] == [0, 1]


@pytest.mark.parametrize(
    "flag, text, words",
    [
        ("--generate-log", "nothing", "has no hypotheses. Give the log of fairseq-generate"),
        ("--generate-log", TRANSLATED.format(1, "a", "a") + END, "has 1 sentences, but not those"),
        ("--generate-log", TRANSLATED.format(0, "a dog", "▁a ▁do g") + END, "Add --remove-bpe sentencepiece"),
        ("--generate-log", TRANSLATED.format(0, "a do@@ g", "a dog") + END, "Add --remove-bpe subword_nmt"),
        ("--generate-log", TRANSLATED.format(0, "a dog", "a cat"), "the last run has no end"),
        ("--generate-log", TRANSLATED.format(0, "a dog", "a dog") + END, "without --score-reference"),
        (
            "--generate-log",
            TRANSLATED.format(0, "今天天气很好", "今天天气好") + END,
            "Give the right code (--language zh",
        ),
        ("--eval-log", "nothing", "has no perplexity, or not of its last run. Give the log of fairseq-eval-lm"),
        ("--train-log", "nothing", "has no finished epoch. Give the log of a fairseq-train"),
        ("--score", "[1]", "expected an object such as"),
        ("--score", '{"metric": "accuracy", "value": "high"}', "value is"),
    ],
)
def test_files_of_another_kind_are_refused_in_one_line(results, tmp_path, capsys, flag, text, words):
    path = tmp_path / "file"
    path.write_text(text)
    assert record(results, flag, path) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not results.exists()


def test_a_score_is_recorded_once_and_a_missing_file_is_named(results, train_log, tmp_path, capsys):
    assert record(results, "--train-log", train_log) == 0
    assert record(results, "--train-log", train_log) == 2
    assert "already has perplexity of row mha, seed 1" in capsys.readouterr().err
    assert record(results, "--score", tmp_path / "none.json") == 2
    assert "No such file or directory" in capsys.readouterr().err
    assert record(results) == 2
    assert "nothing to record" in capsys.readouterr().err
    assert len(results.read_text().splitlines()) == 1


TOKENISED = ["the dog isn &apos;t running , they say .", "a cat sleeps ."]


@pytest.mark.parametrize("text", [TOKENISED, TOKENISED[1:]], ids=["entities", "stops"])
def test_bleu_of_tokens_is_named_so(results, tmp_path, capsys, text):
    """Moses's `&apos;` is three tokens of sacrebleu, and would count as three matches."""
    log = tmp_path / "generate.out"
    hypotheses = [line.replace("running", "sleeping").replace("cat", "dog") for line in text]
    pairs = enumerate(zip(text, hypotheses, strict=True))
    log.write_text("".join(TRANSLATED.format(number, *pair) for number, pair in pairs) + END)
    for row in ("mha", "gain"):
        assert record(results, "--generate-log", log, row=row) == 0
    found = line(results)
    expected = BLEU(tokenize="none", force=True)
    assert found["value"] == round(expected.corpus_score(hypotheses, [text]).score, 2)
    assert found["metric"] == "tokenised_bleu" and found["tokenised_signature"] == str(expected.get_signature())
    assert "signature" not in found and "tokenised_bleu" not in found
    assert f"tokenised_bleu {found['value']} (test)" in capsys.readouterr().out
    assert cli.main(["compare", str(results), "--pair", "mha", "gain"]) == 0


@pytest.mark.parametrize(
    "text", [["The dog isn't running, they say.", "Cats & dogs."], ["no marks"], ["Ab , c. D, e."]]
)
def test_plain_text_has_bleu_of_sacrebleu(text):
    assert not scores.are_tokenised(text)
    assert scores.are_tokenised([*text, "they don &apos;t"])


def test_bleu_follows_the_language(results, tmp_path, capsys):
    log = tmp_path / "generate.out"
    log.write_text(TRANSLATED.format(0, "今天天气很好。", "今天天气好。") + END)
    assert record(results, "--generate-log", log, "--language", "zh") == 0
    assert "tok:zh" in line(results)["signature"] and line(results)["value"] > 20
    for words, message in (
        (["--generate-log", log, "--language", "Chinese"], "--language Chinese: no tokeniser"),
        (["--train-log", log, "--language", "zh"], "--language zh: works only with --generate-log"),
    ):
        assert record(results, *words, seed=2) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/dev/null", "pipe"])
def test_results_that_are_no_file_are_refused_before_logs_are_read(tmp_path, capsys, name):
    os.mkfifo(tmp_path / "pipe")
    assert record(tmp_path / name, "--score", tmp_path / "none.json") == 2
    assert f"{name}: is no regular file" in capsys.readouterr().err


def test_a_training_from_scratch_hides_an_earlier_one_of_its_log(results, train_log, tmp_path):
    """So does a run that was resumed hide what came after its checkpoint."""
    text = train_log.read_text()
    assert record(results, "--train-log", train_log) == 0
    alone = line(results)
    better = re.sub(r"\| ppl [\d.]+", "| ppl 1.01", text)
    assert better != text and FROM_SCRATCH in text
    for seed, log in enumerate((better + text, better + text.replace(FROM_SCRATCH, "")), start=2):
        train_log.write_text(log)
        assert record(results, "--train-log", train_log, seed=seed) == 0
        found = line(results)
        assert {name: found[name] for name in ("value", "curve", "updates")} == {
            name: alone[name] for name in ("value", "curve", "updates")
        }


def test_a_line_proves_the_plugin_too(results, tmp_path, monkeypatch):
    score, plugin = tmp_path / "score.json", tmp_path / "plugin"
    score.write_text('{"metric": "accuracy", "value": 50}')
    plugin.mkdir()
    (plugin / "__init__.py").write_text("first = 1")
    monkeypatch.setattr(cli, "import_plugin", lambda folder: None)
    hashes = []
    for seed in (1, 2):
        words = ["--seed", str(seed), "--results", str(results), "--score", str(score)]
        assert cli.main(["--user-dir", str(plugin), "record", "--row", "a", *words]) == 0
        hashes.append(line(results)["code"])
        (plugin / "__init__.py").write_text("second = 2")
    assert len({*hashes, provenance.code(provenance.PACKAGE)}) == 3
