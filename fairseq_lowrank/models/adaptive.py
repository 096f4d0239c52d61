"""Adaptive input and softmax of Transformer-XL (Dai et al. 2019, their code), as subclasses of fairseq's."""

from __future__ import annotations

import torch
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch import Tensor, nn


class XLAdaptiveInput(AdaptiveInput):
    """An adaptive input like fairseq's, without projections if all bands have the size of the output."""

    def __init__(self, vocab_size: int, padding_idx: int, initial_dim: int, factor: float, output_dim: int, *rest):
        super().__init__(vocab_size, padding_idx, initial_dim, factor, output_dim, *rest)
        if factor == 1 and initial_dim == output_dim:
            for band in self.embeddings:
                band[1] = nn.Identity()

    def weights_for_band(self, band: int) -> tuple[Tensor, Tensor | None]:
        """Return a band's embeddings and its projection; ``None`` if it has no projection."""
        embedding, projection = self.embeddings[band]
        return embedding.weight, getattr(projection, "weight", None)

    @property
    def projections(self) -> list[nn.Module]:
        """Return the layers between a band's embeddings and the model."""
        return [band[1] for band in self.embeddings]


class AddBias(nn.Module):
    """A module whose output gets a bias, which is initialised to 0."""

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.module = module
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) + self.bias


class XLAdaptiveSoftmax(AdaptiveSoftmax):
    """An adaptive softmax like fairseq's, with other projections and optional biases.

    If projections are not tied, the first band has a projection too. A band whose embeddings have no projection has none.

    Args:
        bias: if True, words and bands have biases.

    The other arguments are fairseq's.
    """

    def __init__(self, *args, adaptive_inputs: XLAdaptiveInput | None, tie_proj: bool, bias: bool, **kwargs) -> None:
        super().__init__(*args, adaptive_inputs=adaptive_inputs, tie_proj=tie_proj, **kwargs)
        if adaptive_inputs is not None:
            projections = [adaptive_inputs.weights_for_band(band)[1] for band in range(len(self.cutoff))]
            if projections[0] is not None and projections[0].size(0) == projections[0].size(1) and not tie_proj:
                projection = nn.Linear(*projections[0].shape, bias=False)
                self.head.word_proj = nn.Sequential(projection, self.head.word_proj)
            for tail, projection in zip(self.tail, projections[1:], strict=True):
                if projection is None:
                    tail[0] = nn.Identity()
        if bias:
            self.head = AddBias(self.head, self.cutoff[0] + len(self.tail))
            sizes = [end - start for start, end in zip(self.cutoff, self.cutoff[1:], strict=False)]
            self.tail = nn.ModuleList(AddBias(tail, size) for tail, size in zip(self.tail, sizes, strict=True))

    @property
    def projections(self) -> list[nn.Module]:
        """Return the layers between the model and a band's words, without the layers that score words and bands."""
        head, *tails = (band.module if isinstance(band, AddBias) else band for band in (self.head, *self.tail))
        words = getattr(head, "word_proj", None)
        return [*([words[0]] if isinstance(words, nn.Sequential) else []), *(tail[0] for tail in tails)]
