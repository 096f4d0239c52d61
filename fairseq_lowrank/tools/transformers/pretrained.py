"""Read a model of ``transformers`` from a folder, and count, inspect and measure its attention. It needs no fairseq.

A folder is what ``from_pretrained`` reads. Nothing is downloaded, and no code in the folder is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fairseq_lowrank.attention import AttentionConfig, MultiheadAttention, build_attention
from fairseq_lowrank.files import read_json, read_lines, say
from fairseq_lowrank.huggingface import (
    CONFIG,
    WEIGHTS,
    apply_attention,
    attention_modules,
    attention_weights,
    load_attention,
)
from fairseq_lowrank.huggingface.added import added_to, mixing_tensors, parts_of
from fairseq_lowrank.huggingface.apply import add_plain_attention
from fairseq_lowrank.huggingface.choice import chosen_axes, open_axes
from fairseq_lowrank.huggingface.exported import LowrankConfig
from fairseq_lowrank.huggingface.models import head_sizes
from fairseq_lowrank.huggingface.recorded import recorded_attention
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.tools.inspection import describe
from fairseq_lowrank.tools.measuring.subject import draw
from fairseq_lowrank.tools.spectrum import Spectra

LOCAL = {"local_files_only": True, "trust_remote_code": False}


def load(folder: Path, *, weights: bool = True) -> PreTrainedModel:
    """Return the model of a folder in evaluation mode, with its mixing if the folder has one.

    Args:
        folder: what ``from_pretrained`` reads, or a GGUF file, whose quantised weights become float32.
        weights: False gives parameters that have shapes but no memory.

    Raises:
        UserError: the folder holds no such model, its attention cannot be chosen, or a parameter is not finite.
    """
    source = source_of(folder)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        reason = "it holds a mixing alone, which save_attention wrote"
        remedy = "Give the folder of a whole model, which save_pretrained writes. Only inspect reads a mixing alone."
        raise FlagError("--transformers", folder, reason, remedy)
    if not (is_gguf(folder) or (folder / "config.json").is_file()):
        raise FlagError("--transformers", folder, "no config.json here", "Give a folder that from_pretrained reads.")
    with reading(folder):
        config = AutoConfig.from_pretrained(**source)
    if isinstance(config, LowrankConfig):
        remedy = (
            "Give the checkpoint of fairseq from which it was exported. If apply_attention changed the model since, inspect reads "
            "the folder that save_attention writes."
        )
        raise FlagError("--transformers", folder, "it is an exported model, which this command does not read", remedy)
    with reading(folder):
        classes = (getattr(transformers, name, None) for name in config.architectures or ())
        kind: Any = next(filter(None, classes), AutoModelForCausalLM if is_gguf(folder) else AutoModel)
        if weights:
            reading_options: dict[str, Any] = source | {"output_loading_info": True}
            if is_gguf(folder):
                reading_options["dtype"] = torch.float32
            model, info = kind.from_pretrained(**reading_options)
        else:
            with torch.device("meta"):
                automatic = kind in (AutoModel, AutoModelForCausalLM)
                model, info = kind.from_config(config) if automatic else kind(config), {}
    if not (found := [module for module, _, _ in attention_modules(model)]):
        reason = f"{type(model).__name__} computes its attention itself"
        remedy = "Choose one that fairseq-lowrank params --list transformers shows."
        raise FlagError("--transformers", folder, reason, remedy)
    places = [f"{name}." for name, module in model.named_modules() if module in found]
    missing = sorted(info.get("missing_keys", ()))
    if of_attention := [key for key in missing if key.startswith(tuple(places))]:
        reason = f"{len(of_attention)} weights of attention are missing, {of_attention[0]} for one"
        raise FlagError("--transformers", folder, reason, "Give a folder that save_pretrained wrote.")
    if missing:  # a pooler may be, which nothing here reads
        say(f"{folder} has no {', '.join(missing)}: these weights are random, and so is what depends on them")
    if record := recorded_attention(folder):
        load_attention(model, folder) if weights else apply_attention(model, PLAIN, reset=True, **record)
    if weights and (diverged := [name for name, one in model.named_parameters() if not one.isfinite().all()]):
        reason = f"{diverged[0]} has an infinity or NaN"
        raise FlagError("--transformers", folder, reason, "Give a model from before the training diverged.")
    return model.eval()


def is_gguf(path: Path) -> bool:
    """Return True if a path is a model in one GGUF file instead of a folder."""
    return path.suffix == ".gguf"


def source_of(path: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` reads a folder, or a GGUF file.

    Raises:
        UserError: the package that reads GGUF files is not installed.
    """
    if not is_gguf(path):
        return {"pretrained_model_name_or_path": path} | LOCAL
    if not path.is_file():
        raise FlagError("--transformers", path, "there is no such file", "Give a GGUF file, or a folder.")
    if importlib.util.find_spec("gguf") is None:
        raise FlagError(
            "--transformers", path, "transformers reads GGUF with the package gguf", "Run pip install gguf."
        )
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name} | LOCAL


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what transformers says of a folder that it cannot read into a UserError; its reports are silent meanwhile."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        remedy = "Give a folder that from_pretrained reads."
        raise FlagError("--transformers", folder, f"transformers cannot read it ({reason})", remedy) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def count(model: PreTrainedModel) -> dict:
    """Count a model's parameters by what they are for; shared ones count once.

    Returns:
        `total`; its parts `attention` (projections, their biases and mixing), `embeddings` (words, positions, what takes other
        inputs to the model's width, and the output matrix) and `other`; `sites`, attention at each site; and `axes`, at each
        site the numbers of layers, heads, and heads of keys, and the head size. If layers differ, it is a text such as ``4, 8``.
    """
    kinds: dict[nn.Parameter, str] = {}
    sites: dict[str, int] = {}
    layers: dict[str, list[AttentionConfig]] = {}
    names = {module: name for name, module in model.named_modules()}
    for module, site, _ in attention_modules(model):
        layers.setdefault(site, []).append(head_sizes(module))
        name = names[module]
        # BERT's output projection is in the module around the one that attends
        while "att" in (outer := name.rpartition(".")[0]).rpartition(".")[2].lower():
            name = outer
        for parameter in _without_norms(model.get_submodule(name)):
            if parameter not in kinds:
                kinds[parameter] = "attention"
                sites[site] = sites.get(site, 0) + parameter.numel()
    embeddings = [module for module in model.modules() if type(module).__name__.endswith(("Embedding", "Embeddings"))]
    for module in (*embeddings, model.get_output_embeddings()):
        for parameter in _without_norms(module) if module is not None else ():
            kinds.setdefault(parameter, "embeddings")
    parts = dict.fromkeys(("attention", "embeddings", "other"), 0)
    for parameter in model.parameters():
        parts[kinds.get(parameter, "other")] += parameter.numel()
    axes: dict[str, dict[str, int | str]] = {}
    for site, configs in layers.items():
        for size in ("num_heads", "head_dim", "key_value_heads"):
            first, *others = dict.fromkeys(getattr(config, size) for config in configs)
            axes.setdefault(site, {})[size] = ", ".join(map(str, (first, *others))) if others else first
        axes[site]["layers"] = len(configs)
    return {"model": type(model).__name__, "total": sum(parts.values()), **parts, "sites": sites, "axes": axes}


