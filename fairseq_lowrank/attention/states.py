"""What a saved layer means. Weights of one shape can mean different things: 4 heads or 8, embeddings added or multiplied.

So a state says what its layer computed, beside the version that torch keeps of each module; states of other code do not.
"""

from __future__ import annotations

from torch import Tensor, nn

from fairseq_lowrank.attention.spec import AXES


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
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["attention"] = self._meaning()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        saved = local_metadata.get("attention", {})
        if saved:  # what the first states do not say
            saved = {"value_dim": saved.get("head_dim"), "key_value_heads": saved.get("num_heads"), **saved}
        part_projections(state_dict, prefix)
        self._start_mixing(state_dict, prefix, saved.get("mixing"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for name, ours in self._meaning().items():
            theirs = saved.get(name, ours)
            # mixing that is learned starts as the identity: what had none goes on
            if theirs != ours and not (name == "mixing" and theirs == "none" and list(self.mixing.parameters())):
                errors.append(f"{prefix[:-1]} was saved with {name}={theirs} and is loaded with {ours}")

    # Here and not when fairseq upgrades the checkpoint, which is before it renumbers the layers it keeps of it.
    def _start_mixing(self, state_dict: dict[str, Tensor], prefix: str, saved: str | None) -> None:
        """Give a state that never had mixing this layer's start. What another state lacks is lost, and stays missing.

        Args:
            saved: the mixing that the state says it was saved with; ``None`` in states of other code, such as fairseq's.
        """
        starts = {} if self.mixing is None else self.mixing.state_dict(prefix=f"{prefix}mixing.")
        if saved == "none" or (saved is None and not starts.keys() & state_dict.keys()):
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
