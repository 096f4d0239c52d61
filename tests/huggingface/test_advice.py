"""Each message says what to do, and doing it works."""

import re

import pytest
import torch
import transformers
from transformers_families import TOKENS, build

from fairseq_lowrank import cli
from fairseq_lowrank.huggingface import apply_attention, attention_modules, load_attention, save_attention
from fairseq_lowrank.messages import UserError

INPUTS = {"input_ids": torch.arange(2, 12)[None]}


@pytest.mark.parametrize(("preset", "axes"), [("mhe-mul", {}), ("gqa", {"key_value_heads": 2}), ("diff", {})])
def test_every_preset_that_a_refusal_offers_can_be_taken(preset, axes):
    with pytest.raises(UserError) as refusal:
        apply_attention(build("llama"), preset, **axes)
    offered = re.search(r"Choose from ([\w, -]+), or set", str(refusal.value))
    assert offered is not None, str(refusal.value)
    for name in offered[1].split(", "):
        apply_attention(build("llama"), name)(**INPUTS)


def test_the_sites_that_a_refusal_offers_can_be_taken():
    sizes = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": 0}
    model = transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**sizes, **TOKENS)).eval()
    with pytest.raises(UserError) as refusal:
        apply_attention(model, "mixhead-a")
    offered = re.search(r"sites=\[([^]]+)\]", str(refusal.value))
    apply_attention(model, "mixhead-a", sites=re.findall(r"\w+", offered[1]))
    model(**INPUTS, decoder_input_ids=INPUTS["input_ids"])


def test_a_model_that_passes_more_runs_without_mixing():
    model = apply_attention(build("bert"), "mixhead-a")
    module = attention_modules(model)[0][0]
    with pytest.raises(UserError, match=r'set_attn_implementation\("sdpa"\)'):
        module(torch.randn(1, 3, 32), block_indices=torch.zeros(1))
    apply_attention(model, "mha").set_attn_implementation("sdpa")
    module(torch.randn(1, 3, 32))


@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads", "gain"])
def test_inspect_reads_both_folders_that_it_asks_for(preset, tmp_path, capsys):
    model = build("bert")
    model.save_pretrained(tmp_path / "plain")
    assert cli.main(["inspect", "--transformers", str(tmp_path / "plain")]) == 2
    said = capsys.readouterr().err
    assert "apply_attention" in said and "save_attention or save_pretrained" in said
    apply_attention(model, preset)
    save_attention(model, tmp_path / "folder-a")
    model.save_pretrained(tmp_path / "folder-b")
    shown = []
    for folder in ("folder-a", "folder-b"):
        capsys.readouterr()
        assert cli.main(["inspect", "--transformers", str(tmp_path / folder)]) == 0
        shown.append(capsys.readouterr().out.replace(folder, ""))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("command", [["params"]])
def test_other_commands_ask_for_the_whole_model(command, tmp_path, capsys):
    model = apply_attention(build("bert"), "mixhead-b")
    save_attention(model, tmp_path / "mixing")
    assert cli.main([*command, "--transformers", str(tmp_path / "mixing")]) == 2
    assert "a mixing alone" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "whole")
    assert cli.main([*command, "--transformers", str(tmp_path / "whole")]) == 0


def test_an_earlier_mixing_without_sizes_is_saved_again_as_the_message_says(tmp_path, capsys):
    model = apply_attention(build("bert"), "mixhead-b")
    save_attention(model, tmp_path)
    path = tmp_path / "lowrank_attention.json"
    path.write_text(re.sub(r',\n "modules": \[.*\]\n\}', "\n}", path.read_text(), flags=re.DOTALL))
    assert cli.main(["inspect", "--transformers", str(tmp_path)]) == 2
    assert "save it again" in capsys.readouterr().err
    save_attention(load_attention(build("bert"), tmp_path), tmp_path)
    assert cli.main(["inspect", "--transformers", str(tmp_path)]) == 0
