"""Tiny models of many families of ``transformers``, built from their configurations."""

import transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SEQUENCE = {"decoder_start_token_id": 1, "forced_eos_token_id": None}
BART = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", ROTARY | {"intermediate_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", ROTARY | {"intermediate_size": 64}),
    "mistral": ("MistralForCausalLM", ROTARY | {"intermediate_size": 64, "sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM",
        ROTARY | {"intermediate_size": 64, "sliding_window": 4, "attn_logit_softcapping": 0.1},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        ROTARY | {"intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    ),
    "bert": ("BertForMaskedLM", SIZES | {"intermediate_size": 64}),
    "roberta": ("RobertaForMaskedLM", SIZES | {"intermediate_size": 64}),
    "modernbert": (
        "ModernBertForMaskedLM",
        SIZES | {"intermediate_size": 64, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 1},
    ),
    "bart": ("BartForConditionalGeneration", BART | SEQUENCE),
    "marian": ("MarianMTModel", BART | SEQUENCE),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": 0},
    ),
    "vit": ("ViTForImageClassification", SIZES | {"intermediate_size": 64, "image_size": 16, "patch_size": 4}),
}
EAGER = ("gemma2", "gpt-oss")  # their caps and sinks are computed by transformers' own eager function alone
GENERATING = ("gpt2", "llama", "qwen3", "mistral", "gemma2", "gpt-oss", "bart", "marian", "t5")
CAUSAL = GENERATING[:6]


def build(family: str, **changes):
    """Return a tiny model in evaluation mode; the same weights at each call."""
    name, sizes = FAMILIES[family]
    model_class = getattr(transformers, name)
    tokens = {} if family == "vit" else TOKENS
    transformers.set_seed(1)
    model = model_class(model_class.config_class(**tokens | sizes | changes)).eval()
    if family in EAGER:
        model.set_attn_implementation("eager")
    return model
