"""What a saved layer means. Weights of one shape can mean different things: 4 heads or 8, embeddings added or multiplied.

So a state says what its layer computed, beside the version that torch keeps of each module; states of other code do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fairseq_lowrank.attention.spec import AXES

if TYPE_CHECKING:
    from fairseq_lowrank.attention.layer import MultiheadAttention

Meaning = dict[str, int | str]

_MIXINGS = ("score_mixing", "mixing")  # axes, and the modules of a layer that hold their parameters


def meaning(layer: MultiheadAttention) -> Meaning:
    """Heads, sizes and choices of a layer."""
    sizes = layer.projection.sizes
    named = {name: getattr(layer.spec, name) for name, axis in AXES.items() if axis.choices is not None}
    return {
        "num_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "value_dim": sizes.value_dim,
        "key_value_heads": sizes.key_value_heads or sizes.num_heads,
        **named,
    }


def differences(layer: MultiheadAttention, saved: Meaning) -> list[str]:
    """What a state says that this layer does not mean, as ``name=theirs and is loaded with ours``."""
    found = []
    if saved:  # what the first states do not say
        sizes = {"value_dim": saved.get("head_dim"), "key_value_heads": saved.get("num_heads")}
        saved = {**sizes, "score_mixing": "none", **saved}
    for name, ours in meaning(layer).items():
        theirs = saved.get(name, ours)
        # mixing that is learned starts as the identity: what had none goes on
        if theirs != ours and not (name in _MIXINGS and theirs == "none" and list(getattr(layer, name).parameters())):
            found.append(f"{name}={theirs} and is loaded with {ours}")
    return found


# When a state is loaded and not when fairseq upgrades the checkpoint, which is before it renumbers the layers it keeps of it.
def start_mixing(layer: MultiheadAttention, state_dict: dict[str, Tensor], prefix: str, saved: Meaning) -> None:
    """Give a state that never had mixing this layer's start. What another state lacks is lost, and stays missing.

    Args:
        saved: empty for states of other code, such as fairseq's.
    """
    for axis in _MIXINGS:
        module = getattr(layer, axis)
        starts = {} if module is None else module.state_dict(prefix=f"{prefix}{axis}.")
        # Our own states of before an axis never had it.
        mixing = saved.get(axis, "none" if saved else None)
        if mixing == "none" or (mixing is None and not starts.keys() & state_dict.keys()):
            for name, start in starts.items():
                state_dict.setdefault(name, start)


def part_projections(state_dict: dict[str, Tensor], prefix: str) -> None:
    """Give the projections of old fairseq checkpoints and of ``torch.nn.MultiheadAttention`` the names of ours."""
    for kind in ("weight", "bias"):
        joint = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        parts = () if joint is None else joint.chunk(3)
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=False):
            state_dict[f"{prefix}{projection}.{kind}"] = part
    for projection in ("q_proj", "k_proj", "v_proj"):
        if f"{prefix}{projection}_weight" in state_dict:
            state_dict[f"{prefix}{projection}.weight"] = state_dict.pop(f"{prefix}{projection}_weight")
