"""Find the attention modules of models of ``transformers``, and the models whose attention can be chosen."""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts.projection import AttentionDims

SITES = ("encoder", "decoder", "cross")


def attention_modules(model: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """Return the modules whose attention can be chosen, each with its site and its index within the site."""
    counts = dict.fromkeys(SITES, 0)
    found = []
    for module in model.modules():
        if calls_the_interface(type(module)) and (site := _site(module)) and query_sizes(module):
            found.append((module, site, counts[site]))
            counts[site] += 1
    return found


def sites_of_class(model_class: type[PreTrainedModel], config: PretrainedConfig | None = None) -> list[str]:
    """Return the sites at which the attention of this class's models can be chosen.

    The model is built without memory (on the meta device), from ``config`` or from the defaults of its configuration, with at most
    two layers.
    """
    config = small_config(model_class.config_class()) if config is None else config
    with torch.device("meta"):
        model = model_class(config)
    sites = {site for _, site, _ in attention_modules(model)} if model._can_set_attn_implementation() else ()
    return [site for site in SITES if site in sites]


def table_of_classes(names: Collection[str] = ()) -> list[tuple[str, list[str], str]]:
    """Return the base models of the installed transformers: name, sites, and why a model has none.

    Args:
        names: class names such as ``BertModel``; by default all base models.

    Raises:
        UserError: a name that transformers does not have.
    """
    mapped = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()
    known = sorted({name for entry in mapped for name in ([entry] if isinstance(entry, str) else entry)})
    if unknown := [name for name in names if not hasattr(transformers, name)]:
        raise UserError(f"{unknown[0]}: transformers has no such class. Give a name such as BertModel.")
    rows = []
    for name in tqdm(list(names) or known, desc="models", disable=None):
        try:
            sites = sites_of_class(getattr(transformers, name))
            reason = "" if sites else "computes its attention itself"
        except Exception as error:  # a model whose defaults do not build: its own message says why
            sites, reason = [], f"not built: {' '.join(str(error).split())[:80] or type(error).__name__}"
        rows.append((name, sites, reason))
    return rows


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


def _site(module: nn.Module) -> str:
    """Return where a module attends. Models say so by ``is_cross_attention``, ``is_causal`` and ``is_decoder``."""
    if getattr(module, "is_cross_attention", False):
        return "cross"
    if getattr(module, "is_causal", False):
        return "decoder"
    parameters = inspect.signature(module.forward).parameters
    reads_others = any(name in parameters for name in ("key_value_states", "encoder_hidden_states"))
    if reads_others and getattr(module, "is_decoder", "key_value_states" not in parameters):
        return "cross"
    return "encoder"


def query_sizes(module: nn.Module) -> AttentionDims | None:
    """Return the sizes of a module's query heads, or None if the module does not say them."""
    config = getattr(module, "config", None)
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
    heads = heads or _first(config, "num_attention_heads", "num_heads", "n_head")
    size = _first(module, "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
    width = _first(module, "embed_dim", "hidden_size", "d_model") or _first(config, "hidden_size", "d_model") or 0
    return AttentionDims(width, heads, size, size, width, width) if heads and size else None


def _first(holder: object, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), None)
