"""Head mixing in models of ``transformers``: what happens between projected heads and head outputs.

::

    from fairseq_lowrank.huggingface import apply_attention, load_attention, save_attention

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    apply_attention(model, "mixhead-b")  # the outputs do not change: mixing is initialised to the identity
    save_attention(model, folder)  # the mixing alone; load_attention(model, folder) reads it

Models that compute attention through ``ALL_ATTENTION_FUNCTIONS`` pass projected (and rotated) queries, keys and values to one
registered function. So the mixing of scores, the activation and the mixing of probabilities can be chosen in each of them. The
projections stay the model's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fairseq_lowrank.attention.spec import AXES, PRESETS, AttentionSpec
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.methods import HEAD_OUTPUTS
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, attention
from fairseq_lowrank.ops.activation import activate
from fairseq_lowrank.ops.attention.scores import grouped_product
from fairseq_lowrank.parts.mixing import MIXINGS, SCORE_MIXINGS
from fairseq_lowrank.tools.transformers_models import (
    SITES,
    attention_modules,
    calls_the_interface,
    query_sizes,
    supported,
)

__all__ = ["apply_attention", "attention_modules", "load_attention", "mixing_state", "save_attention", "supported"]

IMPLEMENTATION = "fairseq_lowrank"
"""The name of our function in ``config._attn_implementation``."""
TRAIN = ("all", "mixing")
CHOSEN = ("score_mixing", "activation", "mixing", "head_output", "gate_start", "factor_rank")
"""The axes that a model of transformers leaves open. The others belong to its projections."""
WEIGHTS, CONFIG = "lowrank_attention.safetensors", "lowrank_attention.json"

# What models pass for other attention functions, or for other parts of the model; the mask function and the caches have
# used the rest of it already.
_MODULES = ("mixing", "score_mixing", "head_output")
"""The names of the modules that are added to an attention module."""
_USED_ELSEWHERE = frozenset(
    (
        *("position_ids", "sliding_window", "cache_position", "past_key_values", "use_cache", "return_dict"),
        *("output_hidden_states", "output_router_logits", "num_items_in_batch", "deterministic", "logits_to_keep"),
        *("token_type_ids", "position_embeddings", "layer_idx", "labels", "encoder_attention_mask"),
        *("encoder_hidden_states", "head_mask", "interpolate_pos_encoding"),
    )
)


def spec_of(preset: str, **axes: str | None) -> AttentionSpec:
    """Return the choice of a preset, with ``axes`` over it, if a model of transformers can take it.

    Raises:
        UserError: the preset or an axis changes projections or scores, which are the model's own.
    """
    spec = AttentionSpec.from_preset(preset, **axes)
    plain = AttentionSpec()
    changed = [axis for axis in AXES if axis not in CHOSEN and getattr(spec, axis) != getattr(plain, axis)]
    if changed:
        usable = [name for name, sets in PRESETS.items() if sets.keys() <= set(CHOSEN) and name != "diff"]
        raise UserError(
            f"attention {preset!r} sets {', '.join(changed)}, which belong to the projections of the model. "
            f"Choose from {', '.join(usable)}, or set {', '.join(CHOSEN)}."
        )
    if spec.head_output == "difference":
        raise UserError(
            "attention 'diff' has two heads of queries for each output, which the projections of the model do not have."
        )
    return spec


def apply_attention(
    model: PreTrainedModel,
    preset: str,
    *,
    train: str = "all",
    sites: Collection[str] = SITES,
    layers: Collection[int] | None = None,
    **axes: str | None,
) -> PreTrainedModel:
    """Choose the attention of a model in place, and return the model.

    Args:
        model: any model whose attention calls ``ALL_ATTENTION_FUNCTIONS``; see :func:`supported`.
        preset: a preset that keeps the projections, such as ``mixhead-a``, ``mixhead-b``, ``gain`` or ``talking-heads``.
        train: ``all`` leaves every parameter trainable; ``mixing`` freezes all but the mixing.
        sites: where to mix: ``encoder`` (bidirectional self-attention), ``decoder`` (causal), ``cross``.
        layers: the indices of the layers that mix, counted within each site; by default all.
        axes: ``score_mixing``, ``activation``, ``mixing``, ``head_output``, ``gate_start`` or ``factor_rank``; each overrides the
            preset's.

    Mixing is initialised to the identity, so a preset with softmax leaves the outputs as they are.

    Raises:
        UserError: an unknown choice, a preset that changes projections, or a model without exchangeable attention.
    """
    spec = spec_of(preset, **axes)
    for name, values, known in (("sites", sites, SITES), ("train", [train], TRAIN)):
        if unknown := [value for value in values if value not in known]:
            raise UserError(f"{name}={unknown[0]!r}: expected {', '.join(known)}")
    found = attention_modules(model)
    if not found:
        raise UserError(
            f"{type(model).__name__} computes its attention itself, so it cannot be chosen. "
            "Use a model for which supported(model_class) is true."
        )
    chosen = [module for module, site, index in found if site in sites and (layers is None or index in layers)]
    if spec.head_output == "exclusive" and any(site == "cross" and module in chosen for module, site, _ in found):
        raise UserError(
            f"attention {preset!r} reads each position's own value, so it needs sites=['encoder', 'decoder']"
        )
    if not chosen:
        raise UserError(f"sites={list(sites)}, layers={layers}: {type(model).__name__} has no such attention layer")
    for module, _, _ in found:
        for name in (*_MODULES, "attention_activation", "attention_inputs"):
            if name in vars(module) or name in module._modules:
                delattr(module, name)
        if (hook := vars(module).pop("attention_inputs_hook", None)) is not None:
            hook.remove()
    for module in model.modules():
        if calls_the_interface(type(module)):
            module.attention_activation = "softmax"
    for module in chosen:
        _add_modules(module, spec)
    if train == "mixing":
        mixing_parameters = {id(p) for module in chosen for p in mixing_tensors(module).values()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in mixing_parameters)
    record = {axis: getattr(spec, axis) for axis in CHOSEN}
    model.config.lowrank_attention = record | {"sites": list(sites), "layers": None if layers is None else list(layers)}
    # from_pretrained reads this name: it builds a model that refuses to run without its mixing
    model.config.attn_implementation = IMPLEMENTATION
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def _add_modules(module: nn.Module, spec: AttentionSpec) -> None:
    """Add mixing, output and activation of ``spec`` to one attention module."""
    weight = next(module.parameters())
    dims = query_sizes(module)
    sizes = {"embed_dim": dims.embed_dim, "rank": spec.factor_rank or 2}
    for name, builders in (("mixing", MIXINGS), ("score_mixing", SCORE_MIXINGS)):
        choice = getattr(spec, name)
        built = builders[choice](dims.num_heads, dims.head_dim, **(sizes if choice == "dynamic" else {}))
        setattr(module, name, None if built is None else built.to(weight.device, weight.dtype))
    output = HEAD_OUTPUTS[spec.head_output]
    module.head_output = None if output is None else output(dims, spec.gate_start).to(weight.device, weight.dtype)
    module.attention_activation = spec.activation
    if spec.head_output != "none" or "dynamic" in (spec.mixing, spec.score_mixing):
        # the attention function gets projected tensors only, and these modules read the input of the layer
        module.attention_inputs_hook = module.register_forward_pre_hook(_remember_inputs, with_kwargs=True)


def _remember_inputs(module: nn.Module, args: tuple, kwargs: dict) -> None:
    module.attention_inputs = args[0] if args else kwargs["hidden_states"]


def mixing_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the mixing, by their names in the model's state dict."""
    state = {}
    for name, module in model.named_modules():
        if "attention_activation" in vars(module):
            state |= {f"{name}.{key}": tensor for key, tensor in mixing_tensors(module).items()}
    return state


