"""Transformer-XL: consecutive segments with a memory of earlier hidden states (Dai et al. 2019, arXiv 1901.02860)."""

from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.nn.functional as F
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.tasks import FairseqTask
from fairseq.utils import eval_str_list, safe_getattr
from torch import Tensor, nn

from fairseq_lowrank.attention import CAUSAL
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.methods.relative import RelativePositions
from fairseq_lowrank.models.adaptive import XLAdaptiveInput, XLAdaptiveSoftmax
from fairseq_lowrank.models.defaults import set_defaults
from fairseq_lowrank.plugin.attention import LowrankModel, prepare_language_model
from fairseq_lowrank.tasks.segment_lm import SegmentCache, SegmentLanguageModelingTask


@dataclass
class TransformerXLConfig(TransformerLanguageModelConfig):
    """The flags of fairseq's language models, and the flags of memory."""

    attention_score: Optional[str] = field(  # noqa: UP045 (fairseq reads no unions)
        default="relative",
        metadata={"help": "how scores are computed; only relative: from queries, keys and their distance"},
    )
    memory_length: int = field(
        default=150,
        metadata={
            "help": "number of positions before a segment whose hidden states are cached, without gradient; above 0 it "
            "needs --task segment_lm"
        },
    )
    clamp_length: int = field(
        default=-1,
        metadata={
            "help": "greatest distance, for evaluation with longer memory: larger ones count as this (-1: no limit)"
        },
    )
    softmax_bias: bool = field(default=False, metadata={"help": "add a bias for each word to the output layer"})


class TransformerXLLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer, whose keys include the memory."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        padding: Tensor | None = None,
        incremental_state: dict | None = None,
    ) -> Tensor:
        """Return the layer's output ``[T, B, C]``.

        Args:
            x: ``[T, B, C]``, the segment.
            memory: ``[M, B, C]``, the layer's inputs at the positions before the segment.
            padding: ``[B, M + T]``, true at padding.
            incremental_state: keys and values of earlier steps, instead of memory.
        """
        residual, keys = x, x if memory is None else torch.cat((memory, x))
        if self.normalize_before:
            keys = self.self_attn_layer_norm(keys)
        x, _ = self.self_attn(
            keys[-len(x) :],
            keys,
            keys,
            key_padding_mask=padding,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=CAUSAL,
        )
        x = self.residual_connection(self.dropout_module(x), residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        x = self.residual_connection(self.dropout_module(self.fc2(x)), residual)
        return x if self.normalize_before else self.final_layer_norm(x)


class TransformerXLDecoder(TransformerDecoder):
    """A decoder of segments and their memory.

    Attributes:
        memories: the memory of training (True) and of evaluation (False), so validation does not change that of training.
    """

    def __init__(self, args, dictionary, embed_tokens) -> None:
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)
        self.memory_length = args.memory_length
        self.memories: dict[bool, SegmentCache] = {}
        # fairseq has initialised these parts of its decoder in its own way
        for part in (
            self.embed_tokens,
            self.project_in_dim,
            self.adaptive_softmax,
            self.output_projection,
            self.layer_norm,
        ):
            init_parameters(part)

    def build_decoder_layer(self, args, no_encoder_attn: bool = False) -> nn.Module:
        layer = TransformerXLLayer(args, no_encoder_attn)
        score = layer.self_attn.score
        if not isinstance(score, RelativePositions):
            raise UserError(
                f"--attention-score {score.name}: a Transformer-XL encodes positions in its scores. Use relative, its default."
            )
        score.limit_positions(args.dropout, self.args.clamp_length)
        init_parameters(layer)
        if args.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=args.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if args.checkpoint_activations else args.min_params_to_wrap)

    def build_output_projection(self, args, dictionary, embed_tokens) -> None:
        if args.adaptive_softmax_cutoff is not None:
            self.adaptive_softmax = XLAdaptiveSoftmax(
                len(dictionary),
                self.output_embed_dim,
                eval_str_list(args.adaptive_softmax_cutoff, type=int),
                args.adaptive_softmax_dropout,
                adaptive_inputs=embed_tokens if args.tie_adaptive_weights else None,
                factor=args.adaptive_softmax_factor,
                tie_proj=args.tie_adaptive_proj,
                bias=self.args.softmax_bias,
            )
            return
        self.output_projection = nn.Linear(self.output_embed_dim, len(dictionary), bias=self.args.softmax_bias)
        if self.share_input_output_embed:
            self.output_projection.weight = embed_tokens.weight

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        segment: tuple[int, int] | None = None,
        **unused: object,
    ) -> tuple[Tensor, dict]:
        """Return logits ``[B, T, V]`` (features ``[B, T, C]`` if the softmax is adaptive), like fairseq's decoders.

        Args:
            prev_output_tokens: ``[B, T]``.
            incremental_state: the cache of keys and values of decoding steps; with it, only the last token is read.
            features_only: leave out the output layer.
            segment: the segment's number in its stream, and the number of segments. Memory is used if the previous call had the
                segment before it. After the last segment, no memory is kept.
        """
        x, extra = self.extract_features(prev_output_tokens, incremental_state, segment)
        return x if features_only else self.output_layer(x), extra

    def extract_features(
        self, tokens: Tensor, incremental_state: dict | None = None, segment: tuple[int, int] | None = None
    ) -> tuple[Tensor, dict]:
        if incremental_state is not None:
            tokens = tokens[:, -1:]
        x = self._embed(tokens)
        memory = self._previous_memory(segment, x)
        padded = tokens.eq(self.padding_idx)
        padding = F.pad(padded, (memory[0].size(0), 0)) if padded.any() else None
        states = [x]
        for layer, before in zip(self.layers, memory, strict=True):
            x = layer(x, before if len(before) else None, padding, incremental_state)
            states.append(x)
        if segment is not None:
            self._update_memory(segment, memory, states)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = self.dropout_module(x).transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": states}

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[T, B, C]`` of tokens ``[B, T]``."""
        x = self.embed_scale * self.embed_tokens(tokens.contiguous())
        for module in (self.quant_noise, self.project_in_dim, self.layernorm_embedding):
            x = x if module is None else module(x)
        return self.dropout_module(x).transpose(0, 1)

    def _previous_memory(self, segment: tuple[int, int] | None, x: Tensor) -> list[Tensor]:
        """Return the memory ``[M, B, C]`` of each layer; M is 0 unless the previous call had the segment before this one."""
        known, batch = self.memories.get(self.training), x.size(1)
        if segment is None or known is None or known.segment != segment[0] or known.hidden[0].size(1) < batch:
            return [x.new_empty(0, *x.shape[1:])] * len(self.layers)
        # Later batches have fewer rows.
        return [hidden[:, :batch].to(x) for hidden in known.hidden]

    @torch.no_grad()
    def _update_memory(self, segment: tuple[int, int], memory: list[Tensor], states: list[Tensor]) -> None:
        number, count = segment
        self.memories.pop(self.training, None)
        if self.memory_length and number + 1 < count:
            joined = (torch.cat(pair)[-self.memory_length :] for pair in zip(memory, states, strict=False))
            self.memories[self.training] = SegmentCache(number + 1, list(joined))


def init_parameters(module: nn.Module | None) -> None:
    """Initialise parameters like the authors' code: normal with std 0.02, and 0.01 for projections of adaptive bands."""
    if module is None:
        return
    projections = module.projections if isinstance(module, (XLAdaptiveInput, XLAdaptiveSoftmax)) else ()
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01 if any(part is one for one in projections) else 0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
        elif isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, mean=1.0, std=0.02)


# Flags of fairseq's language models that a Transformer-XL does not have, and why.
_UNSUPPORTED_FLAGS = {
    "decoder_learned_pos": "its positions are in its scores",
    "decoder_layerdrop": "memory belongs to a layer by its number",
    "base_layers": "they read no memory",
    "embed_kernel": "the first positions of a segment would need the words of the segment before",
    "layernorm_embedding": "the first layer's memory consists of embeddings without a norm",
    **dict.fromkeys(("scale_fc", "scale_attn", "scale_heads", "scale_resids"), "its layers have none of these scales"),
}


@register_model("lowrank_transformer_xl", dataclass=TransformerXLConfig)
class TransformerXL(LowrankModel, TransformerLanguageModel):
    """Transformer-XL with any attention of this package that has relative scores.

    It follows the authors' code. Each layer has separate u and v and a separate dropout of positions.
    """

    takes_segments = True

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @classmethod
    @prepare_language_model
    def build_with_attention(cls, args, task) -> "TransformerXL":
        _check(args, task)
        args.no_token_positional_embeddings = True
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if safe_getattr(args, "max_target_positions", None) is None:
            args.max_target_positions = safe_getattr(args, "tokens_per_sample", 1024)
        words = task.source_dictionary
        if args.adaptive_input:
            embedding = XLAdaptiveInput(
                len(words),
                words.pad(),
                args.decoder_input_dim,
                args.adaptive_input_factor,
                args.decoder_embed_dim,
                eval_str_list(args.adaptive_input_cutoff, type=int),
                args.quant_noise_pq,
                args.quant_noise_pq_block_size,
            )
        else:
            embedding = cls.build_embedding(args, words, args.decoder_input_dim)
        return cls(TransformerXLDecoder(args, task.target_dictionary, embedding))


