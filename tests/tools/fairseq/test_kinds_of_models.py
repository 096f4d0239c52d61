"""Commands on checkpoints of models that neither translate nor continue text."""

import json

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from tiny_transformer import SIZES

from fairseq_lowrank import cli
from fairseq_lowrank.attention import METHODS
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.tasks.span_head import add_span_head
from fairseq_lowrank.tools.fairseq import checkpoints, parameters, subject
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model

ENCODER = [*SIZES[:6], *SIZES[12:14]]
DECODER = [*SIZES[6:12], *SIZES[14:], "--tokens-per-sample", "12"]
CLASSES = "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --max-positions 32 --classification-head-name own"
KINDS = {
    "text": ["--task", "language_modeling", "--arch", "lowrank_transformer_lm", *DECODER],
    "masked": ["--task", "masked_lm", "--arch", "roberta_base", "--tokens-per-sample", "12", *ENCODER],
    "pairs": [
        *("--task", "bert_pretraining", "--arch", "lowrank_bert_base"),
        *("--tokens-per-sample", "12", "--max-positions", "12", *ENCODER),
    ],
    "classes": [*CLASSES.split(), "--arch", "roberta_base", *ENCODER],
    "classes-bert": [*CLASSES.split(), "--arch", "lowrank_bert_base", *ENCODER],
    "denoising": ["--task", "denoising", "--arch", "bart_base", "--tokens-per-sample", "24", *SIZES],
    "edits": ["--task", "translation_lev", "--arch", "nonautoregressive_transformer", *SIZES],
    "languages": [
        "--task",
        "multilingual_translation",
        "--lang-pairs",
        "de-en",
        "--arch",
        "multilingual_transformer",
        *SIZES,
    ],
}


@pytest.fixture
def untrained(translation_data, language_model_data, tmp_path, fairseq_command):
    """``untrained(kind, *flags)``: a checkpoint of a model without training, by default with ``--attention mixhead-a``."""

    def sentences():
        for name, lines in (("input0", ["ab cd", "ef gh ij"]), ("label", ["no", "yes"])):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
            texts = [f"--{part}pref={tmp_path / name}" for part in ("train", "valid")]
            fairseq_command("preprocess", "--only-source", *texts, "--destdir", tmp_path / "bin" / name)
        return tmp_path / "bin"

    def make(kind, *flags):
        of_pairs = kind in ("edits", "languages")
        data = sentences() if kind.startswith("classes") else translation_data if of_pairs else language_model_data
        words = [str(data), *KINDS[kind], *(flags or ("--attention", "mixhead-a"))]
        parser = options.get_training_parser(KINDS[kind][KINDS[kind].index("--task") + 1])
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
        torch.manual_seed(1)
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        state = {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [{"num_updates": 0, "lr_scheduler_state": {}}],
            "extra_state": {"train_iterator": {"epoch": 1}},
        }
        torch.save(state, path := tmp_path / "checkpoint.pt")
        return path

    return make


