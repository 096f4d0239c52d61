"""The papers' language models: fairseq's, with this package's plain attention unless a flag chooses another one."""

from dataclasses import dataclass

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)

from fairseq_lowrank.models.defaults import set_defaults
from fairseq_lowrank.plugin.attention import LowrankModel


@dataclass
class LowrankTransformerLanguageModelConfig(TransformerLanguageModelConfig):
    """The flags of fairseq's language model, for the model of another name."""


@register_model("lowrank_transformer_lm", dataclass=LowrankTransformerLanguageModelConfig)
class LowrankTransformerLanguageModel(LowrankModel, TransformerLanguageModel):
    """fairseq's ``transformer_lm`` with this package's ``mha``, unless ``--attention`` chooses another attention."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103")
def wiki103(args) -> None:
    """Set fairseq's `transformer_lm_wiki103`: 16 layers, d 1024, ffn 4096, 8 heads, adaptive input and softmax, tied.

    It follows Baevski and Auli (2019), who have 16 heads. The Mixhead paper's Transformer-Baevski (table 1) has these 8 heads of
    size 128.
    """
    transformer_lm_baevski_wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_synthesizer_lm_wiki103")
def synthesizer_wiki103(args) -> None:
    """Set the Mixhead paper's Synthesizer on WikiText-103 (table 1): the model above with the dense synthesizer's scores.

    The paper does not describe its synthesizer. Its 248M parameters follow from one second layer for all heads and from the four
    projections of standard attention, so its projection of keys is unused. Without ``--unused-key-projection``, which only this
    architecture sets, the model has 231.2M.
    """
    set_defaults(args, attention_score="synthesizer-dense")
    if args.attention_score == "synthesizer-dense":
        set_defaults(args, synthesizer_heads=1)
        args.unused_key_projection = True
    wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103_vanilla")
def wiki103_vanilla(args) -> None:
    """Set the Mixhead paper's vanilla Transformer on WikiText-103 (table 1): 6 layers, 8 heads, d 512, ffn 2048, tied.

    The paper gives layers and heads; the other sizes follow from its 67M parameters.
    """
    set_defaults(args, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki2")
def wiki2(args) -> None:
    """Set the Mixhead paper's vanilla Transformer on WikiText-2 (table 2): 16 layers, 8 heads, d 512, ffn 2048, tied.

    The paper gives layers and heads; the other sizes follow from its number of parameters.
    """
    set_defaults(args, decoder_layers=16)
    wiki103_vanilla(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_gbw")
def gbw(args) -> None:
    """Set the Mixhead paper's Baevski model on LM1B (table 3): as on WikiText-103, with cutoffs 60000, 160000.

    Only layers and attention have dropout, 0.1. Projections are not tied (Baevski and Auli 2019, §3, §4.1, §5.4).
    """
    set_defaults(
        args,
        adaptive_input_cutoff="60000,160000",
        adaptive_softmax_cutoff="60000,160000",
        tie_adaptive_proj=False,
        dropout=0.1,
        activation_dropout=0.0,
        adaptive_softmax_dropout=0.0,
    )
    transformer_lm_baevski_wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_lm1b_small")
def lm1b_small(args) -> None:
    """Set the fixed multi-head paper's LM1B model (section 4, fig. 1): 6 layers, d 256, head size 32, 32k subwords.

    The paper gives no feed-forward size and no tying. It uses tensor2tensor, where ffn = 4d and embeddings are tied.
    """
    set_defaults(
        args,
        decoder_embed_dim=256,
        decoder_ffn_embed_dim=1024,
        decoder_attention_heads=8,
        head_dim=32,
        share_decoder_input_output_embed=True,
    )
    base_lm_architecture(args)
