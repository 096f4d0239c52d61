"""Folders with the mixing of a model: what they record, and what another installation reads from them."""

import copy
import json
import os

import pytest
import torch
import transformers
from full_disk import full_disk
from safetensors.torch import load_file
from torch.nn.utils import parametrizations, parametrize, prune
from transformers_families import build

from fairseq_lowrank.attention import AXES, Method, register
from fairseq_lowrank.files import whole_files
from fairseq_lowrank.huggingface import apply_attention, load_attention, mixing_state, save_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import HeadOutput, Option

TOKENS = torch.arange(2, 12)[None]


def add_noise(model):
    with torch.no_grad():
        for tensor in mixing_state(model).values():
            tensor.add_(torch.randn_like(tensor))


class Switched(HeadOutput):
    name = "switched"
    options = (Option("switch", "a choice without tensors", default="off", choices=("off", "on")),)

    def __init__(self, config, switch="off"):
        super().__init__(config)
        self.switch = switch

    def heads(self, heads, context):
        return heads * 2 if self.switch == "on" else heads


@pytest.mark.parametrize("save", [save_attention, lambda model, folder: model.save_pretrained(folder)])
def test_a_folder_has_no_option_of_a_method_that_it_does_not_use(save, methods_leave, tmp_path):
    register(Method("switched", "A test", "f", {"head_output": Switched}))
    model = apply_attention(build("gpt2"), "mixhead-b", mixing_normalization="l2")
    save(model, tmp_path)
    assert "switch" not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
    del AXES["switch"]  # as in a process that does not import the plugin
    loaded = load_attention(build("gpt2"), tmp_path)
    assert loaded.config.lowrank_attention["mixing_normalization"] == "l2"


