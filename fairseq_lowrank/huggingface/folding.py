"""Fold attention that is plain attention in other words into a model's own projections, for programs that know stock models alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fairseq_lowrank.huggingface.added import SLOT, parts_of
from fairseq_lowrank.huggingface.apply import carry_out, planned
from fairseq_lowrank.huggingface.models import attention_modules, head_sizes, model_of_transformers
from fairseq_lowrank.huggingface.sites import caps_scores
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import AXES, PLAIN, Mixing
from fairseq_lowrank.parts.stages import declared

SOFTMAX = AXES["activation"].default
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "Wo", "o", "output.dense")
_QUERIES = ("q_proj", "query", "q", "c_attn", "Wqkv")
"""Names of projections. The last two hold queries, keys and values, one after the other."""


@torch.no_grad()
def fold(model: PreTrainedModel) -> PreTrainedModel:
    """Write the chosen attention into the model's own weights, in place, and return the stock model with the same outputs.

    A diagonal M scales what the output projection reads of each head, a diagonal L the queries. If all heads share one key and value,
    any static M becomes a map of the output projection (``avghead``).

    Raises:
        UserError: the attention computes more than plain attention, or a projection is not found. The model stays as it was.
    """
    model = model_of_transformers(model)
    names = {module: name for name, module in model.named_modules()}
    changes = []
    if (record := getattr(model.config, SLOT, None)) is None:
        raise UserError(
            f"{type(model).__name__} has no chosen attention, so there is nothing to fold. Use it as it is."
        )
    for module, _, _ in attention_modules(model):
        if record.get("activation", SOFTMAX) != SOFTMAX:
            raise _refused(module, "its activation is not the softmax")
        for axis, part in parts_of(module).items():
            changes += _changes(model, names[module], module, axis, declared(part))
    for weight, value in changes:
        weight.copy_(value)
    carry_out(planned(model, PLAIN))
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return model


def _changes(model: nn.Module, name: str, module: nn.Module, axis: str, part: Any) -> list[tuple[Tensor, Tensor]]:
    """Return tensors of the model, and their values once a part is folded into them.

    Raises:
        UserError: the part does not fold.
    """
    sizes = head_sizes(module)
    matrix = part.fixed_matrix() if isinstance(part, Mixing) else None
    if matrix is None:
        raise _refused(module, f"{axis} {part.name!r} depends on the input or on positions")
    diagonal, shared = torch.equal(matrix, matrix.diag().diag()), sizes.key_value_heads == 1
    if not diagonal and (axis == "score_mixing" or not shared):
        raise _refused(module, f"{axis} {part.name!r} mixes heads that have separate values")
    if axis == "score_mixing" and (hasattr(module, "q_norm") or caps_scores(module)):
        raise _refused(module, "its queries are normalised, or its scores capped, after they are projected")
    projection = _projection(model, name, _OUTPUTS if axis == "mixing" else _QUERIES)
    if projection is None:
        raise _refused(module, "its projections have other names than those that are known")
    weight = projection.weight
    matrix = matrix.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    by_rows = type(projection).__name__ == "Conv1D"  # [inputs, outputs]
    wide = (weight.mT if by_rows else weight).to(matrix.dtype)
    changes = []
    if axis == "mixing":
        heads = wide.unflatten(1, (sizes.num_heads, -1))
        folded = torch.einsum("ji,oid->ojd", matrix, heads).flatten(1)
    else:
        factors = wide.new_ones(len(wide))
        factors[: sizes.num_heads * sizes.head_dim] = matrix.diag().repeat_interleave(sizes.head_dim)
        folded = factors[:, None] * wide
        if projection.bias is not None:
            changes.append((projection.bias, factors * projection.bias))
    return [*changes, (weight, folded.mT if by_rows else folded)]


def _projection(model: nn.Module, name: str, known: tuple[str, ...]) -> Any:
    """Return the projection of an attention module, which may be a child of the module around it."""
    for outer in (name, name.rpartition(".")[0]):
        for child in known:
            try:
                found = model.get_submodule(f"{outer}.{child}")
            except AttributeError:
                continue
            if type(found).__name__ in ("Linear", "Conv1D"):
                return found
    return None


def _refused(module: nn.Module, reason: str) -> UserError:
    return UserError(f"{type(module).__name__}: {reason}, so no stock model computes this. Keep the model as it is.")
