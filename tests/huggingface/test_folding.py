"""A model with plain attention in other words becomes a stock model with the same outputs, and other attention is refused."""

import pytest
import torch
from transformers_families import CAUSAL, EAGER, FAMILIES, build

from fairseq_lowrank.huggingface import apply_attention, fold, mixing_state
from fairseq_lowrank.messages import UserError

TOKENS = torch.arange(2, 9)[None]


def outputs(model, family):
    inputs = {"pixel_values": torch.ones(1, 3, 16, 16)} if family == "vit" else {"input_ids": TOKENS}
    inputs |= {"decoder_input_ids": TOKENS} if family in ("t5", "bart", "marian") else {}
    with torch.no_grad():
        return model(**inputs).logits


def trained(family, preset, **sizes):
    model = apply_attention(build(family, **sizes), preset)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.add_(0.3 * torch.randn_like(tensor) if name in mixing_state(model) or "bias" in name else 0)
    return model.eval()


@pytest.mark.parametrize("preset", ["gain", "score-gain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_factors_of_heads_fold_into_every_family(preset, family, tmp_path):
    model = trained(family, preset)
    expected = outputs(model, family)
    if preset == "score-gain" and family in ("qwen3", "gemma2"):
        with pytest.raises(UserError, match="its queries are normalised, or its scores capped"):
            fold(model)
        assert torch.equal(outputs(model, family), expected) and mixing_state(model)
        return
    folded = fold(model)
    assert folded.config._attn_implementation == ("eager" if family in EAGER else "sdpa")
    assert folded.state_dict().keys() == build(family).state_dict().keys()
    torch.testing.assert_close(outputs(folded, family), expected, rtol=1e-4, atol=1e-5)
    folded.save_pretrained(tmp_path)
    assert "lowrank" not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
    again = type(folded).from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(outputs(again, family), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", ["avghead", "mixhead-a", "mixhead-random", "gain"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_any_static_mixing_folds_where_heads_share_one_value(preset, family):
    model = trained(family, preset, num_key_value_heads=1)
    expected = outputs(model, family)
    torch.testing.assert_close(outputs(fold(model), family), expected, rtol=1e-4, atol=1e-5)


REFUSED = {
    "avghead": "mixes heads that have separate values",
    "mixhead-a": "mixes heads that have separate values",
    "mixhead-b": "depends on the input",
    "talking-heads": "mixes heads that have separate values",
    "alibi": "depends on the input or on positions",
    "gated": "depends on the input",
    "dcmha": "depends on the input",
}


@pytest.mark.parametrize("preset", REFUSED)
def test_attention_that_computes_more_is_refused(preset):
    model = trained("llama", preset)
    expected = outputs(model, "llama")
    with pytest.raises(UserError, match=f"LlamaAttention: .*{REFUSED[preset]}.* no stock model"):
        fold(model)
    assert torch.equal(outputs(model, "llama"), expected)
    with pytest.raises(UserError, match="its activation is not the softmax"):
        fold(apply_attention(build("llama"), "gain", activation="sigsoftmax"))


def test_half_precision_is_folded_in_float32():
    model = trained("llama", "gain").to(torch.bfloat16)
    expected = outputs(model, CAUSAL[1])
    torch.testing.assert_close(outputs(fold(model), "llama"), expected, rtol=0.05, atol=0.05)
