"""Conversion of checkpoints to other attention: mixing, head sizes, numbers of key and value heads, or projections.

Outputs stay the same with two exceptions: fewer key and value heads, which are means of the old ones, and factors of low rank.
"""

from __future__ import annotations

import collections
import math
from argparse import Namespace
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_lowrank.attention import AXES, AttentionSpec, MultiheadAttention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import METHODS, PARTS
from fairseq_lowrank.plugin.flags import AttentionOptions, learning_parts
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tools.axes import axes_of
from fairseq_lowrank.tools.fairseq.architecture import AttentionLayer, attention_layers, build_model, our_arguments
from fairseq_lowrank.tools.fairseq.checkpoints import model_arguments, vocab_size
from fairseq_lowrank.tools.rewriting import factorize, full_rank, layer_with, relative_error

# Projections whose heads share one value: a mixture of heads is then a mixture of their columns in out_proj.
ONE_VALUE = ("single", "multi-query")
LEARNED = ("none", "static", "positionwise", "diagonal")
SIZES = ("head_dim", "value_dim", "key_value_heads")
"""Axes that are numbers, which a conversion can change."""
FACTORS = ("latent_dim", "shared_dim", "factor_rank")
"""Sizes of the projections into which plain attention can be factored."""
OF_ONE_PRESET = (*FACTORS, "query_rank", "gate_start")
"""Axes that belong to a preset and are dropped with it."""


def convert(
    state: dict, *, attention: str | None = None, mixing: str | None = None, **sizes: int | None
) -> tuple[dict, list[str]]:
    """Return a checkpoint with other attention, without the optimizer's state, and notes on what stays the same.

    Args:
        state: see :func:`~fairseq_lowrank.tools.fairseq.checkpoints.load_state`; it is not changed.
        attention: the new `--attention`. It may differ from the old one in its mixing and in :data:`SIZES`. It may also be
            `mha` if the old one is a restricted or equal method, or a factorisation of plain attention. A size that only the
            old preset needed is dropped.
        mixing: the new `--head-mixing`.
        sizes: new values of :data:`SIZES` and :data:`FACTORS`; None keeps the old value.

    Raises:
        UserError: the new attention cannot give the same outputs, or other axes differ.
    """
    if state.get("shard_metadata"):
        raise UserError("the checkpoint is one shard of several. Convert a checkpoint of the entire model.")
    old = model_arguments(state)
    new = our_arguments(old)
    if new is None:
        raise FlagError(
            "--arch", old.arch, "its attention cannot be chosen", "See the list of fairseq-lowrank architectures."
        )
    preset = getattr(old, "attention", None) or "mha"
    if attention not in (None, preset) and preset in METHODS and (need := METHODS[preset].needs):
        setattr(new, AXES[need.axis].flag, None)
    if attention not in (None, preset):
        for name in OF_ONE_PRESET:
            setattr(new, AXES[name].flag, None)
    new.attention, new.head_mixing = attention or preset, mixing
    for name, size in sizes.items():
        if size is not None:
            setattr(new, AXES[name].flag, size)
    if not _learns(new):
        new.mixing_lr_scale = None
    if (size := vocab_size(state)) is None:
        raise UserError(f"the checkpoint of {old.arch} has no word embeddings. Use a translation or language model.")
    before, after = AttentionOptions.from_args(old), AttentionOptions.from_args(new)
    if differing_axes(before, after) and (
        PARTS["projection"][after.spec.projection].factor is not None
        or after.spec == AttentionSpec(activation=after.spec.activation, **_sizes(after))
    ):
        return rewrite(state, our_arguments(old), new, size)
    check_axes(before, after, new)
    model = build_model(new, size)
    tensors, folds, resized, exact = dict(state["model"]), [], False, True
    for layer in attention_layers(model):
        spec, wanted = before.spec_at(layer.site), after.spec_at(layer.site)
        now, then = axes_of(layer.module, spec), axes_of(layer.module, wanted)
        if any(now[name] != then[name] for name in SIZES):
            resized, exact = True, _change_layer(tensors, layer, resize, spec, now, then) and exact
        if spec.mixing != wanted.mixing:
            folds.append(_change_layer(tensors, layer, remix, spec, wanted.mixing, now["num_heads"], then["head_dim"]))
    if not folds and not resized:
        raise FlagError(
            "--attention",
            new.attention,
            f"the checkpoint already has this attention ({before.spec.mixing} mixing)",
            "Give another.",
        )
    result = as_state_of(model, tensors, state["model"])
    check_outputs(attention_layers(build_model(our_arguments(old), size)), state["model"], model, result, exact=exact)
    return with_model(state, new, result), notes(state, any(folds), resized=resized, exact=exact)


