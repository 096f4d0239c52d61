"""The configuration of an attention layer in its state dict.

The same shapes are valid for different configurations: 4 heads or 8, embeddings added or multiplied. So a state carries the
configuration of each layer, next to the version that torch keeps of each module. States of other code have none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_lowrank.messages import IMPORT_PLUGIN, StateDictMismatch, UserError
from fairseq_lowrank.parts import AXES, SLOTS

StateConfig = dict[str, int | float | str | bool]
"""Sizes and choices of a layer, by name."""


_WITHOUT: StateConfig = {"qk_norm": False, "rotary": False}
"""The options of states that are older than these options."""
_FORMULAS = tuple(axis for axis, slot in SLOTS.items() if not slot.holds_tensors)
"""The axes whose values have no tensors."""


class AttentionConfigInStateDict:
    """Writes the configuration of a layer into its states, and compares it with that of a loaded state.

    Args:
        config: of the layer.
        initial: the state in which each part starts that a state may lack, by the axis of the part.
        learned: the axes of these parts that have parameters.
        without_tensors: the names of settings that no tensor of this layer shows, next to choices that never have one.

    Attributes:
        markers: the name of a further tensor for each of these settings that is not fairseq's, such as ``activation_sigsoftmax``.
            Other code, which does not read the configuration, refuses a state with such a tensor.
    """

    def __init__(
        self,
        config: StateConfig,
        initial: dict[str, dict[str, Tensor]],
        learned: frozenset[str],
        without_tensors: Sequence[str] = (),
    ) -> None:
        self.config, self.initial, self.learned = config, initial, learned
        plain = default_config(0, 0)
        changed = [name for name in (*_FORMULAS, *without_tensors) if config[name] != plain[name]]
        self.markers = tuple(f"{name}_{config[name]}".lower().replace("-", "_") for name in changed)

    def save(self, destination: dict[str, Any], prefix: str) -> None:
        """Write the configuration into the metadata of a state."""
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["attention"] = {
                name: value for name, value in self.config.items() if not _is_default_choice(name, value)
            }

    def prepare(self, state_dict: dict[str, Tensor], prefix: str, metadata: dict[str, Any], layer: nn.Module) -> None:
        """Check that a state fits this layer, and give it the names and the parts of this layer.

        Raises:
            StateDictMismatch: the state was saved by a layer with other settings.
            UserError: it was saved with an option that is unknown here.
        """
        saved = config_from_metadata(metadata)
        # These parts are initialised to the identity, so a state without one may continue with it and its options.
        continued = {axis for axis in self.learned if saved.get(axis) == AXES[axis].default}
        options = {name for name, axis in AXES.items() if axis.readers and dict(axis.readers).keys() <= continued}
        current = {name: value for name, value in self.config.items() if name not in continued | options}
        check_settings(prefix, saved, current)
        listed = metadata.get("attention", {})
        refuse_unknown_options(listed, listed.keys() - AXES.keys() - self.config.keys())
        split_in_proj(state_dict, prefix)
        self._fill_missing_parts(state_dict, prefix, saved, layer)
        for name in self.markers:  # older states and states of other code have none
            state_dict.setdefault(prefix + name, torch.zeros(1))

    # Not when fairseq upgrades a checkpoint: that is before it renumbers the layers that it keeps.
    def _fill_missing_parts(
        self, state_dict: dict[str, Tensor], prefix: str, saved: StateConfig, layer: nn.Module
    ) -> None:
        """Give a state that never had a part this layer's initial one. Other missing tensors stay missing.

        A state that lacks other parameters of the layer too, such as that of an adapter, says nothing of the part: the part stays.

        Args:
            saved: the configuration of the state. It is empty in states of other code, such as fairseq's; they never had parts
                if they have no tensor of them.
        """
        parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
        own = [f"{prefix}{name}" for name in parameters if name.partition(".")[0] not in self.initial]
        if not own or not state_dict.keys() >= {*own}:  # a quantised layer has no parameters
            return
        tensors = parameters | buffers  # a part that another library has wrapped has other names
        initial = {
            axis: {f"{prefix}{axis}.{name}": value for name, value in values.items() if f"{axis}.{name}" in tensors}
            for axis, values in self.initial.items()
        }
        of_other_code = not saved and not any(state_dict.keys() & values.keys() for values in initial.values())
        for axis, values in initial.items():
            if of_other_code or saved.get(axis) == AXES[axis].default:
                for name, value in values.items():
                    state_dict.setdefault(name, value.to(state_dict[own[0]].device, copy=True))


def record_initial_states(
    modules: Mapping[str, nn.Module | None], build: Callable[[str], nn.Module | None]
) -> dict[str, dict[str, Tensor]]:
    """Return copies of the states in which parts start, by axis.

    A layer that was trained, or emptied with ``to_empty``, no longer has them. A module on the meta device has no values, so
    another one is built on the CPU.

    Args:
        modules: the parts of a layer, by axis.
        build: builds the module of an axis again.
    """
    initial = {}
    for axis, module in modules.items():
        if module is not None and any(tensor.is_meta for tensor in module.state_dict().values()):
            with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # as on meta, no number is drawn
                module = build(axis)
        if module is not None:
            initial[axis] = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return initial


def config_from_metadata(metadata: dict[str, Any]) -> StateConfig:
    """Return the configuration in the metadata of a state, with defaults for later axes; empty in states of other code."""
    saved = metadata.get("attention", {})
    if not saved:
        return {}
    sizes = {"value_dim": saved.get("head_dim"), "key_value_heads": saved.get("num_heads")}
    # The first states had choices without tensors and did not record them, so these have no default.
    later = {name: value for name, value in _default_choices().items() if name not in _FORMULAS}
    return {**sizes, **_WITHOUT, **later, **saved}


def without_default_options(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices without the options of parts at their defaults, so that a file needs no plugin that it does not use."""
    return {name: value for name, value in choices.items() if not _is_default_option(name, value)}


