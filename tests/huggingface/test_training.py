"""What trains after ``apply_attention``, in which groups, and together with PEFT."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertModel, Trainer, TrainingArguments
from transformers_families import SIZES, TOKENS, build

from fairseq_lowrank.huggingface import (
    apply_attention,
    attention_modules,
    load_attention,
    mixing_state,
    parameter_groups,
    save_attention,
)
from fairseq_lowrank.messages import UserError

INPUTS = {"input_ids": torch.arange(2, 12)[None]}


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(1)
    return BertForSequenceClassification(BertConfig(**SIZES, **TOKENS, intermediate_size=64)).eval()


def trainable(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_the_head_of_a_task_learns_with_the_mixing(capsys):
    model = apply_attention(classifier(), "mixhead-a", train="mixing")
    assert trainable(model) == {*mixing_state(model), "classifier.weight", "classifier.bias"}
    assert "trains 32 added numbers and 66 of the model's own" in capsys.readouterr().err
    assert trainable(apply_attention(model, "mixhead-a", train="mixing-only")) == set(mixing_state(model))


def test_a_matrix_that_predicts_tokens_is_no_new_head():
    model = apply_attention(build("bert"), "mixhead-a", train="mixing")
    assert trainable(model) == set(mixing_state(model))


def test_what_was_frozen_here_is_trained_again_and_nothing_else():
    model = classifier()
    model.bert.embeddings.requires_grad_(False)
    before = trainable(model)
    for train in ("mixing", "mixing-only", "all"):
        apply_attention(model, "mixhead-a", train=train)
    assert trainable(model) == before | set(mixing_state(model))


def test_groups_decay_neither_mixing_nor_biases():
    model = apply_attention(classifier(), "mixhead-b")
    groups = parameter_groups(model, learning_rate=1e-4, weight_decay=0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-4, 0.0)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [{names[id(parameter)] for parameter in group["params"]} for group in groups]
    assert grouped[2] == set(mixing_state(model))
    assert all(name.endswith("bias") or "LayerNorm" in name for name in grouped[1])
    assert sum(map(len, grouped)) == len(names) == len(set().union(*grouped))


def test_the_rate_of_mixing_is_that_of_the_model_or_given():
    model = apply_attention(classifier(), "gated")
    groups = parameter_groups(model, learning_rate=1e-4, mixing_learning_rate=1e-3)
    assert [group["lr"] for group in groups] == [1e-4, 1e-4, 1e-3]
    assert len(groups[2]["params"]) == len(mixing_state(model))


def test_trainer_takes_the_groups(tmp_path):
    model = apply_attention(classifier(), "mixhead-a")
    with torch.no_grad():
        for tensor in mixing_state(model).values():
            tensor.add_(1.0)
    before = {name: tensor.clone() for name, tensor in mixing_state(model).items()}
    optimizer = torch.optim.AdamW(parameter_groups(model, learning_rate=0.0, weight_decay=0.5))
    rows = [{"input_ids": INPUTS["input_ids"][0], "labels": 1}] * 2
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], save_strategy="no", use_cpu=True)
    Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in mixing_state(model).items())


# --- PEFT


def lora(**more) -> LoraConfig:
    return LoraConfig(target_modules=["query", "value"], init_lora_weights=False, **more)


def train(model) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(**INPUTS, labels=torch.tensor([1])).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(**INPUTS).logits


@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads", "gated"])
def test_an_adapter_saves_mixing_that_was_applied_before_it(preset, tmp_path):
    modules = ["mixing", "score_mixing", "head_output", "classifier"]
    model = get_peft_model(apply_attention(classifier(), preset), lora(modules_to_save=modules))
    train(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(apply_attention(classifier(), preset), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected)
    with pytest.raises(UserError, match="merge_and_unload"):
        save_attention(model.get_base_model(), tmp_path / "early")
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    save_attention(merged, tmp_path / "mixing")
    merged.config.lowrank_attention = merged.config.attn_implementation = None
    plain = classifier()
    plain.load_state_dict(merged.state_dict(), strict=False)
    torch.testing.assert_close(logits(load_attention(plain, tmp_path / "mixing")), expected, atol=1e-5, rtol=1e-5)


def test_mixing_that_is_applied_after_an_adapter_is_saved_next_to_it(tmp_path):
    model = get_peft_model(classifier(), lora(modules_to_save=["classifier"]))
    frozen = trainable(model)
    apply_attention(model.get_base_model(), "mixhead-b")
    assert trainable(model) - frozen == {f"base_model.model.{name}" for name in mixing_state(model.get_base_model())}
    train(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    save_attention(model.get_base_model(), tmp_path / "mixing")
    loaded = PeftModel.from_pretrained(classifier(), tmp_path / "adapter")
    load_attention(loaded.get_base_model(), tmp_path / "mixing")
    torch.testing.assert_close(logits(loaded), expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    save_attention(merged, tmp_path / "merged")


# --- files


def test_a_mixing_loads_with_and_without_the_head_of_a_task(tmp_path):
    model = apply_attention(classifier(), "mixhead-b")
    train(model)
    save_attention(model, tmp_path / "task")
    base = load_attention(BertModel(model.config), tmp_path / "task")
    assert all(torch.equal(mixing_state(model)[f"bert.{name}"], value) for name, value in mixing_state(base).items())
    save_attention(base, tmp_path / "base")
    again = load_attention(classifier(), tmp_path / "base")
    assert all(torch.equal(mixing_state(model)[name], value) for name, value in mixing_state(again).items())
    for name, source, target in (("a", model, BertModel(model.config)), ("b", base, classifier())):
        source.save_pretrained(tmp_path / name)
        loaded = mixing_state(load_attention(target, tmp_path / name))
        assert all(
            torch.equal(value, loaded[key]) for key, value in zip(loaded, mixing_state(base).values(), strict=True)
        )


def test_two_mixings_in_one_folder_are_refused_where_they_differ(tmp_path):
    model = apply_attention(classifier(), "mixhead-a")
    save_attention(model, tmp_path)
    model.save_pretrained(tmp_path)
    load_attention(classifier(), tmp_path)
    train(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lowrank_attention\.safetensors and in model\.safetensors"):
        load_attention(classifier(), tmp_path)
    apply_attention(model, "mixhead-b", reset=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"mixing is 'static' in .* and 'positionwise'"):
        load_attention(classifier(), tmp_path)


def test_every_layer_that_is_mixed_has_its_mixing():
    model = apply_attention(classifier(), "mixhead-a")
    assert len(mixing_state(model)) == len(attention_modules(model)) == 2


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({}, None),
        (
            {"activation": "sigsoftmax"},
            r"checkpoint-1 was trained with activation 'softmax', and the model has 'sigsoftmax'",
        ),
        (
            None,
            r"checkpoint-1 was trained with mixing 'static', and the model has 'none'\. Call apply_attention as before",
        ),
    ],
    ids=["the same", "another", "none"],
)
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapter"])
def test_a_training_resumes_with_the_same_attention_alone(axes, reason, adapted, tmp_path):
    def trainer(axes, steps):
        model = classifier()
        if axes is not None:
            apply_attention(model, "mixhead-a", **axes)
        if adapted:
            model = get_peft_model(model, LoraConfig(target_modules=["query"], modules_to_save=["classifier"]))
        given = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "steps", "save_steps": 1}
        arguments = TrainingArguments(tmp_path, max_steps=steps, per_device_train_batch_size=2, **given)
        data = [{"input_ids": INPUTS["input_ids"][0], "labels": label} for label in (0, 1, 0, 1)]
        return Trainer(model, arguments, train_dataset=data)

    trainer({}, 1).train()
    resumed = trainer(axes, 2)
    if reason is None:
        assert resumed.train(resume_from_checkpoint=True).global_step == 2
    else:
        with pytest.raises(UserError, match=reason):
            resumed.train(resume_from_checkpoint=True)
