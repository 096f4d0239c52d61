"""What a saved layer means. Weights of one shape can mean different things: 4 heads or 8, embeddings added or multiplied.

So a state says what its layer computed, beside the version that torch keeps of each module; states of other code do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_lowrank.attention.spec import AXES, AttentionSpec
from fairseq_lowrank.messages import StateDictMismatch

_MIXINGS = ("score_mixing", "mixing")  # axes, and the modules of a layer that hold their parameters


class SavedWithMeaning(nn.Module):
    """A layer whose state has its meaning beside it, and is refused by layers of another one."""

    def keep_mixing_starts(self, builders: dict[str, Callable[[int, int], nn.Module | None]]) -> None:
        """Keep how mixing starts, for states that had none: what the layer holds is another thing once it was trained, and
        nothing at all after ``to_empty``. Where it was made without values (on 'meta'), a start is made for this."""
        self._mixing_starts = {}
        for axis, build in builders.items():
            module = getattr(self, axis)
            if module is not None and any(tensor.is_meta for tensor in module.state_dict().values()):
                with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # as on meta, no number is drawn
                    module = build(self.num_heads, self.head_dim)
            if module is not None:
                start = module.state_dict()
                self._mixing_starts[axis] = {name: tensor.detach().clone() for name, tensor in start.items()}

    def _meaning(self) -> dict[str, int | str | bool]:
        """Heads, sizes and choices."""
        sizes = self.projection.sizes
        named = {name: getattr(self.spec, name) for name, axis in AXES.items() if axis.choices is not None}
        return {
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim,
            "key_value_heads": sizes.key_value_heads or sizes.num_heads,
            "add_zero_attn": self.add_zero_attn,
            **named,
            **self.score.meaning,
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["attention"] = self._meaning()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        saved = saved_meaning(local_metadata)
        # Mixing that is learned starts as the identity, so a state that had none may load.
        learned = {
            name for name in _MIXINGS if getattr(self, name) is not None and list(getattr(self, name).parameters())
        }
        starts = {name for name in learned if saved.get(name) == "none"}
        check_settings(prefix, saved, {name: value for name, value in self._meaning().items() if name not in starts})
        part_projections(state_dict, prefix)
        self._start_mixing(state_dict, prefix, saved)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    # Here and not when fairseq upgrades the checkpoint, which is before it renumbers the layers it keeps of it.
    def _start_mixing(self, state_dict: dict[str, Tensor], prefix: str, saved: dict[str, int | str]) -> None:
        """Give a state that never had mixing this layer's start. What another state lacks is lost, and stays missing.

        Args:
            saved: what the state says it was saved with; empty in states of other code, such as fairseq's, which never had
                mixing if they have nothing of it.
        """
        starts = {
            axis: {f"{prefix}{axis}.{name}": tensor for name, tensor in start.items()}
            for axis, start in self._mixing_starts.items()
        }
        of_other_code = not saved and not any(state_dict.keys() & start.keys() for start in starts.values())
        for axis, start in starts.items():
            if of_other_code or saved.get(axis) == "none":
                for name, tensor in start.items():
                    state_dict.setdefault(name, tensor.clone())


def saved_meaning(metadata: dict) -> dict[str, int | str]:
    """What a state says that a layer computed, with what the first states do not say; empty in states of other code."""
    saved = metadata.get("attention", {})
    if not saved:
        return {}
    sizes = {"value_dim": saved.get("head_dim"), "key_value_heads": saved.get("num_heads")}
    return {**sizes, "score": "dot-product", "score_mixing": "none", **saved}


def plain_meaning(num_heads: int, head_dim: int) -> dict[str, int | str]:
    """Of fairseq's own attention."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "value_dim": head_dim, "key_value_heads": num_heads}
    return sizes | {name: getattr(AttentionSpec(), name) for name, axis in AXES.items() if axis.choices is not None}


def check_settings(prefix: str, saved: dict[str, int | str], current: dict[str, int | str]) -> None:
    """Check that a layer has the settings of the layer that was saved.

    Raises:
        StateDictMismatch: it has others, which the fields ``saved`` and ``current`` name.
    """
    if differing := [name for name, value in current.items() if saved.get(name, value) != value]:
        raise StateDictMismatch(
            prefix.removesuffix(".") or "the layer",
            {name: saved[name] for name in differing},
            {name: current[name] for name in differing},
        )


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
