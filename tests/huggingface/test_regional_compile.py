"""Layers of a model that are compiled one by one share one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers_families import build

from fairseq_lowrank.huggingface import apply_attention


@pytest.mark.parametrize("preset", ["mixhead-b", "gated-head", "dcmha", "xsa", "t5-bias"])
def test_twelve_layers_compile_to_one_graph(preset):
    torch.compiler.reset()
    model, counter = apply_attention(build("llama", num_hidden_layers=12), preset), CompileCounter()
    tokens = torch.arange(2, 9)[None]
    expected = model(tokens, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(backend=counter)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)
    assert counter.frame_count == 1