def save_attention(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write the mixing alone to a folder: its tensors as safetensors, its choice as JSON.

    ``model.save_pretrained`` needs no help: it writes the mixing with the other weights.

    Raises:
        UserError: no attention was applied to the model.
    """
    folder = Path(folder)
    if (record := getattr(model.config, "lowrank_attention", None)) is None:
        raise UserError(f"{type(model).__name__} has no chosen attention. Call apply_attention(model, preset) first.")
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in mixing_state(model).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def recorded_attention(folder: Path) -> dict | None:
    """Return the arguments of :func:`apply_attention` that a folder records, or None."""
    if (own := folder / CONFIG).is_file():
        return json.loads(own.read_text(encoding="utf-8"))
    config = folder / "config.json"
    return json.loads(config.read_text(encoding="utf-8")).get("lowrank_attention") if config.is_file() else None


def load_attention(model: PreTrainedModel, folder: str | os.PathLike, *, train: str = "all") -> PreTrainedModel:
    """Apply the attention that a folder holds, with its weights, and return the model.

    Args:
        model: a model of the same architecture and sizes.
        folder: what :func:`save_attention` wrote, or what ``save_pretrained`` wrote for a model with chosen attention.
        train: as in :func:`apply_attention`.

    Raises:
        UserError: the folder holds no mixing, or one of other sizes.
    """
    folder = Path(folder)
    record = recorded_attention(folder)
    files = [folder / WEIGHTS] if (folder / CONFIG).is_file() else sorted(folder.glob("model*.safetensors"))
    if not record or not files:
        raise UserError(f"{folder}: no mixing here. Give a folder that save_attention or save_pretrained wrote.")
    apply_attention(model, "mha", train=train, **record)
    wanted = mixing_state(model)
    # save_pretrained of a task model puts its base model's prefix in front
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in wanted.items():
        source = next((key for key in (name, f"{model.base_model_prefix}.{name}") if key in saved), None)
        if source is None or saved[source].shape != tensor.shape:
            there = "nothing" if source is None else f"a tensor {list(saved[source].shape)}"
            raise UserError(f"{folder}: expected {name} {list(tensor.shape)}, and found {there}")
        with torch.no_grad():
            tensor.copy_(saved[source])
    return model


@contextlib.contextmanager
def attention_weights(model: PreTrainedModel, receive: Callable[[nn.Module, str, int, Tensor], None]) -> Iterator[None]:
    """Call ``receive(module, site, layer, weights)`` with each layer's mixed weights ``[B, H, T, S]`` while the context is open.

    The model has its attention from :func:`apply_attention`.
    """
    found = attention_modules(model)
    for module, site, layer in found:
        module.attention_weights_receiver = functools.partial(receive, module, site, layer)
    try:
        yield
    finally:
        for module, _, _ in found:
            del module.attention_weights_receiver


@contextlib.contextmanager
def attention_calls(model: PreTrainedModel, change: Callable[[int, AttentionCall], AttentionCall]) -> Iterator[None]:
    """Compute ``change(index, call)`` in place of each layer's call while the context is open.

    The index counts :func:`attention_modules`. The model has its attention from :func:`apply_attention`.
    """
    found = attention_modules(model)
    for index, (module, _, _) in enumerate(found):
        module.attention_call_hook = functools.partial(change, index)
    try:
        yield
    finally:
        for module, _, _ in found:
            del module.attention_call_hook


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer of a model of transformers; the function that is registered there.

    Args:
        query: ``[B, H, T, D]``, projected and rotated.
        key, value: ``[B, G, S, D]``; G divides H.
        attention_mask: ``[B, 1 or H, T, S]``: bool, True at visible keys; or float, added to the scores.
        position_bias: ``[1 or B, H, T, S]``, added to the (mixed) scores, as in T5.
        softcap: c in c·tanh(s / c), applied to the scores of each head before they are mixed, as in Gemma 2.
        s_aux: ``[H]`` one more score (a sink) in each row of the mixed scores, whose weight reads no value, as in gpt-oss.
        output_attentions: return the mixed weights too.

    Returns:
        ``[B, T, H, D]`` and the weights ``[B, H, T, S]`` or None.

    Raises:
        UserError: the model passes something that is not computed here.
    """
    if unknown := [name for name, given in others.items() if given is not None and name not in _USED_ELSEWHERE]:
        raise UserError(
            f"{type(module).__name__} passes {unknown[0]} to its attention, which is not computed here. "
            'Call model.set_attn_implementation("sdpa") to use this model without mixing.'
        )
    if (activation := vars(module).get("attention_activation")) is None:
        folder = getattr(getattr(module, "config", None), "name_or_path", "") or "FOLDER"
        raise UserError(
            f"{type(module).__name__} has no mixing, because from_pretrained does not load it. "
            f'Call load_attention(model, "{folder}"), or model.set_attn_implementation("sdpa") to leave the mixing out.'
        )
    receive = vars(module).get("attention_weights_receiver")
    query_length, key_length = query.size(2), key.size(2)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query_length > 1
    if causal and key_length > query_length:  # the first tokens in an empty static cache: later slots hold nothing yet
        key, value = key[:, :, :query_length], value[:, :, :query_length]
        position_bias = None if position_bias is None else position_bias[..., :query_length]
    hidden = attention_mask
    if hidden is not None and hidden.dtype == torch.bool:
        hidden = ~hidden
    modules = {name: module._modules.get(name) for name in _MODULES}
    inputs = vars(module).get("attention_inputs")
    if any(modules.values()) and (heads := query_sizes(module).num_heads) != query.size(1):
        raise UserError(
            f"{type(module).__name__}: mixing of {heads} heads, and the model passes {query.size(1)}. "
            "This layer repeats or splits its heads; leave it out with layers= or sites=."
        )
    call = AttentionCall(
        DotProduct(query, key, scaling),
        value,
        AttentionMask(causal=causal, additive=hidden),
        score_bias=position_bias,
        activation=activation,
        dropout_p=dropout,
        need_weights=bool(output_attentions) or receive is not None,
        score_mixing=None if modules["score_mixing"] is None else modules["score_mixing"].operation(query, inputs),
        prob_mixing=None if modules["mixing"] is None else modules["mixing"].operation(query, inputs),
    )
    if (hook := vars(module).get("attention_call_hook")) is not None:
        call = hook(call)
    if softcap is None and s_aux is None:
        heads, weights = attention(call)
    else:
        heads, weights = _dense_attention(call, softcap, s_aux)
    if receive is not None:
        receive(weights)
    if (output := modules["head_output"]) is not None:
        own = _own_values(value, query, attention_mask) if output.reads_own_value else None
        heads = output(heads, inputs, own)
    return heads.transpose(1, 2).contiguous(), None if weights is None else weights.to(query.dtype)


def _own_values(value: Tensor, query: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values ``[B, H, T, D]`` at the positions of the queries, which are the last keys that causality shows them."""
    queries, keys = query.size(2), value.size(2)
    if queries == keys or mask is None:
        own = value[:, :, -queries:]
    else:  # a cache with empty slots behind the last position
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        last = keys - 1 - visible[:, 0].flip(-1).int().argmax(dim=-1)
        own = value.gather(2, last[:, None, :, None].expand(value.size(0), value.size(1), -1, value.size(3)))
    return own.repeat_interleave(query.size(1) // own.size(1), dim=1)


def _dense_attention(call: AttentionCall, softcap: float | None, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Compute ``call`` with capped scores and sinks, with tensors of size T×S."""
    scores = call.scores.dense()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if call.score_mixing is not None:
        scores = call.score_mixing.mix_heads(scores)
    for bias in (call.score_bias, call.mask.bias):
        scores = scores if bias is None else scores + bias
    if (hidden := call.mask.hidden(*scores.shape[2:], scores.device)) is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = activate(torch.cat([scores, sinks], dim=-1), call.activation)[..., :-1]
    else:
        weights = activate(scores, call.activation)
    weights = weights if call.prob_mixing is None else call.prob_mixing.mix_heads(weights)
    dropped = F.dropout(weights, call.dropout_p) if call.dropout_p else weights
    return grouped_product(dropped.to(call.v.dtype), call.v), weights if call.need_weights else None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)  # without it transformers drops masks in silence


def mixing_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's mixing, by their names in the module's state dict."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in _MODULES:
            if (added := getattr(module, name, None)) is not None:
                yield from ((f"{name}.{key}", t) for key, t in (*added.named_parameters(), *added.named_buffers()))

    return dict(tensors())
