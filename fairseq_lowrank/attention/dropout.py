"""Dropout of attention weights, which the operation does: a layer's module says how much."""

from torch import nn


class AttentionDropout(nn.Module):
    """The dropout probability of attention weights, and whether it holds at evaluation too, as fairseq's ``FairseqDropout``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.apply_during_inference = False

    def extra_repr(self) -> str:
        return f"p={self.p}"