def _is_default_option(name: str, value: object) -> bool:
    return name in AXES and bool(AXES[name].readers) and value == AXES[name].default


def _is_default_choice(name: str, value: object) -> bool:
    """Return True for the default of an option with named values; a number's default may be another one in a later version."""
    return _is_default_option(name, value) and AXES[name].choices is not None


def refuse_unknown_options(saved: Mapping[str, Any], unknown: Collection[str]) -> None:
    """Refuse choices with unknown options that change what is computed.

    Version 0.2.0 saved every registered option with named values, so an unknown one is at its default there: it belongs to a part of a plugin, and
    an unknown part is refused by its name. Later versions save such an option only if it is not at its default.

    Args:
        saved: the choices of a file.
        unknown: the names among them that are not known here.

    Raises:
        UserError: an unknown option changes what is computed.
    """
    if unknown and not any(_is_default_choice(name, value) for name, value in saved.items()):
        name = min(unknown)
        raise UserError(f"saved with {name}={saved[name]!r}, an option that is unknown here. {IMPORT_PLUGIN}")


def default_config(num_heads: int, head_dim: int) -> StateConfig:
    """Return the configuration of fairseq's own attention."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "value_dim": head_dim, "key_value_heads": num_heads}
    return sizes | _WITHOUT | _default_choices()


def _default_choices() -> dict[str, Any]:
    return {name: axis.default for name, axis in AXES.items() if axis.choices is not None}


def check_settings(prefix: str, saved: StateConfig, current: StateConfig) -> None:
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


def split_in_proj(state_dict: dict[str, Tensor], prefix: str) -> None:
    """Rename and split the projections of old fairseq checkpoints and of ``torch.nn.MultiheadAttention``."""
    for kind in ("weight", "bias"):
        joint = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        parts = () if joint is None else joint.chunk(3)
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=False):
            state_dict[f"{prefix}{projection}.{kind}"] = part
    for projection in ("q_proj", "k_proj", "v_proj"):
        if f"{prefix}{projection}_weight" in state_dict:
            state_dict[f"{prefix}{projection}.weight"] = state_dict.pop(f"{prefix}{projection}_weight")