def check_outputs(
    before: Collection[AttentionLayer],
    tensors: dict[str, Tensor],
    model: torch.nn.Module,
    result: dict[str, Tensor],
    *,
    exact: bool,
) -> None:
    """Load each converted layer, and compare its outputs on random inputs with those of the old one.

    Args:
        before, tensors: the old layers, without memory, and their tensors.
        model, result: the new model, without memory, and its state.
        exact: the outputs should be the same, up to the rounding of the tensors.

    Raises:
        UserError: a layer cannot be loaded, or has other outputs.
    """
    old = {layer.name: layer.module for layer in before}
    for layer in attention_layers(model):
        if layer.name not in old:
            continue
        first, second = (
            layer_with(
                module,
                {
                    name.removeprefix(f"{layer.name}."): t
                    for name, t in state.items()
                    if name.startswith(f"{layer.name}.")
                },
            )
            for module, state in ((old[layer.name], tensors), (layer.module, result))
        )
        error = relative_error(first, second)
        if exact or not math.isfinite(error):
            _check_error(layer.name, error, result[f"{layer.name}.out_proj.weight"].dtype)


def _check_error(name: str, error: float, dtype: torch.dtype) -> None:
    """Check that a relative error can come from rounding to this dtype.

    Raises:
        UserError: it is larger, or not finite.
    """
    if not error <= 1e3 * torch.finfo(dtype).eps:
        raise UserError(
            f"{name}: the converted layer has other outputs (relative error {error:.2g}), so this conversion is not known "
            "for the checkpoint's attention. Keep the checkpoint as it is."
        )


def _learns(args: Namespace) -> bool:
    """Return True if heads are mixed by trainable weights."""
    spec = AttentionOptions.from_args(Namespace(**vars(args) | {"mixing_lr_scale": None})).spec
    return bool(learning_parts(spec))


def _sizes(options: AttentionOptions) -> dict[str, int | None]:
    return {name: getattr(options.spec, name) for name in ("head_dim", "value_dim")}


def differing_axes(before: AttentionOptions, after: AttentionOptions) -> list[str]:
    """Return the axes other than mixing and sizes of heads in which two choices differ."""
    names = (name for name in AXES if name not in ("mixing", *SIZES))
    return [name for name in names if getattr(before.spec, name) != getattr(after.spec, name)]


def check_axes(before: AttentionOptions, after: AttentionOptions, new: Namespace) -> None:
    """Check that two choices differ in mixing and sizes of heads only.

    Raises:
        UserError: they differ in a further axis.
    """
    for axis in differing_axes(before, after)[:1]:
        ours, theirs = getattr(after.spec, axis), getattr(before.spec, axis)
        raise FlagError(
            "--attention",
            new.attention,
            f"its {axis.replace('_', ' ')} is {ours}, the checkpoint's {theirs}",
            "Use --head-mixing, --head-dim, --value-dim or --key-value-heads, or --attention mha, mla, collaborative or lrkv.",
        )


