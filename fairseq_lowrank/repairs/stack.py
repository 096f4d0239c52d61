"""Repairs that let fairseq run on current Python, torch and numpy.

They are tested with fairseq-fixed 0.12.3.1 (fairseq's main branch) on Python 3.11, torch 2.13 and numpy 2.4.
"""

import atexit
import contextlib
import functools
import logging
import os
import queue
import time
import types
import warnings
import weakref
from collections.abc import Callable

import numpy
import torch
from fairseq.data.iterators import BackgroundConsumer

from fairseq_lowrank import linear

logger = logging.getLogger(__name__)


def with_old_names(module: types.ModuleType) -> types.ModuleType:
    """Return numpy with the names that numpy 2 dropped, for the modules of fairseq that use them."""

    def percentile(*args, interpolation, **kwargs):
        return numpy.percentile(*args, method=interpolation, **kwargs)

    proxy = types.ModuleType("numpy")
    vars(proxy).update(vars(numpy), int=int, float=float, compat=types.SimpleNamespace(long=int), percentile=percentile)
    return proxy


def watch_gradients_of_tensors(add_hooks: Callable) -> Callable:
    """Wrap ``NanDetector.add_hooks``: watch the gradients of a module's outputs by hooks of these tensors.

    torch's hook of a module fails if the output is a dictionary of lists, as that of an encoder is.
    """

    def tensors(output):
        if isinstance(output, torch.Tensor):
            yield output
        elif isinstance(output, (dict, list, tuple)):
            for part in output.values() if isinstance(output, dict) else output:
                yield from tensors(part)

    @functools.wraps(add_hooks)
    def add_hooks_of_tensors(self, module):
        def watch(module, inputs, output):
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self.bhook_fn, module, inputs))

        backward, self.backward = self.backward, False
        add_hooks(self, module)
        self.backward = backward
        if backward:
            self.fhooks.append(module.register_forward_hook(watch))

    return add_hooks_of_tensors


ON_CPU = "legacy_ddp", "no_c10d"
"""The values of --ddp-backend that work on the CPU, two names of one. fairseq passes device ids to pytorch_ddp."""


# Under torchrun, fairseq divides by the number of GPUs (by zero, on the CPU), or trains each worker by itself into the
# same folder when --distributed-world-size is 1, its default with fewer than two GPUs.
def join_torchrun(call_main: Callable) -> Callable:
    """Wrap ``call_main``: make the processes that torchrun starts workers of one training, on GPUs or on the CPU."""

    @functools.wraps(call_main)
    def joined(cfg, main, **kwargs):
        distributed = cfg.distributed_training
        if "TORCHELASTIC_RUN_ID" in os.environ and distributed.distributed_init_method is None:
            distributed.distributed_init_method = "env://"
            distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
            distributed.distributed_rank = int(os.environ["RANK"])
            distributed.distributed_no_spawn = True
            distributed.device_id = int(os.environ["LOCAL_RANK"])
            if cfg.common.cpu or not torch.cuda.is_available():
                cfg.common.cpu = True
                distributed.device_id = 0
                distributed.distributed_backend = "gloo"
                if distributed.ddp_backend not in ON_CPU:
                    if distributed.distributed_rank == 0:
                        logger.warning(
                            f"--ddp-backend {distributed.ddp_backend} needs a GPU; the workers use {ON_CPU[0]}"
                        )
                    distributed.ddp_backend = ON_CPU[0]
        return call_main(cfg, main, **kwargs)

    return joined


# A worker without a batch repeats its first one with weight 0. If that comes last in an update, fairseq takes the worker's other
# batches of the update for such ones too: their gradients count, and their tokens do not.
def count_every_batch(train_step: Callable) -> Callable:
    """Wrap ``Trainer.train_step``: a worker that has batches for a part of an update makes passes with these alone."""

    @functools.wraps(train_step)
    def train_on_own_batches(self, samples, raise_oom=False):
        # in each pass, workers of FSDP gather weights, and those of --base-layers exchange tokens
        if not (self.is_fsdp or getattr(self.cfg.model, "base_layers", 0)):
            samples = [sample for sample in samples if sample] or samples[:1]
        return train_step(self, samples, raise_oom)

    return train_on_own_batches


# fairseq reads batches ahead in a daemon thread. If a process ends before its data does (--max-update), Python kills that
# thread at its next step. Inside torch's code, this ends the process with an error although its work is done.
def end_reading_with_the_process(create: Callable, seconds: float = 10) -> Callable:
    """Wrap ``_create_consumer``: before a process ends, it waits up to ``seconds`` for the batch that is being read."""
    readers: weakref.WeakSet[BackgroundConsumer] = weakref.WeakSet()

    @functools.wraps(create)
    def _create_consumer(self):
        create(self)
        readers.add(self._consumer)

    def end() -> None:
        deadline = time.monotonic() + seconds
        for reader in list(readers):
            reader._max_len = 0  # this batch is the last one
            while reader.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get(timeout=0.01)  # the reader may wait for space in its queue

    atexit.register(end)
    return _create_consumer


def quieten_warnings() -> None:
    """Silence torch's warning about pinned memory without a GPU, and hydra's about fairseq's configuration."""
    warnings.filterwarnings("ignore", category=UserWarning, message="'pin_memory' argument is set as true")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra\.")
    warnings.filterwarnings("ignore", category=UserWarning, message=r"\n?'config' is validated against ConfigStore")


def multiply_by_onednn(original: Callable) -> Callable:
    """Return the linear function of oneDNN for ``torch.nn.functional.linear``, or with a warning torch's own."""
    if linear.is_available():
        return linear.linear
    warnings.warn(
        "LOWRANK_ENABLE=onednn-linear: this torch has no linear layer by oneDNN; torch's own is used", stacklevel=2
    )
    return original
