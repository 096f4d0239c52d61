"""Random problems for the attention operation, drawn by hypothesis."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from fairseq_lowrank.ops import AttentionMask, HeadMixing

# The same examples on every run and every machine, and no files left behind.
fixed = settings(derandomize=True, deadline=None, database=None)

MIXINGS = ("none", "static", "positionwise", "diagonal")


@st.composite
def problems(draw, device, activations=("softmax", "sigsoftmax"), mixings=MIXINGS, dtype=torch.float64, largest=5):
    """Keyword arguments of ``attention``: any shapes, masks, biases and mixing. Float tensors require gradients."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    dim, value_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups = draw(st.sampled_from((1, heads)))
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
    mixing = draw(st.sampled_from(mixings))
    problem = {
        "q": normal(batch, heads, queries, dim),
        "k": normal(batch, groups, keys, dim),
        "v": normal(batch, groups, keys, value_dim),
        "mask": AttentionMask(
            causal=draw(st.booleans()),
            key_padding=coin(batch, keys) if draw(st.booleans()) else None,
            additive=additive[draw(st.sampled_from(sorted(additive)))](),
        ),
        "activation": draw(st.sampled_from(activations)),
        "score_bias": normal(*shape) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from((None, 0.3, 2.0))),
    }
    if mixing != "none":
        query_weight = normal(dim, heads) if mixing == "positionwise" else None
        weight = normal(heads) if mixing == "diagonal" else normal(heads, heads)
        problem["mixing"] = HeadMixing(weight, query_weight)
        problem["mixing_query"] = normal(batch, heads, queries, dim) if mixing == "positionwise" else None
    return problem


def leaves(problem):
    """The tensors of a problem that require gradients, by name."""
    parts = {name: problem.get(name) for name in ("q", "k", "v", "score_bias", "mixing_query")}
    parts["mask.additive"] = problem["mask"].additive
    parts |= {f"mixing.{name}": part for name, part in (problem.get("mixing") or HeadMixing(None))._asdict().items()}
    return {name: part for name, part in parts.items() if part is not None and part.requires_grad}


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
                if (mask.causal and s > t + keys - queries) or (
                    mask.key_padding is not None and mask.key_padding[b, s]
                ):
                    result[b, :, t, s] = True
    return result
