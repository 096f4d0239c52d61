"""Input embeddings by convolution: each position reads the last K tokens (vocabulary bottleneck paper, eqs. 2 and 4)."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import NamedTuple

import torch
from fairseq.models.transformer import TransformerDecoder
from torch import Tensor, nn
from torch.nn import functional as F


class ConvolvedEmbedding(nn.Linear):
    """A convolution y_i = Σ_j W_j x_{i−K+j} over the K tokens up to position i; tokens before the first are 0.

    The paper's W̃ is `weight`, [d, K·r]. With embeddings x of size r the rank is at most min(d, K·r); one token gives min(d, r).
    The paper cuts its input into pieces of K (a stride of K). A language model predicts every token, so the stride is 1.

    Args:
        embedding_dim: r, the size of a token's embedding.
        width: d.
        kernel: K.
    """

    def __init__(self, embedding_dim: int, width: int, kernel: int) -> None:
        super().__init__(kernel * embedding_dim, width, bias=False)
        nn.init.xavier_uniform_(self.weight)  # like fairseq's projection of one token
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolved embeddings, [B, T, r] → [B, T, d]."""
        length, call = x.size(1), _call.get()
        if call is not None and call.embedding is self:
            if call.context is not None:
                x = torch.cat([call.context, x], 1)
            x = x.masked_fill(call.padding.unsqueeze(-1), 0)
        x = F.pad(x, (0, 0, self.kernel - 1 + length - x.size(1), 0))
        return super().forward(torch.cat([x[:, j : j + length] for j in range(self.kernel)], -1))


class DecoderCall(NamedTuple):
    """What the call of a decoder gives its embedding.

    Args:
        context: embeddings of the tokens before those of the call, [B, up to K − 1, r]; None if there are none.
        padding: [B, up to K − 1 + T], true where context and tokens are padding.
    """

    embedding: ConvolvedEmbedding
    context: Tensor | None
    padding: Tensor


_call: ContextVar[DecoderCall | None] = ContextVar("call of a decoder in this thread", default=None)


def convolve_embedding(decoder: TransformerDecoder, kernel: int) -> None:
    """Make a decoder of fairseq embed each position by a convolution over the last `kernel` tokens."""
    decoder.project_in_dim = ConvolvedEmbedding(decoder.embed_tokens.embedding_dim, decoder.embed_dim, kernel)
    decoder.extract_features = functools.partial(_extract_features, decoder)


# A step of generation embeds only the last token. It receives all tokens, so nothing is cached between steps.
def _extract_features(
    decoder: TransformerDecoder, prev_output_tokens: Tensor, encoder_out=None, incremental_state=None, *others, **named
):
    """Call the decoder's own method with the earlier tokens of a generation step as context.

    Padding counts as 0. (fairseq initialises its embedding to 0 and trains it if an output layer shares it.)
    """
    embedding, read, context = decoder.project_in_dim, prev_output_tokens, None
    if incremental_state is not None:
        read = read[:, -embedding.kernel :]
        context = decoder.embed_scale * decoder.embed_tokens(read[:, :-1])
        context = context if decoder.quant_noise is None else decoder.quant_noise(context)
    token = _call.set(DecoderCall(embedding, context, read.eq(decoder.padding_idx)))
    try:
        return type(decoder).extract_features(
            decoder, prev_output_tokens, encoder_out, incremental_state, *others, **named
        )
    finally:
        _call.reset(token)
