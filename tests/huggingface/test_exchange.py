"""A model with chosen attention never computes another attention function in silence."""

import copy
import pickle

import pytest
import torch
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers_families import build

from fairseq_lowrank.huggingface import apply_attention, attention_forward
from fairseq_lowrank.messages import UserError

TOKENS = torch.arange(2, 8)[None]
EXCHANGES = {
    "sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "eager": lambda model: model.set_attn_implementation("eager"),
    "paged": lambda model: model.set_attn_implementation("paged|eager"),
    "configuration": lambda model: setattr(model.config, "_attn_implementation", "sdpa"),
}


@pytest.mark.parametrize("axes", [{}, {"mixing": "none", "activation": "sigsoftmax"}], ids=["mixing", "activation"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchanged_function_is_refused_at_the_next_call(exchange, axes):
    model = apply_attention(build("llama"), "mixhead-a", **axes)
    expected = model(TOKENS).logits
    EXCHANGES[exchange](model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UserError, match=r"does not compute the chosen attention\. Call model\.set_attn_impl"):
            other(TOKENS)
    model.set_attn_implementation("fairseq_lowrank")
    torch.testing.assert_close(model(TOKENS).logits, expected)


@pytest.mark.parametrize("family", ["bert", "t5", "vit"])
def test_every_kind_of_model_refuses(family):
    model = apply_attention(build(family), "mixhead-a")
    model.set_attn_implementation("eager")
    inputs = {"pixel_values": torch.zeros(1, 3, 16, 16)} if family == "vit" else {"input_ids": TOKENS}
    with pytest.raises(UserError, match="'eager' does not compute"):
        model(**inputs, **({"decoder_input_ids": TOKENS} if family == "t5" else {}))


def test_a_model_whose_choice_was_removed_takes_any_function():
    plain = build("llama")
    model = apply_attention(apply_attention(build("llama"), "mixhead-a"), "mha")
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits)


def test_continuous_batching_is_refused():
    model = apply_attention(build("llama"), "mixhead-a")
    settings = GenerationConfig(max_new_tokens=2, eos_token_id=-1, pad_token_id=0)
    for start in (
        lambda: model.generate_batch(inputs=[[1, 2, 3]], generation_config=settings),
        lambda: model.generate(TOKENS, generation_config=settings, cache_implementation="paged"),
    ):
        with pytest.raises(UserError, match="continuous batching has its own attention functions"):
            start()


@pytest.mark.parametrize("name", ["fairseq_lowrank", "sdpa"])
def test_sequence_parallelism_is_refused(name, monkeypatch):
    def of_deepspeed(
        module, query, key, value, mask, **options
    ):  # Ulysses: each worker gets the whole sequence of some heads
        some = query.size(1) // 2
        return attention_forward(module, query[:, :some], key[:, :some], value[:, :some], mask, **options)

    of_deepspeed.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, of_deepspeed)
    model = apply_attention(build("llama"), "mixhead-a")
    if name == "sdpa":
        model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="'sdpa' does not compute" if name == "sdpa" else "or sequence parallelism"):
        model(TOKENS)
