"""fairseq works on this Python, torch and numpy, and loads checkpoints safely."""

import argparse
import pickle
import re

import numpy as np
import omegaconf
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.logging.meters import AverageMeter
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from tiny_transformer import SIZES, arguments, build, make_task

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.messages import StateDictMismatch

TINY_TRANSFORMER = [
    *("--arch", "transformer", "--optimizer", "adam", "--lr", "0.01", "--cpu", "--max-tokens", "500", "--seed", "3"),
    *("--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "16", "--decoder-embed-dim", "16"),
    *("--encoder-ffn-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2"),
    *("--decoder-attention-heads", "2", "--max-update", "4", "--no-progress-bar", "--num-workers", "0"),
    *("--no-epoch-checkpoints", "--log-interval", "1"),
]
TINY_LANGUAGE_MODEL = [
    *("--task", "language_modeling", "--arch", "transformer_lm", "--optimizer", "adam", "--lr", "0.01", "--cpu"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--max-tokens", "500", "--max-update", "4", "--num-workers", "0"),
    *("--no-epoch-checkpoints", "--no-progress-bar", "--tokens-per-sample", "16", "--max-target-positions", "16"),
]


class RunsCode:
    """Pickled, it calls a function when it is loaded without care."""

    def __init__(self, function, path):
        self.call = function, (path,)

    def __reduce__(self):
        return self.call


def save(tmp_path, legacy=False, **extra_state):
    """The path of a small checkpoint; legacy: in the file format of torch before 1.6."""
    path = tmp_path / "checkpoint.pt"
    state = {
        "args": argparse.Namespace(arch="transformer", task="translation"),
        "model": {"w": torch.ones(2)},
        "optimizer_history": [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}],
        "extra_state": {"train_iterator": {"epoch": 1}, **extra_state},
    }
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("arch", ["transformer_lm", "lowrank_transformer_lm"])
def test_a_checkpoint_whose_configuration_is_code_is_refused_and_runs_nothing(tmp_path, arch):
    Dictionary().save(str(tmp_path / "dict.txt"))
    target = tmp_path / "made_by_the_checkpoint"
    model = {"_name": arch, "decoder_layers": 1, "tokens_per_sample": 8, "max_target_positions": 8}
    model |= {"add_bos_token": False, "tpu": False}
    model["adaptive_softmax_cutoff"] = f"[__import__('os').mkdir({str(target)!r}), 2]"
    config = {"task": {"_name": "language_modeling", "data": str(tmp_path)}, "model": model}
    history = [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}]
    extra = {"train_iterator": {"epoch": 1}}
    state = {"args": None, "cfg": config, "model": {}, "optimizer_history": history, "extra_state": extra}
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="made_by_the_checkpoint"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint.pt")])
    assert not target.exists()


def test_a_checkpoint_with_an_average_of_the_weights_loads_safely_too(tmp_path):
    weights = checkpoint_utils.load_ema_from_checkpoint(save(tmp_path, ema={"w": torch.ones(2)}))["model"]
    assert weights["w"].tolist() == [1, 1]


def test_a_state_that_workers_send_one_another_is_refused_by_other_layers_as_one_from_a_file():
    tensors = []
    sent = distributed_utils._split_tensors_from_obj({"model": build_attention("mha", 8, 2).state_dict()}, tensors)
    received = distributed_utils._put_tensors_in_obj(sent, tensors)["model"]
    build_attention("mha", 8, 2).load_state_dict(received)
    with pytest.raises(StateDictMismatch) as error:
        build_attention("mha", 8, 4).load_state_dict(received)
    assert {"num_heads": 2, "head_dim": 4}.items() <= error.value.saved.items()
    assert {"num_heads": 4, "head_dim": 2}.items() <= error.value.current.items()


def test_fairseq_alone_may_load_the_allowed_classes(tmp_path):
    path = save(tmp_path)
    assert checkpoint_utils.load_checkpoint_to_cpu(path)["args"].arch == "transformer"
    with pytest.raises(pickle.UnpicklingError, match=r"argparse\.Namespace"):
        torch.load(path)


def test_old_checkpoints_with_meters_configurations_and_numpy_arrays_load(tmp_path):
    meter = AverageMeter()
    meter.update(3.0, 2)
    config = omegaconf.OmegaConf.create({"lr": [0.1], "task": {"data": "x"}})
    counts = np.array([1, 2, 3, 4])
    path = save(tmp_path, meters={"loss": meter}, config=config, counts=counts, halves=counts / 2)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)["extra_state"]
    assert state["meters"]["loss"].avg == 3.0
    assert state["config"].task.data == "x"
    assert state["counts"].tolist() == [1, 2, 3, 4]
    assert state["halves"].tolist() == [0.5, 1.0, 1.5, 2.0]


