"""Warnings about a command line before anything is read but dictionaries."""

import json

import pytest

pytest.importorskip("fairseq")

from fairseq import options

import fairseq_lowrank.plugin  # noqa: F401


@pytest.fixture
def warnings(tmp_path, monkeypatch, caplog):
    """``warnings(parser, entries, words)``: warnings for a command line on data with these entries of the dictionaries."""

    def parse(parser, entries: list[str], words: str) -> list[str]:
        for language in ("de", "en"):
            (tmp_path / f"dict.{language}.txt").write_text("".join(f"{entry} 9\n" for entry in entries))
        (tmp_path / "checkpoint.pt").touch()
        monkeypatch.setattr("sys.argv", ["fairseq", str(tmp_path), "-s", "de", "-t", "en", *words.split()])
        monkeypatch.chdir(tmp_path)
        caplog.clear()
        options.parse_args_and_arch(parser)
        return [record.getMessage() for record in caplog.records if "BLEU" in record.getMessage()]

    return parse


PIECES, MERGES, WORDS = ["▁the", "▁do", "g"], ["the", "do@@", "g"], ["the", "dog"]
GENERATE = "--path checkpoint.pt"
TRAIN = "--arch transformer --eval-bleu"


@pytest.mark.parametrize(
    ("entries", "command", "flag"),
    [
        (PIECES, GENERATE, "--remove-bpe sentencepiece"),
        (MERGES, GENERATE, "--remove-bpe subword_nmt"),
        (PIECES, TRAIN, "--eval-bleu-remove-bpe sentencepiece"),
        (MERGES, TRAIN, "--eval-bleu-remove-bpe subword_nmt"),
    ],
)
def test_bleu_of_subwords_is_announced_with_the_flag_to_add(warnings, entries, command, flag):
    def parser():
        return options.get_training_parser() if command == TRAIN else options.get_generation_parser()

    [said] = warnings(parser(), entries, command)
    assert f"Add {flag}." in said
    assert warnings(parser(), entries, f"{command} {flag}") == warnings(parser(), WORDS, command) == []


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (lambda: options.get_training_parser(), "--arch transformer"),
        (lambda: options.get_interactive_generation_parser(), GENERATE),
        (lambda: options.get_generation_parser(), f"{GENERATE} --bpe sentencepiece --sentencepiece-model spm.model"),
    ],
)
def test_commands_without_bleu_of_subwords_say_nothing(warnings, parser, words):
    assert warnings(parser(), PIECES, words) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--eval-bleu --best-checkpoint-metric bleu", True),
        ("--best-checkpoint-metric accuracy", True),
        ("--eval-bleu --best-checkpoint-metric bleu --maximize-best-checkpoint-metric", False),
        ("--best-checkpoint-metric accuracy --disable-validation", False),
        ("--best-checkpoint-metric nll_loss", False),
    ],
)
def test_lowest_bleu_as_the_best_is_announced(warnings, caplog, flags, said):
    warnings(options.get_training_parser(), WORDS, f"--arch transformer {flags}")
    assert ("the lowest value counts as the best" in caplog.text) is said


@pytest.mark.parametrize(
    ("moses", "subwords", "flags", "said"),
    [
        ({}, "sentencepiece", "", "was tokenised and cut into subwords of sentencepiece"),
        (None, "subword_nmt", "--tokenizer moses", "was cut into subwords of subword_nmt"),
        ({}, None, "--bpe characters", "was tokenised"),
        (None, "sentencepiece", "--bpe sentencepiece", None),
        (None, None, "", None),
    ],
)
def test_raw_text_of_prepared_data_is_announced(warnings, caplog, tmp_path, moses, subwords, flags, said):
    settings = {"source": "de", "target": "en", "moses": {"lowercase": True} if moses is not None else None}
    (tmp_path / "text.json").write_text(json.dumps(settings | {"subwords": subwords}))
    warnings(options.get_interactive_generation_parser(), WORDS, f"{GENERATE} {flags}")
    lines = [text for text in caplog.messages if "For raw text, use fairseq-lowrank translate" in text]
    assert [said in text for text in lines] == ([True] if said else [])
    caplog.clear()
    warnings(options.get_generation_parser(), WORDS, f"{GENERATE} --remove-bpe")
    assert "raw text" not in caplog.text


def test_missing_checkpoint_is_looked_for_in_the_save_folder(refusal, translation_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint_best.pt").touch()
    flags = ["--arch", "transformer", "--save-dir", "run", "--cpu"]
    line = refusal("train", translation_data, *flags, "--restore-file", "checkpoint_best.pt")
    assert line.endswith("checkpoint_best.pt: no such file. Did you mean run/checkpoint_best.pt?")
