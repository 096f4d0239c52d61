"""Attention of exported models: copies, and what a cache holds."""

import copy
import pickle

import pytest
import torch
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fairseq_lowrank.huggingface.exported import LowrankConfig, LowrankForCausalLM, LowrankForSeq2SeqLM
from fairseq_lowrank.messages import UserError


def language_model(**attention):
    torch.manual_seed(0)
    sizes = {f"decoder_{name}": 8 for name in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")}
    config = LowrankConfig(
        vocab_size=12,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_attention=attention,
        is_encoder_decoder=False,
        **sizes,
    )
    return LowrankForCausalLM(config).eval()


@pytest.fixture
def model():
    return language_model(score_bias="alibi")


@torch.no_grad()
def test_copies_generate_what_the_model_does(model):
    inputs = torch.tensor([[4, 5, 6]])
    expected = model.generate(inputs, max_new_tokens=3, do_sample=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.generate(inputs, max_new_tokens=3, do_sample=False), expected)


def test_left_padding_changes_no_token_with_a_static_cache():
    model, options = language_model(), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    inputs = torch.tensor([[4, 5, 6, 7, 8, 9], [1, 1, 1, 4, 5, 6]])
    options["attention_mask"] = inputs.ne(1).long()
    expected = model.generate(inputs, **options)
    assert torch.equal(model.generate(inputs, cache_implementation="static", **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_mask_of_any_dtype_counts_positions(dtype):
    model, inputs = language_model(), torch.randint(3, 12, (1, 300))
    found = model(inputs, attention_mask=torch.ones(1, 300, dtype=dtype)).logits
    torch.testing.assert_close(found, model(inputs).logits)


class QuantizedStates(QuantizedLayer):
    """The quantised cache of transformers, without rounding."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


@pytest.mark.parametrize("attention", [{"projection": "latent", "rotary_dim": 2}, {"head_map": "heads"}])
def test_a_quantised_cache_has_all_positions(attention):
    model, inputs = language_model(**attention), torch.tensor([[4, 5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cache = Cache(layers=[QuantizedStates(residual_length=2) for _ in range(2)])
    assert torch.equal(model.generate(inputs, past_key_values=cache, **options), model.generate(inputs, **options))


@torch.no_grad()
@pytest.mark.parametrize("attention", [{}, {"mixing": "static"}])
def test_packed_texts_are_separate(attention):
    model, texts = language_model(**attention), torch.tensor([[4, 5, 6, 7, 8]])
    found = model(texts, position_ids=torch.tensor([[0, 1, 2, 0, 1]]), use_cache=False).logits
    expected = torch.cat([model(text).logits for text in texts.split([3, 2], dim=1)], dim=1)
    torch.testing.assert_close(found, expected)


def test_parts_stay_float32_in_a_model_that_is_loaded_in_bfloat16(tmp_path):
    model = language_model(mixing="static")
    weight = model.decoder.layers[0].self_attn.mixing.weight
    torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    loaded = LowrankForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).decoder.layers[0].self_attn
    assert loaded.out_proj.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.mixing.weight, weight) and loaded.mixing.weight.dtype == torch.float32


def translation_model(shared=False, **attention):
    sizes = {f"{stack}_{name}": 8 for stack in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    heads = {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("attention_heads", "layers")}
    words = {"vocab_size": 12, "source_vocab_size": 12, "decoder_input_dim": 8, "decoder_output_dim": 8}
    tied = dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed", "tie_word_embeddings"), shared)
    return LowrankForSeq2SeqLM(LowrankConfig(**sizes, **heads, **words, **tied, **attention)).eval()


@pytest.mark.parametrize("shared", [True, False])
def test_a_resized_translation_model_is_saved_whole_or_refused(shared, tmp_path):
    model = translation_model(shared)
    model.resize_token_embeddings(12)
    if not shared:
        with pytest.raises(UserError, match=r"resize_token_embeddings\(14\): the source has 12 words"):
            model.resize_token_embeddings(14)
        return
    model.resize_token_embeddings(14)
    model.save_pretrained(tmp_path)
    inputs = torch.tensor([[4, 13, 2]])
    loaded = LowrankForSeq2SeqLM.from_pretrained(tmp_path)(inputs, labels=inputs).logits
    torch.testing.assert_close(loaded, model(inputs, labels=inputs).logits)


@pytest.mark.parametrize("before", [{}, {"mixing": "static"}])
def test_parts_that_a_file_lacks_get_their_initial_values(before, tmp_path):
    model, inputs = language_model(**before), torch.tensor([[4, 5, 6]])
    for part in (getattr(layer.self_attn, "mixing", None) for layer in model.decoder.layers):
        if part is not None:
            torch.nn.init.normal_(part.weight)
    model.save_pretrained(tmp_path)
    config = LowrankConfig.from_pretrained(tmp_path)
    config.decoder_attention = {"mixing": "positionwise", "head_output": "gate", "score_bias": "t5"}
    loaded = LowrankForCausalLM.from_pretrained(tmp_path, config=config).eval()
    torch.testing.assert_close(loaded(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize("kept", [(), ("decoder.embed_tokens.weight",)])
@pytest.mark.parametrize("translates", [False, True])
def test_weights_that_a_file_lacks_are_initialised(kept, translates, monkeypatch):
    attention = {"score": "relative", "projection": "head-embedding-mul"}
    model = translation_model(encoder_attention=attention) if translates else language_model(**attention)
    read = {name: model.state_dict()[name] for name in kept}
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **others: empty_like(*args, **others).fill_(1e6))
    for name, tensor in type(model).from_pretrained(None, config=model.config, state_dict=read).state_dict().items():
        assert tensor.abs().max() < 5 and (tensor.any() or "bias" in name), name


@torch.no_grad()
@pytest.mark.parametrize("attention", [{}, {"cross_attention": {"mixing": "static"}}])
@pytest.mark.parametrize("name", ["inputs", "input_ids"])
def test_a_search_hides_padding_of_the_source_as_a_forward_pass_does(name, attention):
    torch.manual_seed(1)
    model, source = translation_model(**attention), torch.tensor([[4, 5, 6, 7], [8, 9, 1, 1]])
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    found = model.generate(**{name: source}, **options).logits[0]
    torch.testing.assert_close(found, model(source, decoder_input_ids=torch.full((2, 1), 2)).logits[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("kept", [2, torch.tensor([0, 3])])
def test_a_language_model_computes_the_logits_that_are_kept(kept):
    model, text = language_model(), torch.tensor([[4, 5, 6, 7, 8]])
    expected = model(text).logits[:, slice(-2, None) if isinstance(kept, int) else kept]
    torch.testing.assert_close(model(text, logits_to_keep=kept).logits, expected)


def test_sequence_parallelism_of_an_exported_model_is_refused(monkeypatch):
    tokens, model = torch.tensor([[4, 5, 6]]), language_model(mixing="static")
    model(tokens)

    def of_deepspeed(*tensors, **options):
        raise AssertionError

    of_deepspeed.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", of_deepspeed)
    with pytest.raises(UserError, match=r"sequence parallelism \(Ulysses\) of this attention is not computed"):
        model(tokens)
