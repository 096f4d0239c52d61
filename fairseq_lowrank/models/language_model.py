"""The papers' language models: fairseq's, with plain attention of this package where no attention flag says otherwise."""

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
    """fairseq's language model flags, under a name of their own."""


@register_model("lowrank_transformer_lm", dataclass=LowrankTransformerLanguageModelConfig)
class LowrankTransformerLanguageModel(LowrankModel, TransformerLanguageModel):
    """fairseq's ``transformer_lm``; its attention is ``mha`` of this package unless ``--attention`` says otherwise."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103")
def wiki103(args) -> None:
    """fairseq's `transformer_lm_wiki103`, after Baevski and Auli (2019), who have 16 heads: 16 layers, d 1024, ffn 4096, 8 heads,
    adaptive input and softmax, tied. The Mixhead paper's Transformer-Baevski (table 1) is this one, of 8 heads of size 128."""
    transformer_lm_baevski_wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_synthesizer_lm_wiki103")
def synthesizer_wiki103(args) -> None:
    """For the Mixhead paper's Synthesizer on WikiText-103 (table 1), the model above with the dense synthesizer's scores.

    The paper names neither form nor make-up. Its 248M are met by one second layer for all heads beside the four projections of standard attention, so by a projection
    of keys that feeds nothing; without ``--unused-key-projection``, which is set here alone, they are 231.2M.
    """
    set_defaults(args, attention_score="synthesizer-dense")
    if args.attention_score == "synthesizer-dense":
        set_defaults(args, synthesizer_heads=1)
        args.unused_key_projection = True
    wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103_vanilla")
def wiki103_vanilla(args) -> None:
    """The Mixhead paper's vanilla Transformer on WikiText-103 (table 1): 6 layers and 8 heads; d 512, ffn 2048, tied, by its 67M."""
    set_defaults(args, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki2")
def wiki2(args) -> None:
    """The Mixhead paper's vanilla Transformer on WikiText-2 (table 2): 16 layers and 8 heads; d 512, ffn 2048, tied, by its size."""
    set_defaults(args, decoder_layers=16)
    wiki103_vanilla(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_gbw")
def gbw(args) -> None:
    """The Mixhead paper's Baevski model on LM1B (table 3): as on WikiText-103, with cutoffs 60000, 160000.

    Dropout is 0.1 in layers and attention alone, and projections are not tied (Baevski and Auli 2019, §3, §4.1, §5.4).
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
    """The fixed multi-head paper's LM1B model (section 4, fig. 1): 6 layers, d 256, head size 32, 32k sub-words.

    The paper gives no feed-forward size and no tying; ffn = 4d and tied embeddings are tensor2tensor's, which it uses.
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
