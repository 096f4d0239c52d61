"""Models of fairseq architectures without memory for parameters, and the sites of a model's attention layers."""

from __future__ import annotations

import difflib
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import fairseq.modules
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import (
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqDecoder,
    FairseqEncoderModel,
    FairseqLanguageModel,
)
from fairseq.tasks import TASK_REGISTRY
from omegaconf.errors import InterpolationKeyError
from torch import nn

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.plugin import architectures, foreign
from fairseq_lowrank.plugin.attention import chosen_options
from fairseq_lowrank.plugin.flags import as_namespace

STACKS = ("encoder", "decoder")
ATTENTION = (MultiheadAttention, fairseq.modules.MultiheadAttention)


class AttentionLayer(NamedTuple):
    """One attention layer of a model; `site` is encoder, decoder or cross, `layer` counts from 0 at the input."""

    name: str
    site: str
    layer: int
    module: Any  # a layer of this package, or fairseq's own


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return every attention layer, ours or fairseq's, in the model's order."""
    return [
        AttentionLayer(name, *_site_and_layer(model, name, module), module)
        for name, module in model.named_modules()
        if isinstance(module, ATTENTION)
    ]


def _site_and_layer(model: nn.Module, name: str, attention: nn.Module) -> tuple[str, int]:
    """Return site and number of an attention layer, from the types of the modules that contain it."""
    parts = name.split(".")
    owners = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    layer = next((int(parts[depth]) for depth, owner in enumerate(owners) if isinstance(owner, nn.ModuleList)), 0)
    return foreign.site_of(attention, any(isinstance(owner, FairseqDecoder) for owner in owners)), layer


def parse_architecture(architecture: str, flags: Sequence[str] = (), *, task: str | None = None) -> Namespace:
    """Return an architecture's arguments, completed with its defaults.

    Args:
        architecture: a value of fairseq's `--arch`.
        flags: flags of fairseq-train. Only flags of the model have an effect.
        task: fairseq's task, by default one that works with the model.

    Raises:
        UserError: the architecture is unknown, or fairseq refuses a flag or value.
    """
    if architecture not in ARCH_MODEL_REGISTRY:
        close = difflib.get_close_matches(architecture, ARCH_MODEL_REGISTRY, 5)
        ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("lowrank"))
        remedy = f"Did you mean {', '.join(close)}?" if close else f"Use one of {', '.join(ours)}."
        raise FlagError("--arch", architecture, "unknown", remedy)
    if task is not None and task not in TASK_REGISTRY:
        raise FlagError("--task", task, "unknown", f"Use one of {', '.join(sorted(TASK_REGISTRY))}.")
    parser = options.get_training_parser(task or _default_task(architecture))

    def refuse(message: str) -> None:
        raise UserError(f"{architecture}: {message}")

    parser.error = refuse
    args = options.parse_args_and_arch(parser, input_args=["no-data", "--arch", architecture, *flags])
    if ARCH_MODEL_NAME_REGISTRY[architecture] in MODEL_DATACLASS_REGISTRY:
        # like fairseq-train: flags that are not given get the dataclass's defaults
        try:
            args = as_namespace(convert_namespace_to_omegaconf(args).model)
        except InterpolationKeyError as error:  # a size comes from the task
            raise _cannot_be_built(architecture, error) from error
    args.arch = architecture
    return args


def chooses_attention(args: Namespace) -> bool:
    """Return True if an attention flag is given, or the architecture belongs to this package."""
    return chosen_options(args, ARCH_MODEL_REGISTRY[args.arch]) is not None


def model_name(args: Namespace) -> str:
    """Return the name of the registered model (not of the architecture) of some arguments."""
    return ARCH_MODEL_NAME_REGISTRY.get(args.arch, args.arch)


def our_arguments(args: Namespace) -> Namespace | None:
    """Return the arguments with this package's attention, plain if none is chosen; None if that cannot be chosen."""
    args = copy(args)
    if not chooses_attention(args):
        coverage = architectures.coverage(args.arch)
        if not coverage.sites or coverage.reason:
            return None
        args.attention = PLAIN
    return args


def _default_task(architecture: str) -> str:
    model = ARCH_MODEL_REGISTRY[architecture]
    if issubclass(model, FairseqLanguageModel):
        return "language_modeling"
    return "masked_lm" if issubclass(model, FairseqEncoderModel) else "translation"


def build_model(args: Namespace, vocab_size: int, target_vocab_size: int | None = None) -> nn.Module:
    """Return the model of :func:`parse_architecture`'s arguments, whose parameters have shapes but no memory.

    Args:
        vocab_size: size of the dictionary.
        target_vocab_size: size of the dictionary of the target, if it has another one.

    Raises:
        UserError: the model refuses its arguments, or needs more than arguments and a dictionary.
    """
    cls = ARCH_MODEL_REGISTRY[args.arch]
    task = architectures.stand_in_task(cls, args, architectures.SizedDictionary(vocab_size))
    if target_vocab_size is not None:
        target = architectures.SizedDictionary(target_vocab_size)
        vars(task).update(target_dictionary=target, tgt_dict=target)
    try:
        return architectures.build_on_meta(cls, args, task)
    except AssertionError as error:
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise UserError(
            f"{args.arch}: fairseq refuses these flags ({reason}). Change the flags that this names."
        ) from error
    except (AttributeError, ImportError, NameError, OSError) as error:
        raise _cannot_be_built(args.arch, error) from error


def _cannot_be_built(architecture: str, error: Exception) -> FlagError:
    """Return the error for an architecture that needs more than a dictionary: sizes of its data, a package, a file."""
    reason = f"fairseq cannot build it from flags and a dictionary alone ({' '.join(str(error).split())})"
    remedy = "Use a text architecture that needs no more, such as transformer or transformer_lm."
    return FlagError("--arch", architecture, reason, remedy)


def stacks(args: Namespace) -> Iterator[tuple[str, int, int, int]]:
    """Yield name (encoder or decoder), layers, width and heads of each stack of an architecture."""
    for stack in STACKS:
        sizes: list[Any] = [
            getattr(args, f"{stack}_{size}", None) for size in ("layers", "embed_dim", "attention_heads")
        ]
        if all(isinstance(size, int) for size in sizes):
            layers, width, heads = sizes
            yield stack, layers, width, heads
