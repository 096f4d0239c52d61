"""BERT (Devlin et al. 2019): fairseq's RoBERTa with the parts of BERT that it lacks.

fairseq has a BERT (``masked_lm``) with token types and next-sentence prediction. It has no classification heads, works with
one task, and ``--encoder-normalize-before`` only adds a LayerNorm before its first layer. fairseq's RoBERTa has heads and the
usual layers and tasks, but no token types, no pooler and no next-sentence head. This module adds these three to RoBERTa, so
the model works with ``masked_lm``, ``sentence_prediction`` and everything else for RoBERTa.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel, base_architecture
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.utils import get_activation_fn
from torch import Tensor, nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.models.defaults import set_defaults
from fairseq_lowrank.plugin.attention import LowrankModel

SEGMENTS = ("pair", "one")


@register_model("lowrank_bert")
class LowrankBertModel(LowrankModel, RobertaModel):
    """BERT with this package's ``mha``, unless ``--attention`` chooses another attention.

    ``forward`` takes the arguments of RoBERTa's, and ``segment_labels`` (see :class:`BertEncoder`).
    """

    predicts_next_sentences = True

    @classmethod
    def hub_models(cls) -> dict:
        return {}

    @staticmethod
    def add_args(parser) -> None:
        RobertaModel.add_args(parser)
        parser.add_argument("--num-segment", type=int, metavar="N", help="number of token types (default: 2)")
        parser.add_argument(
            "--segments",
            choices=SEGMENTS,
            help="token types if the task gives none. pair: the second sentence begins after the first </s>; one: all are "
            "of type 0 (default: one for --task masked_lm, pair for other tasks)",
        )
        parser.add_argument(
            "--layer-norm-eps",
            type=float,
            metavar="X",
            help="number that LayerNorm adds to the variance (default: 1e-12)",
        )

    @classmethod
    def check_args(cls, args) -> None:
        """Check flags before data is read.

        Raises:
            UserError: a size or probability is not accepted.
        """
        check_bert_sizes(args)

    @classmethod
    def build_with_attention(cls, args, task) -> LowrankBertModel:
        base(args)
        check_bert_sizes(args)
        if args.segments is None:
            args.segments = "one" if isinstance(task, MaskedLMTask) else "pair"
        return cls(args, BertEncoder(args, task.source_dictionary))

    def __init__(self, args, encoder: BertEncoder) -> None:
        super().__init__(args, encoder)
        for module in self.modules():
            if hasattr(module, "normalized_shape"):  # LayerNorm, apex's too
                module.eps = args.layer_norm_eps

    def register_classification_head(
        self, name: str, num_classes: Any = None, inner_dim: int | None = None, **unused
    ) -> None:
        """Register BERT's classification head, which shares the pooler with the next-sentence head.

        Raises:
            UserError: the inner size differs from the pooler's.
        """
        pooler = self.encoder.pooler
        if inner_dim not in (None, pooler.out_features):
            raise UserError(
                f"classification head {name}: its inner size is {inner_dim}. Use {pooler.out_features}, the size of the pooler."
            )
        head = BertClassificationHead(pooler, num_classes, self.args.pooler_activation_fn, self.args.pooler_dropout)
        head.out_proj.apply(init_bert_params)
        quant_noise(head.out_proj, self.args.quant_noise_pq, self.args.quant_noise_pq_block_size)
        self.classification_heads[name] = head

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Upgrade a state like RoBERTa; heads that the checkpoint does not have get its pooler."""
        prefix = f"{name}." if name else ""
        super().upgrade_state_dict_named(state_dict, name)
        for head in self.classification_heads:
            for part in ("weight", "bias"):
                if (pooler := state_dict.get(f"{prefix}encoder.pooler.{part}")) is not None:
                    state_dict[f"{prefix}classification_heads.{head}.dense.{part}"] = pooler


class BertClassificationHead(nn.Module):
    """A head y = W dropout(a(W_p h + b_p)) + b on the first token's last hidden state h; W_p, b_p and a are the pooler's.

    Args:
        pooler: the pooler, which is shared and not copied.
        num_classes: size of y.
        activation_fn: name of a.
        dropout: probability.
    """

    def __init__(self, pooler: nn.Linear, num_classes: int, activation_fn: str, dropout: float) -> None:
        super().__init__()
        self.dense = pooler
        self.activation_fn = get_activation_fn(activation_fn)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(pooler.out_features, num_classes)

    def forward(self, features: Tensor, **unused) -> Tensor:
        """Return scores of classes ``[B, C]`` for hidden states ``[B, T, d]``."""
        return self.out_proj(self.dropout(self.activation_fn(self.dense(features[:, 0]))))