def rewrite(state: dict, old: Namespace, new: Namespace, size: int) -> tuple[dict, list[str]]:
    """Return a checkpoint whose layers are plain attention or factors of it, and notes on what stays the same.

    Args:
        state, size: the checkpoint, and the number of words of its model.
        old, new: arguments of the model before and after. A size that `new` lacks is chosen so that nothing is lost.

    Raises:
        UserError: the old layers compute more than plain attention.
    """
    before, after = AttentionOptions.from_args(old), AttentionOptions.from_args(new)
    if before.spec.activation != after.spec.activation:
        check_axes(before, after, new)
    tensors, layers = dict(state["model"]), {}
    for layer in attention_layers(build_model(old, size)):
        if layer.site in before.sites:
            prefix = f"{layer.name}."
            found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            layers[layer.name] = layer_with(layer.module, found)
    plain = {name: _named(name, plain_attention, layer) for name, layer in layers.items()}
    factor = PARTS["projection"][after.spec.projection].factor
    if factor is None:
        _set_plain_sizes(new, plain.values())
    elif getattr(new, AXES[factor].flag, None) is None:
        largest = max(full_rank(layer, after.spec.projection) for layer in plain.values())
        setattr(new, AXES[factor].flag, largest)
    model, errors = build_model(new, size), {}
    for name, _, _, module in attention_layers(model):
        if name not in layers:
            continue
        result = plain[name] if factor is None else _named(name, factorize, layers[name], module)
        errors[name] = relative_error(layers[name], result)
        wanted, found = module.state_dict(), result.state_dict()
        dtype = tensors[f"{name}.out_proj.weight"].dtype
        # a bias that this layer lacks and another one needs is 0
        written = {key: found.get(key, torch.zeros(like.shape)).to(dtype) for key, like in wanted.items()}
        _check_error(name, relative_error(result, layer_with(module, written)), dtype)
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
        tensors |= {f"{name}.{key}": tensor for key, tensor in written.items()}
    converted = with_model(state, new, as_state_of(model, tensors, state["model"]))
    return converted, [*rewriting_notes(errors, after.spec.projection), *dropped_parts(state)]


def _named(name: str, change: Callable, *layers):
    """Call a function on layers, and add the layer's name to its errors."""
    try:
        return change(*layers)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _set_plain_sizes(args: Namespace, layers: Collection[MultiheadAttention]) -> None:
    """Set the flags of a model whose chosen sites have these plain layers.

    Raises:
        UserError: layers need different head sizes, and there is one flag.
    """
    sizes = {(layer.head_dim, layer.projection.dims.value_dim) for layer in layers}
    usual = all(layer.head_dim * layer.num_heads == layer.embed_dim for layer in layers)
    if len(sizes) > 1 and not usual:
        raise UserError(f"--head-dim: layers need different sizes {sorted(sizes)}. Keep the checkpoint as it is.")
    head_dim, value_dim = next(iter(sizes))
    args.head_dim = None if usual else head_dim
    args.value_dim = None if value_dim == head_dim else value_dim
    if any(layer.q_proj.bias is not None for layer in layers):
        args.no_attention_bias = False


def rewriting_notes(errors: dict[str, float], projection: str) -> list[str]:
    """Return a note on the difference of each layer's outputs before and after, on random inputs."""
    worst = max(errors, key=errors.get)
    mean = sum(errors.values()) / len(errors)
    measured = (
        f"relative error of layers' outputs on random inputs: {mean:.2g} on average, {errors[worst]:.2g} in {worst}"
    )
    if projection == "latent":
        return [f"not exact: the norm of the latent depends on the input. {measured}"]
    if errors[worst] > 1e-9:
        return [f"not exact: the rank is too small for these weights. {measured}"]
    return [f"exact up to rounding: the model's outputs. {measured}"]


