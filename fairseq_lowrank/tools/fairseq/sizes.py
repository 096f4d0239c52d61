"""Compare sizes of a model that bound each other: the rank of its embedding, its heads and its depth with its width.

Nothing is measured. `fairseq-lowrank measure` says what a trained model uses.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any, NamedTuple

from fairseq.modules import AdaptiveInput
from torch import nn

from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.tools.axes import config_of
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, stacks


class Comparison(NamedTuple):
    """A size of a stack or site, what it is compared with, and what follows from a value on the wrong side (else empty)."""

    place: str
    size: str
    value: int
    against: str
    bound: float
    note: str


def compare_sizes(model: nn.Module, args: Namespace) -> list[Comparison]:
    """Compare embedding rank, depth and attention width of a model with its width.

    The theorems are those of Wies et al. 2021 (rank of the embedding, attention width) and Levine et al. 2020 (depth).

    Args:
        args: the arguments of its architecture, see :func:`~.architecture.parse_architecture`.
    """
    found = []
    for stack, layers, width, _ in stacks(args):
        rank = embedding_rank(model, stack, width)
        if rank is not None:
            note = "" if rank >= width else "More layers help more than more width (Wies et al. 2021)"
            found.append(Comparison(stack, "rank of the embedding", rank, "width", width, note))
        threshold = round(math.log(width, 3), 1)
        note = "" if layers > threshold else "Another layer helps more than more width (Levine et al. 2020)"
        found.append(Comparison(stack, "layers", layers, "log₃ of the width", threshold, note))
    sites = {layer.site: layer.module for layer in reversed(attention_layers(model))}
    for site, module in reversed(sites.items()):
        inner = module.num_heads * config_of(module).head_dim
        note = "" if inner <= module.embed_dim else "Parameters beyond the width are worth less (Wies et al. 2021)"
        size = f"heads × head size {module.num_heads} × {config_of(module).head_dim} ="
        found.append(Comparison(f"{site} attention", size, inner, "width", module.embed_dim, note))
    return found


def embedding_rank(model: Any, stack: str, width: int) -> int | None:
    """Return the greatest rank of a stack's input embedding; None if it has no word embeddings."""
    part = getattr(model, stack, None)
    modules = dict(part.named_modules()) if part else {}
    embed = next((module for name, module in modules.items() if name.endswith("embed_tokens")), None)
    if isinstance(embed, AdaptiveInput):
        bands = (module for band in embed.embeddings for module in band.modules() if isinstance(module, nn.Embedding))
        return min(width, sum(min(band.weight.shape) for band in bands))
    if not isinstance(embed, nn.Embedding):
        return None
    convolved = (module.kernel for module in modules.values() if isinstance(module, ConvolvedEmbedding))
    return min(width, next(convolved, 1) * min(embed.weight.shape))
