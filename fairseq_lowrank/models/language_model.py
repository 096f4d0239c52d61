"""fairseq's Transformer language model, with attention built from the attention flags and a low-rank input embedding."""

import ast
from argparse import Namespace
from dataclasses import dataclass, field, make_dataclass
from typing import Optional

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.utils import eval_str_list, safe_getattr

from fairseq_lowrank.models.options import AttentionOptions, as_namespace, check_sizes, dataclass_fields
from fairseq_lowrank.models.transformer import LowrankTransformerDecoder

AttentionFlags = make_dataclass(
    "AttentionFlags", dataclass_fields(), bases=(TransformerLanguageModelConfig,), namespace={"__module__": __name__}
)


@dataclass
class LowrankTransformerLanguageModelConfig(AttentionFlags):
    """fairseq's language model flags, the attention flags, and the rank of the input embedding."""

    embed_rank: Optional[int] = field(  # noqa: UP045 (fairseq reads the annotation)
        default=None,
        metadata={
            "help": "factor the input embedding into V x R and R x d (vocabulary bottleneck paper, section 5.1); the "
            "output matrix stays full and untied (default: not factored)"
        },
    )


@register_model("lowrank_transformer_lm", dataclass=LowrankTransformerLanguageModelConfig)
class LowrankTransformerLanguageModel(TransformerLanguageModel):
    """fairseq's ``transformer_lm`` with the attention flags and ``--embed-rank``; all its own flags keep working."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @classmethod
    def check_args(cls, args) -> None:
        """Refuse flags before anything is built.

        Raises:
            ValueError: a flag is refused, or sizes do not fit together.
        """
        check_sizes(args)
        options = AttentionOptions.from_args(args)
        options.check_sites("decoder")
        options.check("decoder", args.decoder_embed_dim, args.decoder_attention_heads, scale_heads=args.scale_heads)
        if args.embed_rank is not None:
            cls._check_embed_rank(args)
        cls._check_adaptive(args)

    @staticmethod
    def _check_embed_rank(args) -> None:
        rank = args.embed_rank
        if not 1 <= rank <= args.decoder_embed_dim:
            raise ValueError(f"--embed-rank {rank}: expected 1 to {args.decoder_embed_dim} (--decoder-embed-dim)")
        conflicts = {
            "--adaptive-input": (args.adaptive_input, "it gives every band of words a rank of its own"),
            "--adaptive-softmax-cutoff": (
                args.adaptive_softmax_cutoff,
                "it factors the output matrix, which stays full here",
            ),
            "--character-embeddings": (args.character_embeddings, "it has no embedding matrix to factor"),
            "--share-decoder-input-output-embed": (
                args.share_decoder_input_output_embed,
                "it would make the output matrix low-rank too",
            ),
        }
        for flag, (given, reason) in conflicts.items():
            if given:
                raise ValueError(f"--embed-rank {rank} does not go with {flag}: {reason}")
        if args.decoder_output_dim < args.decoder_embed_dim:
            raise ValueError(
                f"--embed-rank {rank} keeps the output matrix full, but --decoder-output-dim {args.decoder_output_dim} "
                f"is below --decoder-embed-dim {args.decoder_embed_dim}"
            )

    @staticmethod
    def _check_adaptive(args) -> None:
        """Adaptive input needs a cutoff, and its weights can be tied only to an adaptive softmax of the same bands."""
        if args.adaptive_input and not args.adaptive_input_cutoff:
            raise ValueError("--adaptive-input needs --adaptive-input-cutoff, such as 20000,60000")
        if not args.tie_adaptive_weights or not args.adaptive_softmax_cutoff:
            return
        if not args.adaptive_input:
            raise ValueError("--tie-adaptive-weights needs --adaptive-input, whose weights are tied")
        for name, of_input, of_softmax in (
            ("factor", args.adaptive_input_factor, args.adaptive_softmax_factor),
            ("cutoff", args.adaptive_input_cutoff, args.adaptive_softmax_cutoff),
        ):
            if of_input != of_softmax:
                raise ValueError(
                    f"--tie-adaptive-weights needs the same --adaptive-input-{name} and --adaptive-softmax-{name}: "
                    f"{of_input} and {of_softmax}"
                )
        if args.decoder_input_dim != args.decoder_output_dim:
            raise ValueError(
                "--tie-adaptive-weights needs the same --decoder-input-dim and --decoder-output-dim: "
                f"{args.decoder_input_dim} and {args.decoder_output_dim}"
            )

    @classmethod
    def build_model(cls, args, task) -> "LowrankTransformerLanguageModel":
        args = as_namespace(args)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        cls.check_args(args)
        if args.embed_rank is not None:
            args.decoder_input_dim = args.embed_rank
        cfg = TransformerConfig.from_namespace(args)
        cfg.attention_options = AttentionOptions.from_args(args)
        # Tied adaptive weights need the very embedding that the decoder gets, so the decoder is built once, here.
        return cls(
            LowrankTransformerDecoder(
                cfg, task.target_dictionary, cls._input_embedding(args, task.source_dictionary), no_encoder_attn=True
            )
        )

    @classmethod
    def _input_embedding(cls, args: Namespace, dictionary):
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                ast.literal_eval(args.character_filters),
                args.character_embedding_dim,
                args.decoder_embed_dim,
                args.char_embedder_highway_layers,
            )
        if not args.adaptive_input:
            return cls.build_embedding(args, dictionary, args.decoder_input_dim)
        return AdaptiveInput(
            len(dictionary),
            dictionary.pad(),
            args.decoder_input_dim,
            args.adaptive_input_factor,
            args.decoder_embed_dim,
            eval_str_list(args.adaptive_input_cutoff, type=int),
            args.quant_noise_pq,
            args.quant_noise_pq_block_size,
        )


def _default(args, **values) -> None:
    for name, value in values.items():
        setattr(args, name, safe_getattr(args, name, value))


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103")
def wiki103(args) -> None:
    """fairseq's `transformer_lm_wiki103`, after Baevski and Auli (2019), who have 16 heads: 16 layers, d 1024, ffn 4096, 8 heads,
    adaptive input and softmax, tied. The Mixhead paper's Transformer-Baevski (table 1) is this one, of 8 heads of size 128."""
    transformer_lm_baevski_wiki103(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki103_vanilla")
def wiki103_vanilla(args) -> None:
    """The Mixhead paper's vanilla Transformer on WikiText-103 (table 1): 6 layers, d 512, ffn 2048, 8 heads, tied."""
    _default(args, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_wiki2")
def wiki2(args) -> None:
    """The Mixhead paper's vanilla Transformer on WikiText-2 (table 2): 16 layers, d 512, ffn 2048, 8 heads, tied."""
    _default(args, decoder_layers=16)
    wiki103_vanilla(args)


@register_model_architecture("lowrank_transformer_lm", "lowrank_transformer_lm_gbw")
def gbw(args) -> None:
    """The Mixhead paper's Baevski model on LM1B (table 3): as on WikiText-103, with cutoffs 60000, 160000.

    Dropout is 0.1 in layers and attention alone, and projections are not tied (Baevski and Auli 2019, §3, §4.1, §5.4).
    """
    _default(
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
    _default(
        args,
        decoder_embed_dim=256,
        decoder_ffn_embed_dim=1024,
        decoder_attention_heads=8,
        head_dim=32,
        share_decoder_input_output_embed=True,
    )
    base_lm_architecture(args)