class BertEncoder(RobertaEncoder):
    """RoBERTa's encoder with embeddings of token types, the pooler, and the next-sentence head."""

    def __init__(self, args, dictionary) -> None:
        super().__init__(args, dictionary)
        self.eos = dictionary.eos()
        self.embed_segments = nn.Embedding(args.num_segment, args.encoder_embed_dim)
        self.pooler = nn.Linear(args.encoder_embed_dim, args.encoder_embed_dim)
        self.pooler_activation = get_activation_fn(args.pooler_activation_fn)
        self.next_sentence = nn.Linear(args.encoder_embed_dim, 2)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        segment_labels: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, dict]:
        """Return hidden states, or the outputs of the heads of pre-training.

        Args:
            src_tokens: ``[B, T]``, padded on the right: ``<s> a </s>`` or ``<s> a </s> b </s>``.
            features_only: return the last hidden states ``[B, T, d]``.
            return_all_hiddens: also return the states of all layers, ``inner_states`` of the second result, each ``[T, B, d]``.
            masked_tokens: ``[B, T]``, true where words are predicted (default: everywhere).
            segment_labels: token types ``[B, T]`` (default: by ``--segments``).

        Returns:
            Logits of words ``[B, T, V]`` (``[number of masked tokens, V]``), and a dictionary with ``pooled_output``
            ``[B, d]`` and ``sentence_logits`` ``[B, 2]``: that the second sentence follows the first, that it does not.

        Raises:
            ValueError: more tokens than positions.
        """
        features, extra = self.extract_features(
            src_tokens, return_all_hiddens=return_all_hiddens, segment_labels=segment_labels
        )
        if features_only:
            return features, extra
        pooled = self.pooler_activation(self.pooler(features[:, 0]))
        extra |= {"pooled_output": pooled, "sentence_logits": self.next_sentence(pooled)}
        return self.output_layer(features, masked_tokens=masked_tokens), extra

    def extract_features(
        self,
        src_tokens: Tensor,
        return_all_hiddens: bool = False,
        segment_labels: Tensor | None = None,
        token_embeddings: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, dict]:
        """Return the last hidden states ``[B, T, d]``, and ``inner_states``.

        The arguments are those of :meth:`forward`. ``token_embeddings`` ``[B, T, d]`` replace the embeddings of ``src_tokens``.
        """
        if src_tokens.size(1) > self.max_positions():
            raise ValueError(
                f"{src_tokens.size(1)} tokens: expected at most {self.max_positions()}, the model's positions"
            )
        if segment_labels is None:
            segment_labels = self.segments(src_tokens)
        if token_embeddings is None:
            token_embeddings = self.sentence_encoder.embed_tokens(src_tokens)
        embeddings = token_embeddings + self.embed_segments(segment_labels)
        return super().extract_features(src_tokens, return_all_hiddens, token_embeddings=embeddings)

    def segments(self, src_tokens: Tensor) -> Tensor:
        """Return token types ``[B, T]`` for a task that gives none, see ``--segments``; padding has type 0."""
        if self.args.segments == "one" or self.args.num_segment == 1:
            return torch.zeros_like(src_tokens)
        ends = src_tokens.eq(self.eos)
        behind = (ends.cumsum(dim=1) - ends.long()).gt(0)
        return (behind & src_tokens.ne(self.dictionary.pad())).long()


def check_bert_sizes(args) -> None:
    """Check sizes and probabilities that only BERT has.

    Raises:
        UserError: a flag has a value that is not accepted.
    """
    for name in ("max_positions", "num_segment"):
        if (size := getattr(args, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} {size}: expected a number >= 1.")
    if not 0 <= args.pooler_dropout < 1:
        raise UserError(f"--pooler-dropout {args.pooler_dropout:g}: expected a number from 0 to below 1.")
    if not 0 < args.layer_norm_eps < math.inf:
        raise UserError(f"--layer-norm-eps {args.layer_norm_eps:g}: expected a number above 0.")
    if getattr(args, "spectral_norm_classification_head", False):
        raise UserError("--spectral-norm-classification-head: fairseq cannot load such a head again. Remove the flag.")


@register_model_architecture("lowrank_bert", "lowrank_bert_base")
def base(args) -> None:
    """Set BERT-base: 12 layers, d 768, ffn 3072, 12 heads, 512 positions, dropout 0.1 (Devlin et al. 2019, section 3, A.2)."""
    set_defaults(args, max_positions=512, num_segment=2, segments=None, layer_norm_eps=1e-12, pooler_dropout=0.1)
    base_architecture(args)


@register_model_architecture("lowrank_bert", "lowrank_bert_large")
def large(args) -> None:
    """Set BERT-large: 24 layers, d 1024, ffn 4096, 16 heads (Devlin et al. 2019, section 3)."""
    set_defaults(
        args, encoder_layers=24, encoder_embed_dim=1024, encoder_ffn_embed_dim=4096, encoder_attention_heads=16
    )  # fmt: skip
    base(args)


@register_model_architecture("lowrank_bert", "lowrank_bert_fixed")
def fixed(args) -> None:
    """Set the fixed multi-head paper's BERT (section 4.2): 24 layers, d 512, 8 heads of size 128.

    The head size stays 128 for any number of heads. The paper gives no ffn; 4096 gives its 168M parameters.
    """
    set_defaults(
        args,
        encoder_layers=24,
        encoder_embed_dim=512,
        encoder_ffn_embed_dim=4096,
        encoder_attention_heads=8,
        head_dim=128,
    )
    base(args)
