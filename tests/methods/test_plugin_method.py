"""A method that a user's plugin registers is as good as ours: flags, Python, commands and saved models."""

import json
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import utils
from tiny_transformer import SIZES, arguments, make_task

from fairseq_lowrank import cli
from fairseq_lowrank.attention import build_attention

PLUGIN = """
import torch

from fairseq_lowrank.attention import Method, register
from fairseq_lowrank.parts import HeadOutput, Option, no_weight_decay


class MyNorm(HeadOutput):
    name = "my-norm"
    options = (Option("norm_power", "power of the rms (default: 1)", default=1),)

    def __init__(self, config, norm_power=1):
        super().__init__(config)
        self.norm_power = norm_power
        self.weight = no_weight_decay(torch.ones(config.num_heads))

    def heads(self, heads, context):
        rms = heads.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        return heads / rms**self.norm_power * self.weight[:, None, None]


register(
    Method(
        "my-norm",
        "Normed heads",
        "O_i / rms(O_i) w_i",
        {"head_output": MyNorm},
        parameters="4·d·h·d_k + h",
        cached="2·h·d_k",
        kind="OV",
    )
)
"""


@pytest.fixture
def plugin(tmp_path, plugins_leave):
    folder = tmp_path / "normed_heads_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text(PLUGIN)
    return folder


def run(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_commands_take_the_method_of_a_plugin(plugin, capsys):
    shape = ("--arch", "transformer", "--vocab-size", 20, *SIZES)
    told = run(capsys, "--user-dir", plugin, "params", "--json", *shape, "--attention", "my-norm", "--norm-power", 2)
    described = json.loads(told)
    assert described["attention_kind"] == "my-norm" and described["extra"] == 6 * 4
    assert described["axes"]["encoder"]["class"] == "OV" and described["axes"]["cross"]["norm_power"] == 2


def test_a_model_is_built_saved_and_refused_by_another_choice(plugin):
    utils.import_user_module(Namespace(user_dir=str(plugin)))
    args = arguments("transformer", *SIZES, "--attention", "my-norm", "--norm-power", 2)
    model = make_task().build_model(args)
    layer = model.decoder.layers[0].encoder_attn
    assert layer.head_output.norm_power == 2 and "norm_power=2" in repr(layer)
    other = build_attention("mha", 16, 4, encoder_decoder_attention=True)
    with pytest.raises(RuntimeError, match="head_output"):
        other.load_state_dict(layer.state_dict())


def test_transformers_takes_the_method_of_a_plugin(plugin):
    pytest.importorskip("transformers")
    from transformers_families import build

    from fairseq_lowrank.huggingface import apply_attention

    utils.import_user_module(Namespace(user_dir=str(plugin)))
    model = apply_attention(build("gpt2"), "my-norm", norm_power=2)
    assert model.config.lowrank_attention["norm_power"] == 2
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_convert_takes_the_method_and_the_options_of_a_plugin(plugin, trained, tmp_path, capsys):
    code = (plugin / "__init__.py").read_text()
    gain = code.replace(
        "heads / rms**self.norm_power * self.weight[:, None, None]", "heads * self.weight[:, None, None]"
    )
    assert gain != code  # starts as the identity
    (plugin / "__init__.py").write_text(gain)
    target = tmp_path / "converted.pt"
    words = ["convert", trained("stock"), "--attention", "my-norm", "--norm-power", 2, "--output", target]
    assert "exact: the model's outputs" in run(capsys, "--user-dir", plugin, *words)
    inspected = json.loads(run(capsys, "inspect", target, "--json"))
    assert {layer["axes"]["norm_power"] for layer in inspected["layers"]} == {2}
    assert cli.main([*map(str, [*words[:4], "--norm-pwer", 2, "--output", tmp_path / "b.pt"])]) == 2
    assert "--norm-pwer" in capsys.readouterr().err
