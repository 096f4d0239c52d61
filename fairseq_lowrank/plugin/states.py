"""States of models: the metadata of every layer goes with them, and a state that does not fit is refused by name."""

import argparse
import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from fairseq import checkpoint_utils, models
from fairseq.file_io import PathManager

from fairseq_lowrank.attention import states
from fairseq_lowrank.messages import StateDictMismatch
from fairseq_lowrank.repairs import dictionaries

COMPONENTS = {"encoder": models.FairseqEncoder, "decoder": models.FairseqDecoder}


def rebuild_with_metadata(rebuild: Callable) -> Callable:
    """Wrap a step of the broadcast to workers: a state dict keeps the metadata that layers check."""

    @functools.wraps(rebuild)
    def rebuild_whole(obj, tensors):
        rebuilt = rebuild(obj, tensors)
        if isinstance(obj, collections.OrderedDict):
            rebuilt = collections.OrderedDict(rebuilt)
            vars(rebuilt).update(vars(obj))
        return rebuilt

    return rebuild_whole


class StateDictWithMetadata(collections.OrderedDict):
    """A state dict that keeps its metadata when it is copied, which an ``OrderedDict`` does not."""

    def __init__(self, tensors: Mapping, metadata: Mapping) -> None:
        super().__init__(tensors)
        self._metadata = collections.OrderedDict(metadata)

    def copy(self) -> "StateDictWithMetadata":
        return StateDictWithMetadata(self, self._metadata)


def prune_with_metadata(prune: Callable) -> Callable:
    """Wrap ``prune_state_dict``: renumber the metadata of a state together with the layers that are kept."""

    @functools.wraps(prune)
    def prune_state_dict(state_dict, model_cfg):
        metadata = getattr(state_dict, "_metadata", {})
        of_modules = {f"{module}.": kept for module, kept in metadata.items()}  # no tensor's name ends with a dot
        pruned = prune(whole := {**state_dict, **of_modules}, model_cfg)
        if pruned is whole:
            return state_dict
        tensors = {name: value for name, value in pruned.items() if not name.endswith(".")}
        return StateDictWithMetadata(
            tensors, {name[:-1]: value for name, value in pruned.items() if name.endswith(".")}
        )

    return prune_state_dict


def load_average_with_metadata(load_average: Callable) -> Callable:
    """Wrap ``load_ema_from_checkpoint``: an average of the weights (``--store-ema``) keeps the metadata of the state."""

    @functools.wraps(load_average)
    def load_ema_from_checkpoint(path):
        state = load_average(path)
        if metadata := getattr(state["extra_state"]["ema"], "_metadata", None):
            state["model"]._metadata = metadata
        return state

    return load_ema_from_checkpoint


def load_component_with_metadata(load_component: Callable) -> Callable:
    """Wrap ``load_pretrained_component_from_model``: the state of one component keeps its metadata."""

    @functools.wraps(load_component)
    def load_pretrained_component_from_model(component, checkpoint, strict=True):
        kind = next((kind for kind, cls in COMPONENTS.items() if isinstance(component, cls)), None)
        if kind is None or not PathManager.exists(checkpoint):
            return load_component(component, checkpoint, strict)
        whole = checkpoint_utils.load_checkpoint_to_cpu(checkpoint)["model"]
        part, metadata = (
            {name[len(kind) + 1 :]: value for name, value in values.items() if name.startswith(kind)}
            for values in (whole, getattr(whole, "_metadata", {}))
        )
        if origin := getattr(whole, "_metadata", {}).get("", {}).get(dictionaries.ENTRY):
            dictionaries.check({kind: component.dictionary} if component.dictionary else {}, origin)
        with explain_mismatch(component):
            component.load_state_dict(StateDictWithMetadata(part, metadata), strict=strict)
        return component

    return load_pretrained_component_from_model


def load_languages_with_metadata(load_languages: Callable) -> Callable:
    """Wrap ``load_state_dict`` of a multilingual model: a state keeps its metadata if only some languages are loaded."""

    @functools.wraps(load_languages)
    def load_state_dict(self, state_dict, strict=True, model_cfg=None):
        whole = StateDictWithMetadata(state_dict, getattr(state_dict, "_metadata", {}))
        return load_languages(self, whole, strict, model_cfg)

    return load_state_dict


def refuse_states_of_other_attention(load: Callable) -> Callable:
    """Wrap loading of fairseq's own attention: refuse a state that was saved by attention with other settings."""

    @functools.wraps(load)
    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        current = states.default_config(self.num_heads, self.head_dim)
        states.check_settings(prefix, states.config_from_metadata(local_metadata), current)
        load(self, state_dict, prefix, local_metadata, *args)

    return _load_from_state_dict


