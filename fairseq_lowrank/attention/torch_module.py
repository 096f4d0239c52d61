"""Compatibility with ``torch.nn.MultiheadAttention``: what torch's modules read of it besides its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn

_NO_TORCHSCRIPT = "attention of fairseq_lowrank is not available in TorchScript: use torch.export or torch.compile"


class _DisabledInProj:
    """A stand-in for the joint weight of queries, keys and values, which makes torch's fused paths decline."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        raise TypeError(
            "queries, keys and values have separate projections: there is no in_proj_weight. Use q_proj, k_proj and v_proj."
        )


class TorchMHACompat(nn.Module):
    """Declines torch's fused paths and TorchScript."""

    # torch.nn.TransformerEncoder and its layers read these from ``self_attn`` before they take a fused path at evaluation,
    # which computes torch.nn.MultiheadAttention for any module. These values decline it.
    in_proj_weight = _DisabledInProj()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse ``torch.jit.script``, which calls this first, also for a module inside another one."""
        raise NotImplementedError(_NO_TORCHSCRIPT)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse ``torch.jit.trace``, under which a module calls this in place of ``forward``."""
        raise NotImplementedError(_NO_TORCHSCRIPT)