def _without_norms(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a module except those of its layer norms."""
    for part in module.modules():
        if "norm" not in type(part).__name__.lower():
            yield from part.parameters(recurse=False)


def inspect(model: PreTrainedModel) -> list[dict]:
    """Return a dict for each layer that mixes or maps its heads, as :func:`~fairseq_lowrank.tools.inspection.inspect` does."""
    names = {module: name for name, module in model.named_modules()}
    layers = []
    for module, site, layer in attention_modules(model):
        if tensors := mixing_tensors(module):
            sizes = head_sizes(module)
            place = {"name": names[module], "site": site, "layer": layer}
            chosen = added_to(module).config  # the configuration of the model does not record a choice for a part of it
            assert chosen is not None
            layers.append(_described(place, tensors, sizes.num_heads, sizes.head_dim, vars(chosen.spec)))
    return layers


def inspect_saved(folder: Path) -> list[dict] | None:
    """Return what :func:`inspect` returns, from a folder that :func:`~.huggingface.save_attention` wrote; None for another folder."""
    if (folder / "config.json").is_file() or not (folder / CONFIG).is_file():
        return None
    record = read_json(folder / CONFIG)
    if "modules" not in record:
        reason = f"{CONFIG} does not say the sizes of its layers, as an earlier version wrote it"
        raise FlagError("--transformers", folder, reason, "Load it with load_attention, and save it again.")
    with reading(folder):
        saved = load_file(folder / WEIGHTS)
    layers = []
    for module in record["modules"]:
        prefix = f"{module['name']}."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
        place = {name: module[name] for name in ("name", "site", "layer")}
        layers.append(_described(place, tensors, module["num_heads"], module["head_dim"], record))
    return layers


def _described(place: dict, tensors: dict[str, torch.Tensor], num_heads: int, head_dim: int, record: dict) -> dict:
    axes = {"num_heads": num_heads, "head_dim": head_dim} | chosen_axes(record)
    del axes["mixing_queries"]  # no axis
    tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
    return place | {"axes": axes} | describe(tensors, axes, None, num_heads * head_dim)


def attention_flags(model: PreTrainedModel) -> dict[str, object]:
    """Return the preset and the axes of a model's attention, which give its colour in pictures."""
    record = getattr(model.config, "lowrank_attention", None) or {}
    return {"preset": PLAIN} | {axis: record[axis] for axis in open_axes() if record.get(axis) is not None}


def sequences(
    folder: Path, text: Path, *, count: int, seed: int, min_length: int, max_length: int | None
) -> list[torch.Tensor]:
    """Return tokens ``[1, T]`` of `count` lines of a text, drawn without replacement, with lengths in range.

    Args:
        folder: holds the tokenizer, which adds its own special tokens.
        max_length: longer lines are left out; by default those that the tokenizer calls too long.

    Raises:
        UserError: there is no text, no tokenizer, or no line of such a length.
    """
    with reading(folder):
        tokenizer = AutoTokenizer.from_pretrained(**source_of(folder))
    longest = min(max_length or tokenizer.model_max_length, tokenizer.model_max_length)
    lines = [line for line in read_lines(text) if line.strip()]

    def read(index: int) -> torch.Tensor | None:
        tokens = tokenizer(lines[index], return_tensors="pt", verbose=False)["input_ids"]
        return tokens if min_length <= tokens.size(1) <= longest else None

    chosen = draw(len(lines), count, seed, read)
    if not chosen:
        reason = f"no line has a length of {min_length} to {longest} tokens"
        raise FlagError("--text", text, reason, "Change --min-length or --max-length, or give another text.")
    return chosen


@torch.no_grad()
def check_length(model: PreTrainedModel, chosen: list[torch.Tensor], flag: str, value: object, remedy: str) -> None:
    """Check that a model reads the longest of these sequences.

    Args:
        flag, value, remedy: of the error.

    Raises:
        UserError: it reads the first tokens of this sequence and not the whole of it, such as a model with fewer positions; or it
            reads no tokens alone.
    """
    longest = max(chosen, key=lambda tokens: tokens.size(1))
    try:
        _read(model, longest)
    except (AttributeError, IndexError, RuntimeError, ValueError) as error:
        refuse_other_inputs(model)
        _read(model, longest[:, :2])
        reason = f"{type(model).__name__} cannot read {longest.size(1)} tokens at once"
        if (positions := getattr(model.config, "max_position_embeddings", None)) is not None:
            reason += f", with {positions} positions"
        raise FlagError(flag, value, reason, remedy) from error


def refuse_other_inputs(model: PreTrainedModel) -> None:
    """Refuse a model that reads something else than tokens.

    Raises:
        UserError: it does.
    """
    name = type(model).__name__
    if others := [part for part in ("vision_config", "audio_config") if getattr(model.config, part, None) is not None]:
        raise UserError(
            f"{name} reads more than text (it has a {others[0]}), so a text does not measure it. Use a model of text."
        )
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UserError(
            f"{name} reads {model.main_input_name}, not tokens, so it cannot be measured on a text. Use a model of text."
        )


def _read(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Run a model; an encoder-decoder reads the same tokens on both sides."""
    both = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    model(input_ids=tokens, **both)


@torch.no_grad()
def measure(model: PreTrainedModel, chosen: list[torch.Tensor], label: str) -> dict[str, dict]:
    """Return the spectra of a model's attention on tokens, as :meth:`~.spectrum.Spectra.summary` does."""
    add_plain_attention(model)
    spectra = Spectra()

    def receive(module: nn.Module, site: str, layer: int, weights: torch.Tensor) -> None:
        spectra.add(site, layer, head_sizes(module).head_dim, weights.transpose(0, 1))

    with attention_weights(model, receive):
        for tokens in tracked(chosen, label, "sequences"):
            _read(model, tokens)
    return spectra.summary()


def layer_like(module: nn.Module) -> MultiheadAttention:
    """Return a layer of this package with the sizes and the parts of a module, without memory."""
    sizes = head_sizes(module)
    axes: dict[str, Any] = {axis: part.name for axis, part in parts_of(module).items()}
    if sizes.num_heads * sizes.head_dim != sizes.embed_dim:
        axes["head_dim"] = sizes.head_dim
    if sizes.key_value_heads != sizes.num_heads:
        axes["key_value_heads"] = sizes.key_value_heads
    return build_attention(PLAIN, sizes.embed_dim, sizes.num_heads, self_attention=True, device="meta", **axes)