def refused(capsys, *words):
    assert cli.main([*map(str, words)]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_convert_keeps_the_outputs_of_roberta(untrained, language_model_data, tmp_path, capsys):
    path, target = untrained("masked"), tmp_path / "converted.pt"
    flags = ["--attention", "mixhead-b", "--data", language_model_data, "--sequences", "2", "--output", target]
    assert cli.main(["convert", *map(str, (path, *flags))]) == 0
    assert "by 0 at most" in capsys.readouterr().out.splitlines()[-1]
    (layer, *_) = parameters.composition(checkpoints.load_state(target))
    assert layer["axes"]["mixing"] == METHODS["mixhead-b"].axes["mixing"]


@pytest.mark.parametrize("kind", ["masked", "classes", "classes-bert"])
def test_params_counts_the_heads_that_a_task_adds(kind, untrained, capsys):
    path = untrained(kind)
    assert cli.main(["params", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, _ = checkpoints.load_model(path)
    assert found["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["extra"] == 2 * 4 * 4  # a matrix of each layer


def test_params_counts_the_head_of_spans(untrained):
    state = checkpoints.load_state(untrained("masked"))
    before = parameters.describe_state(state)["total"]
    model = build_model(checkpoints.model_arguments(state), checkpoints.vocab_size(state))
    state["model"] |= add_span_head(model, 16).span_head.state_dict(prefix="span_head.")
    assert parameters.describe_state(state)["total"] == before + 2 * 16 + 2


@pytest.mark.parametrize("command", ["inspect --spectrum", "inspect", "convert"])
def test_models_that_edit_a_translation_are_refused(command, untrained, translation_data, tmp_path, capsys):
    target = tmp_path / "converted.pt"
    more = ["--attention", "mixhead-b", "--output", target] if command == "convert" else []
    line = refused(capsys, *command.split(), untrained("edits"), "--data", translation_data, *more)
    assert "NATransformerModel reads other inputs than a sample of its data has" in line and "tgt_tokens" in line
    assert not target.exists()


def test_difference_of_a_classifier_is_refused_before_a_file_is_written(untrained, tmp_path, capsys):
    target = tmp_path / "converted.pt"
    path = untrained("classes")
    line = refused(capsys, "convert", path, "--attention", "mixhead-b", "--data", tmp_path / "bin", "--output", target)
    assert line.endswith("predicts labels or numbers. Remove the flag.") and not target.exists()


def test_models_of_several_pairs_of_languages_are_refused(untrained, tmp_path, capsys):
    path, target = untrained("languages"), tmp_path / "converted.pt"
    line = refused(capsys, "inspect", "--spectrum", path)
    assert "MultilingualTranslationTask reads several data sets at once (de-en)" in line
    assert "word embeddings of one encoder or decoder" in refused(capsys, "params", path)
    line = refused(capsys, "convert", path, "--attention", "mixhead-b", "--output", target)
    assert "word embeddings of one encoder or decoder" in line


def test_inspect_shows_the_axes_of_models_without_one_vocabulary(untrained, capsys):
    path = untrained("languages", "--lang-pairs", "de-en,en-de")
    assert cli.main(["inspect", str(path), "--json"]) == 0
    names = {layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]}
    model, _ = checkpoints.load_model(path)
    assert names == {layer.name for layer in attention_layers(model)} and len(names) == 12


def test_length_is_that_of_blocks(trained, untrained, capsys):
    assert "not blocks. Remove the flag." in refused(capsys, "inspect", "--spectrum", trained("stock"), "--length", "7")
    path = untrained("denoising")
    _, task = checkpoints.load_model(path, tokens_per_sample=9)
    assert task.cfg.tokens_per_sample == 9
    with pytest.raises(FlagError, match="reads at most 1024 tokens"):
        checkpoints.load_model(path, tokens_per_sample=1025)


@pytest.mark.parametrize("length", [4, 13])
def test_length_that_a_task_refuses_is_named_by_its_flag(length, untrained, capsys):
    assert f"--length {length}: expected at" in refused(
        capsys, "inspect", "--spectrum", untrained("pairs"), "--length", length
    )


@pytest.mark.parametrize("score", ["synthesizer-random", "relative"])
def test_blocks_are_as_long_as_tables_of_positions_allow(score, untrained):
    """Sinusoidal positions and relative scores read any length."""
    path = untrained("text", "--attention-score", score)
    if score == "relative":
        model, task = checkpoints.load_model(path, tokens_per_sample=20)
        (sample,) = checkpoints.sequences(task, "valid", count=1, seed=1, min_length=20, max_length=20)
        assert model(**sample["net_input"])[0].size(1) == 20
        return
    with pytest.raises(FlagError, match="reads at most 12 tokens"):
        checkpoints.load_model(path, tokens_per_sample=20)


def test_targets_that_are_not_a_word_for_each_position_are_refused(untrained):
    model, task = checkpoints.load_model(untrained("masked"))
    spans = {"net_input": {"src_tokens": torch.full((1, 9), 5)}, "target": torch.tensor([[2, 4]]), "ntokens": 9}
    with pytest.raises(UserError, match="has no words as targets"):
        subject.scoring(model, spans, task)


def test_text_is_refused_for_tasks_that_need_other_files(untrained, tmp_path, capsys):
    (tmp_path / "text").write_text("ab cd\n" * 4)
    line = refused(capsys, "measure", untrained("classes"), "--text", tmp_path / "text")
    assert f"--text {tmp_path / 'text'}: {tmp_path / 'bin' / 'dict.txt'} does not exist." in line
