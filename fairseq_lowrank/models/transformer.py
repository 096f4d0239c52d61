"""The papers' translation models: fairseq's, with this package's plain attention unless a flag chooses another one."""

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerModel,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)
from fairseq.models.transformer.transformer_legacy import base_architecture

from fairseq_lowrank.plugin.attention import LowrankModel


@register_model("lowrank_transformer")
class LowrankTransformerModel(LowrankModel, TransformerModel):
    """fairseq's ``transformer`` with this package's ``mha``, unless ``--attention`` chooses another attention."""

    @classmethod
    def hub_models(cls) -> dict:
        return {}


register_model_architecture("lowrank_transformer", "lowrank_transformer")(base_architecture)
register_model_architecture("lowrank_transformer", "lowrank_transformer_iwslt_de_en")(transformer_iwslt_de_en)
register_model_architecture("lowrank_transformer", "lowrank_transformer_wmt_en_de")(transformer_wmt_en_de)
register_model_architecture("lowrank_transformer", "lowrank_transformer_wmt_en_de_big")(transformer_wmt_en_de_big)
