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
from fairseq import utils
from fairseq.data.iterators import BackgroundConsumer

from fairseq_lowrank.ops import linear
from fairseq_lowrank.repairs.search import log_once

logger = logging.getLogger(__name__)


def with_old_names(module: types.ModuleType) -> types.ModuleType:
    """Return numpy with the names that numpy 2 dropped, for the modules of fairseq that use them."""

    def percentile(*args, interpolation, **kwargs):
        return numpy.percentile(*args, method=interpolation, **kwargs)

    proxy = types.ModuleType("numpy")
    vars(proxy).update(vars(numpy), int=int, float=float, compat=types.SimpleNamespace(long=int), percentile=percentile)
    return proxy


# For --replace-unk, fairseq reads from the hypothesis which source word each target word is aligned with. Only
# --print-alignment makes an alignment, and in another form (pairs). Without a file of translations, the flag is parsed as
# "@@ ", the default of --remove-bpe, which is not a file. An alignment takes a tenth of the time of a translation, so only
# models that were prepared for the flag get one.
def note_unknown_words(prepare: Callable) -> Callable:
    """Wrap ``prepare_for_inference_``: mark the models that replace unknown words."""

    @functools.wraps(prepare)
    def prepare_for_inference_(self, cfg):
        self.replaces_unknown_words = getattr(cfg.generation, "replace_unk", None) is not None
        prepare(self, cfg)

    return prepare_for_inference_


def align_unknown_words(generate: Callable) -> Callable:
    """Wrap ``SequenceGenerator.generate``: align each target word with the source word that has the most attention."""

    @functools.wraps(generate)
    def generate_aligned(self, models, sample, **kwargs):
        sentences = generate(self, models, sample, **kwargs)
        if not any(getattr(model, "replaces_unknown_words", False) for model in models):
            return sentences
        sources = sample["net_input"].get("src_tokens")
        if sources is not None and sources.dim() == 2:
            for source, hypotheses in zip(sources.cpu(), sentences, strict=True):
                for hypothesis in hypotheses:
                    if (attention := hypothesis["attention"]) is not None and attention.numel():
                        hypothesis["alignment"] = utils.extract_hard_alignment(
                            attention.cpu().T, source, hypothesis["tokens"].cpu(), self.pad, self.eos
                        )
        return sentences

    return generate_aligned


def load_no_align_dict(load: Callable) -> Callable:
    """Wrap ``utils.load_align_dict``: load nothing for ``"@@ "``, the value of ``--replace-unk`` without a file."""

    @functools.wraps(load)
    def load_align_dict(path):
        return load("" if path == "@@ " else path)

    return load_align_dict


def replace_by_target(replace: Callable) -> Callable:
    """Wrap ``utils.replace_unk``: pass the source word of each target word, not pairs."""

    @functools.wraps(replace)
    def replace_unk(hypo_str, src_str, alignment, align_dict, unk):
        return replace(hypo_str, src_str, {target: source for source, target in alignment}, align_dict, unk)

    return replace_unk


# fairseq sets the beam size of a BART when a search is built, and keeps it. Then cross-attention uses the keys of one sentence for
# as many sentences: in a later search with one hypothesis, and in a training with --eval-bleu, which builds its search first.
def set_no_beam_size(set_beam_size: Callable) -> Callable:
    """Wrap ``set_decoder_beam_size``, which the constructor of a search calls: leave the models as they are."""

    @functools.wraps(set_beam_size)
    def set_decoder_beam_size(self, beam_size):
        if beam_size > 1 and any(model.training and hasattr(model, "set_beam_size") for model in self.models):
            log_once(
                "--eval-bleu: each sentence trains with its own source; stock fairseq would take that of another one, or fail"
            )

    return set_decoder_beam_size


def search_with_its_own_beam(generate: Callable) -> Callable:
    """Wrap ``generate`` of a search: its models have its beam size during the search alone."""

    @functools.wraps(generate)
    def generate_told(self, models, sample, **kwargs):
        models_of_search = models or self.model.models  # online back-translation gives none
        beamable = [model for model in models_of_search if self.beam_size > 1 and hasattr(model, "set_beam_size")]
        for model in beamable:
            model.set_beam_size(self.beam_size)
        try:
            return generate(self, models, sample, **kwargs)
        finally:
            for model in beamable:
                model.set_beam_size(1)
                # BART's encoder has got a method that repeats no states for hypotheses
                vars(getattr(model, "encoder", model)).pop("reorder_encoder_out", None)

    return generate_told


def take_special_symbols(init: Callable) -> Callable:
    """Wrap ``__init__`` of a dictionary with a mask: accept the argument that ``Dictionary.load`` passes, with its only value."""

    @functools.wraps(init)
    def __init__(self, *args, add_special_symbols=True, **kwargs):
        init(self, *args, **kwargs)

    return __init__


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


def quantise_on_any_device(emulate: Callable) -> Callable:
    """Wrap ``emulate_int8_histogram``: the scale of 8 bits is found on the device of the tensor, not on a GPU."""

    @functools.wraps(emulate)
    def emulate_int8_histogram(w, scale=None, zero_point=None, bits=8):
        if scale is None:
            from torch.ao.quantization.observer import HistogramObserver

            observer = HistogramObserver().to(w.device)
            observer(w.float())
            scale, zero_point = (number.to(w) for number in observer.calculate_qparams())
        return emulate(w, scale, zero_point, bits)

    return emulate_int8_histogram


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


def close_what_was_opened(close: Callable) -> Callable:
    """Wrap ``__del__`` of a binarised dataset: do nothing if its file could not be opened."""

    @functools.wraps(close)
    def __del__(self):
        with contextlib.suppress(AttributeError):  # its fields are set after the file is opened
            close(self)

    return __del__


def multiply_by_onednn(original: Callable) -> Callable:
    """Return the linear function of oneDNN for ``torch.nn.functional.linear``, or with a warning torch's own."""
    if linear.is_available():
        return linear.linear
    warnings.warn(
        "LOWRANK_ENABLE=onednn-linear: this torch has no linear layer by oneDNN; torch's own is used", stacklevel=2
    )
    return original
