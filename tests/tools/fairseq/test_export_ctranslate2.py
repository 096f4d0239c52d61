"""CTranslate2 gets plain attention or a refusal, from our command and from its own converter."""

import runpy
import sys

import pytest
import torch

pytest.importorskip("fairseq")
pytest.importorskip("ctranslate2")

import ctranslate2

from fairseq_lowrank import cli
from fairseq_lowrank.repairs.commands import end_commands
from fairseq_lowrank.tools.fairseq import checkpoints

CONVERTER = "ctranslate2.converters.fairseq"


@pytest.mark.parametrize("name", ["stock", "mhe"])
def test_plain_attention_reaches_ctranslate2(name, trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["export", str(trained(name)), str(out), "--to", "ctranslate2", "--max-len-b", "8"]) == 0
    assert "20 sentences are equal" in capsys.readouterr().out
    assert ctranslate2.Translator(str(out), device="cpu").translate_batch([["ab", "cd"]], max_decoding_length=4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("stock", {"decoder_output_dim": 20}, "--decoder-output-dim 20: CTranslate2's translation models end with"),
        (
            "stock",
            {"decoder_output_dim": 20, "decoder_input_dim": 20, "share_decoder_input_output_embed": True},
            "--decoder-output-dim 20: CTranslate2's translation models end with",
        ),
        (
            "stock",
            {"decoder_normalize_before": True, "encoder_normalize_before": True, "no_decoder_final_norm": True},
            "--no-decoder-final-norm : CTranslate2's pre-norm models have a LayerNorm there",
        ),
        ("mixhead-a", {"attention": "mha", "head_dim": 7}, "--head-dim 7: CTranslate2 computes heads of size 4"),
        ("mixhead-a", {"attention": "mha", "value_dim": 7}, "--value-dim 7: CTranslate2 computes heads of size 4"),
        ("mixhead-a", {"attention": "fixedhead", "head_dim": 7}, "--head-dim 7: CTranslate2 computes heads of size 4"),
        ("mixhead-a", {}, "--head-mixing static: CTranslate2 computes plain attention alone"),
        ("mixhead-b", {}, "--head-mixing positionwise: CTranslate2 computes plain attention alone"),
    ],
)
def test_flags_are_checked_before_a_model_is_built(name, settings, message, trained, tmp_path, monkeypatch, capsys):
    state = checkpoints.load_state(trained(name))
    vars(state["cfg"]["model"]).update(settings)
    torch.save(state, path := tmp_path / "checkpoint.pt")
    monkeypatch.setattr(checkpoints, "load_model", None)
    assert cli.main(["export", str(path), str(tmp_path / "out"), "--to", "ctranslate2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert message in line and "--to transformers, or train with" in line
    assert not (tmp_path / "out").exists()


def test_scores_of_its_search_leave_out_the_end_at_the_first_token(trained, tmp_path):
    path, out = trained("stock"), tmp_path / "out"
    assert cli.main(["export", str(path), str(out), "--to", "ctranslate2", "--max-len-b", "8"]) == 0
    translator, source = ctranslate2.Translator(str(out), device="cpu"), [["ab", "cd"]]
    options = {"return_scores": True, "length_penalty": 1.0, "max_decoding_length": 8}
    (default,) = translator.translate_batch(source, **options)
    (every,) = translator.translate_batch(source, min_decoding_length=0, **options)
    (given,) = translator.score_batch(source, every.hypotheses)
    assert every.scores[0] == pytest.approx(sum(given.log_probs[:-1]) / 8, abs=1e-4)
    assert default.scores[0] > every.scores[0] + 1e-3


@pytest.mark.parametrize("name", ["mixhead-a", "mixhead-b"])
def test_other_attention_is_refused_with_the_ways_that_are_left(name, trained, tmp_path, capsys):
    assert cli.main(["export", str(trained(name)), str(tmp_path / "out"), "--to", "ctranslate2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "mixing" in line and "--to transformers" in line and "--attention mha" in line
    assert not list(tmp_path.iterdir())


def test_converter_of_ctranslate2_is_refused_in_one_line(trained, translation_data, tmp_path, monkeypatch, capsys):
    state = checkpoints.load_state(trained("mixhead-a"))
    state["cfg"]["model"].arch = "transformer_iwslt_de_en"
    torch.save({"args": state["cfg"]["model"], "model": state["model"]}, path := tmp_path / "model.pt")
    words = ["--model_path", path, "--data_dir", translation_data, "--output_dir", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["converter", *map(str, words), "--unsafe_deserialization"])
    hook = end_commands(sys.__excepthook__)
    with pytest.raises(SystemExit) as end:
        try:
            runpy.run_module(CONVERTER, run_name="__main__", alter_sys=True)
        except ValueError as error:
            hook(type(error), error, error.__traceback__)
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "mixing static" in line and "fairseq-lowrank export" in line
    assert not (tmp_path / "out").exists()
