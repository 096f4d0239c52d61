"""A layer in the place of ``torch.nn.MultiheadAttention``: what torch's modules ask of it besides its forward pass."""

from __future__ import annotations

import torch
from torch import nn

_NO_TORCHSCRIPT = "attention of fairseq_lowrank is not available in TorchScript: use torch.export or torch.compile"


class _NoJointProjection:
    """In the place of a joint weight of queries, keys and values: something that torch's fused paths leave alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError("queries, keys and values have projections of their own: there is no in_proj_weight")


class InPlaceOfTorchs(nn.Module):
    """Declines torch's fused paths and TorchScript."""

    # torch.nn.TransformerEncoder and its layers ask these of their ``self_attn`` before they take a fused path at evaluation,
    # which computes torch.nn.MultiheadAttention whatever stands there. The answers decline it.
    in_proj_weight = _NoJointProjection()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` asks first, of a module inside another one too."""
        raise NotImplementedError(_NO_TORCHSCRIPT)

    def refuse_tracing(self) -> None:
        if torch.jit.is_tracing():
            raise NotImplementedError(_NO_TORCHSCRIPT)
