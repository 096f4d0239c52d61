"""Checkpoints of fairseq: loaded safely, with the metadata of every layer, and refused if they do not fit the model."""

import argparse
import collections
import functools
import os
import tarfile
import types
import typing
from collections.abc import Callable

import numpy
import omegaconf
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters
from numpy._core import multiarray

from fairseq_lowrank.messages import InvalidCheckpoint
from fairseq_lowrank.repairs import checkpoint_file


class Archive(tarfile.TarFile):
    """An archive whose members are unpacked below their folder only, without their rights and owners."""

    extraction_filter = staticmethod(tarfile.data_filter)


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
        raise InvalidCheckpoint(file.name, "it has no 'model' entry", "Give a file that fairseq-train wrote.")
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


def unpack_within_the_folder(tarfile_module: types.ModuleType) -> types.SimpleNamespace:
    """Return a stand-in for ``tarfile``, with which ``from_pretrained`` unpacks an archive only below its folder."""
    return types.SimpleNamespace(open=Archive.open)
