"""Head mixing in models of ``transformers``: what happens between projected heads and head outputs.

::

    from fairseq_lowrank.huggingface import apply_attention, load_attention, save_attention

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    apply_attention(model, "mixhead-b")  # the outputs do not change: mixing is initialised to the identity
    save_attention(model, folder)  # the mixing alone; load_attention(model, folder) reads it

Models that compute attention through ``ALL_ATTENTION_FUNCTIONS`` pass projected (and rotated) queries, keys and values to one
registered function. So the mixing of scores, the activation and the mixing of probabilities can be chosen in each of them. The
projections stay the model's own. What is added is in float32, whatever the dtype of the model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fairseq_lowrank.attention.spec import AttentionSpec
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, attention
from fairseq_lowrank.parts import AXES, METHODS, PARTS, PRESETS
from fairseq_lowrank.parts.parameters import NoDecayModule
from fairseq_lowrank.tools.transformers_models import (
    SITES,
    attention_modules,
    calls_the_interface,
    describe,
    other_attention,
    query_sizes,
    supported,
)

__all__ = [
    "apply_attention",
    "attention_modules",
    "load_attention",
    "mixing_state",
    "parameter_groups",
    "save_attention",
    "supported",
]

IMPLEMENTATION = "fairseq_lowrank"
"""The name of our function in ``config._attn_implementation``."""
TRAIN = ("all", "mixing", "mixing-only")
OPEN = ("score_mixing", "activation", "mixing", "head_output")
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


def open_axes() -> list[str]:
    """Return the axes that a model of transformers leaves open, and the options of the parts on them."""
    return [*OPEN, *(name for name, axis in AXES.items() if any(reader in OPEN for reader, _ in axis.readers))]


def chosen_axes(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recorded choice, with defaults for options that are newer than the record."""
    return {name: record.get(name, AXES[name].default) for name in open_axes()}


def spec_of(preset: str, **axes: str | None) -> AttentionSpec:
    """Return the choice of a preset, with ``axes`` over it, if a model of transformers can take it.

    Raises:
        UserError: the preset or an axis changes projections or scores, which are the model's own.
    """
    spec = AttentionSpec.from_preset(preset, **axes)
    plain = AttentionSpec()
    changed = [axis for axis in AXES if axis not in open_axes() and getattr(spec, axis) != getattr(plain, axis)]
    reason = f"sets {', '.join(changed)}, which belong to the projections of the model" if changed else ""
    if spec.queries_per_head > 1:
        reason = "has two heads of queries for each output, which the projections of the model do not have"
    if reason:
        possible = (name for name in PRESETS if METHODS[name].needs is None and PRESETS[name].keys() <= set(OPEN))
        usable = [name for name in possible if AttentionSpec.from_preset(name).queries_per_head == 1]
        raise UserError(
            f"attention {preset!r} {reason}. Choose from {', '.join(usable)}, or set {', '.join(open_axes())}."
        )
    return spec