def test_meters_and_arrays_load_under_the_names_of_older_fairseq_and_numpy(tmp_path):
    path = save(tmp_path, legacy=True, meters={"loss": AverageMeter()}, array=np.array([1.5, 2.5]))
    written = path.read_bytes()
    old = written.replace(b"cfairseq.logging.meters\n", b"cfairseq.meters\n")
    old = old.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert len(old) == len(written) - len(".logging") - 1
    path.write_bytes(old)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)["extra_state"]
    assert isinstance(state["meters"]["loss"], AverageMeter)
    assert state["array"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-bf16"])
def test_bf16_trains_on_the_cpu_in_bfloat16(fairseq_command, translation_data, tmp_path, flag):
    fairseq_command("train", translation_data, *TINY_TRANSFORMER, flag, "--save-dir", tmp_path)
    state = checkpoint_utils.load_checkpoint_to_cpu(tmp_path / "checkpoint_last.pt")
    assert state["cfg"].common.bf16
    assert not state["cfg"].common.tpu
    # fairseq saves in float32 what it trained in half precision
    assert all(torch.equal(parameter, parameter.bfloat16().float()) for parameter in state["model"].values())


@pytest.mark.parametrize(
    ("flags", "dtype"), [([], torch.float32), (["--fp16"], torch.float16), (["--bf16"], torch.bfloat16)]
)
def test_translation_runs_in_the_precision_that_is_asked_for(
    fairseq_command, translation_data, tmp_path, monkeypatch, enable, flags, dtype
):
    enable("bf16-evaluation")
    fairseq_command("train", translation_data, *TINY_TRANSFORMER, "--save-dir", tmp_path)
    generate, used = SequenceGenerator.generate, set()

    def recorded(self, models, sample, **kwargs):
        used.update(parameter.dtype for model in models for parameter in model.parameters())
        return generate(self, models, sample, **kwargs)

    monkeypatch.setattr(SequenceGenerator, "generate", recorded)
    model = [translation_data, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--max-tokens", "500"]
    assert fairseq_command("generate", *model, "--max-len-b", "5", *flags).count("\nH-") == 12
    assert used == {dtype}


def test_a_model_used_by_a_program_keeps_its_precision_though_trained_in_another():
    flags = [*SIZES, "--bf16"]
    model = build("transformer", *flags)
    GeneratorHubInterface(convert_namespace_to_omegaconf(arguments("transformer", *flags)), make_task(), [model])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_bf16_asks_for_a_tpu_only_with_the_flag_for_one():
    def tpu(*flags):
        return options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", "transformer", *flags]).tpu

    assert not tpu("--bf16")
    assert tpu("--bf16", "--tpu")


def test_language_models_of_single_sentences_train_and_score(fairseq_command, language_model_data, tmp_path):
    train = [*TINY_LANGUAGE_MODEL, "--save-dir", tmp_path, "--sample-break-mode", "eos"]
    assert "done training" in fairseq_command("train", language_model_data, *train)
    model = TransformerLanguageModel.from_pretrained(tmp_path, "checkpoint_last.pt", str(language_model_data))
    assert model.score("ab cd ef")["positional_scores"].shape == (3,)


def test_translation_in_buckets_of_length_trains(fairseq_command, translation_data, tmp_path):
    flags = ["--num-batch-buckets", "2", "--save-dir", tmp_path]
    assert "done training" in fairseq_command("train", translation_data, *TINY_TRANSFORMER, *flags)


def test_numpy_itself_is_left_alone():
    assert not hasattr(np, "int")
    assert not hasattr(np, "compat")


def test_no_sentence_is_left_out_of_what_is_evaluated(fairseq_command, translation_data, tmp_path, enable):
    # neither the 20 sentences to validate on nor the 12 to test on are a multiple of 8
    validated = re.compile(r"valid on 'valid' subset .* bsz 20\b")
    train = [translation_data, *TINY_TRANSFORMER]
    assert not validated.search(fairseq_command("train", *train, "--save-dir", tmp_path / "stock"))
    enable("whole-validation")
    assert validated.search(fairseq_command("train", *train, "--save-dir", tmp_path))
    model = [translation_data, "--path", tmp_path / "checkpoint_last.pt", "--max-tokens", "500", "--cpu"]
    assert validated.search(fairseq_command("validate", *model, "--task", "translation"))
    assert fairseq_command("generate", *model, "--beam", "1", "--max-len-b", "5").count("\nH-") == 12


def test_references_are_scored_by_a_stock_model_with_one_of_ours(fairseq_command, trained, translation_data):
    """fairseq adds up the attention weights of all models, and a stock model always has them."""
    models = [str(trained(name)) for name in ("stock", "mixhead-a")]
    search = ["--cpu", "--score-reference", "--max-tokens", 300, "--num-workers", 0]
    outputs = [
        fairseq_command("generate", translation_data, "--path", ":".join(order), *search)
        for order in (models, models[::-1])
    ]
    scores = [[line for line in output.splitlines() if line.startswith("P-")] for output in outputs]
    assert len(scores[0]) == 12 and scores[0] == scores[1]


def test_eval_lm_refuses_blocks_that_the_model_cannot_take(fairseq_command, refusal, language_model_data, tmp_path):
    fairseq_command("train", language_model_data, *TINY_LANGUAGE_MODEL, "--save-dir", tmp_path)
    evaluate = [language_model_data, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--gen-subset", "valid"]
    perplexity = re.compile(r"Perplexity: \S+")
    by_16 = fairseq_command("eval-lm", *evaluate, "--tokens-per-sample", "16")
    assert "--tokens-per-sample: " in refusal("eval-lm", *evaluate, "--tokens-per-sample", "64")
    # each block fits, but not with the window before it
    window = [*evaluate, "--tokens-per-sample", "24", "--context-window", "12"]
    assert "--tokens-per-sample: " in refusal("eval-lm", *window)
    window = fairseq_command("eval-lm", *evaluate, "--tokens-per-sample", "16", "--context-window", "12")
    longer = ["--tokens-per-sample", "64", "--model-overrides", "{'max_target_positions': 64}"]
    assert "Perplexity" in fairseq_command("eval-lm", *evaluate, *longer)
    # without the flag: the model's own length, said so
    of_its_own = fairseq_command("eval-lm", *evaluate)
    assert "--tokens-per-sample is not given: blocks of 16 tokens" in of_its_own
    assert perplexity.findall(of_its_own) == perplexity.findall(by_16)
    assert perplexity.findall(fairseq_command("eval-lm", *evaluate, "--context-window", "12")) == perplexity.findall(
        window
    )
