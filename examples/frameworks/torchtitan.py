"""An object with the signature of torchtitan's inner attention: ``[T, N, H]``, the batch folded away, documents by ``cu_seq``.

There ``window_size`` is (left, right), and left counts keys *before* the query: ``SlidingWindow(left + 1)`` here. In a torchtitan model,
derive the class from its ``InnerAttention``, with a ``Config`` of these fields.
"""

from torch import nn

from fairseq_lowrank.attention import PackedDocuments, build_core


class LowrankInnerAttention(nn.Module):
    def __init__(self, method, num_heads, head_dim, window_size=(-1, 0)):
        super().__init__()
        self.core, self.window = build_core(method, num_heads, head_dim, layout="BTHD"), window_size

    def forward(self, q, k, v, *, attention_metadata, scale=None, out_transform=None, **kwargs):
        if out_transform is not None:
            raise NotImplementedError("out_transform reads a log-sum-exp, which mixed weights do not have")
        if not hasattr(attention_metadata, "cu_seq_k"):  # a BlockMask of FlexAttention
            return self.core(q[None], k[None], v[None], attention_metadata, scale=scale)[0]
        mask = PackedDocuments(cu_seqlens=attention_metadata.cu_seq_k, causal=self.window[1] == 0)
        if self.window[0] >= 0:
            mask = mask.replace(window=self.window[0] + 1)
        return self.core(q[None], k[None], v[None], mask, scale=scale)[0]