def test_an_unknown_option_is_ignored_only_where_it_is_at_its_default(tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-a")
    save_attention(model, tmp_path)
    path = tmp_path / "lowrank_attention.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"switch": "on"}))
    with pytest.raises(UserError, match=r"lowrank_attention\.json: saved with switch='on'.* import the plugin"):
        load_attention(build("gpt2"), tmp_path)
    path.write_text(
        json.dumps(record | {"factor_rank": None, "gate_start": "identity", "switch": "off"})
    )  # as 0.2.0 wrote
    torch.testing.assert_close(load_attention(build("gpt2"), tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_a_part_of_a_plugin_is_refused_with_the_remedy(tmp_path):
    save_attention(apply_attention(build("gpt2"), "mixhead-a"), tmp_path)
    path = tmp_path / "lowrank_attention.json"
    path.write_text(path.read_text().replace('"static"', '"of-a-plugin"'))
    with pytest.raises(ValueError, match=r"'of-a-plugin': expected one of .* import the plugin first"):
        load_attention(build("gpt2"), tmp_path)


def test_a_pipeline_of_a_saved_folder_has_its_mixing(tmp_path):
    model = apply_attention(build("bert"), "mixhead-b")
    add_noise(model)
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    fill = transformers.pipeline("fill-mask", model=str(tmp_path))
    assert fill("a [MASK]")
    torch.testing.assert_close(fill.model(TOKENS).logits, model(TOKENS).logits)


def test_a_failed_save_leaves_the_earlier_mixing(tmp_path, monkeypatch):
    model = apply_attention(build("gpt2"), "mixhead-a")
    save_attention(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        next(iter(mixing_state(model).values())).add_(1)
    with full_disk(10), pytest.raises(UserError, match=r"lowrank_attention\.\w+: .*nothing was written"):
        save_attention(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_save_that_ends_between_two_files_is_refused(tmp_path, monkeypatch):
    save_attention(apply_attention(build("gpt2"), "mixhead-a"), tmp_path)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: str(path).endswith("json") or replace(part, path))
    save_attention(apply_attention(build("gpt2"), "mixhead-a", activation="sigsoftmax"), tmp_path)
    with pytest.raises(UserError, match=r"safetensors was saved with activation='sigsoftmax', and .* has 'softmax'"):
        load_attention(build("gpt2"), tmp_path)


@pytest.mark.parametrize("name", ["lowrank_attention.json", "lowrank_attention.safetensors", "config.json"])
@pytest.mark.parametrize("content", ["", "[]"])
def test_a_damaged_file_is_named(name, content, tmp_path):
    save_attention(apply_attention(build("gpt2"), "mixhead-a"), tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} (is damaged|is not valid JSON|has no JSON object).* (Save|Make)"):
        load_attention(build("gpt2"), tmp_path)


def test_files_that_belong_together_are_renamed_when_all_are_complete(tmp_path):
    paths = [tmp_path / "weights", tmp_path / "choice"]
    with full_disk(10), pytest.raises(UserError, match="nothing was written"), whole_files(*paths) as files:
        for file, text in zip(files, ("short", "longer than the disk"), strict=True):
            file.write(text)  # into a buffer, which is written when the file is closed
    assert not [*tmp_path.iterdir()]


def test_layers_that_share_a_part_are_saved(tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-a")
    first, second = (block.attn for block in model.transformer.h)
    second.mixing = first.mixing
    torch.nn.init.normal_(first.mixing.weight)
    save_attention(model, tmp_path)
    torch.testing.assert_close(load_attention(build("gpt2"), tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_a_mixing_is_not_saved_over_that_of_a_whole_model(tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-a")
    model.save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=f"{tmp_path} holds a whole model"):
        save_attention(model, tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_mixing_follows_links_and_refuses_files_as_folders(tmp_path):
    model, target = apply_attention(build("gpt2"), "mixhead-a"), tmp_path / "target"
    target.write_bytes(b"")
    (tmp_path / "mixing").mkdir()
    (tmp_path / "mixing" / "lowrank_attention.safetensors").symlink_to(target)
    save_attention(model, tmp_path / "mixing")
    assert (tmp_path / "mixing" / "lowrank_attention.safetensors").is_symlink() and target.stat().st_size
    with pytest.raises(UserError, match=f"{target}: is a file"):
        save_attention(model, target)


@pytest.mark.parametrize("change", ["apply", "load"])
def test_a_refused_choice_leaves_the_model_as_it_was(change, tmp_path):
    save_attention(apply_attention(build("bert", num_attention_heads=8), "mixhead-b"), tmp_path)
    model = apply_attention(build("bert"), "mixhead-a", train="mixing")
    torch.nn.init.normal_(next(iter(mixing_state(model).values())))
    expected, before, config = model(TOKENS).logits, mixing_state(model), model.config.to_dict()
    trained = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"position_buckets=3|found a tensor \[8, 8\]"):
        if change == "apply":
            apply_attention(model, "t5-bias", position_buckets=3)
        else:
            load_attention(model, tmp_path)
    assert model.config.to_dict() == config and [p.requires_grad for p in model.parameters()] == trained
    assert all(tensor is before[name] for name, tensor in mixing_state(model).items())
    assert torch.equal(model(TOKENS).logits, expected)


def test_models_of_one_configuration_object_keep_their_own_choices(tmp_path):
    config = build("gpt2").config
    models = {choice: transformers.GPT2LMHeadModel(config).eval() for choice in ("none", "sum", "l2")}
    for choice, model in models.items():
        apply_attention(model, "mixhead-a", mixing_normalization=choice)
        torch.nn.init.uniform_(next(iter(mixing_state(model).values())))
    for choice, model in models.items():
        save_attention(model, tmp_path / choice)
        model.save_pretrained(tmp_path / f"whole-{choice}")
        for name in (choice, f"whole-{choice}"):
            loaded = load_attention(copy.deepcopy(model), tmp_path / name)
            assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
            assert loaded.config.lowrank_attention.get("mixing_normalization", "none") == choice
    config = build("gpt2").config
    first, second = (apply_attention(transformers.GPT2LMHeadModel(config), "mixhead-a") for _ in range(2))
    apply_attention(first, "mha")
    assert second.config.lowrank_attention["mixing"] == "static"


def test_a_model_whose_choice_was_removed_is_saved_as_any_other(tmp_path):
    model = apply_attention(apply_attention(build("bert"), "mixhead-a"), "mha")
    model.save_pretrained(tmp_path)
    assert "lowrank" not in (tmp_path / "config.json").read_text()
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, build("bert")(TOKENS).logits)


def test_a_compiled_model_is_saved_under_the_names_of_the_model(tmp_path):
    model = build("gpt2")
    compiled = torch.compile(model, backend="eager")
    assert apply_attention(compiled, "mixhead-a", train="mixing-only") is compiled
    save_attention(compiled, tmp_path)
    loaded = mixing_state(load_attention(build("gpt2"), tmp_path))
    assert loaded.keys() == mixing_state(model).keys()
    apply_attention(model, "mixhead-a")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("use", [save_attention, load_attention, lambda model, _: apply_attention(model, "gain")])
def test_a_wrapped_model_is_refused_with_the_remedy(use, tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-a")
    save_attention(model, tmp_path)
    with pytest.raises(UserError, match=r"model is a DataParallel: .* give the model inside: model\.module"):
        use(torch.nn.DataParallel(model), tmp_path)


def test_values_are_not_loaded_into_a_model_without_memory(tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-a")
    save_attention(model, tmp_path)
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(model.config)
    with pytest.raises(UserError, match=r"mixing\.weight would be on the meta device.* Load the model's weights first"):
        load_attention(empty, tmp_path)


def test_a_choice_for_a_part_of_a_model_is_not_saved_in_silence(tmp_path, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    text = sizes | {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 4})
    for is_part in (True, False):
        model = transformers.CLIPModel(copy.deepcopy(config))
        apply_attention(model.vision_model if is_part else model, "mixhead-a")
        capsys.readouterr()
        model.save_pretrained(tmp_path)
        assert ("attention was chosen for a part of this CLIPModel" in capsys.readouterr().err) == is_part


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda part: prune.l1_unstructured(part, "weight", amount=2), lambda part: prune.remove(part, "weight")),
        (
            lambda part: parametrizations.orthogonal(part, "weight"),
            lambda part: parametrize.remove_parametrizations(part, "weight"),
        ),
    ],
)
def test_a_mixing_under_other_names_is_refused_before_it_is_saved(change, undo, tmp_path):
    model = apply_attention(build("gpt2"), "mixhead-b")
    part = model.transformer.h[1].attn.mixing
    change(part)
    with pytest.raises(UserError, match=r"h\.1\.attn\.mixing\.\w+.* is the tensor of a parametrisation or of pruning"):
        save_attention(model, tmp_path)
    undo(part)
    save_attention(model, tmp_path)
    torch.testing.assert_close(load_attention(build("gpt2"), tmp_path)(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
def test_a_model_that_is_saved_under_older_names_is_loaded(kind, tmp_path):
    model = apply_attention(build("vit"), "mixhead-a")
    with torch.no_grad():
        for tensor in mixing_state(model).values():
            tensor.add_(torch.randn_like(tensor))
    model.save_pretrained(tmp_path)
    assert "vit.encoder.layer.0.attention.mixing.weight" in load_file(tmp_path / "model.safetensors")
    loaded = load_attention(getattr(transformers, kind).from_pretrained(tmp_path).eval(), tmp_path)
    pixels = torch.randn(1, 3, 16, 16)
    expected = model if kind != "ViTModel" else model.vit
    torch.testing.assert_close(loaded(pixels)[0], expected(pixels)[0])
