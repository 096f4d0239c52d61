"""Attention of exported models: copies, and what a cache holds."""

import copy
import pickle

import pytest
import torch

from fairseq_lowrank.huggingface.exported import LowrankConfig, LowrankForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {f"decoder_{name}": 8 for name in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")}
    config = LowrankConfig(
        vocab_size=12,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_attention={"score_bias": "alibi"},
        is_encoder_decoder=False,
        **sizes,
    )
    return LowrankForCausalLM(config).eval()


@torch.no_grad()
def test_copies_generate_what_the_model_does(model):
    inputs = torch.tensor([[4, 5, 6]])
    expected = model.generate(inputs, max_new_tokens=3, do_sample=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.generate(inputs, max_new_tokens=3, do_sample=False), expected)
