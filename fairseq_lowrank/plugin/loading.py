"""Checkpoints of fairseq: loaded safely, with the metadata of every layer, and refused if they do not fit the model."""

import argparse
import collections
import contextlib
import functools
import logging
import os
import tarfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping

import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils, models, utils
from fairseq.data import Dictionary
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters
from numpy._core import multiarray

from fairseq_lowrank.attention import states
from fairseq_lowrank.messages import InvalidCheckpoint, StateDictMismatch
from fairseq_lowrank.plugin import checkpoint_file


class Archive(tarfile.TarFile):
    """An archive whose members are unpacked below their folder only, without their rights and owners."""

    extraction_filter = staticmethod(tarfile.data_filter)


COMPONENTS = {"encoder": models.FairseqEncoder, "decoder": models.FairseqDecoder}

# The classes that checkpoints of fairseq contain. Without a list, torch.load(weights_only=True) refuses them.
CHECKPOINT_CLASSES = [
    argparse.Namespace,  # the arguments of models without a dataclass
    # numpy arrays in the meters of --eval-bleu, under their name in numpy 2 and in numpy 1
    numpy.ndarray,
    numpy.dtype,
    *(numpy.dtypes.Int64DType, numpy.dtypes.Float64DType, numpy.dtypes.Float32DType, numpy.dtypes.BoolDType),
    multiarray._reconstruct,
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    # scores that a checkpoint was chosen by, if a task computes them with numpy
    multiarray.scalar,
    (multiarray.scalar, "numpy.core.multiarray.scalar"),
    Dictionary,  # in the states of fairseq's tasks for speech
    # meters, in old public checkpoints
    meters.AverageMeter,
    meters.TimeMeter,
    meters.StopwatchMeter,
    (meters.AverageMeter, "fairseq.meters.AverageMeter"),
    (meters.TimeMeter, "fairseq.meters.TimeMeter"),
    (meters.StopwatchMeter, "fairseq.meters.StopwatchMeter"),
    # configurations: in checkpoints of 2020 and 2021, and in objects that workers exchange when they resume
    omegaconf.DictConfig,
    omegaconf.ListConfig,
    omegaconf.base.ContainerMetadata,
    omegaconf.base.Metadata,
    omegaconf.nodes.AnyNode,
    typing.Any,
    collections.defaultdict,
    dict,
    list,
    int,
    distributed_utils._TensorPlaceholder,
]


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Return the content of a checkpoint file as it was saved, on the CPU, without fairseq's upgrades.

    Raises:
        InvalidCheckpoint: the file is damaged, not a checkpoint, or contains what no checkpoint needs.
        OSError: the file does not exist.
    """
    with PathManager.open(os.fspath(path), "rb") as file:
        return load_file(file)


def load_file(file: typing.BinaryIO, **options: object) -> dict:
    """Return the content of an opened checkpoint, see :func:`load_checkpoint`; options of ``torch.load`` are ignored."""
    state = checkpoint_file.load(file, CHECKPOINT_CLASSES)
    if not isinstance(state, dict) or "model" not in state:
        raise InvalidCheckpoint(file.name, "it has no 'model' entry")
    return state


def load_safely(torch_module: types.ModuleType) -> types.ModuleType:
    """Return torch with :func:`load_file` as its ``load``, for fairseq's functions that load checkpoints."""
    safe = types.ModuleType(torch_module.__name__)
    vars(safe).update(__getattr__=functools.partial(getattr, torch_module), load=load_file)
    return safe


def broadcast_safely(broadcast: Callable) -> Callable:
    """Wrap ``_broadcast_object_slow``: workers that resume may exchange objects of :data:`CHECKPOINT_CLASSES`."""

    @functools.wraps(broadcast)
    def _broadcast_object_slow(*args, **kwargs):
        with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
            return broadcast(*args, **kwargs)

    return _broadcast_object_slow


def read_old_arguments(upgrade: Callable) -> Callable:
    """Wrap ``_upgrade_state_dict``: accept other types in old arguments, such as ``lr="0.001"`` or no largest length."""

    @functools.wraps(upgrade)
    def _upgrade_state_dict(state):
        arguments = vars(state.get("args") or argparse.Namespace())
        for name, kind in {"lr": float, "update_freq": int}.items():
            if name in arguments:
                arguments[name] = utils.eval_str_list(arguments[name], type=kind)
        for name in ("max_positions", "max_source_positions", "max_target_positions"):
            if arguments.get(name, 0) is None:
                del arguments[name]  # fairseq has a default
            elif isinstance(arguments.get(name), str | float):
                arguments[name] = int(float(arguments[name]))
        return upgrade(state)

    return _upgrade_state_dict


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


def unpack_within_the_folder(tarfile_module: types.ModuleType) -> types.SimpleNamespace:
    """Return a stand-in for ``tarfile``, with which ``from_pretrained`` unpacks an archive only below its folder."""
    return types.SimpleNamespace(open=Archive.open)


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