def resize(tensors: dict[str, Tensor], spec: AttentionSpec, now: dict, then: dict) -> tuple[dict[str, Tensor], bool]:
    """Return a layer's tensors with other sizes, and True if its outputs stay the same.

    Larger heads are exact. Queries get rows of 0 and are scaled by √(d_p / d_k), because the layer divides scores by √d_p
    instead of √d_k. Keys get random rows with the standard deviation of the others, so that the new part of the queries can
    learn. Values get such rows too, and the output projection gets columns of 0.

    More heads of keys and values are exact: each old head is repeated. Fewer are means of neighbours (Ainslie et al. 2023,
    section 2.1), which changes the outputs.

    Args:
        now, then: the axes of the layer, see :func:`~fairseq_lowrank.tools.axes.axes_of`.

    Raises:
        UserError: the sizes cannot be changed in this way.
    """
    plain = AttentionSpec()
    for axis in ("projection", "score", "head_map", "head_output"):
        if (choice := getattr(spec, axis)) != getattr(plain, axis):
            raise UserError(
                f"{axis.replace('_', ' ')} {choice}: sizes of these heads cannot be converted. Keep the sizes."
            )
    if "bias_k" in tensors or "q_norm.weight" in tensors:
        raise UserError(
            "appended keys or normalised queries: sizes of these heads cannot be converted. Keep the sizes."
        )
    for name in ("head_dim", "value_dim"):
        if then[name] < now[name]:
            raise UserError(
                f"--{name.replace('_', '-')} {then[name]}: smaller than the checkpoint's {now[name]}, so outputs would change. "
                f"Use {now[name]} or more."
            )
    heads, groups, new_groups = now["num_heads"], now["key_value_heads"], then["key_value_heads"]
    if groups % new_groups and new_groups % groups:
        raise FlagError(
            "--key-value-heads",
            new_groups,
            f"neither a divisor nor a multiple of the checkpoint's {groups}",
            "Use one of these.",
        )

    def grouped(tensor: Tensor) -> Tensor:
        if new_groups >= groups:
            return tensor.repeat_interleave(new_groups // groups, 0)
        return tensor.unflatten(0, (new_groups, -1)).mean(1)

    generator = torch.Generator().manual_seed(1)

    def padded(tensor: Tensor, size: int, *, drawn: bool = False) -> Tensor:
        """Extend dimension 1 to a size, by random numbers with the tensor's standard deviation or by 0."""
        missing = size - tensor.size(1)
        if not missing:
            return tensor
        rest = tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])
        if drawn:
            rest = torch.randn(rest.shape, generator=generator, dtype=tensor.dtype) * tensor.std()
        return torch.cat((tensor, rest), 1)

    changed = {}
    scale = (then["head_dim"] / now["head_dim"]) ** 0.5
    for name, number, size in (
        ("q_proj", heads, "head_dim"),
        ("k_proj", groups, "head_dim"),
        ("v_proj", groups, "value_dim"),
    ):
        for part in ("weight", "bias"):
            if (tensor := tensors.get(f"{name}.{part}")) is None:
                continue
            values = tensor.double().unflatten(0, (number, now[size]))
            values = values * scale if name == "q_proj" else grouped(values)
            values = padded(values, then[size], drawn=part == "weight" and name != "q_proj")
            changed[f"{name}.{part}"] = values.flatten(0, 1).to(tensor.dtype)
    weight = tensors["out_proj.weight"].unflatten(1, (heads, now["value_dim"]))
    changed["out_proj.weight"] = F.pad(weight, (0, then["value_dim"] - now["value_dim"])).flatten(1)
    if (query_weight := tensors.get("mixing.query_weight")) is not None:  # it reads the queries before the scale
        changed["mixing.query_weight"] = F.pad(query_weight / scale, (0, 0, 0, then["head_dim"] - now["head_dim"]))
    return tensors | changed, new_groups >= groups


