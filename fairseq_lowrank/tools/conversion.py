"""One way of mixing heads turned into another where both compute the same: P̄_i V_i = Σ_j M[j,i] P_j V_i."""

from __future__ import annotations

import collections
from argparse import Namespace
from dataclasses import fields

import torch
from torch import Tensor

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.plugin.flags import AttentionOptions, learns_mixing
from fairseq_lowrank.tools.architecture import AttentionLayer, attention_layers, build, our_arguments
from fairseq_lowrank.tools.checkpoints import model_arguments, vocab_size

# Projections whose heads all read one value: a mixture of heads is then a mixture of their columns in out_proj.
ONE_VALUE = ("single", "multi-query")
LEARNED = ("none", "static", "positionwise", "diagonal")


def convert(state: dict, *, attention: str | None = None, mixing: str | None = None) -> tuple[dict, list[str]]:
    """A checkpoint with another way of mixing heads and the same outputs, without the state of its optimizer.

    Args:
        state: see :func:`~fairseq_lowrank.tools.checkpoints.load_state`; it is not changed.
        attention: the new `--attention`, which may differ from the old one in its mixing alone.
        mixing: the new `--head-mixing`.

    Returns:
        The new state, and lines that say what is the same and what is not.

    Raises:
        ValueError: the new attention cannot give the same outputs, or has other axes than mixing that differ.
    """
    if state.get("shard_metadata"):
        raise ValueError("the checkpoint is one shard of several: convert one that holds the whole model")
    old = model_arguments(state)
    new = our_arguments(old)
    if new is None:
        raise ValueError(f"--arch {old.arch} has no attention that can be chosen: see fairseq-lowrank architectures")
    new.attention = attention or getattr(old, "attention", None) or "mha"
    new.head_mixing = mixing
    if not _learns(new):
        new.mixing_lr_scale = None
    before, after = check_axes(old, new)
    if (size := vocab_size(state)) is None:
        raise ValueError(
            f"the checkpoint of {old.arch} has no word embeddings: expected a translation or language model"
        )
    model = build(new, size)
    tensors, folds = dict(state["model"]), []
    for layer in attention_layers(model):
        spec, mixing = before.spec_at(layer.site), after.spec_at(layer.site).mixing
        if spec.mixing != mixing:
            folds.append(_remix_layer(tensors, layer, spec, mixing))
    if not folds:
        raise ValueError(
            f"--attention {new.attention}: the checkpoint's heads are mixed so already ({before.spec.mixing})"
        )
    return with_model(state, new, as_state_of(model, tensors, state["model"])), notes(state, any(folds))


def _learns(args: Namespace) -> bool:
    """Whether anything mixes heads by weights that are learned, at a rate of their own where one was given."""
    spec = AttentionOptions.from_args(Namespace(**vars(args) | {"mixing_lr_scale": None})).spec
    return learns_mixing(spec.mixing) or learns_mixing(spec.score_mixing)


def check_axes(old: Namespace, new: Namespace) -> tuple[AttentionOptions, AttentionOptions]:
    """The attention of both arguments, after checking that they differ in mixing alone."""
    before, after = AttentionOptions.from_args(old), AttentionOptions.from_args(new)
    for axis in (field.name for field in fields(AttentionSpec) if field.name != "mixing"):
        ours, theirs = getattr(after.spec, axis), getattr(before.spec, axis)
        if ours != theirs:
            raise ValueError(
                f"--attention {new.attention}: its {axis.replace('_', ' ')} is {ours}, the checkpoint's {theirs}; only the "
                "mixing of heads can be converted: give --head-mixing, or an --attention that differs in it alone"
            )
    return before, after


def _remix_layer(tensors: dict[str, Tensor], layer: AttentionLayer, spec: AttentionSpec, mixing: str) -> bool:
    """Give a layer's tensors, in place, another way of mixing; whether M was folded, see :func:`remix`."""
    prefix = f"{layer.name}."
    found = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    try:
        found, folded = remix(found, spec, mixing, layer.module.num_heads, layer.module.head_dim)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error
    tensors |= {prefix + name: tensor for name, tensor in found.items()}
    return folded


def remix(
    tensors: dict[str, Tensor], spec: AttentionSpec, mixing: str, num_heads: int, head_dim: int
) -> tuple[dict[str, Tensor], bool]:
    """A layer's tensors with another way of mixing, and whether M was folded into its output projection.

    Raises:
        ValueError: another way of mixing would compute something else.
    """
    if mixing not in LEARNED:
        raise ValueError(
            f"{mixing} mixing is fixed, so it cannot become what the checkpoint has; expected one of "
            f"{', '.join(LEARNED)}"
        )
    tensors = dict(tensors)
    like = tensors["out_proj.weight"]
    identity = torch.eye(num_heads, dtype=like.dtype)
    query_weight = tensors.pop("mixing.query_weight", like.new_zeros(head_dim, num_heads))
    matrix = identity if spec.mixing == "none" else tensors.pop("mixing.weight", None)
    if matrix is None:
        raise ValueError(f"the checkpoint lacks mixing.weight, which {spec.mixing} mixing has")
    matrix = matrix.diag() if matrix.dim() == 1 else matrix
    if mixing == "positionwise":
        return tensors | {"mixing.weight": matrix, "mixing.query_weight": query_weight}, False
    if query_weight.any():
        raise ValueError("its mixing depends on the query (W^M is not 0), which no other way of mixing can repeat")
    if mixing == "static":
        return tensors | {"mixing.weight": matrix}, False
    diagonal = torch.equal(matrix, matrix.diag().diag())
    if mixing == "diagonal" and diagonal:
        return tensors | {"mixing.weight": matrix.diag().clone()}, False
    if mixing == "diagonal":
        raise ValueError("its M has entries off the diagonal, which mix heads")
    if torch.equal(matrix, identity):
        return tensors, False
    return fold(tensors, spec.projection, matrix, diagonal), True


