"""fairseq's Transformer for translation, with attention built from the attention flags."""

from __future__ import annotations

from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_lowrank.attention import CAUSAL, MultiheadAttention
from fairseq_lowrank.models.options import SITES, AttentionOptions, add_attention_args, as_namespace, check_sizes


class LowrankEncoderLayer(TransformerEncoderLayerBase):
    """An encoder layer whose attention comes from ``cfg.attention_options``."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _name_dropouts(self, "TransformerEncoderLayerBase")

    def build_self_attention(self, embed_dim: int, cfg) -> MultiheadAttention:
        return cfg.attention_options.build(
            "encoder",
            embed_dim,
            cfg.encoder.attention_heads,
            self_attention=True,
            **_noise(cfg),
        )


class LowrankDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer whose attention comes from ``cfg.attention_options``."""

    def __init__(self, cfg, *args, **kwargs) -> None:
        super().__init__(cfg, *args, **kwargs)
        _name_dropouts(self, "TransformerDecoderLayerBase")
        # Otherwise fairseq computes cross-attention weights in every layer at validation, and reads none.
        self.need_attn = False

    def make_generation_fast_(self, **kwargs) -> None:
        """Fairseq would compute the weights of every layer for ``--print-alignment``; the decoder asks the one it reads."""

    def build_self_attention(
        self, embed_dim: int, cfg, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> MultiheadAttention:
        return cfg.attention_options.build(
            "decoder",
            embed_dim,
            cfg.decoder.attention_heads,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=not cfg.cross_self_attention,
            **_noise(cfg),
        )

    def build_encoder_attention(self, embed_dim: int, cfg) -> MultiheadAttention:
        return cfg.attention_options.build(
            "cross",
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            encoder_decoder_attention=True,
            **_noise(cfg),
        )


def _noise(cfg) -> dict[str, float]:
    return {
        "dropout": cfg.attention_dropout,
        "q_noise": cfg.quant_noise.pq,
        "qn_block_size": cfg.quant_noise.pq_block_size,
    }


def _name_dropouts(module: nn.Module, name: str) -> None:
    """Let ``--retain-dropout-modules`` find the dropouts of ``module`` under the name that they have in fairseq's own models."""
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = name


def _wrap(layer: nn.Module, cfg) -> nn.Module:
    """What fairseq does with a finished layer: ``--checkpoint-activations`` and FSDP."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class LowrankTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder over :class:`LowrankEncoderLayer`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _name_dropouts(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg) -> nn.Module:
        return _wrap(LowrankEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class LowrankTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder over :class:`LowrankDecoderLayer`.

    Cross-attention weights are computed only where something reads them: with ``need_alignment`` (set by
    ``--load-alignments``, ``--print-alignment``, ``--replace-unk`` and ``from_pretrained``, whose caller may read them) or
    an explicit ``alignment_layer``.
    """

    need_alignment = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _name_dropouts(self, "TransformerDecoder")

    def build_decoder_layer(self, cfg, no_encoder_attn: bool = False) -> nn.Module:
        return _wrap(LowrankDecoderLayer(cfg, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | str:
        """A marker instead of a T×T mask, unless encoder states are put before the keys (``--cross-self-attention``)."""
        return super().buffered_future_mask(tensor) if self.cross_self_attention else CAUSAL

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out=None,
        incremental_state=None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ):
        if alignment_layer is None and not self.need_alignment:
            alignment_layer = -1  # matches no layer
        return super().extract_features(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            full_context_alignment,
            alignment_layer,
            alignment_heads,
        )


@register_model("lowrank_transformer")
class LowrankTransformerModel(TransformerModel):
    """fairseq's ``transformer`` with the attention flags; all its own flags and checkpoints keep working."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @classmethod
    def add_args(cls, parser) -> None:
        super().add_args(parser)
        add_attention_args(parser)

    @classmethod
    def check_args(cls, args) -> None:
        """Refuse flags before anything is built.

        Raises:
            ValueError: a flag is refused, or sizes do not fit together.
        """
        check_sizes(args)
        options = AttentionOptions.from_args(args)
        options.check_sites(*(site for site in SITES if site != "cross" or not args.no_cross_attention))
        options.check("encoder", args.encoder_embed_dim, args.encoder_attention_heads)
        options.check("decoder", args.decoder_embed_dim, args.decoder_attention_heads)
        if not args.no_cross_attention:
            options.check("cross", args.decoder_embed_dim, args.decoder_attention_heads, args.encoder_embed_dim)

    @classmethod
    def build_model(cls, args, task) -> LowrankTransformerModel:
        args = as_namespace(args)
        base_architecture(args)
        cls.check_args(args)
        model = super().build_model(args, task)
        model.decoder.need_alignment = bool(getattr(task.cfg, "load_alignments", False))
        return model

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens) -> LowrankTransformerEncoder:
        cfg.attention_options = AttentionOptions.from_args(cfg)
        return LowrankTransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens) -> LowrankTransformerDecoder:
        cfg.attention_options = AttentionOptions.from_args(cfg)
        return LowrankTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def prepare_for_inference_(self, cfg) -> None:
        super().prepare_for_inference_(cfg)
        called = cfg.common_eval.path is None  # by a program; commands are told a path
        replaces = cfg.generation.replace_unk is not None
        self.decoder.need_alignment = called or replaces or bool(cfg.generation.print_alignment)


register_model_architecture("lowrank_transformer", "lowrank_transformer")(base_architecture)
register_model_architecture("lowrank_transformer", "lowrank_transformer_iwslt_de_en")(transformer_iwslt_de_en)
register_model_architecture("lowrank_transformer", "lowrank_transformer_wmt_en_de")(transformer_wmt_en_de)
register_model_architecture("lowrank_transformer", "lowrank_transformer_wmt_en_de_big")(transformer_wmt_en_de_big)
