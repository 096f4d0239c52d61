"""What a saved layer means. Weights of one shape can mean different things: 4 heads or 8, embeddings added or multiplied.

So a state says what its layer computed, beside the version that torch keeps of each module; states of other code do not.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_lowrank.attention.spec import AXES

_MIXINGS = ("score_mixing", "mixing")  # axes, and the modules of a layer that hold their parameters


class SavedWithMeaning(nn.Module):
    """A layer whose state has its meaning beside it, and is refused by layers of another one."""

    def _meaning(self) -> dict[str, int | str]:
        """Heads, sizes and choices."""
        sizes = self.projection.sizes
        named = {name: getattr(self.spec, name) for name, axis in AXES.items() if axis.choices is not None}
        return {
            "num_heads": sizes.num_heads,
            "head_dim": sizes.head_dim,
            "value_dim": sizes.value_dim,
            "key_value_heads": sizes.key_value_heads or sizes.num_heads,
            **named,
            **self.score.meaning,
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["attention"] = self._meaning()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        saved = local_metadata.get("attention", {})
        if saved:  # what the first states do not say
            sizes = {"value_dim": saved.get("head_dim"), "key_value_heads": saved.get("num_heads")}
            saved = {**sizes, "score": "dot-product", "score_mixing": "none", **saved}
        part_projections(state_dict, prefix)
        self._start_mixing(state_dict, prefix, saved)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for name, ours in self._meaning().items():
            theirs = saved.get(name, ours)
            # Mixing that is learned starts as the identity: what had none goes on.
            if theirs == ours or (name in _MIXINGS and theirs == "none" and list(getattr(self, name).parameters())):
                continue
            errors.append(f"{prefix[:-1]} was saved with {name}={theirs} and is loaded with {ours}")

    # Here and not when fairseq upgrades the checkpoint, which is before it renumbers the layers it keeps of it.
    def _start_mixing(self, state_dict: dict[str, Tensor], prefix: str, saved: dict[str, int | str]) -> None:
        """Give a state that never had mixing this layer's start. What another state lacks is lost, and stays missing.

        Args:
            saved: what the state says it was saved with; empty in states of other code, such as fairseq's, which never had
                mixing if they have nothing of it.
        """
        modules = {axis: getattr(self, axis) for axis in _MIXINGS if getattr(self, axis) is not None}
        starts = {axis: module.state_dict(prefix=f"{prefix}{axis}.") for axis, module in modules.items()}
        of_other_code = not saved and not any(state_dict.keys() & start.keys() for start in starts.values())
        for axis, start in starts.items():
            if of_other_code or saved.get(axis) == "none":
                for name, tensor in start.items():
                    state_dict.setdefault(name, tensor)


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
