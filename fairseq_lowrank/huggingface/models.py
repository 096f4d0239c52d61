"""The attention modules of models of ``transformers``, and the models whose attention can be chosen."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec
from fairseq_lowrank.huggingface.sites import SITES, names_used, site_of
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import LayerPart

_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_OWN_FUNCTIONS = frozenset(
    ("scaled_dot_product_attention", "flash_attn_func", "flex_attention", "multi_scale_deformable_attention")
)


def model_of_transformers(model: nn.Module) -> PreTrainedModel:
    """Return a model itself, or the one that ``torch.compile`` was given.

    Raises:
        UserError: it is no model of transformers, such as a wrapper for several workers.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel):
        raise UserError(
            f"model is a {type(model).__name__}: expected a model of transformers, such as from_pretrained returns. Choose attention "
            "before DistributedDataParallel. Of a wrapper, give the model inside: model.module, or model.get_base_model() of PEFT."
        )
    return inner


def attention_modules(model: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """Return the modules whose attention can be chosen, each with its site and its index within the site."""
    counts = dict.fromkeys(SITES, 0)
    found = []
    for name, module in model.named_modules():
        if calls_the_interface(type(module)) and query_sizes(module):
            site = site_of(model, name)
            found.append((module, site, counts[site]))
            counts[site] += 1
    return found


def other_attention(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose attention cannot be chosen: they compute it themselves, or do not say how many heads they have."""
    chosen = {id(module) for module, _, _ in attention_modules(model)}
    others: list[nn.Module] = []
    within: set[int] = set()
    for module in model.modules():
        if isinstance(module, LayerPart):  # added to a module that can be chosen
            within |= {id(part) for part in module.modules()}
        if id(module) in within or id(module) in chosen or not _is_attention(type(module)):
            continue
        parts = {id(part) for part in module.modules()}
        if not parts & chosen:  # else it is a wrapper around a module that can be chosen
            others.append(module)
            within |= parts
    return others


def causal_by_site(model: nn.Module) -> dict[nn.Module, bool]:
    """Return, for modules of models that transformers never runs with SDPA, whether they are causal.

    Their flag ``is_causal`` may be wrong or missing, because without SDPA transformers always makes the mask.
    """
    makes_masks: dict[nn.Module, bool] = {}
    for outer in model.modules():  # a model within another one comes later
        if isinstance(outer, PreTrainedModel):
            makes_masks |= dict.fromkeys(outer.modules(), not outer._supports_sdpa)
    return {module: site == "decoder" for module, site, _ in attention_modules(model) if makes_masks.get(module)}


_ADDS_MASKS: dict[type, bool] = {}


def adds_masks(config_class: type) -> bool:
    """Return True if a model of a configuration class may add its mask to the scores. Adding a boolean mask would hide nothing.

    transformers never runs such a model with SDPA, and a class of its modules computes attention itself.
    """
    if config_class not in _ADDS_MASKS:  # a dictionary, because a compiler cannot trace the search
        _ADDS_MASKS[config_class] = _finds_added_masks(config_class)
    return _ADDS_MASKS[config_class]


def _finds_added_masks(config_class: type) -> bool:
    kinds, places = [PreTrainedModel], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.config_class is config_class and not kind._supports_sdpa:
            places |= {kind.__module__} & sys.modules.keys()
    classes = [part for place in places for part in vars(sys.modules[place]).values() if isinstance(part, type)]
    parts = [part for part in classes if issubclass(part, nn.Module)]
    return any(_is_attention(part) and not calls_the_interface(part) for part in parts)


def describe(modules: Collection[nn.Module]) -> str:
    """Return how many modules there are of each class, such as ``12 SwinAttention, 1 SiglipMultiheadAttentionPoolingHead``."""
    kinds = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def sites_of_class(model_class: type[PreTrainedModel], config: PretrainedConfig | None = None) -> list[str]:
    """Return the sites at which the attention of this class's models can be chosen.

    The model is built without memory (on the meta device), from ``config`` or from the defaults of its configuration, with at most
    two layers.
    """
    return _sites(small_model(model_class, config))


def small_model(model_class: type[PreTrainedModel], config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Return a model on the meta device with the sizes of ``config``; by default the class's own, with at most two layers."""
    if config is None:
        assert model_class.config_class is not None
        config = small_config(model_class.config_class())
    with torch.device("meta"):
        return model_class(config)


def can_exchange_attention(kind: type[PreTrainedModel]) -> bool:
    """Return True if transformers exchanges the attention function of a class's models.

    It looks for one in the source of the class. A class of a notebook has no source, and inherits what was found for its bases.
    """
    if not kind._can_set_attn_implementation() and not kind.__module__.startswith("transformers."):
        for base in kind.__mro__[1 : kind.__mro__.index(PreTrainedModel)]:
            if issubclass(base, PreTrainedModel):
                base._can_set_attn_implementation()
    return kind._can_set_attn_implementation()


def _sites(model: PreTrainedModel) -> list[str]:
    sites = {site for _, site, _ in attention_modules(model)} if can_exchange_attention(type(model)) else ()
    return [site for site in SITES if site in sites]


def supported(model_class: type[PreTrainedModel], config: PretrainedConfig | None = None) -> bool:
    """Return True if the attention of this class's models can be chosen; see :func:`sites_of_class`."""
    return bool(sites_of_class(model_class, config))


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return ``config`` with at most two layers in each part, which is enough to see how the model computes attention."""
    names = (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
        "depth",
    )
    parts = [config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)]
    for part in parts:
        for name in names:
            if isinstance(value := getattr(part, name, None), int) and value > 2:
                setattr(part, name, 2)
        if isinstance(types := getattr(part, "layer_types", None), list):
            part.layer_types = types[:2]
    return config


def calls_the_interface(kind: type[nn.Module]) -> bool:
    """Return True if the class's own ``forward`` looks a function up in ``ALL_ATTENTION_FUNCTIONS``."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def query_sizes(module: nn.Module, spec: AttentionSpec | None = None) -> AttentionConfig | None:
    """Return a module's own sizes with the choices of ``spec``, or None if the module does not say the sizes of its heads."""
    config = getattr(module, "config", None)
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
    heads = heads or _first(config, "num_attention_heads", "num_heads", "n_head")
    size = _first(module, "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
    width = _first(module, "embed_dim", "hidden_size", "d_model") or _first(config, "hidden_size", "d_model")
    if not heads or not size:
        return None
    groups = heads // (_first(module, "num_key_value_groups") or 1)
    return AttentionConfig(
        (spec or AttentionSpec()).replace(head_dim=size, key_value_heads=groups), width or heads * size, heads
    )


def head_sizes(module: nn.Module, spec: AttentionSpec | None = None) -> AttentionConfig:
    """Return :func:`query_sizes` of a module from :func:`attention_modules`."""
    sizes = query_sizes(module, spec)
    assert sizes is not None
    return sizes


def _first(holder: object, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), None)


def _is_attention(kind: type[nn.Module]) -> bool:
    """Return True if a class is attention: it says so, or it multiplies what a softmax returns."""
    names = names_used(kind)  # type: ignore[arg-type]
    if names & _OWN_FUNCTIONS or calls_the_interface(kind):
        return True
    computes = "softmax" in names and bool(names & _PRODUCTS)
    return computes or kind.__name__.endswith(("Attention", "AttentionPoolingHead"))