def _check(args, task) -> None:
    """Refuse flags that have no effect here, and memory for segments that are not consecutive.

    Raises:
        UserError: see the messages.
    """
    for name, reason in _UNSUPPORTED_FLAGS.items():
        if value := safe_getattr(args, name, None):
            raise UserError(
                f"--{name.replace('_', '-')} {value}: does not work with a Transformer-XL: {reason}. Remove the flag."
            )
    if safe_getattr(args, "character_embeddings", False):
        raise UserError(
            "--character-embeddings: does not work with lowrank_transformer_xl. Remove it, or use --adaptive-input."
        )
    if args.memory_length < 0:
        raise UserError(f"--memory-length {args.memory_length}: expected a number of positions >= 0.")
    if args.clamp_length < -1:
        raise UserError(f"--clamp-length {args.clamp_length}: expected a distance >= 0, or -1 for no limit.")
    if args.memory_length and isinstance(task, FairseqTask) and not isinstance(task, SegmentLanguageModelingTask):
        raise UserError(
            f"--memory-length {args.memory_length} needs consecutive segments. Add --task segment_lm, or turn memory off with "
            "--memory-length 0 (for a checkpoint: --model-overrides \"{'memory_length': 0}\")."
        )


def _base(args) -> None:
    """Set what the papers' models share: post-norm, relative scores, no biases in attention, one dropout."""
    normalize_before = safe_getattr(args, "decoder_normalize_before", False)
    set_defaults(args, attention_score="relative", no_attention_bias=True, dropout=0.1)
    set_defaults(args, activation_dropout=args.dropout)
    base_lm_architecture(args)
    args.decoder_normalize_before = normalize_before  # base_lm_architecture sets it to True


@register_model_architecture("lowrank_transformer_xl", "lowrank_transformer_xl_wiki103")
def wiki103(args) -> None:
    """Set the base model of Dai et al. and of the Mixhead paper (table 1) on WikiText-103: 151.1M.

    16 layers, d 410, 10 heads of size 41, ffn 2100, memory of 150, adaptive input and softmax of one size, tied, with biases.
    """
    set_defaults(
        args,
        adaptive_input=True,
        adaptive_input_cutoff="20000,40000,200000",
        adaptive_softmax_cutoff="20000,40000,200000",
        adaptive_input_factor=1,
        adaptive_softmax_factor=1,
        tie_adaptive_weights=True,
        tie_adaptive_proj=True,
        decoder_ffn_embed_dim=2100,
        memory_length=150,
    )
    _sixteen_layers(args)


@register_model_architecture("lowrank_transformer_xl", "lowrank_transformer_xl_wiki2")
def wiki2(args) -> None:
    """Set the Mixhead paper's model on WikiText-2 (table 2): as on WikiText-103, with ffn 1000 and one tied softmax.

    It has 40.3M parameters; ffn and softmax are chosen to match the paper's 40M.
    """
    set_defaults(args, share_decoder_input_output_embed=True, decoder_ffn_embed_dim=1000, memory_length=150)
    _sixteen_layers(args)


def _sixteen_layers(args) -> None:
    set_defaults(
        args,
        decoder_layers=16,
        decoder_embed_dim=410,
        decoder_attention_heads=10,
        head_dim=41,
        softmax_bias=True,
    )
    _base(args)


@register_model_architecture("lowrank_transformer_xl", "lowrank_transformer_xl_lm1b")
def lm1b(args) -> None:
    """Set the Mixhead paper's model on LM1B (table 3): 293.7M.

    18 layers, d 1024, 8 heads of size 128, ffn 4096, memory of 32, no dropout, bands that shrink by 4, tied embeddings and untied
    projections. (The authors' softmax has biases, 0.8M more.)
    """
    set_defaults(
        args,
        adaptive_input=True,
        adaptive_input_cutoff="20000,40000,200000",
        adaptive_softmax_cutoff="20000,40000,200000",
        adaptive_input_factor=4,
        adaptive_softmax_factor=4,
        tie_adaptive_weights=True,
        decoder_layers=18,
        decoder_embed_dim=1024,
        decoder_attention_heads=8,
        head_dim=128,
        decoder_ffn_embed_dim=4096,
        dropout=0.0,
        memory_length=32,
    )
    _base(args)
