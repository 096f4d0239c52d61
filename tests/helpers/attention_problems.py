"""Random problems for the attention operation, drawn by hypothesis."""

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_lowrank.attention import Prefix
from fairseq_lowrank.attention.masks import attention_mask
from fairseq_lowrank.ops import (
    AttentionCall,
    AttentionMask,
    DiagonalMixing,
    DotProduct,
    PositionwiseMixing,
    StaticMixing,
    attention,
)


def FUNCTION(b, h, query, key):
    """A mask as FlexAttention takes it."""
    return (query - key) % (b + 2) == 0


NOTHING_HIDDEN = AttentionMask()
MIXINGS = ("none", "static", "positionwise", "diagonal")


def call_of(q, k, v=None, *, scale=None, mask=NOTHING_HIDDEN, **parts):
    """The call of dot products of ``q`` and ``k``."""
    return AttentionCall(DotProduct(q, k, scale), k if v is None else v, mask, **parts)


def attend(q, k, v, *, backend="auto", **parts):
    """Attention of dot products; ``parts`` are those of a call, and ``scale``."""
    return attention(call_of(q, k, v, **parts), backend)


def mixing_of(name, normal, scores):
    """A mixing rule for scores ``[B, H, T, S]`` with the numbers of ``normal(*shape)``."""
    batch, heads, queries, _ = scores
    return {
        "none": lambda: None,
        "static": lambda: StaticMixing(normal(heads, heads)),
        "positionwise": lambda: PositionwiseMixing(normal(batch, queries, heads, heads)),
        "diagonal": lambda: DiagonalMixing(normal(heads)),
    }[name]()


@st.composite
def problems(
    draw,
    device,
    activations=("softmax", "sigsoftmax"),
    mixings=MIXINGS,
    befores=MIXINGS,
    dtype=torch.float64,
    largest=5,
    sinks=True,
):
    """Keyword arguments of :func:`attend`: any shapes, masks, biases, sinks and mixing. Float tensors require gradients.

    Heads share keys and values in groups of any size; causality may count queries from 0 again, and leave the last keys alone.
    """
    batch, heads = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 4)))
    repeats, appended = draw(st.sampled_from((1, 1, 1, 2, 3))), draw(st.sampled_from((0, 0, 0, 1, 2)))
    queries, keys = draw(st.integers(1, largest)) * repeats, draw(st.integers(1, largest)) + appended
    dim, value_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    divisors = [groups for groups in range(1, heads + 1) if heads % groups == 0]
    key_groups, value_groups = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def normal(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype).requires_grad_()

    def coin(*shape):
        return (torch.rand(shape, generator=generator) < 0.3).to(device)

    shape = draw(
        st.sampled_from(((queries, keys), (batch, 1, 1, keys), (heads, 1, 1), (batch, heads, queries, keys), (1,)))
    )
    additive = {"none": lambda: None, "float": lambda: normal(*shape), "bool": lambda: coin(*shape)}
    additive["-inf"] = lambda: normal(*shape).detach().masked_fill(coin(*shape), float("-inf"))
    scores = (batch, heads, queries, keys)
    causal = draw(st.booleans())
    has_positions = queries // repeats <= keys - appended
    starts = range(keys - appended - queries // repeats + 1)
    lengths = torch.randint(4, (batch,), generator=generator).to(device)
    rules = [Prefix(2).rule, Prefix(lengths).rule, attention_mask(FUNCTION, None, scores).rule]
    documents = torch.randint(3, (draw(st.sampled_from((1, batch))), keys - appended), generator=generator).to(device)
    return {
        "q": normal(batch, heads, queries, dim),
        "k": normal(batch, key_groups, keys, dim),
        "v": normal(batch, value_groups, keys, value_dim),
        "mask": AttentionMask(
            causal=causal,
            key_padding=coin(batch, keys) if draw(st.booleans()) else None,
            additive=additive[draw(st.sampled_from(sorted(additive)))](),
            query_repeats=repeats,
            num_appended_keys=appended,
            window=draw(st.sampled_from((None, None, 1, 2, 9))) if causal else None,
            documents=documents if has_positions and draw(st.booleans()) else None,
            rule=draw(st.sampled_from((None, None, *rules))),
            query_start=draw(st.sampled_from((None, None, *starts))),
        ),
        "activation": draw(st.sampled_from(activations)),
        "score_bias": normal(*shape) if draw(st.booleans()) else None,
        "sinks": normal(heads) if sinks and draw(st.booleans()) else None,
        "distance_bias": normal(draw(st.sampled_from((1, batch))), heads, queries // repeats + keys - 1)
        if draw(st.booleans())
        else None,
        "scale": draw(st.sampled_from((None, 0.3, 2.0))),
        "score_mixing": mixing_of(draw(st.sampled_from(befores)), normal, scores),
        "prob_mixing": mixing_of(draw(st.sampled_from(mixings)), normal, scores),
    }


def leaves(problem):
    """The tensors of a problem that require gradients, by name."""
    parts = {name: problem.get(name) for name in ("q", "k", "v", "score_bias", "sinks", "distance_bias")}
    parts["mask.additive"] = problem["mask"].additive
    parts |= {name: problem[name].weight for name in ("score_mixing", "prob_mixing") if problem.get(name) is not None}
    return {name: part for name, part in parts.items() if part is not None and part.requires_grad}


def bias_of_distances(problem):
    """What ``distance_bias`` adds to each score, ``[B, H, T, S]``, entry by entry."""
    (batch, heads, queries, _), keys, bias = problem["q"].shape, problem["k"].size(2), problem["distance_bias"]
    result = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    if bias is None:
        return result
    positions = queries // problem["mask"].query_repeats
    for t in range(queries):
        for s in range(keys):
            result[:, :, t, s] = bias.detach().cpu()[:, :, positions - 1 - t % positions + s]
    return result


def hidden(problem):
    """Where keys are hidden by causality, padding or a bool mask: ``[B, H, T, S]``, entry by entry."""
    (batch, heads, queries, _), keys, mask = problem["q"].shape, problem["k"].size(2), problem["mask"]
    result = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    additive = mask.additive
    if additive is not None and additive.dtype == torch.bool:
        result |= additive.cpu()
    for b in range(batch):
        for t in range(queries):
            for s in range(keys):
                own_keys, positions = keys - mask.num_appended_keys, queries // mask.query_repeats
                own = t % positions + own_keys - positions  # the key at the position of the query
                own = own if mask.query_start is None else t % positions + mask.query_start
                outside = mask.causal and s < own_keys and (s > own or (mask.window and s <= own - mask.window))
                if mask.documents is not None and s < own_keys:
                    document = mask.documents[b % len(mask.documents)]
                    outside = outside or document[own] != document[s]
                if mask.rule is not None and s < own_keys:
                    outside = outside or not shown_by_rule(mask.rule, b, own, s)
                if outside or (mask.key_padding is not None and mask.key_padding[b, s]):
                    result[b, :, t, s] = True
    return result


def shown_by_rule(rule, b, query, key):
    """Return True if a rule of :data:`RULES` shows a key to a query, both counted from key 0."""
    length = getattr(rule, "length", None)
    if length is None:
        return FUNCTION(b, 0, query, key)
    return key <= query or key < (length if isinstance(length, int) else length[b])


class LargestTensor(TorchDispatchMode):
    """Remembers the size in bytes of the largest memory behind any tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result
