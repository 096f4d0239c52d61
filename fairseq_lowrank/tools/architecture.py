"""fairseq architectures from their flags, built without allocating them, and where attention sits in a model."""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

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
    module: nn.Module


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Every attention layer, ours or fairseq's, in the model's order."""
    return [
        AttentionLayer(name, *_place(model, name, module), module)
        for name, module in model.named_modules()
        if isinstance(module, ATTENTION)
    ]


def _place(model: nn.Module, name: str, attention: nn.Module) -> tuple[str, int]:
    """(site, layer) of an attention layer, by what it and the modules around it are."""
    parts = name.split(".")
    owners = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    layer = next((int(parts[depth]) for depth, owner in enumerate(owners) if isinstance(owner, nn.ModuleList)), 0)
    return foreign.site_of(attention, any(isinstance(owner, FairseqDecoder) for owner in owners)), layer


def parse(architecture: str, flags: Sequence[str] = (), *, task: str | None = None) -> Namespace:
    """An architecture's arguments with its defaults filled in.

    Args:
        architecture: a value of fairseq's `--arch`.
        flags: any flags of fairseq-train; those of the model matter.
        task: fairseq's task, by default one that fits the kind of model.

    Raises:
        ValueError: an unknown architecture, or a flag or value that fairseq refuses.
    """
    if architecture not in ARCH_MODEL_REGISTRY:
        close = difflib.get_close_matches(architecture, ARCH_MODEL_REGISTRY, 5)
        ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("lowrank"))
        raise ValueError(
            f"--arch {architecture}: unknown; {'did you mean' if close else 'there are'} {', '.join(close or ours)}?"
        )
    if task is not None and task not in TASK_REGISTRY:
        raise ValueError(f"--task {task}: unknown; expected one of {', '.join(sorted(TASK_REGISTRY))}")
    parser = options.get_training_parser(task or _default_task(architecture))

    def refuse(message: str) -> None:
        raise ValueError(f"{architecture}: {message}")

    parser.error = refuse
    args = options.parse_args_and_arch(parser, input_args=["no-data", "--arch", architecture, *flags])
    if ARCH_MODEL_NAME_REGISTRY[architecture] in MODEL_DATACLASS_REGISTRY:
        # as fairseq-train does: flags that were not given get the dataclass's defaults
        try:
            args = as_namespace(convert_namespace_to_omegaconf(args).model)
        except InterpolationKeyError as error:  # a size that is the task's
            raise _cannot_be_built(architecture, error) from error
    args.arch = architecture
    return args


def chooses_attention(args: Namespace) -> bool:
    """Whether the attention of :func:`parse`'s arguments is ours: an attention flag is given, or the architecture is ours."""
    return chosen_options(args, ARCH_MODEL_REGISTRY[args.arch]) is not None


def model_name(args: Namespace) -> str:
    """The registered model (not the architecture) that arguments belong to."""
    return ARCH_MODEL_NAME_REGISTRY.get(args.arch, args.arch)


def our_arguments(args: Namespace) -> Namespace | None:
    """The same arguments with attention of this package, plain where none is chosen; None where the architecture has none."""
    args = copy(args)
    if not chooses_attention(args):
        coverage = architectures.coverage(args.arch)
        if not coverage.sites or coverage.reason:
            return None
        args.attention = "mha"
    return args


def _default_task(architecture: str) -> str:
    model = ARCH_MODEL_REGISTRY[architecture]
    if issubclass(model, FairseqLanguageModel):
        return "language_modeling"
    return "masked_lm" if issubclass(model, FairseqEncoderModel) else "translation"


def build(args: Namespace, vocab_size: int) -> nn.Module:
    """The model of :func:`parse`'s arguments with parameters that have shapes but no memory.

    Raises:
        ValueError: the model refuses its arguments, or needs more than them and a dictionary.
    """
    cls = ARCH_MODEL_REGISTRY[args.arch]
    task = architectures.stand_in_task(cls, args, architectures.SizedDictionary(vocab_size))
    try:
        return architectures.build_on_meta(cls, args, task)
    except AssertionError as error:
        reason = str(error) or "an assertion failed"
        raise ValueError(f"{args.arch}: fairseq refuses these flags ({reason})") from error
    except (AttributeError, ImportError, NameError, OSError) as error:
        raise _cannot_be_built(args.arch, error) from error


def _cannot_be_built(architecture: str, error: Exception) -> ValueError:
    """What to say of an architecture that needs more than a dictionary: sizes of its data, a package, a file."""
    return ValueError(
        f"--arch {architecture}: fairseq cannot build it from flags and a dictionary alone ({' '.join(str(error).split())})"
        "; expected a text architecture that needs no more, such as transformer or transformer_lm"
    )


def stacks(args: Namespace) -> Iterator[tuple[str, int, int, int]]:
    """(encoder or decoder, layers, width, heads) of each stack an architecture has."""
    for stack in STACKS:
        sizes = [getattr(args, f"{stack}_{size}", None) for size in ("layers", "embed_dim", "attention_heads")]
        if all(isinstance(size, int) for size in sizes):
            yield (stack, *sizes)
