"""Repairs of fairseq for current Python, torch and numpy: all of them here, each with its reason.

Seen with fairseq-fixed 0.12.3.1 (fairseq's main branch) on Python 3.11, torch 2.13 and numpy 2.4. :func:`apply`
runs once, when the plugin is imported, so a stock fairseq checkpoint too needs ``--user-dir`` to load.
"""

import argparse
import collections
import functools
import pickle
import types
import typing

import numpy
import omegaconf
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import meters
from fairseq.modules import dynamic_crf_layer


@functools.cache
def apply() -> None:
    """Apply every repair, once a process."""
    restore_numpy_names()
    load_checkpoints_safely()
    keep_bf16_off_tpus()


# numpy 2 dropped names that fairseq still uses. Can go when fairseq stops using them.
def restore_numpy_names() -> None:
    """Give ``np.int``, ``np.float`` and ``np.compat.long`` back to the fairseq modules that use them."""
    proxy = types.ModuleType("numpy")
    vars(proxy).update(vars(numpy), int=int, float=float, compat=types.SimpleNamespace(long=int))
    for module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
        module.np = proxy


# torch.load reads weights only by default since 2.6 and refuses the classes that fairseq checkpoints hold. The
# usual answer, switching that safety off, lets a checkpoint run any code.
CHECKPOINT_CLASSES = [
    argparse.Namespace,  # the arguments of models without a dataclass
    # numpy arrays in the meters of --eval-bleu, under their name in numpy 2 and in numpy 1
    numpy.ndarray,
    numpy.dtype,
    numpy.dtypes.Int64DType,
    numpy.dtypes.Float64DType,
    numpy._core.multiarray._reconstruct,
    (numpy._core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),
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


def load_checkpoints_safely() -> None:
    """Let fairseq load its own checkpoints, holding :data:`CHECKPOINT_CLASSES` and nothing else."""

    def safely(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
                return function(*args, **kwargs)

        return wrapper

    load = safely(checkpoint_utils.load_checkpoint_to_cpu)

    @functools.wraps(load)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        try:
            return load(path, *args, **kwargs)
        except pickle.UnpicklingError as error:
            raise ValueError(refusal(path, error)) from error

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu
    # workers that resume get the checkpoint's contents from the first one, as a pickle too
    distributed_utils._broadcast_object_slow = safely(distributed_utils._broadcast_object_slow)


def refusal(path: str, error: pickle.UnpicklingError) -> str:
    """The message for a checkpoint that torch refused to unpickle."""
    with torch.serialization.safe_globals(CHECKPOINT_CLASSES):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if not unsafe:
        return f"{path} cannot be read as a checkpoint: {error}"
    return (
        f"{path} was not loaded: it holds {', '.join(sorted(unsafe))}, which has no place in a fairseq "
        "checkpoint and could run code while loading. If you trust the file, convert it where it was written."
    )


# fairseq's argument parser takes --bf16 to mean "on a TPU" and then asks for torch_xla, on GPUs and CPUs too.
def keep_bf16_off_tpus() -> None:
    """Let ``--bf16`` train wherever torch can; a TPU has to be asked for by ``--tpu``."""
    parse = options.parse_args_and_arch

    @functools.wraps(parse)
    def parse_args_and_arch(parser, input_args=None, **kwargs):
        parsed = parse(parser, input_args=input_args, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(args, "bf16", False):
            asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            asked.add_argument("--tpu", action="store_true")
            args.tpu = asked.parse_known_args(input_args)[0].tpu
        return parsed

    options.parse_args_and_arch = parse_args_and_arch
