"""The configuration of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_lowrank.attention.spec import AttentionSpec


@dataclass(frozen=True)
class AttentionConfig:
    """The choice on every axis, and the sizes and options of a layer.

    Args:
        spec: the choice on every axis.
        embed_dim: d, size of queries and of the output.
        num_heads: h.
        kdim: size of keys, by default d.
        vdim: size of values, by default d.
        bias: whether the projections add a bias.
        add_bias_kv: append a learned key and value.
        add_zero_attn: append a key and value of zeros.
        self_attention: query, key and value are the same tensor.
        encoder_decoder_attention: keys and values come from an encoder.
        batch_first: query, key, value and output are ``[batch, time, .]`` instead of ``[time, batch, .]``.
        max_positions: the greatest length of a sentence: synthesizers need it, other scores take any length.
        qk_norm: divide each head's queries and keys by their root mean square, and multiply them by a learned gain for each feature
            (``q_norm``, ``k_norm``: ``torch.nn.RMSNorm``, shared by heads, before rotary positions), as Qwen3 does.
        depth: the number of the layer in its encoder or decoder, from 1. Parts may start differently in deeper layers.
        backend: one of :data:`fairseq_lowrank.ops.BACKENDS` that runs on the device of the inputs. If weights are requested and it
            has none, another one computes them.
    """

    spec: AttentionSpec
    embed_dim: int
    num_heads: int
    kdim: int | None = None
    vdim: int | None = None
    bias: bool = True
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    self_attention: bool = False
    encoder_decoder_attention: bool = False
    batch_first: bool = False
    max_positions: int | None = None
    qk_norm: bool = False
    depth: int = 1
    backend: str = "auto"
