"""Where the attention of a model of transformers can be chosen, and that no part is left out in silence."""

import re

import pytest
import torch
import transformers
from transformers_families import BART, FAMILIES, SEQUENCE, SIZES, TOKENS, build

from fairseq_lowrank import huggingface
from fairseq_lowrank.huggingface import apply_attention, attention_modules, attention_weights
from fairseq_lowrank.huggingface.exported import LowrankConfig, LowrankForSeq2SeqLM
from fairseq_lowrank.huggingface.models import describe, other_attention, small_model
from fairseq_lowrank.messages import UserError

BERT = SIZES | TOKENS | {"intermediate_size": 64}

# The sites of modules by their names, in families whose names, flags or arguments alone would mislead.
KNOWN = {
    "BltModel": {"local_decoder.cross_attn_layers": "cross", "local_decoder.layers": "decoder"},
    "BridgeTowerModel": {"crossattention": "cross", r"cross_modal_\w+_layers.N.attention": "encoder"},
    "CLIPModel": {"text_model": "decoder", "vision_model": "encoder"},
    "EfficientLoFTRModel": {"self_attention": "encoder", "cross_attention": "cross"},
    "Gemma3Model": {"vision_tower": "encoder", "language_model": "decoder"},
    "Idefics2Model": {"resampler": "cross", "vision_model": "encoder", "text_model": "decoder"},
    "IdeficsModel": {"gated_cross_attn": "cross", "vision_model": "encoder", r"^layers": "decoder"},
    "InstructBlipModel": {r"qformer.*\.attention\.": "encoder", "crossattention": "cross"},
    "LightGlueForKeypointMatching": {"self_attention": "encoder", "cross_attention": "cross"},
    "MobileBertModel": {"self": "encoder"},
    "MoonshineModel": {r"decoder.*self_attn": "decoder", "encoder_attn": "cross", r"^encoder": "encoder"},
    "NllbMoeModel": {r"decoder.*self_attn": "decoder", "cross_attention": "cross", r"^encoder": "encoder"},
    "PegasusXModel": {r"decoder.*self_attn": "decoder", "encoder_attn": "cross"},
    "Sam2VideoModel": {r"memory_attention.*cross_attn_image": "cross", r"memory_attention.*self_attn": "encoder"},
    "SegformerModel": {"attention": "encoder"},
    "T5Model": {r"encoder.*SelfAttention": "encoder", r"decoder.*SelfAttention": "decoder", "EncDec": "cross"},
    "VideoPrismClipModel": {r"video_model\.head": "cross"},
    "XCLIPModel": {"text_model": "decoder", "cross_attn": "cross", "mit": "encoder"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_site_is_what_a_module_does(name):
    model = small_model(getattr(transformers, name))
    places = {id(module): re.sub(r"\.\d+", ".N", name) for name, module in model.named_modules()}
    found = [(places[id(module)], site) for module, site, _ in attention_modules(model)]
    for pattern, site in KNOWN[name].items():
        matching = {known for place, known in found if re.search(pattern, place)}
        assert matching == {site}, pattern


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "vit"])
def test_a_site_agrees_with_the_weights(family):
    model = apply_attention(build(family), "mha")
    seen = {}

    def receive(module, site, layer, weights):
        later = torch.ones(weights.shape[2:], dtype=torch.bool).triu(1)
        is_cross = weights.size(2) != weights.size(3)
        seen[site, layer] = "cross" if is_cross else "encoder" if weights[..., later].any() else "decoder"

    given = {"decoder_input_ids": torch.arange(2, 7)[None]} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), attention_weights(model, receive):
        model(input_ids=torch.arange(2, 10)[None], **given)
    assert len(seen) == len(attention_modules(model))
    assert all(site == known for (site, _), known in seen.items())


@pytest.mark.parametrize(
    ("decoder", "cross", "sites"),
    [(False, False, {"encoder"}), (True, False, {"decoder"}), (True, True, {"decoder", "cross"})],
)
def test_one_class_has_the_sites_that_its_configuration_gives(decoder, cross, sites):
    config = transformers.BertConfig(**BERT, is_decoder=decoder, add_cross_attention=cross)
    assert {site for _, site, _ in attention_modules(transformers.BertModel(config))} == sites


def test_cross_attention_of_a_decoder_in_a_wrapper_is_found():
    """A language model with the decoder of BART calls it through a class that passes on all arguments."""
    config = transformers.MBartConfig(**BART | TOKENS | {"decoder_layers": 1, "is_decoder": True})
    decoder = transformers.MBartForCausalLM(config)
    assert [site for _, site, _ in attention_modules(decoder)] == ["decoder", "cross"]
    vit = transformers.ViTModel(transformers.ViTConfig(**SIZES | {"image_size": 16, "patch_size": 8}))
    model = transformers.VisionEncoderDecoderModel(encoder=vit, decoder=decoder).eval()
    assert [site for _, site, _ in attention_modules(model)] == ["encoder", "encoder", "decoder", "cross"]
    with pytest.raises(UserError, match="'xsa' in cross attention"):
        apply_attention(model, "xsa")


def test_exported_models_have_the_sites_that_their_modules_have():
    """Their classes are not those of transformers, as those of a folder with code are not."""
    sizes = {f"{stack}_{name}": 8 for stack in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
    counts = {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = LowrankConfig(
        vocab_size=9, source_vocab_size=9, decoder_input_dim=8, decoder_output_dim=8, **sizes, **counts
    )
    model = LowrankForSeq2SeqLM(config)
    sites = [site for _, site, _ in attention_modules(model)]
    assert sites == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]
    with pytest.raises(UserError, match="'xsa' in cross attention"):
        apply_attention(model, "xsa")


def partial():
    """A model whose encoder computes its attention itself."""
    config = transformers.LongT5Config(
        d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, decoder_start_token_id=0, **TOKENS
    )
    return transformers.LongT5ForConditionalGeneration(config)


def test_a_part_is_mixed_only_where_it_is_asked_for(capsys):
    with pytest.raises(UserError, match=r"in 4 of 6 layers, and not in 2 LongT5\w+\. .*sites=\['decoder', 'cross'\]"):
        apply_attention(partial(), "mixhead-a")
    model = apply_attention(partial(), "mixhead-a", sites=["decoder", "cross"])
    assert "mixhead-a in 4 of 6 attention layers (not: 2 LongT5" in capsys.readouterr().err
    assert len(huggingface.mixing_state(model)) == 4
    apply_attention(partial(), "mixhead-a", layers=[1])
    assert "mixhead-a in 2 of 6 attention layers" in capsys.readouterr().err


def test_what_is_left_out_is_said(capsys):
    config = transformers.BartConfig(**BART, **SEQUENCE, **TOKENS)
    apply_attention(transformers.BartModel(config), "mixhead-a", sites=["cross"])
    assert "mixhead-a in 2 of 6 attention layers (not: 4 BartAttention)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("BertModel", ""),
        ("LlamaModel", ""),
        ("SiglipVisionModel", "1 SiglipMultiheadAttentionPoolingHead"),
        ("PegasusXModel", "2 PegasusXGlobalLocalAttention"),
        ("Sam2Model", "12 Sam2MultiScaleAttention"),
    ],
)
def test_attention_that_cannot_be_chosen_is_found(name, others):
    assert describe(other_attention(small_model(getattr(transformers, name)))) == others
