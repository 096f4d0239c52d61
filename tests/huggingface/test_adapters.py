"""Adapters of PEFT: mixing goes with them, and no load loses it in silence."""

import copy

import peft
import pytest
import torch
from peft.config import PeftConfigMixin
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from fairseq_lowrank.huggingface import apply_attention, load_adapter, peft_modules
from fairseq_lowrank.huggingface.adapters import MARK
from fairseq_lowrank.huggingface.exported import LowrankConfig, LowrankForCausalLM
from fairseq_lowrank.messages import UserError

IDS = torch.arange(9)[None]
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 20}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def of(base):
    return BertForSequenceClassification.from_pretrained(base).eval()


@pytest.fixture(scope="module", params=["SEQ_CLS", None])
def adapter(request, base, tmp_path_factory):
    """The folder of an adapter, its task type, and the outputs of its model."""
    model = apply_attention(of(base), "mixhead-b", mixing_normalization="l2")
    config = {"target_modules": ["query"], "modules_to_save": [*peft_modules(model), "classifier"]}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=request.param, **config)).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "default" in name:
            torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, request.param, model(IDS).logits


def test_the_added_modules_are_named(base):
    assert peft_modules(of(base)) == []
    assert peft_modules(apply_attention(of(base), "talking-heads")) == ["mixing", "score_mixing"]


def test_an_adapter_loads_with_its_mixing(adapter, base):
    folder, _, expected = adapter
    for model in (None, of(base)):
        torch.testing.assert_close(load_adapter(folder, model).eval()(IDS).logits, expected)


WAYS = {
    "PeftModel": lambda base, folder, task: peft.PeftModel.from_pretrained(of(base), folder),
    "AutoPeftModel": lambda base, folder, task: (
        peft.AutoPeftModelForSequenceClassification if task else peft.AutoPeftModel
    ).from_pretrained(folder),
    "AutoModel": lambda base, folder, task: AutoModelForSequenceClassification.from_pretrained(folder),
    "load_adapter": lambda base, folder, task: of(base).load_adapter(folder),
    "other mixing": lambda base, folder, task: peft.PeftModel.from_pretrained(
        apply_attention(of(base), "mixhead-a"), folder
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_loses_the_mixing_in_silence(way, adapter, base):
    folder, task, _ = adapter
    with pytest.raises(UserError, match=r"the adapter has .*mixing.* has not\. Load it with .*load_adapter"):
        WAYS[way](base, folder, task)


@pytest.mark.parametrize("way", ["PeftModel", "AutoPeftModel", "AutoModel", "load_adapter"])
def test_no_process_without_this_package_loses_the_mixing(way, adapter, base, monkeypatch):
    folder, task, _ = adapter
    monkeypatch.setattr(PeftConfigMixin, "from_json_file", classmethod(PeftConfigMixin.from_json_file.__wrapped__))
    with pytest.raises(KeyError, match=f"LORA{MARK}"):
        WAYS[way](base, folder, task)


def test_an_adapter_that_transformers_added_keeps_its_mixing(base, tmp_path):
    model = apply_attention(of(base), "mixhead-a")
    model.add_adapter(peft.LoraConfig(target_modules=["query"], modules_to_save=[*peft_modules(model), "classifier"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "default" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "lowrank_attention.json").is_file() and MARK in (tmp_path / "adapter_config.json").read_text()
    loaded = apply_attention(of(base), "mixhead-a")
    loaded.load_adapter(tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


def test_an_adapter_without_mixing_is_left_alone(base, tmp_path):
    model = peft.get_peft_model(of(base), peft.LoraConfig(target_modules=["query"]))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "lowrank_attention.json").exists()
    assert MARK not in (tmp_path / "adapter_config.json").read_text()
    peft.PeftModel.from_pretrained(of(base), tmp_path)
    with pytest.raises(UserError, match=r"no lowrank_attention\.json here.* Call apply_attention"):
        load_adapter(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("saved", [[], ["mixing"]])
def test_an_adapter_of_an_exported_model_keeps_its_mixing(saved, tmp_path):
    sizes = {f"decoder_{name}": 8 for name in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")}
    sizes |= {"vocab_size": 12, "decoder_layers": 1, "decoder_attention_heads": 2, "is_encoder_decoder": False}
    exported = LowrankForCausalLM(LowrankConfig(decoder_attention={"mixing": "static"}, **sizes)).eval()
    exported.decoder.layers[0].self_attn.mixing.weight.normal_()
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(exported), lora).eval()
    for name, parameter in model.named_parameters():
        if "default" in name:
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(exported, tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


def test_several_adapters_of_parts_in_one_batch_are_refused(base):
    model = apply_attention(of(base), "mixhead-a")
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=peft_modules(model))
    model = peft.get_peft_model(model, config).eval()
    model.add_adapter("other", config)
    with pytest.raises(
        UserError, match=r"StaticMatrix of several adapters in one batch is not computed\. Call set_adapter"
    ):
        model(IDS.repeat(2, 1), adapter_names=["default", "other"])
