"""A table of fairseq's architectures and the sites where they can have our attention, found on the meta device."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    BaseFairseqModel,
)
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.speech_to_speech.s2s_transformer import S2SpecTTransformerModel
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from omegaconf import OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.plugin import attention, foreign
from fairseq_lowrank.plugin.flags import SITES
from fairseq_lowrank.plugin.sizes import embedding_flags

# Values that models take from the data, or from flags of a task or of the training, and that have no default.
MODEL_ARG_DEFAULTS = {
    "tokens_per_sample": 512,
    "max_source_positions": 512,
    "max_target_positions": 512,
    "input_feat_per_channel": 80,
    "input_channels": 1,
    "n_frames_per_step": 1,
    "target_speaker_embed": False,
    "criterion": "cross_entropy",
    "fp16": False,
    "add_bos_token": False,
    "model_parallel_size": 1,
    "w2v_path": None,
    "autoregressive": True,
    "discrete_duration": False,
    "discrete_f0": False,
    "ignore_duration_input": False,
    "ignore_f0_input": False,
    "pitch_min": 0.0,
    "pitch_max": 1.0,
    "energy_min": 0.0,
    "energy_max": 1.0,
}


class SizedDictionary(Dictionary):
    """A dictionary that has a size and fairseq's special symbols, but no words."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < len(self.symbols):
            raise UserError(f"--vocab-size {size}: expected at least {len(self.symbols)}, fairseq's special symbols")
        self.size = size

    def __len__(self) -> int:
        return self.size


LARGE = 10**6  # words: enough for every choice of an adaptive softmax


class Coverage(NamedTuple):
    """An architecture, the sites where attention can be chosen, and why it cannot be chosen at the others."""

    architecture: str
    model: str
    sites: tuple[str, ...]
    reason: str


def coverage(architecture: str) -> Coverage:
    """Find the sites where attention can be chosen, by building the architecture with one layer on the meta device."""
    model_name, cls = ARCH_MODEL_NAME_REGISTRY[architecture], ARCH_MODEL_REGISTRY[architecture]
    try:
        args = default_arguments(architecture)
        if not issubclass(cls, attention.LowrankModel):
            args.attention = PLAIN
            args.attention_sites = None
        model = build_small(cls, args, check=False)
    except Exception as error:
        words = " ".join(str(error).split()) or "an assertion"
        return Coverage(architecture, model_name, (), f"not built: {words.rstrip('.')[:100]}")
    elsewhere = foreign.attention_by_site(model)
    sites = tuple(site for site in SITES if site in attention.our_sites(model) and site not in elsewhere)
    reasons = [f"{site}: {kind.__name__}" for site, kind in elsewhere.items()]
    return Coverage(architecture, model_name, sites, "; ".join(reasons) or ("" if sites else "no attention"))


def check_args(cls: type, args: object) -> None:
    """Refuse attention flags before data is read, by a build on the meta device.

    Raises:
        UserError: a flag is refused, sizes do not fit together, or the model builds its own attention at a chosen site.
    """
    if attention.chosen_options(args, cls) is not None or embedding_flags(args):
        validate(cls, args)


def validate(cls: type[BaseFairseqModel], args: object) -> None:
    """Build a small model on the meta device, to check the attention flags.

    Raises:
        UserError: a flag is refused. Another error may come from missing data. It is logged, and the build of the model repeats it.
    """
    try:
        build_small(cls, args)
    except UserError:
        raise
    except Exception as error:
        logging.getLogger(__name__).info(
            f"{cls.__name__} cannot be built before its data is read ({type(error).__name__}: {error}), so attention flags are "
            "checked when it is built"
        )


def build_small(cls: type[BaseFairseqModel], args: object, *, check: bool = True) -> nn.Module:
    """Build a model with one layer in each stack on the meta device, without output or log lines.

    Args:
        cls: the class of the model.
        args: arguments, completed with the values that a model takes from elsewhere.
        check: refuse attention that is chosen at a site where the model builds its own.
    """
    args = _with_one_layer(_complete(cls, args))
    task = stand_in_task(cls, args, SizedDictionary(_words(args)))
    if MODEL_DATACLASS_REGISTRY.get(getattr(args, "_name", None)) or getattr(cls, "__dataclass", None) is not None:
        args = OmegaConf.create({name: value for name, value in vars(args).items() if name != "arch"})
    with torch.random.fork_rng(devices=[]), _silence():
        return build_on_meta(cls, args, task, check=check)


