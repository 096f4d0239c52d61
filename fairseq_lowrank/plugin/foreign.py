"""Search for attention in fairseq's models that does not belong to this package."""

from __future__ import annotations

from fairseq.model_parallel.modules import ModelParallelMultiheadAttention
from fairseq.models import FairseqDecoder, fconv, fconv_self_att, lstm
from fairseq.models.speech_to_text.berard import MLPAttention
from fairseq.models.speech_to_text.modules import emformer
from fairseq.modules import MultiheadAttention, downsampled_multihead_attention, espnet_multihead_attention
from fairseq.modules.location_attention import LocationAttention
from torch import nn

from fairseq_lowrank.attention import MultiheadAttention as OurAttention
from fairseq_lowrank.plugin.layer import FairseqAttention

FOREIGN = (
    MultiheadAttention,
    ModelParallelMultiheadAttention,
    LocationAttention,
    MLPAttention,
    downsampled_multihead_attention.SingleHeadAttention,
    emformer.NoSegAugmentedMemoryMultiheadAttentionBmm,
    espnet_multihead_attention.ESPNETMultiHeadedAttention,
    fconv.AttentionLayer,
    fconv_self_att.SelfAttention,
    lstm.AttentionLayer,
    nn.MultiheadAttention,
)


def attention_by_site(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Return the first class of foreign attention at each site of a model."""
    found: dict[str, type[nn.Module]] = {}

    def search(module: nn.Module, in_decoder: bool) -> None:
        if isinstance(module, FOREIGN) and not isinstance(module, OurAttention):
            found.setdefault(site_of(module, in_decoder), type(module))
        elif not isinstance(module, OurAttention):
            for child in module.children():
                search(child, in_decoder or isinstance(module, FairseqDecoder))

    search(model, False)
    return {site: found[site] for site in ("encoder", "decoder", "cross") if site in found}


def site_of(attention: nn.Module, in_decoder: bool) -> str:
    """Return the site of an attention layer: for ours, the site it was built for; for fairseq's, by its stack."""
    if isinstance(attention, FairseqAttention):
        return attention.site
    if getattr(attention, "encoder_decoder_attention", False):
        return "cross"
    return "decoder" if in_decoder else "encoder"