def apply_attention(
    model: PreTrainedModel,
    preset: str,
    *,
    train: str = "all",
    sites: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    **axes: str | None,
) -> PreTrainedModel:
    """Choose the attention of a model in place, and return the model.

    Args:
        model: any model whose attention calls ``ALL_ATTENTION_FUNCTIONS``; see :func:`supported`.
        preset: a preset that keeps the projections, such as ``mixhead-a``, ``mixhead-b``, ``gain`` or ``talking-heads``.
        train: ``all`` leaves every parameter trainable; ``mixing`` freezes all but what is added and the head of the task, such as
            a classifier; ``mixing-only`` freezes the head of the task too. A later call trains again what an earlier one froze.
        sites: where to mix: ``encoder`` (bidirectional self-attention), ``decoder`` (causal), ``cross``; by default all.
        layers: the indices of the layers that mix, counted within each site; by default all.
        axes: ``score_mixing``, ``activation``, ``mixing``, ``head_output`` or an option of their parts, such as ``gate_start`` or
            ``factor_rank``; each overrides the preset's.

    Mixing is initialised to the identity, so a preset with softmax leaves the outputs as they are. What is added is in float32.
    Unless the choice changes nothing, a line on standard error says how many layers are mixed, and what trains.

    Raises:
        UserError: an unknown choice, a preset that changes projections, a model without exchangeable attention or with such attention
            in a part of its layers only (``sites`` or ``layers`` asks for this part), or a model that is sharded already.
    """
    spec = spec_of(preset, **axes)
    sites = None if sites is None else _collection("sites", sites, str, "['encoder']")
    layers = None if layers is None else _collection("layers", layers, int, "[0, 1]")
    for name, values, known in (("sites", sites or (), SITES), ("train", [train], TRAIN)):
        if unknown := [value for value in values if value not in known]:
            raise UserError(f"{name}={unknown[0]!r}: expected {', '.join(known)}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError(
            f"{type(model).__name__} is sharded already. Call apply_attention before fully_shard. "
            "Tensor parallelism (tp_plan) is not computed: load the model without it."
        )
    found, others = attention_modules(model), other_attention(model)
    chosen = _chosen(model, found, others, sites, layers)
    output = PARTS["head_output"][spec.head_output]
    if (
        output is not None
        and output.reads_own_value
        and any(site == "cross" and module in chosen for module, site, _ in found)
    ):
        raise UserError(
            f"attention {preset!r} reads each position's own value, so it needs sites=['encoder', 'decoder']"
        )
    for module, _, _ in found:
        for name in (*_MODULES, "attention_activation", "attention_inputs"):
            if name in vars(module) or name in module._modules:
                delattr(module, name)
        for hook in vars(module).pop("attention_inputs_hooks", ()):
            hook.remove()
    for module in model.modules():
        if calls_the_interface(type(module)):
            vars(module)["attention_activation"] = "softmax"
    for module in chosen:
        _add_modules(module, spec)
    _freeze(model, train)
    record = {axis: getattr(spec, axis) for axis in open_axes()}
    model.config.lowrank_attention = record | {"sites": sites, "layers": layers}
    # from_pretrained reads this name: it builds a model that refuses to run without its mixing
    model.config.attn_implementation = IMPLEMENTATION
    model.set_attn_implementation(IMPLEMENTATION)
    left = [module for module, _, _ in found if module not in chosen] + others
    changed = {axis: value for axis, value in record.items() if value != getattr(AttentionSpec(), axis)}
    if changed or train != "all":
        name = preset if preset != "mha" else ", ".join(f"{axis} {value}" for axis, value in changed.items()) or preset
        print(_summary(name, model, chosen, left), file=sys.stderr)
    return model


def _collection(name: str, values: object, kind: type, example: str) -> list:
    """Return the values of an argument as a list.

    Raises:
        UserError: it is no collection, or holds values of another type.
    """
    if (
        isinstance(values, str)
        or not isinstance(values, Collection)
        or not all(type(value) is kind for value in values)
    ):
        raise UserError(f"{name}={values!r}: expected a list such as {example}")
    return list(values)


def _chosen(
    model: PreTrainedModel,
    found: list[tuple[nn.Module, str, int]],
    others: list[nn.Module],
    sites: list[str] | None,
    layers: list[int] | None,
) -> list[nn.Module]:
    """Return the modules that a choice of sites and layers means.

    Raises:
        UserError: there are none, a layer does not exist, or only a part of the model can be mixed and nothing asks for a part.
    """
    name = type(model).__name__
    if not found:
        raise UserError(
            f"{name} computes its attention itself, so it cannot be chosen. "
            "Use a model for which supported(model_class) is true."
        )
    if others and sites is None and layers is None:
        there = [site for site in SITES if any(site == known for _, known, _ in found)]
        raise UserError(
            f"{name}: attention can be chosen in {len(found)} of {len(found) + len(others)} layers, and not in "
            f"{describe(others)}. Ask for this part with sites={there}, or with layers=."
        )
    here = [(module, index) for module, site, index in found if sites is None or site in sites]
    counts = {site: sum(site == known for _, known, _ in found) for site in SITES}
    has = ", ".join(f"{count} {site}" for site, count in counts.items() if count)
    if not here:
        raise UserError(f"sites={sites}: {name} has no such attention layer, only {has}. Use these sites.")
    if absent := [layer for layer in layers or () if layer not in {index for _, index in here}]:
        raise UserError(
            f"layers={layers}: {name} has no layer {absent[0]} there. It has {has}. Count from 0, within each site."
        )
    if layers is not None and not layers:
        raise UserError("layers=[]: expected at least one layer, or None for all")
    return [module for module, index in here if layers is None or index in layers]