def fold(tensors: dict[str, Tensor], projection: str, matrix: Tensor, diagonal: bool) -> dict[str, Tensor]:
    """M inside the output projection W_O, whose rows for head i are W_i.

    A diagonal M scales them: W_i' = M[i,i] W_i. Where all heads read one value V, Σ_i Σ_j M[j,i] P_j V W_i =
    Σ_j P_j V (Σ_i M[j,i] W_i), so W_j' = Σ_i M[j,i] W_i; values V ⊙ (1 + e_i) are one value once 1 + e_i has gone into W_i.

    Raises:
        ValueError: heads have values of their own.
    """
    weight = tensors["out_proj.weight"]
    heads = weight.double().unflatten(1, (matrix.size(0), -1))
    matrix = matrix.double()
    changed = {}
    if diagonal:
        heads = heads * matrix.diag()[:, None]
    elif projection in ONE_VALUE or projection == "head-embedding-mul":
        if projection == "head-embedding-mul":
            embedding = tensors["head_embeddings.value"]
            heads = heads * (1 + embedding.double())
            changed["head_embeddings.value"] = torch.zeros_like(embedding)
        heads = torch.einsum("ji,oid->ojd", matrix, heads)
    else:
        raise ValueError(
            f"its M mixes heads that have values of their own (projection {projection}): Σ_j M[j,i] P_j V_i needs values of "
            "size h·d_k, so without mixing the same outputs are not to be had; expected a diagonal M, or one shared value"
        )
    folded = heads.flatten(1).to(weight.dtype)
    if not folded.isfinite().all():
        raise ValueError(f"out_proj with M inside does not fit into {weight.dtype}")
    return tensors | changed | {"out_proj.weight": folded}


def as_state_of(model: torch.nn.Module, tensors: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the model's order, with the meanings that its layers save.

    Raises:
        ValueError: they are not those of the model.
    """
    fresh = model.state_dict()
    order = {name: index for index, name in enumerate(fresh)}
    if missing := [name for name in fresh if "_attn." in name and name not in tensors]:
        raise ValueError(f"the checkpoint lacks {missing[0]}")
    state = collections.OrderedDict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))
    attention = tuple(layer.name for layer in attention_layers(model))
    saved = getattr(old, "_metadata", {})
    state._metadata = collections.OrderedDict(
        (name, meaning if name.startswith(attention) else saved.get(name, meaning))
        for name, meaning in fresh._metadata.items()
    )
    return state


def with_model(state: dict, args: Namespace, model: dict[str, Tensor]) -> dict:
    """The checkpoint with another model: its arguments changed, the optimizer and averaged weights of the old one gone."""
    from omegaconf import OmegaConf

    changes = {name: getattr(args, name, None) for name in ("attention", "head_mixing", "mixing_lr_scale")}
    cfg = state["cfg"]
    cfg = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True) if OmegaConf.is_config(cfg) else dict(cfg)
    kind = Namespace if isinstance(cfg["model"], Namespace) else dict
    model_cfg = dict(vars(cfg["model"]) if kind is Namespace else cfg["model"])
    named = {}
    if args.arch != model_arguments(state).arch:  # stock becomes ours; legacy models are named by arch, others by _name
        named = {name: args.arch for name in ("arch", "_name") if name in model_cfg}
    cfg["model"] = kind(**model_cfg | changes | named)
    state = {name: value for name, value in state.items() if name != "last_optimizer_state"}
    extra = {name: value for name, value in (state.get("extra_state") or {}).items() if name != "ema"}
    return state | {"args": None, "cfg": cfg, "model": model, "extra_state": extra}


def notes(state: dict, folded: bool) -> list[str]:
    """What is the same as before, and what is not."""
    lines = (
        [
            "exact up to rounding: the model's outputs, M being part of out_proj now",
            "not the same: the attention weights it returns (unmixed now), and dropout in further training (it falls on them)",
        ]
        if folded
        else ["exact: the model's outputs and the attention weights it returns"]
    )
    dropped = ["the optimizer's state"] * ("last_optimizer_state" in state)
    dropped += ["averaged weights (EMA)"] * ("ema" in (state.get("extra_state") or {}))
    if dropped:
        lines.append(f"left out: {' and '.join(dropped)}; train on with --finetune-from-model or --reset-optimizer")
    return lines
