"""Texts of a configuration or of data are read as literals and never run."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

import fairseq
from fairseq import utils
from fairseq.data import codedataset, data_utils

import fairseq_lowrank.plugin  # noqa: F401
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.literals import literal
from fairseq_lowrank.repairs.patch import locate

HOSTILE = "__import__('pathlib').Path({!r}).touch()"
FIELDS = {
    "models.fconv.FConvModel.build_model": "encoder_layers",
    "models.fconv_lm.FConvLanguageModel.build_model": "decoder_attention",
    "models.fconv_self_att.FConvModelSelfAtt.build_model": "downsample",
    "models.lightconv_lm.LightConvLanguageModel.build_model": "character_filters",
    "models.transformer_lm.TransformerLanguageModel.build_model": "character_filters",
    "models.hubert.hubert.HubertModel.__init__": "conv_feature_layers",
    "models.wav2vec.wav2vec.Wav2VecModel.__init__": "conv_aggregator_layers",
    "models.wav2vec.wav2vec2.Wav2Vec2Model.__init__": "conv_feature_layers",
    "models.wav2vec.wav2vec2.TransformerEncoder.__init__": "conv_feature_layers",
    "models.speech_to_text.s2t_wav_transformer.SpeechWavTransformerEncoder.__init__": "conv_feature_layers",
    "criterions.ctc.CtcCriterion.__init__": "wer_args",
    "data.audio.raw_audio_dataset.RawAudioDataset.__init__": "feature_encoder_spec",
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.25,0.5", (0.25, 0.5)),
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("[(512, 3)] * 2 + [(1024, -1)]", [(512, 3), (512, 3), (1024, -1)]),
        (" {'beam': 5, 'kinds': {1, 2}, 'none': None}", {"beam": 5, "kinds": {1, 2}, "none": None}),
        ("1e-3 * (1 - 1 / 4)", 7.5e-4),
        ("True", True),
    ],
)
def test_literal_returns_the_value(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("print(1)", "x", "[x for x in 'ab']", "().__class__", "{**{}}", "2 ** 9", "1,,2", ""),
        *("[0] * 10**10", "[0] * 9999999999", "'a' * 99999 * 99999", "[[0] * 9999] * 9999", "5 * '12' * 10000"),
        *("1 / 0", "'a' + 1", "{[]: 1}", "-" * 5000 + "1", "(" * 5000, "1+" * 4999 + "1", "9" * 5000, "\0"),
        "1" * 20000,
    ],
)
def test_literal_refuses_everything_else(text):
    with pytest.raises(UserError) as refused:
        literal(text)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("evaluate", [utils.eval_str_list, utils.eval_str_dict, utils.eval_bool])
def test_utilities_evaluate_literals_only(evaluate, tmp_path):
    with pytest.raises(UserError):
        evaluate(HOSTILE.format(str(tmp_path / "made")))
    assert not list(tmp_path.iterdir())
    assert utils.eval_str_list("1,2", int) == [1, 2] and utils.eval_bool("True")


@pytest.mark.parametrize(("target", "field"), FIELDS.items())
def test_configuration_runs_nothing(target, field, tmp_path):
    holder, name = locate(f"fairseq.{target}")
    hostile = Namespace(**{field: HOSTILE.format(str(tmp_path / "made"))})
    arguments = (hostile, None) if name == "build_model" else (None, hostile)
    with pytest.raises(UserError):
        getattr(holder, name)(*arguments)
    assert not list(tmp_path.iterdir())


def test_lines_of_data_run_nothing(tmp_path):
    (tmp_path / "manifest").write_text(HOSTILE.format(str(tmp_path / "made")))
    with pytest.raises(UserError):
        codedataset.parse_manifest(tmp_path / "manifest", None)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]


def test_no_other_module_of_fairseq_evaluates_text():
    root = Path(fairseq.__path__[0])
    sources = {path: path.read_text() for path in root.rglob("*.py") if "examples" not in path.parts}
    evaluating = {path for path, text in sources.items() if re.search(r"(?<![.\w])eval\(", text)}
    found = {".".join(path.relative_to(root).with_suffix("").parts) for path in evaluating}
    optimizers = {module for module in found if module.startswith("optim.")}  # their flags are never a checkpoint's
    assert found - optimizers == {target.rsplit(".", 2)[0] for target in FIELDS} | {"utils", "data.codedataset"}


def test_format_that_runs_a_shell_is_refused(tmp_path):
    made = tmp_path / "made"
    (tmp_path / f"a;touch {made.name};.fasta").write_text(">a\nb\n")
    with pytest.raises(UserError, match="--dataset-impl fasta"):
        data_utils.load_indexed_dataset(str(tmp_path / f"a;touch {made.name};"))
    assert not made.exists()


def test_no_other_module_of_fairseq_runs_a_shell():
    root = Path(fairseq.__path__[0])
    found = [path for path in root.rglob("*.py") if re.search(r"shell=True|os\.system\(", path.read_text())]
    assert [path.name for path in found if "examples" not in path.parts] == ["fasta_dataset.py"]