def output_error(first, second, samples: list[dict], pad: int) -> dict[str, float]:
    """Compare the outputs of two models on samples, whose targets are padded with `pad`.

    Returns:
        `bits_before` and `bits_after`: the mean loss of a target token in bits. `mean`: the mean absolute difference of the
        target tokens' log₂ probabilities. `largest`: the largest difference over the entire vocabulary.
    """
    totals, largest = torch.zeros(4, dtype=torch.float64), 0.0
    for sample in tracked(samples, "comparing outputs", "sequences"):
        with torch.no_grad():
            before, after = (
                model.get_normalized_probs(model(**sample["net_input"]), log_probs=True).double() / math.log(2)
                for model in (first, second)
            )
        largest = max(largest, (after - before).abs().max().item())
        target = sample["target"].view(before.shape[:-1])
        said = target != pad
        old, new = (each.gather(-1, target[..., None])[..., 0][said] for each in (before, after))
        totals += torch.stack((-old.sum(), -new.sum(), (new - old).abs().sum(), said.sum().double()))
    bits_before, bits_after, mean = (totals[:3] / totals[3]).tolist()
    return {"bits_before": bits_before, "bits_after": bits_after, "mean": mean, "largest": largest}


def _change_layer(tensors: dict[str, Tensor], layer: AttentionLayer, change: Callable, *args) -> bool:
    """Apply :func:`remix` or :func:`resize` to a layer's tensors in place, and return its second result."""
    prefix = f"{layer.name}."
    found = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    try:
        found, result = change(found, *args)
    except ValueError as error:
        raise UserError(f"{layer.name}: {error}") from error
    tensors |= {prefix + name: tensor for name, tensor in found.items()}
    return result


def remix(
    tensors: dict[str, Tensor], spec: AttentionSpec, mixing: str, num_heads: int, head_dim: int
) -> tuple[dict[str, Tensor], bool]:
    """Return a layer's tensors with another mixing, and True if M was folded into its output projection.

    Raises:
        UserError: the other mixing would change the outputs.
    """
    if mixing not in LEARNED:
        raise FlagError(
            "--head-mixing",
            mixing,
            "this mixing is fixed, so it cannot have the checkpoint's values",
            f"Use one of {', '.join(LEARNED)}.",
        )
    tensors = dict(tensors)
    like = tensors["out_proj.weight"]
    identity = torch.eye(num_heads, dtype=like.dtype)
    query_weight = tensors.pop("mixing.query_weight", like.new_zeros(head_dim, num_heads))
    matrix = identity if spec.mixing == "none" else tensors.pop("mixing.weight", None)
    if matrix is None:
        raise UserError(
            f"the checkpoint has no mixing.weight, which {spec.mixing} mixing needs. Use a complete checkpoint."
        )
    matrix = matrix.diag() if matrix.dim() == 1 else matrix
    if mixing == "positionwise":
        return tensors | {"mixing.weight": matrix, "mixing.query_weight": query_weight}, False
    if query_weight.any():
        raise UserError(
            "its mixing depends on the query (W^M is not 0), which no other mixing can compute. Keep the mixing."
        )
    if mixing == "static":
        return tensors | {"mixing.weight": matrix}, False
    diagonal = torch.equal(matrix, matrix.diag().diag())
    if mixing == "diagonal" and diagonal:
        return tensors | {"mixing.weight": matrix.diag().clone()}, False
    if mixing == "diagonal":
        raise UserError(
            "its M has entries off the diagonal, which mix heads. Use --head-mixing static or positionwise."
        )
    if torch.equal(matrix, identity):
        return tensors, False
    return fold(tensors, spec.projection, matrix, diagonal), True