def _summary(preset: str, model: nn.Module, chosen: list[nn.Module], left: list[nn.Module]) -> str:
    """Return a line that says which attention layers are mixed, and what trains."""
    mixed = f"{len(chosen)} of {len(chosen) + len(left)} attention layers" + (
        f" (not: {describe(left)})" if left else ""
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    added = {id(parameter) for module in chosen for parameter in _added_parameters(module)}
    numbers = sum(parameter.numel() for parameter in trained if id(parameter) in added)
    rest = sum(parameter.numel() for parameter in trained if id(parameter) not in added)
    return f"fairseq-lowrank: {preset} in {mixed}; trains {numbers:,} added numbers and {rest:,} of the model's own"


def _freeze(model: PreTrainedModel, train: str) -> None:
    """Make trainable what ``train`` names. What an earlier call froze is trainable again first."""
    names = dict(model.named_parameters())
    for name in vars(model).pop("lowrank_frozen", ()):
        if name in names:
            names[name].requires_grad_(True)
    if train == "all":
        return
    kept = {id(parameter) for module in model.modules() for parameter in _added_parameters(module)}
    if train == "mixing":
        kept |= {id(parameter) for parameter in _task_head(model)}
    frozen = [name for name, parameter in names.items() if parameter.requires_grad and id(parameter) not in kept]
    for name in frozen:
        names[name].requires_grad_(False)
    vars(model)["lowrank_frozen"] = tuple(frozen)


def _task_head(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of a head that a task adds to a base model, such as a classifier.

    The matrix that predicts tokens is no such head: it is as old as the model.
    """
    if model.base_model is model or model.get_output_embeddings() is not None:
        return []
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in base]


def _added_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that are added to an attention module."""
    for added in _added(module):
        yield from added.parameters()


def _added(module: nn.Module) -> list[nn.Module]:
    """Return the modules that are added to an attention module; another library may have wrapped them."""
    if "attention_activation" not in vars(module):
        return []
    return [added for name in _MODULES if (added := module._modules.get(name)) is not None]


def parameter_groups(
    model: PreTrainedModel,
    *,
    learning_rate: float,
    mixing_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict]:
    """Return groups of parameters for an optimizer of torch, or for ``Trainer(optimizers=…)``.

    Weight decay would pull mixing and gates to 0, not to the identity, so these have none, nor have biases and norms.

    Args:
        learning_rate: of the model's own parameters.
        mixing_learning_rate: of what is added; by default 10 times ``learning_rate``, which measured best in fine-tuning a BERT.
        weight_decay: of the model's own matrices.

    Returns:
        Up to three groups, of the parameters that are trainable.
    """
    added = {id(parameter): parameter for module in model.modules() for parameter in _added_parameters(module)}
    own = [parameter for parameter in model.parameters() if id(parameter) not in added and parameter.requires_grad]
    rate = 10 * learning_rate if mixing_learning_rate is None else mixing_learning_rate
    groups = [
        {"params": [p for p in own if p.dim() > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() <= 1], "lr": learning_rate, "weight_decay": 0.0},
        {"params": [p for p in added.values() if p.requires_grad], "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _add_modules(module: Any, spec: AttentionSpec) -> None:
    """Add mixing, output and activation of ``spec`` to one attention module."""
    dims = query_sizes(module)
    assert dims is not None
    for name in _MODULES:
        setattr(module, name, _placed(spec.build(name, dims), module))
    module.attention_activation = spec.activation
    mixings = (module.mixing, module.score_mixing)
    if module.head_output is not None or any(mixing is not None and mixing.reads_inputs for mixing in mixings):
        # the attention function gets projected tensors only, and these modules read the input of the layer
        module.attention_inputs_hooks = (
            module.register_forward_pre_hook(_remember_inputs, with_kwargs=True),
            module.register_forward_hook(_forget_inputs, always_call=True),
        )


def _placed(added: NoDecayModule | None, module: nn.Module) -> NoDecayModule | None:
    """Put what is added to a module on the module's device, in float32, or float64 where the module is.

    The device is where the module computes: weights on a disk are loaded there at each call.
    """
    if added is None:
        return None
    tensors = [*module.parameters(), *module.buffers()]
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    device = next((place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None), None)
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    added.to(device, torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32)
    added.keeps_float32 = True
    return added


def _remember_inputs(module: Any, args: tuple, kwargs: dict) -> None:
    # mypy does not see that a class of modules is hashable
    inputs = args[0] if args else kwargs[_first_argument(type(module))]  # type: ignore[arg-type]
    dims = query_sizes(module)
    if dims is not None and (width := dims.embed_dim) != inputs.size(-1):
        raise UserError(
            f"{type(module).__name__} reads inputs of size {inputs.size(-1)}, and its attention was chosen for {width}. "
            "Leave this layer out with layers= or sites=, or choose mixing that reads no inputs."
        )
    module.attention_inputs = inputs


@functools.cache
def _first_argument(kind: type[nn.Module]) -> str:
    return list(inspect.signature(kind.forward).parameters)[1]


def _forget_inputs(module: nn.Module, args: tuple, output: object) -> None:
    """Keep nothing of a call: its tensors would stay in copies and in files of the model."""
    vars(module).pop("attention_inputs", None)


def mixing_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the mixing, by their names in the model's state dict."""
    state: dict[str, Tensor] = {}
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
    added = [part for module in model.modules() for part in _added(module)]
    if wrapped := [type(part).__name__ for part in added if not isinstance(part, NoDecayModule)]:
        raise UserError(
            f"the mixing is wrapped in {wrapped[0]}. Save the adapter with its own save_pretrained, or call "
            "merge_and_unload() and give save_attention the model that it returns."
        )
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in mixing_state(model).items()}
    names = {module: name for name, module in model.named_modules()}
    sizes = [
        {"name": names[module], "site": site, "layer": layer, "num_heads": dims.num_heads, "head_dim": dims.head_dim}
        for module, site, layer in attention_modules(model)
        if mixing_tensors(module) and (dims := query_sizes(module)) is not None
    ]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(record | {"modules": sizes}, indent=1) + "\n", encoding="utf-8")


def recorded_attention(folder: Path) -> dict | None:
    """Return the arguments of :func:`apply_attention` that a folder records, or None.

    Raises:
        UserError: the folder holds two choices that differ.
    """
    records = {path.name: record for path in (folder / CONFIG, folder / "config.json") if (record := _record(path))}
    if len(records) == 2:
        own, whole = (chosen_axes(record) for record in records.values())
        if own != whole:
            differing = next(name for name in own if own[name] != whole[name])
            raise UserError(
                f"{folder} holds two choices of attention: {differing} is {own[differing]!r} in {CONFIG}, and "
                f"{whole[differing]!r} in config.json. Delete {CONFIG} and {WEIGHTS}, or give a folder with one of them."
            )
    return next(iter(records.values()), None)


def _record(path: Path) -> dict | None:
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    record = content if path.name == CONFIG else content.get("lowrank_attention")
    return None if record is None else {name: value for name, value in record.items() if name != "modules"}


def load_attention(model: PreTrainedModel, folder: str | os.PathLike, *, train: str = "all") -> PreTrainedModel:
    """Apply the attention that a folder holds, with its weights, and return the model.

    Args:
        model: a model of the same architecture and sizes, with or without the head of a task.
        folder: what :func:`save_attention` wrote, or what ``save_pretrained`` wrote for a model with chosen attention.
        train: as in :func:`apply_attention`.

    Raises:
        UserError: the folder holds no mixing, one of other sizes, or two that differ.
    """
    folder = Path(folder)
    record = recorded_attention(folder)
    files = [path for path in (folder / WEIGHTS, *sorted(folder.glob("model*.safetensors"))) if path.is_file()]
    if not record or not files:
        raise UserError(f"{folder}: no mixing here. Give a folder that save_attention or save_pretrained wrote.")
    apply_attention(model, "mha", train=train, **record)
    wanted = mixing_state(model)
    loaded = _saved_tensors(files, model.base_model_prefix, wanted)
    for name, tensor in wanted.items():
        if (saved := loaded.get(name)) is None or saved.shape != tensor.shape:
            there = "nothing" if saved is None else f"a tensor {list(saved.shape)}"
            raise UserError(f"{folder}: expected {name} {list(tensor.shape)}, and found {there}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(loaded[name])
    return model


def _saved_tensors(files: list[Path], prefix: str, names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of these names; a model with the head of a task has the base model's prefix in front of them.

    Raises:
        UserError: two files hold different tensors of one name.
    """
    found: dict[str, tuple[Path, Tensor]] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            keys = set(tensors.keys())
            for name in names:
                candidates = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
                if (key := next((key for key in candidates if key in keys), None)) is None:
                    continue
                tensor = tensors.get_tensor(key)
                if name in found and not torch.equal(found[name][1], tensor):
                    raise UserError(
                        f"{file.parent} holds two mixings that differ: {key} in {found[name][0].name} and in {file.name}. "
                        f"Delete {WEIGHTS} and {CONFIG} if save_pretrained is the newer, else save into another folder."
                    )
                found.setdefault(name, (file, tensor))
    return {name: tensor for name, (_, tensor) in found.items()}


@contextlib.contextmanager
def attention_weights(model: PreTrainedModel, receive: Callable[[nn.Module, str, int, Tensor], None]) -> Iterator[None]:
    """Call ``receive(module, site, layer, weights)`` with each layer's mixed weights ``[B, H, T, S]`` while the context is open.

    The model has its attention from :func:`apply_attention`.
    """
    found: list[tuple[Any, str, int]] = attention_modules(model)
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
    found: list[tuple[Any, str, int]] = attention_modules(model)
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
    modules: dict[str, Any] = {name: module._modules.get(name) for name in _MODULES}
    inputs = vars(module).get("attention_inputs")
    for added in modules.values():  # a module whose weights were moved by hooks may compute on another device
        if added is not None and any(
            tensor.device != query.device for tensor in (*added.parameters(), *added.buffers())
        ):
            added.to(query.device)
    dims = query_sizes(module) if any(modules.values()) else None
    if dims is not None and (mixed := dims.num_heads) != query.size(1):
        raise UserError(
            f"{type(module).__name__}: mixing of {mixed} heads, and the model passes {query.size(1)}. "
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
        score_cap=softcap,
        sinks=s_aux,
    )
    if (hook := vars(module).get("attention_call_hook")) is not None:
        call = hook(call)
    heads, weights = attention(call)
    if receive is not None:
        receive(weights)
    if (output := modules["head_output"]) is not None:
        own = _own_values(value, query, attention_mask) if output.reads_own_value else None
        heads = output(heads, inputs, own).to(query.dtype)
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


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)  # without it transformers drops masks in silence


def mixing_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's mixing, by their names in the module's state dict."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in _MODULES:
            if (added := getattr(module, name, None)) is not None:
                yield from ((f"{name}.{key}", t) for key, t in (*added.named_parameters(), *added.named_buffers()))

    return dict(tensors())
