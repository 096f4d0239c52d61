"""Checkpoints: loaded safely, whole on every worker, and refused in one line where they do not fit."""

import argparse
import collections
import contextlib
import functools
import gzip
import logging
import lzma
import os
import pickle
import re
import tarfile
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils, models
from fairseq.data import Dictionary
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters

from fairseq_lowrank.archives import Archive
from fairseq_lowrank.attention import states
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin import checkpoint_file

COMPONENTS = {"encoder": models.FairseqEncoder, "decoder": models.FairseqDecoder}

# Since 2.6 torch.load reads weights only and refuses the classes that fairseq checkpoints hold. The
# usual answer, switching that safety off, lets a checkpoint run any code.
CHECKPOINT_CLASSES = [
    argparse.Namespace,  # the arguments of models without a dataclass
    # numpy arrays in the meters of --eval-bleu, under their name in numpy 2 and in numpy 1
    numpy.ndarray,
    numpy.dtype,
    *(numpy.dtypes.Int64DType, numpy.dtypes.Float64DType, numpy.dtypes.Float32DType, numpy.dtypes.BoolDType),
    numpy._core.multiarray._reconstruct,
    (numpy._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
    # scores that a checkpoint was chosen by, where a task computes them with numpy
    numpy._core.multiarray.scalar,
    (numpy._core.multiarray.scalar, "numpy.core.multiarray.scalar"),
    Dictionary,  # in the states of fairseq's tasks for speech
    # meters, in old public checkpoints
    meters.AverageMeter,
    meters.TimeMeter,
    meters.StopwatchMeter,
    (meters.AverageMeter, "fairseq.meters.AverageMeter"),
    (meters.TimeMeter, "fairseq.meters.TimeMeter"),
    (meters.StopwatchMeter, "fairseq.meters.StopwatchMeter"),
    # configurations, in checkpoints of 2020 and 2021 and in what workers send one another on resuming
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

# what torch raises on a file that it cannot read, and fairseq on a state in which it does not find its way
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, IndexError, TypeError, AttributeError, AssertionError)
UNREADABLE += (OverflowError, UnicodeDecodeError, omegaconf.errors.OmegaConfBaseException)


def load_checkpoint(path: str | os.PathLike) -> dict:
    """What a checkpoint file holds, on the CPU, read safely and as it was saved: fairseq's upgrades are not applied.

    Raises:
        UserError: the file is damaged, no checkpoint, or holds what no checkpoint needs.
        OSError: there is no such file.
    """

    def load(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or "model" not in state:
            raise UserError(f"{path} is no fairseq checkpoint: it lacks 'model'")
        return state

    return safely(load)(path)


def broadcast_safely(broadcast: Callable) -> Callable:
    """Let workers that resume send one another :data:`CHECKPOINT_CLASSES`."""

    @functools.wraps(broadcast)
    def _broadcast_object_slow(*args, **kwargs):
        with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
            return broadcast(*args, **kwargs)

    return _broadcast_object_slow


def safely(load: Callable[..., dict]) -> Callable[..., dict]:
    """``load(path, …)`` of a checkpoint, refused in one line where the file is not one."""

    @functools.wraps(load)
    def load_safely(path, *args, **kwargs):
        try:
            checkpoint_file.check(PathManager.get_local_path(os.fspath(path)))
            with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
                return load(path, *args, **kwargs)
        except checkpoint_file.Unsafe as error:
            raise UserError(refusal(path, str(error))) from error
        except checkpoint_file.Unfit as error:
            raise UserError(f"{path} cannot be read as a checkpoint: {error}") from error
        except (
            KeyError,
            AttributeError,
        ) as error:  # fairseq's upgrade of old checkpoints takes what it needs for granted
            raise UserError(f"{path} is no fairseq checkpoint: it lacks {error.args[0]!r}") from error
        except (pickle.UnpicklingError, RuntimeError, EOFError, IndexError, TypeError) as error:
            unsafe = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", str(error))
            raise UserError(refusal(path, unsafe[1] if unsafe else None)) from error

    return load_safely


def refusal(path: str | os.PathLike, unsafe: str | None) -> str:
    """The message for a checkpoint that did not load. torch's own advises to switch the safety off."""
    if unsafe is not None:
        return (
            f"{path} was not loaded: it holds {unsafe}, which has no place in a fairseq checkpoint and could run "
            "code while loading. If you trust the file, convert it where it was written."
        )
    return f"{path} cannot be read as a checkpoint: it is damaged, cut short or another kind of file"


# fairseq sends what one worker has loaded to the others as plain dictionaries, in which a state of a model no longer
# says what its layers computed.
def rebuild_with_metadata(rebuild: Callable) -> Callable:
    """Let the state of a model reach every worker with its metadata, without which no layer can refuse it."""

    @functools.wraps(rebuild)
    def rebuild_whole(obj, tensors):
        rebuilt = rebuild(obj, tensors)
        if isinstance(obj, collections.OrderedDict):
            rebuilt = collections.OrderedDict(rebuilt)
            vars(rebuilt).update(vars(obj))
        return rebuilt

    return rebuild_whole


# from_pretrained unpacks an archive of a model as it comes: over files elsewhere, if its members say so.
def unpack_within_the_folder(tarfile_module: types.ModuleType) -> types.SimpleNamespace:
    """Let ``from_pretrained`` unpack an archive below its folder only."""
    return types.SimpleNamespace(open=Archive.open)


def name_damaged_archives(load: Callable) -> Callable:
    """Let ``from_pretrained`` refuse an archive that does not unpack in one line."""

    @functools.wraps(load)
    def load_archive_file(archive_file):
        try:
            return load(archive_file)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
            raise UserError(f"{archive_file} is no archive of a model, or a damaged one: {error}") from error

    return load_archive_file


class WholeState(collections.OrderedDict):
    """A state that hands its metadata on to its copies, which an ``OrderedDict`` does not."""

    def __init__(self, tensors: Mapping, metadata: Mapping) -> None:
        super().__init__(tensors)
        self._metadata = collections.OrderedDict(metadata)

    def copy(self) -> "WholeState":
        return WholeState(self, self._metadata)


# Where only some layers are kept (--encoder-layers-to-keep) fairseq makes a new dictionary of their tensors, and others where it
# takes the average of the weights (--store-ema) as the model, one component of a model (--load-pretrained-encoder-from), or the
# languages of a multilingual one that are trained.
def prune_with_metadata(prune: Callable) -> Callable:
    """Let the metadata of a state be renumbered together with the layers that are kept."""

    @functools.wraps(prune)
    def prune_state_dict(state_dict, model_cfg):
        metadata = getattr(state_dict, "_metadata", {})
        of_modules = {f"{module}.": kept for module, kept in metadata.items()}  # no tensor's name ends so
        pruned = prune(whole := {**state_dict, **of_modules}, model_cfg)
        if pruned is whole:
            return state_dict
        tensors = {name: value for name, value in pruned.items() if not name.endswith(".")}
        return WholeState(tensors, {name[:-1]: value for name, value in pruned.items() if name.endswith(".")})

    return prune_state_dict


def load_average_with_metadata(load_average: Callable) -> Callable:
    """Let an average of the weights (``--store-ema``) keep the metadata of the model's state."""

    @functools.wraps(load_average)
    def load_ema_from_checkpoint(path):
        state = load_average(path)
        if metadata := getattr(state["extra_state"]["ema"], "_metadata", None):
            state["model"]._metadata = metadata
        return state

    return load_ema_from_checkpoint


def load_component_with_metadata(load_component: Callable) -> Callable:
    """Let the state of one component of a model keep its metadata."""

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
        with explained():
            component.load_state_dict(WholeState(part, metadata), strict=strict)
        return component

    return load_pretrained_component_from_model


def load_languages_with_metadata(load_languages: Callable) -> Callable:
    """Let a multilingual model keep the metadata of a state of which it loads some languages."""

    @functools.wraps(load_languages)
    def load_state_dict(self, state_dict, strict=True, model_cfg=None):
        whole = WholeState(state_dict, getattr(state_dict, "_metadata", {}))
        return load_languages(self, whole, strict, model_cfg)

    return load_state_dict


# fairseq's layers do not look at what a state says of the layer that it was saved by, and weights of another activation, or
# of other heads, may fit.
def refuse_states_of_other_attention(load: Callable) -> Callable:
    """Let fairseq's own attention refuse the states of this package's that compute something else."""

    @functools.wraps(load)
    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        load(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        errors += states.differences(
            prefix, states.saved_meaning(local_metadata), states.plain_meaning(self.num_heads, self.head_dim)
        )

    return _load_from_state_dict


# torch lists every parameter that differs, in as many lines, and fairseq's trainer buries them under a second traceback.
def explain_unfit_checkpoints(load: Callable) -> Callable:
    """Say in one line how a checkpoint differs from the model."""

    @functools.wraps(load)
    def load_state_dict(self, *args, **kwargs):
        with explained():
            return load(self, *args, **kwargs)

    return load_state_dict


class Unfit(UserError, RuntimeError):
    """A state does not fit. Programs, some of fairseq's models among them, catch torch's RuntimeError and go on with what fits."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Let torch's error about a state that does not fit say so in one line, as :class:`Unfit`."""
    try:
        yield
    except RuntimeError as error:
        if difference := differences(str(error)):
            raise Unfit(difference) from error
        raise


# fairseq's RoBERTa leaves out the heads for classes of a checkpoint that its model has not; it does not know that for questions.
def drop_heads_for_questions(upgrade: Callable) -> Callable:
    """Let a model that was fine-tuned on questions be fine-tuned on another task."""

    @functools.wraps(upgrade)
    def upgrade_state_dict_named(self, state_dict, name):
        upgrade(self, state_dict, name)
        head = f"{name}.span_head." if name else "span_head."
        if not hasattr(self, "span_head") and (lost := [key for key in state_dict if key.startswith(head)]):
            logging.getLogger(__name__).warning(
                "leaving out the checkpoint's head for questions, which this task has not"
            )
            for key in lost:
                del state_dict[key]

    return upgrade_state_dict_named


def differences(message: str) -> str | None:
    """What torch's ``message`` about a state that does not fit a model comes down to, or None if it is about other things."""

    def count(names: list[str]) -> str:
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    found, lost = [], []
    for kind, owner in ("Unexpected", "checkpoint"), ("Missing", "model"):
        if listed := re.search(rf"{kind} key\(s\) in state_dict: (.*)", message):
            names = re.findall(r'"([^"]+)"', listed[1])
            found.append(f"only the {owner} has {count(names)}")
            lost = names if kind == "Missing" and all(re.search(r"\b(score_)?mixing\.", name) for name in names) else []
    shapes = re.findall(r"size mismatch for (\S+): .*?Size\((.*?)\) from checkpoint.*?Size\((.*?)\)", message)
    if shapes:
        name, theirs, ours = shapes[0]
        more = f", and {len(shapes) - 1} more differ" if len(shapes) > 1 else ""
        found.append(f"{name} is {theirs} in the checkpoint and {ours} in the model{more}")
    # a state that never had mixing misses none of it
    if lost and len(found) == 1 and not re.search("was saved with (score_)?mixing=", message):
        return f"The checkpoint is damaged: it has lost {count(lost)}, which it was saved with"
    # of weights that fit, the layers of attention say what else is different
    if not found and (meanings := re.findall(r"(\S+) was saved with (\S+) and is loaded with (\S+)", message)):
        name, theirs, ours = meanings[0]
        found.append(f"{name} was saved with {theirs} and is built with {ours}")
    if not found:
        return None
    return f"The checkpoint is of another model: {'; '.join(found)}. Give the flags that it was trained with"
