"""Mixing that reads queries, in models with rotary positions: it reads them before they are rotated, as in the layer."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from fairseq_lowrank.attention import RotaryPositions, build_attention, build_core
from fairseq_lowrank.attention.core import core_presets
from fairseq_lowrank.huggingface import apply_attention, load_attention, save_attention
from fairseq_lowrank.huggingface.rotation import rotation_of
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import LayerPart, parts_of

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 50, "head_dim": 8, "max_position_embeddings": 1024},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
TOKENS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
# half of a head by pairs, a quarter in front, whole by pairs, halves of pairs, normalised before, scaled cosines
FAMILIES = ["Llama", "Glm", "GPTNeoX", "Phi", "Cohere", "GptOss", "Qwen3"]
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


def model_of(name, method="mixhead-b", **options):
    torch.manual_seed(1)
    extra = {"rope_parameters": YARN} if name == "Yarn" else {}
    family = "Llama" if name == "Yarn" else name
    config = getattr(transformers, f"{family}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{family}Model")(config).eval()
    return moved(apply_attention(model, method, **options))


def moved(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixing." in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 4)
    return model


def shift(model):
    """Return how far outputs move if all positions move by 500."""
    with torch.no_grad():
        here, there = (
            model(input_ids=TOKENS, position_ids=torch.arange(first, first + 9)[None]).last_hidden_state
            for first in (0, 500)
        )
    return float((here - there).abs().max())


@pytest.mark.parametrize("name", [*FAMILIES, "Yarn"])
def test_outputs_do_not_move_with_positions(name):
    assert shift(model_of(name)) < 1e-4
    assert shift(model_of(name, mixing_queries="rotated")) > 1e-2


def test_it_is_the_mixing_of_the_layer():
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 4})
    torch.manual_seed(1)
    model = moved(apply_attention(LlamaModel(config), "mixhead-b").eval())
    theirs = model.layers[0].self_attn
    ours = build_attention(
        "mixhead-b", 32, 4, rotary=RotaryPositions(), self_attention=True, batch_first=True, bias=False
    ).eval()
    state = {name.replace("o_proj", "out_proj"): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(ours.state_dict() | state)
    x = torch.randn(2, 9, 32)
    positions = model.rotary_emb(x, torch.arange(9)[None])
    expected, _ = ours(x, x, x, is_causal=True, need_weights=False)
    result = theirs(x, position_embeddings=positions, attention_mask=None)[0]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_equals_one_pass(cache):
    model = moved(apply_attention(LlamaForCausalLM(LlamaConfig(**SIZES)), "mixhead-b").eval())
    generated = model.generate(
        TOKENS, max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation=cache, use_cache=True
    )
    plain = model.generate(TOKENS, max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(generated, plain)


@pytest.mark.parametrize("name", ["SmolLM3", "Cohere2", "HunYuanDenseV1"])
def test_rotation_that_cannot_be_undone_is_refused(name):
    with pytest.raises(UserError, match='mixing_queries="rotated"'):
        model_of(name)
    model_of(name, "mixhead-a")
    model = model_of(name, mixing_queries="rotated")
    assert model.config.lowrank_attention["mixing_queries"] == "rotated"


def test_a_part_that_may_read_queries_counts_as_one_that_does():
    assert LayerPart.reads_queries  # of a user, whose class does not say it
    readers = [
        name for name in core_presets() if any(p.reads_queries for p in parts_of(build_core(name, 4, 8)).values())
    ]
    assert readers == ["mixhead-b"]
    with pytest.raises(UserError, match="expected 'unrotated' or 'rotated'"):
        model_of("Llama", mixing_queries="both")


def test_folders_keep_what_they_were_trained_with(tmp_path):
    model = model_of("Llama")
    save_attention(model, tmp_path)
    record = json.loads((tmp_path / "lowrank_attention.json").read_text())
    assert record.pop("mixing_queries") == "unrotated"
    again = load_attention(LlamaModel(LlamaConfig(**SIZES)).eval(), tmp_path)
    assert shift(again) < 1e-4
    (tmp_path / "lowrank_attention.json").write_text(json.dumps(record))  # as versions before 0.3.0 wrote it
    for file in tmp_path.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in model.state_dict().items() if ".mixing." in name}
        save_file(tensors, file)
    older = load_attention(LlamaModel(LlamaConfig(**SIZES)).eval(), tmp_path)
    assert older.config.lowrank_attention["mixing_queries"] == "rotated" and shift(older) > 1e-2


def test_scaled_cosines_leave_queries_their_size():
    cos, sin = model_of("Yarn", "mha").rotary_emb(torch.zeros(1, 9, 32), torch.arange(9)[None])
    assert (cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2 - 1).abs() > 0.1  # it scales them
    q = torch.randn(2, 4, 9, 8)
    rotated, _ = apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(rotation_of(LlamaAttention, 8).undone(rotated, cos, sin), q, atol=1e-5, rtol=1e-5)
