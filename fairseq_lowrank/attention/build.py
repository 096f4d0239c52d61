"""Builds a layer from a preset."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.parts import AttentionConfig, AttentionSpec, Rotation
from fairseq_lowrank.parts.part import Value
from fairseq_lowrank.parts.spec import check_names


def build_attention(
    preset: str,
    embed_dim: int,
    num_heads: int,
    *,
    self_attention: bool = False,
    encoder_decoder_attention: bool = False,
    kdim: int | None = None,
    vdim: int | None = None,
    dropout: float | nn.Module = 0.0,
    bias: bool = True,
    add_bias_kv: bool = False,
    add_zero_attn: bool = False,
    batch_first: bool = False,
    max_positions: int | None = None,
    qk_norm: bool = False,
    depth: int = 1,
    rotary: Rotation | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    wrap_projection: Callable[[nn.Linear], nn.Module] | None = None,
    **axes: Value,
) -> MultiheadAttention:
    """Return the attention layer of a method; axes override the choices of the method.

    ::

        layer = build_attention("mixhead-b", 512, 8, batch_first=True, self_attention=True)
        x = torch.randn(2, 100, 512)  # [batch, time, embed_dim]
        output, weights = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)  # [2, 100, 512], None

    Args:
        preset: one of :data:`~fairseq_lowrank.attention.PRESETS`.
        device: where the parameters are created, by default on torch's default device. On 'meta' they have no values:
            call ``to_empty``, and then ``reset_parameters`` of the layer or ``load_state_dict``.
        dtype: of the parameters, by default torch's default dtype.
        axes: values that override the method's; ``None`` keeps the method's. The axes are ``head_dim``, ``value_dim``,
            ``key_value_heads``, ``projection``, ``score``, ``score_mixing``, ``activation``, ``mixing``, ``head_map``,
            ``head_output``, ``score_bias`` and ``attention_sinks``. The options of their parts are ``shared_dim``,
            ``factor_rank``, ``gate_start``, ``diff_version``, ``latent_dim``, ``rotary_dim``, ``mixing_normalization``, ``blocks``,
            ``synthesizer_heads``, ``unused_key_projection``, ``query_rank``, ``position_buckets``, ``max_distance`` and
            ``bucket_sides``. For one, ``AXES["mixing"].help`` says what it decides and ``list(AXES["mixing"])`` what it can be.

    The other arguments are those of :class:`AttentionConfig` and :class:`MultiheadAttention`. The layer can replace
    ``torch.nn.MultiheadAttention``, whose state ``mha`` loads.

    Raises:
        ValueError: an unknown method, axis or value, or sizes that do not fit.
    """
    check_names(axes, inspect.signature(build_attention).parameters)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: expected a float dtype such as torch.float32")
    with nullcontext() if device is None else _device(device):
        config = AttentionConfig(
            AttentionSpec.from_preset(preset, **axes),
            embed_dim,
            num_heads,
            kdim=kdim,  # type: ignore[arg-type]
            vdim=vdim,  # type: ignore[arg-type]
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=self_attention,
            encoder_decoder_attention=encoder_decoder_attention,
            batch_first=batch_first,
            max_positions=max_positions,
            qk_norm=qk_norm,
            depth=depth,
            rotary=rotary,
            backend=backend,
        )
        layer = MultiheadAttention(config, dropout=dropout, wrap_projection=wrap_projection)
    return layer if dtype is None else layer.to(dtype)


def _device(device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: expected a device of torch such as 'cpu', 'cuda:0', 'meta'") from error
