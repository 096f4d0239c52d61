"""A saved folder brings its attention: to from_pretrained, to code of strangers, and past the habits of training scripts."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers_families import build

from fairseq_lowrank.huggingface import apply_attention, load_attention, mixing_state, parameter_groups, save_attention
from fairseq_lowrank.huggingface.added import MARKER
from fairseq_lowrank.messages import UserError

TOKENS = torch.arange(2, 9)[None]
ROOT = Path(__file__).resolve().parents[2]


def trained(preset="mixhead-a", family="llama", **options):
    model = apply_attention(build(family), preset, **options)
    with torch.no_grad():
        for tensor in mixing_state(model).values():
            tensor.add_(torch.randn_like(tensor))
    return model


@pytest.mark.parametrize("way", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}], ids=str)
@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b", "alibi", "gated", "sinks"])
def test_a_saved_folder_is_restored_whatever_function_is_asked_for(preset, way, tmp_path, caplog):
    model = trained(preset)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **way).eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert "UNEXPECTED" not in caplog.text
    base = AutoModel.from_pretrained(tmp_path, **way).eval()
    assert torch.equal(base(TOKENS)[0], model.model(TOKENS)[0])


def test_the_report_on_other_tensors_stays(tmp_path):
    trained().save_pretrained(tmp_path)
    _, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["unexpected_keys"] == {"lm_head.weight"}
    build("llama").save_pretrained(tmp_path / "plain")
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not report["unexpected_keys"] and "_keys_to_ignore_on_load_unexpected" not in vars(type(build("llama")))


def test_a_half_precision_model_is_restored_with_parts_in_float32(tmp_path):
    trained().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in mixing_state(loaded).values()} == {torch.float32}
    assert loaded.lm_head.weight.dtype == torch.bfloat16


def test_a_model_of_the_hub_is_restored(tmp_path, monkeypatch):
    model, snapshot = trained(), tmp_path / "models--me--mine" / "snapshots" / "a1"
    model.save_pretrained(snapshot)
    (tmp_path / "models--me--mine" / "refs").mkdir()
    (tmp_path / "models--me--mine" / "refs" / "main").write_text("a1")
    loaded = AutoModelForCausalLM.from_pretrained("me/mine", cache_dir=tmp_path, local_files_only=True).eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("preset", ["alibi", "mha"])
def test_attention_without_tensors_leaves_a_mark(preset, tmp_path):
    model = apply_attention(build("llama"), preset, activation="softmax" if preset == "alibi" else "sigsoftmax")
    model.save_pretrained(tmp_path)
    assert any(MARKER in name for name in load_file(tmp_path / "model.safetensors"))
    for other in (apply_attention(copy.deepcopy(model), "mixhead-a"), apply_attention(model, "mha")):
        assert not any(MARKER in name for name in other.state_dict())


def test_applying_the_same_choice_again_keeps_what_is_trained(tmp_path):
    trained().save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(TOKENS).logits
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    apply_attention(model, "mixhead-a", train="mixing-only")
    assert torch.equal(model(TOKENS).logits, expected)
    parts = {id(tensor) for tensor in mixing_state(model).values()}
    assert all(p.requires_grad == (id(p) in parts) for p in model.parameters())
    apply_attention(model, "mixhead-a", train="all")
    assert torch.equal(model(TOKENS).logits, expected) and all(p.requires_grad for p in model.parameters())
    apply_attention(model, "mixhead-a", reset=True)
    assert not torch.equal(model(TOKENS).logits, expected)


OTHERS = [
    ("mixhead-b", {}),
    ("talking-heads", {}),
    ("mixhead-a", {"layers": [0]}),
    ("mixhead-a", {"activation": "sigsoftmax"}),
]


@pytest.mark.parametrize(("preset", "options"), OTHERS)
def test_another_choice_does_not_drop_what_is_trained(preset, options):
    model = trained()
    expected = model(TOKENS).logits
    with pytest.raises(UserError, match="trained attention of another choice, which would be lost"):
        apply_attention(model, preset, **options)
    assert torch.equal(model(TOKENS).logits, expected)
    apply_attention(model, preset, reset=True, **options)
    apply_attention(trained(), "mha")  # to remove is to ask for it
    apply_attention(apply_attention(build("llama"), "mixhead-a"), preset, **options)  # nothing was trained


@pytest.mark.parametrize("alone", [True, False])
def test_a_folder_with_trained_attention_is_loaded_not_begun_again(alone, tmp_path):
    model = trained()
    if alone:
        build("llama").save_pretrained(tmp_path)
        save_attention(model, tmp_path)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path)
        state = {name: tensor for name, tensor in model.state_dict().items() if "mixing" not in name}
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        config.name_or_path = str(tmp_path)
        plain = type(model).from_pretrained(None, config=config, state_dict=state)
        plain.config.name_or_path = str(tmp_path)
    with pytest.raises(UserError, match=r"has trained attention, .* Call load_attention\(model, .* or pass reset=True"):
        apply_attention(plain, "mixhead-a")
    apply_attention(copy.deepcopy(plain), "mixhead-a", reset=True)
    assert torch.equal(load_attention(plain, tmp_path).eval()(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("preset", ["mixhead-a", "gated", "alibi", "t5-bias", "talking-heads"])
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_attention_of_an_offloaded_model_is_saved(offload, preset, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = trained(preset)
    expected = model(TOKENS).logits
    options = (tmp_path / "disk",) if offload == "disk_offload" else ()
    getattr(accelerate, offload)(model, *options, execution_device="cpu")
    save_attention(model, tmp_path / "mixing")
    torch.testing.assert_close(load_attention(build("llama"), tmp_path / "mixing")(TOKENS).logits, expected)
    if mixing_state(model):
        with pytest.raises(UserError, match="trained attention of another choice"):
            apply_attention(model, "mixhead-b")


STRANGER = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
for folder, kind, trust in ((sys.argv[1], AutoModelForCausalLM, sys.argv[2]), (sys.argv[1] + "-again", AutoModel, "True")):
    try:
        model = kind.from_pretrained(folder, trust_remote_code=trust == "True").eval()
        with torch.no_grad():
            print("output", float(model(torch.arange(2, 9)[None])[0].double().abs().sum()))
        model.save_pretrained(sys.argv[1] + "-again")
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


NOT_INSTALLED = """
import sys
class Absent:
    def find_spec(self, name, *rest):
        if name == "fairseq_lowrank":
            raise ModuleNotFoundError("No module named 'fairseq_lowrank'", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_a_script_that_does_not_know_the_package(tmp_path):
    model, folder, hidden = trained("mixhead-b"), tmp_path / "folder", tmp_path / "hidden"
    model.save_pretrained(folder)
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(NOT_INSTALLED)

    def run(trust, *paths):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
        environment |= {"HF_HOME": str(tmp_path / f"home{len(paths)}"), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-W", "ignore", "-c", STRANGER, str(folder), str(trust)]
        return subprocess.run(words, capture_output=True, text=True, env=environment).stdout.splitlines()

    with torch.no_grad():
        expected = [float(part(TOKENS)[0].double().abs().sum()) for part in (model, model.model)]
    lines = run(True, ROOT)  # the second of them loads what the first has saved
    assert [line.split()[0] for line in lines] == ["output"] * 2, lines
    assert [float(line.split()[1]) for line in lines] == pytest.approx(expected, rel=1e-5)
    without, trusting = run(False, hidden, ROOT)
    assert without.startswith("ValueError") and 'attn_implementation="fairseq_lowrank"' in without
    assert trusting.startswith("ImportError") and "not found in your environment: fairseq_lowrank" in trusting


def test_a_restored_model_trains_like_a_new_one(tmp_path):
    trained().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.SGD(parameter_groups(model, learning_rate=0.1, mixing_learning_rate=1.0))
    before = {name: tensor.clone() for name, tensor in mixing_state(model).items()}
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in mixing_state(model).items())


def test_a_sentence_transformer_has_the_attention_of_its_folder(tmp_path):
    sentences = pytest.importorskip("sentence_transformers")
    model = trained("mixhead-b", "bert")
    model.save_pretrained(tmp_path / "whole")
    save_attention(model, tmp_path / "mixing")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "whole")
    whole = sentences.SentenceTransformer(str(tmp_path / "whole"), device="cpu")
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]])}
    torch.testing.assert_close(whole[0].auto_model(**inputs)[0], model.bert(**inputs)[0])
    other = copy.deepcopy(whole)
    load_attention(other[0].auto_model, tmp_path / "mixing")  # the line of the page
    assert torch.equal(other.encode(["a b"], convert_to_tensor=True), whole.encode(["a b"], convert_to_tensor=True))