def fold(tensors: dict[str, Tensor], projection: str, matrix: Tensor, diagonal: bool) -> dict[str, Tensor]:
    """Fold M into the output projection W_O, whose rows for head i are W_i.

    A diagonal M scales them: W_i' = M[i,i] W_i. If all heads share one value V, Σ_i Σ_j M[j,i] P_j V W_i =
    Σ_j P_j V (Σ_i M[j,i] W_i), so W_j' = Σ_i M[j,i] W_i. Values V ⊙ (1 + e_i) become one value if W_i contains 1 + e_i.

    Raises:
        UserError: each head has separate values.
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
        raise UserError(
            f"its M mixes heads that have separate values (projection {projection}): without mixing, Σ_j M[j,i] P_j V_i needs "
            "values of size h·d_k. Keep the mixing, because only a diagonal M or one shared value can be converted."
        )
    folded = heads.flatten(1).to(weight.dtype)
    if not folded.isfinite().all():
        raise UserError(f"out_proj times M is too large for {weight.dtype}. Convert the checkpoint to float32 first.")
    return tensors | changed | {"out_proj.weight": folded}


def as_state_of(model: torch.nn.Module, tensors: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the model's order, with the metadata of its layers.

    Raises:
        UserError: a tensor of the model is missing.
    """
    fresh = model.state_dict()
    markers = [
        f"{layer.name}.{marker}" for layer in attention_layers(model) for marker in layer.module.state_config.markers
    ]
    tensors = {name: fresh[name] for name in markers} | tensors  # older checkpoints have none
    order = {name: index for index, name in enumerate(fresh)}
    if missing := [name for name in fresh if "_attn." in name and name not in tensors]:
        raise UserError(f"the checkpoint has no {missing[0]}. Use a complete checkpoint.")
    state = collections.OrderedDict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))
    attention = tuple(layer.name for layer in attention_layers(model))
    saved = getattr(old, "_metadata", {})
    state._metadata = collections.OrderedDict(
        (name, metadata if name.startswith(attention) else saved.get(name, metadata))
        for name, metadata in fresh._metadata.items()
    )
    return state


def with_model(state: dict, args: Namespace, model: dict[str, Tensor]) -> dict:
    """Return the checkpoint with another model and its arguments, without the old optimizer and averaged weights."""
    from omegaconf import OmegaConf

    names = ("attention", "head_mixing", "mixing_lr_scale", *(AXES[name].flag for name in (*SIZES, *OF_ONE_PRESET)))
    changes = {name: getattr(args, name, None) for name in names}
    if getattr(args, "no_attention_bias", None) is not None:
        changes["no_attention_bias"] = args.no_attention_bias
    cfg = state["cfg"]
    cfg = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True) if OmegaConf.is_config(cfg) else dict(cfg)
    kind = Namespace if isinstance(cfg["model"], Namespace) else dict
    model_cfg = dict(vars(cfg["model"]) if kind is Namespace else cfg["model"])
    named = {}
    if args.arch != model_arguments(state).arch:  # a stock model became ours; arch or _name has its name
        named = {name: args.arch for name in ("arch", "_name") if name in model_cfg}
    cfg["model"] = kind(**model_cfg | changes | named)
    state = {name: value for name, value in state.items() if name != "last_optimizer_state"}
    extra = {name: value for name, value in (state.get("extra_state") or {}).items() if name != "ema"}
    return state | {"args": None, "cfg": cfg, "model": model, "extra_state": extra}


def notes(state: dict, folded: bool, *, resized: bool = False, exact: bool = True) -> list[str]:
    """Return notes on what stays the same, and what does not."""
    if not exact:
        lines = [
            "not exact: the model's outputs. Keys and values are means of the heads that now share them. "
            "Train further, or measure the error with --data DIR."
        ]
    elif folded:
        lines = [
            "exact up to rounding: the model's outputs (M is now part of out_proj)",
            "not the same: the returned attention weights, which are not mixed, and their dropout in further training",
        ]
    else:
        rounding = " up to rounding" if resized else ""
        lines = [f"exact{rounding}: the model's outputs and the returned attention weights"]
    return lines + dropped_parts(state)


def dropped_parts(state: dict) -> list[str]:
    """Return a note on the parts of a checkpoint that belong to the old model and are left out."""
    dropped = ["the optimizer's state"] * ("last_optimizer_state" in state)
    dropped += ["averaged weights (EMA)"] * ("ema" in (state.get("extra_state") or {}))
    if not dropped:
        return []
    return [f"left out: {' and '.join(dropped)}. Train further with --finetune-from-model or --reset-optimizer."]