def build_on_meta(cls: type[BaseFairseqModel], args: object, task: object, *, check: bool = True) -> nn.Module:
    """Build a model whose parameters have shapes but no memory."""
    with on_meta():
        return attention.build_with_chosen_attention(
            cls, copy.deepcopy(args), task, lambda args: cls.build_model(args, task), check=check
        )


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device, also those whose initialiser draws its numbers on the CPU, such as RoBERTa's."""
    with torch.device("meta"), _StayOnMeta():
        yield


class _StayOnMeta(TorchFunctionMode):
    """Let ``tensor.cpu()`` return a tensor of the meta device itself."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs or {})


def default_arguments(architecture: str) -> argparse.Namespace:
    """Return the arguments of an architecture without any flag."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    cls = ARCH_MODEL_REGISTRY[architecture]
    cls.add_args(parser.add_argument_group("model", argument_default=argparse.SUPPRESS))
    args = parser.parse_known_args([])[0]
    if getattr(cls, "__dataclass", None) is None:
        _set_missing(args, MODEL_ARG_DEFAULTS)
    args.arch = architecture
    ARCH_CONFIG_REGISTRY[architecture](args)
    return args


def _complete(cls: type, args: object) -> argparse.Namespace:
    """Return a copy of the arguments, completed with defaults of the model and of :data:`MODEL_ARG_DEFAULTS`."""
    args = argparse.Namespace(**copy.deepcopy(vars(args)))
    if (config := getattr(cls, "__dataclass", None)) is not None:
        _set_missing(args, vars(config()))
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("${"):
            setattr(args, name, MODEL_ARG_DEFAULTS.get(name))
    _set_missing(args, {"target_is_code": not issubclass(cls, S2SpecTTransformerModel)})
    _set_missing(args, MODEL_ARG_DEFAULTS)
    return args


def _set_missing(args: argparse.Namespace, defaults: dict) -> None:
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def _words(args: argparse.Namespace) -> int:
    """Return the size of a dictionary for a check: :data:`LARGE`, or less for a model that spells every word."""
    if not getattr(args, "character_embeddings", False):
        return LARGE
    cutoffs = (str(getattr(args, f"adaptive_{part}_cutoff", None)) for part in ("softmax", "input"))
    return 100 + max((int(number) for text in cutoffs for number in re.findall(r"\d+", text)), default=0)


def _with_one_layer(args: argparse.Namespace) -> argparse.Namespace:
    for side in ("encoder", "decoder"):
        if isinstance(getattr(args, f"{side}_layers", None), int) and not hasattr(args, f"{side}_kernel_size_list"):
            setattr(args, f"{side}_layers", 1)
            if hasattr(args, f"{side}_layers_to_keep"):
                setattr(args, f"{side}_layers_to_keep", None)
    if isinstance(languages := getattr(args, "languages", None), (list, tuple)):  # every layer has an adapter for each
        args.languages = languages[:1]
    return args


def stand_in_task(cls: type, args: argparse.Namespace, dictionary: Dictionary) -> object:
    """Return an object with the attributes that a model reads from its task while it is built."""
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary", "src_dict", "tgt_dict")
    facts = dict.fromkeys(names, dictionary)
    facts |= {"args": args, "cfg": args, "multitask_tasks": {}, "target_is_code": True}
    facts |= {"dictionaries": [dictionary], "channels": ["a", "b"]}
    facts |= {"get_speaker_embeddings": lambda args: None, "max_positions": lambda: 512}
    if issubclass(cls, MultilingualTransformerModel):
        task = object.__new__(MultilingualTranslationTask)
        pairs = getattr(args, "lang_pairs", None) or ["a-b"]
        pairs = pairs.split(",") if isinstance(pairs, str) else list(pairs)
        languages = sorted({language for pair in pairs for language in pair.split("-")})
        about = {"langs": languages, "lang_pairs": pairs, "model_lang_pairs": pairs}
        vars(task).update(args=args, cfg=args, dicts=dict.fromkeys(languages, dictionary), training=True, **about)
        return task
    return SimpleNamespace(**facts)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(level)