def explain_unfit_checkpoints(load: Callable) -> Callable:
    """Wrap ``load_state_dict`` of models: raise :class:`StateDictMismatch` for a state that does not fit."""

    @functools.wraps(load)
    def load_state_dict(self, *args, **kwargs):
        with explain_mismatch(self):
            return load(self, *args, **kwargs)

    return load_state_dict


@contextlib.contextmanager
def explain_mismatch(module: torch.nn.Module) -> Iterator[None]:
    """Turn torch's error about a state that does not fit a module into a :class:`StateDictMismatch`.

    torch reports the differences only as text. Hooks of the module collect the saved shapes and the names instead.
    """
    saved: dict[str, tuple[int, ...]] = {}
    differing: list[tuple[str, object, object]] = []

    def collect_shapes(module, state_dict, *args):
        saved.update(shapes_of(state_dict))

    def collect_differences(module, keys):
        current = shapes_of(module.state_dict())
        shapes = [name for name, shape in saved.items() if current.get(name, shape) != shape]
        names = [*shapes, *keys.unexpected_keys, *keys.missing_keys]
        differing.extend((name, saved.get(name), current.get(name)) for name in names)

    hooks = (
        module.register_load_state_dict_pre_hook(collect_shapes),
        module.register_load_state_dict_post_hook(collect_differences),
    )
    try:
        yield
    except StateDictMismatch:
        raise
    except RuntimeError as error:  # torch raises it after it has loaded all modules
        if differing:
            raise StateDictMismatch(*differing[0], others=len(differing) - 1) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


def shapes_of(state_dict: Mapping) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a state dict, which may hold other values too."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state_dict.items()}


def drop_heads_for_questions(upgrade: Callable) -> Callable:
    """Wrap ``upgrade_state_dict_named``: a model fine-tuned on questions can be fine-tuned on another task."""

    @functools.wraps(upgrade)
    def upgrade_state_dict_named(self, state_dict, name):
        upgrade(self, state_dict, name)
        head = f"{name}.span_head." if name else "span_head."
        if not hasattr(self, "span_head") and (lost := [key for key in state_dict if key.startswith(head)]):
            logging.getLogger(__name__).warning("the checkpoint's head for questions is not loaded: this task has none")
            for key in lost:
                del state_dict[key]

    return upgrade_state_dict_named


def explain_what_cannot_resume(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: name a checkpoint that does not fit, and the flags that make it fit."""

    @functools.wraps(load)
    def load_training(self, filename, *args, **kwargs):
        try:
            return load(self, filename, *args, **kwargs)
        except Exception as error:
            # fairseq raises a plain Exception while it handles the model's
            mismatch = error if isinstance(error, StateDictMismatch) else error.__context__
            if not isinstance(mismatch, StateDictMismatch):
                raise
            mismatch.path = str(filename)
            if mismatch is not error and (flags := _differing_flags(filename, self.cfg.model)):
                own = Path(filename).parent == Path(self.cfg.checkpoint.save_dir)
                mismatch.remedy = f"Train with {', '.join(flags)}{', or with another --save-dir' if own else ''}."
            raise mismatch from None

    return load_training


def check_parameter_groups(load: Callable) -> Callable:
    """Wrap ``load_state_dict`` of optimizers: refuse a state for other parameters, such as a stock model's."""

    @functools.wraps(load)
    def load_state_dict(self, state_dict, optimizer_overrides=None):
        saved, current = (
            tuple(len(group["params"]) for group in groups)
            for groups in (state_dict["param_groups"], self.optimizer.param_groups)
        )
        if saved != current:
            remedy = "Add --reset-optimizer to load the model alone, and --reset-dataloader to begin with epoch 1."
            raise StateDictMismatch("the number of parameters in the optimizer's groups", saved, current, remedy=remedy)
        load(self, state_dict, optimizer_overrides)

    return load_state_dict


def _differing_flags(filename: str, model: argparse.Namespace | Mapping) -> list[str]:
    """Return the architecture and attention flags of a checkpoint that differ from those of ``model``, as typed."""
    from fairseq_lowrank.plugin.flags import FLAGS  # imports models, which need the patches

    configuration = checkpoint_utils.load_checkpoint_to_cpu(str(filename)).get("cfg") or {}
    saved, current = _options(configuration.get("model") or {}), _options(model)
    flags = []
    for name in ("arch", *FLAGS):
        value = saved.get(name)
        if value != current.get(name) and name not in ("attention_backend", "mixing_lr_scale"):
            flag = f"--{name.replace('_', '-')}"
            flags.append(f"no {flag}" if value in (None, False) else flag if value is True else f"{flag} {value}")
    return flags


def _options(model: argparse.Namespace | Mapping) -> dict:
    """Return the options of a model; a dataclass calls the architecture ``_name``."""
    return vars(model) if isinstance(model, argparse.Namespace) else {"arch": model.get("_name"), **model}
