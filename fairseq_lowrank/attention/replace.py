"""Put attention of this package in the place of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fairseq_lowrank.attention.build import build_attention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.attention.layer import MultiheadAttention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import METHODS
from fairseq_lowrank.parts.part import Value
from fairseq_lowrank.parts.spec import check_names


def replace_attention(module: nn.Module, preset: str, *, backend: str = "auto", **axes: Value) -> nn.Module:
    """Replace every ``torch.nn.MultiheadAttention`` inside a module, keep its weights, and return the module.

    Args:
        module: any module, such as ``nn.TransformerEncoder``, ``nn.Transformer`` or one of your own. If it is an
            ``nn.MultiheadAttention`` itself, the new layer is returned.
        preset: one of :data:`~fairseq_lowrank.attention.PRESETS` that has the weights of ``nn.MultiheadAttention``: ``mha``, mixing of
            probabilities or scores, gates and head maps.
        backend: see :func:`~fairseq_lowrank.attention.build_attention`.
        axes: values that override the method's, see :func:`~fairseq_lowrank.attention.build_attention`.

    Mixing is initialised to the identity, so outputs do not change. Nothing is replaced if one layer cannot be.

    Raises:
        UserError: a layer's weights do not fit the method, the module has no ``nn.MultiheadAttention``, or one with what a new
            layer cannot keep: hooks, a parametrisation such as ``weight_norm``, quantisation, parameters that another layer shares,
            or a class derived from it.
    """
    check_names(axes)
    theirs = {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, nn.MultiheadAttention)
    }
    owners = Counter(parameter for child in module.modules() for parameter in child._parameters.values())
    for name, part in theirs.items():
        if (lost := _what_is_lost(part, owners)) is not None:
            raise UserError(
                f"{name or type(part).__name__} {lost}, which its replacement would lose. "
                "Remove it first, or replace the attention before it is added."
            )
    if not theirs:
        raise UserError(
            f"{type(module).__name__} holds no torch.nn.MultiheadAttention, so there is nothing to replace. Give a model that has one."
        )
    need = METHODS[preset].needs if preset in METHODS else None
    if need is not None and need.axis not in axes:
        raise UserError(
            f"attention {preset!r} needs {need.what}, so its projections are not those of torch.nn.MultiheadAttention. "
            "Choose a method with the projections of mha, such as mixhead-b."
        )
    made: dict[nn.Module, MultiheadAttention] = {}
    for name, part in theirs.items():
        if part not in made:  # a layer that is used twice stays one layer
            made[part] = _replacement(name, part, preset, backend, axes)
    if "" in theirs:
        return made[module]
    for name, part in theirs.items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, made[part])
    return module


@torch.no_grad()
def to_stock(layer: MultiheadAttention) -> nn.MultiheadAttention:
    """Return a ``torch.nn.MultiheadAttention`` with the outputs of a layer: the way back from :func:`replace_attention`.

    Raises:
        UserError: the layer computes more than plain attention, or its heads have another size than ``embed_dim / num_heads``.
    """
    plain, size = plain_attention(layer), layer.embed_dim // layer.num_heads
    config = plain.config
    if (config.head_dim, config.value_dim) != (size, size):
        raise UserError(
            f"heads of size {config.head_dim} with values of size {config.value_dim}: torch.nn.MultiheadAttention has heads of size "
            f"{size}, embed_dim / num_heads. Keep the layer as it is."
        )
    weight = plain.q_proj.weight
    stock = nn.MultiheadAttention(
        config.embed_dim,
        config.num_heads,
        dropout=layer.dropout_module.p,
        bias=config.bias,
        kdim=config.kdim,
        vdim=config.vdim,
        batch_first=config.batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    projections = (plain.q_proj, plain.k_proj, plain.v_proj)
    if stock.in_proj_weight is not None:
        stock.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
    else:
        for name, projection in zip("qkv", projections, strict=True):
            getattr(stock, f"{name}_proj_weight").copy_(projection.weight)
    stock.out_proj.weight.copy_(plain.out_proj.weight)
    if stock.in_proj_bias is not None:
        stock.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        stock.out_proj.bias.copy_(plain.out_proj.bias)
    return stock.train(layer.training)


def _what_is_lost(part: nn.MultiheadAttention, owners: Counter) -> str | None:
    """Return what of a layer its replacement would not have, or None; ``owners`` counts the modules of each parameter."""
    for name, child in part.named_modules():
        where = f"its {name} " if name else ""
        if parametrize.is_parametrized(child):
            return f"{where}has a parametrisation of {', '.join(child.parametrizations)}".strip()
        if any(value for key, value in vars(child).items() if key.endswith("_hooks")) or "forward" in vars(child):
            return f"{where}has hooks"
    for name, parameter in part.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"its {name} has hooks"
        if owners[parameter] > 1:
            return f"shares its {name} with another layer"
        if type(parameter.data) is not Tensor:
            return f"has a {type(parameter.data).__name__} as its {name}"
    if (
        type(part) is not nn.MultiheadAttention
        or type(part.out_proj) is not nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        other = part if type(part) is not nn.MultiheadAttention else part.out_proj
        return f"is or has a {type(other).__module__}.{type(other).__name__}"
    return None


def _replacement(
    name: str, part: nn.MultiheadAttention, preset: str, backend: str, axes: dict[str, Any]
) -> MultiheadAttention:
    layer = build_attention(
        preset,
        part.embed_dim,
        part.num_heads,
        kdim=part.kdim,
        vdim=part.vdim,
        dropout=part.dropout,
        bias=part.in_proj_bias is not None,
        add_bias_kv=part.bias_k is not None,
        add_zero_attn=part.add_zero_attn,
        batch_first=part.batch_first,
        device=part.out_proj.weight.device,
        dtype=part.out_proj.weight.dtype,
        backend=backend,
        **axes,
    )
    shapes = {key: tuple(tensor.shape) for key, tensor in layer.state_dict().items()}
    expected = {
        "q_proj.weight": (part.embed_dim, part.embed_dim),
        "k_proj.weight": (part.embed_dim, part.kdim),
        "v_proj.weight": (part.embed_dim, part.vdim),
        "out_proj.weight": (part.embed_dim, part.embed_dim),
    }
    for key, shape in expected.items():
        if (found := shapes.get(key)) != shape:
            there = "has no such weight" if found is None else f"has {list(found)}"
            raise UserError(
                f"{name or type(part).__name__}: attention {preset!r} {there} where {key} is {list(shape)}. "
                "Choose a method with the projections of mha, such as mixhead-b."
            )
    try:
        layer.load_state_dict(part.state_dict())
    except RuntimeError as error:
        raise UserError(
            f"{name or type(part).__name__}: attention {preset!r} does not start as the attention of these weights, so outputs would "
            "change. Choose a method that does, such as mixhead-b."
        ) from error
    layer.train(part.training)
    trainable = {key: parameter.requires_grad for key, parameter in part.named_parameters()}
    for key, parameter in layer.named_parameters():
        projection, _, kind = key.partition(".")
        joint = f"in_proj_{kind}" if projection in ("q_proj", "k_proj", "v_proj") else key
        names = (key, f"{projection}_{kind}", joint)  # nn.MultiheadAttention has one of them, and none of mixing
        parameter.requires_grad_(next((trainable[name] for name in names if name in trainable), True))
    return layer
