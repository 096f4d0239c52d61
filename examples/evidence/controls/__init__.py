"""Controls that the package has no flag for, as a plugin over it: for `--user-dir`.

- `--head-mixing column-sums`: static mixing that cannot damp. Each mixed head is a sum of heads with weights that sum to 1,
  P̄_i = Σ_j M[j, i] P_j with Σ_j M[j, i] = 1, so that its rows sum to 1 as they do before mixing.
- `--head-mixing common-mode`: M = diag(a) + 1cᵀ, P̄_i = a_i P_i + c_i Σ_j P_j. A head gets a factor, and more or less of
  the sum of all heads; it takes no other head in particular. 2h numbers a layer.
- `--arch transformer_small_start_iwslt_de_en` and `transformer_lm_small_start`: `lowrank_transformer_iwslt_de_en` and
  `lowrank_transformer_lm` whose attention starts with half its output weights. Nothing else differs, to the bit: all that is
  random was drawn before.
- `--arch transformer_lm_value_rate`: `lowrank_transformer_lm` whose projections of values learn at h times the rate, with h heads.
- `--arch transformer_lm_factored`: `lowrank_transformer_lm` whose input embedding is a product of two matrices at every
  `--embed-rank`. Its entries start with the variance of a whole embedding, 1/d. `--embed-rank` alone starts them with
  2/(r + d), and at full rank it has one matrix.
- `--arch bert_frozen_base`: `lowrank_bert_base` whose mixing, pooler and classification head learn, and nothing else.
"""

from dataclasses import replace

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import transformer_iwslt_de_en

import fairseq_lowrank.plugin  # noqa: F401
from fairseq_lowrank.attention import Method, register
from fairseq_lowrank.models.bert import LowrankBertModel
from fairseq_lowrank.models.bert import base as bert_base
from fairseq_lowrank.models.language_model import LowrankTransformerLanguageModel, LowrankTransformerLanguageModelConfig
from fairseq_lowrank.models.transformer import LowrankTransformerModel
from fairseq_lowrank.parts import Mixing
from fairseq_lowrank.parts.parameters import APPLIES_TO_ALL_OPTIMIZERS
from fairseq_lowrank.tools.fairseq.architecture import attention_layers

START = 0.5


class ColumnSums(Mixing):
    """M = W − (column sums of W − 1) / h, of all matrices whose columns sum to 1 the nearest to W; it starts at I."""

    name = "column-sums"

    def matrix(self):
        return self.weight - (self.weight.sum(0) - 1) / len(self.weight)


class CommonMode(Mixing):
    """M = diag(a) + 1cᵀ, with a and c as the columns of the weight ``[H, 2]``; a starts at 1 and c at 0, so M at I."""

    name = "common-mode"

    def initial_weight(self, num_heads):
        return torch.tensor([1.0, 0.0]).repeat(num_heads, 1)

    def matrix(self):
        own, common = self.weight.unbind(1)
        return own.diag() + common


for method in (
    Method(
        "column-sums", "Mixing that cannot damp", "P̄_i = Σ_j M[j, i] P_j,   Σ_j M[j, i] = 1", {"mixing": ColumnSums}
    ),
    Method("common-mode", "More or less of all heads", "P̄_i = a_i P_i + c_i Σ_j P_j", {"mixing": CommonMode}),
):
    register(replace(method, preset=False))


class SmallStart:
    """A model with attention of the package, whose output weights start at half their size."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        with torch.no_grad():
            for layer in attention_layers(model):
                layer.module.out_proj.weight *= START
        return model


@register_model("transformer_small_start")
class SmallStartTransformer(SmallStart, LowrankTransformerModel):
    """fairseq's ``transformer`` with the small start."""


@register_model("transformer_lm_small_start", dataclass=LowrankTransformerLanguageModelConfig)
class SmallStartLanguageModel(SmallStart, LowrankTransformerLanguageModel):
    """fairseq's ``transformer_lm`` with the small start."""


@register_model("transformer_lm_value_rate", dataclass=LowrankTransformerLanguageModelConfig)
class ValueRateLanguageModel(LowrankTransformerLanguageModel):
    """fairseq's ``transformer_lm`` whose projections of values learn at h times the rate, with h heads."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        for layer in attention_layers(model):
            for parameter in layer.module.v_proj.parameters():
                settings = {"lr_scale": float(layer.module.num_heads)}
                parameter.optim_overrides = {"optimizer": settings, APPLIES_TO_ALL_OPTIMIZERS: True}
        return model


@register_model("transformer_lm_factored", dataclass=LowrankTransformerLanguageModelConfig)
class FactoredLanguageModel(LowrankTransformerLanguageModel):
    """fairseq's ``transformer_lm`` with an embedding E P: E ``[V, r]`` of variance 1/r, and P ``[r, d]`` of variance 1/d."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        decoder = model.decoder
        rank, width = decoder.embed_tokens.embedding_dim, decoder.embed_dim
        decoder.project_in_dim = torch.nn.Linear(rank, width, bias=False)
        torch.nn.init.normal_(decoder.project_in_dim.weight, std=width**-0.5)
        return model


@register_model("bert_frozen")
class FrozenBert(LowrankBertModel):
    """BERT whose mixing, pooler and classification head learn, and nothing else."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task).requires_grad_(False)
        model.encoder.pooler.requires_grad_(True)
        for layer in attention_layers(model):
            if layer.module.mixing is not None:
                layer.module.mixing.requires_grad_(True)
        return model  # the task adds the classification head later


register_model_architecture("transformer_small_start", "transformer_small_start_iwslt_de_en")(transformer_iwslt_de_en)
register_model_architecture("bert_frozen", "bert_frozen_base")(bert_base)
