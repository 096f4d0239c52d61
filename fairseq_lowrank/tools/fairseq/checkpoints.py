"""Models of checkpoints, and the attention weights and mixing that they compute on data."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import struct
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary, RoundRobinZipDatasets
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqEncoderModel
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, nn

import fairseq_lowrank.plugin  # noqa: F401  safe loading, and our models
from fairseq_lowrank.attention import AXES
from fairseq_lowrank.files import first_folder
from fairseq_lowrank.messages import FlagError, InvalidCheckpoint, StateDictMismatch, UserError, did_you_mean
from fairseq_lowrank.parts import PLAIN
from fairseq_lowrank.plugin.flags import as_namespace, given_flags
from fairseq_lowrank.tools.fairseq.architecture import AttentionLayer, attention_layers
from fairseq_lowrank.tools.measuring.subject import draw

DATA_ERRORS = (AssertionError, EOFError, IndexError, OSError, ValueError, struct.error)
"""What fairseq raises if files of data are damaged or of another kind."""


def load_state(path: Path | str, overrides: dict | None = None) -> dict:
    """Return a checkpoint with fairseq's upgrades; `overrides` replace arguments in it.

    Raises:
        UserError: there is no such file, it is not a checkpoint of fairseq, or only one shard of it.
    """
    if not (path := Path(path)).is_file():
        raise UserError(f"{path} is not a checkpoint file. Give the path of one, such as checkpoint_best.pt.")
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
    except KeyError as error:  # fairseq's upgrade reads entries of a training
        reason = f"it has no {error.args[0]!r} entry"
        raise InvalidCheckpoint(path, reason, "Give a file that fairseq-train wrote.") from error
    if not (state.get("cfg") or state.get("args")):
        raise InvalidCheckpoint(path, "it has no configuration of fairseq", "Give a file that fairseq-train wrote.")
    if "fsdp_metadata" in state and configuration(state, "distributed_training", "use_sharded_state"):
        raise InvalidCheckpoint(path, "it is one shard of several", "Give a checkpoint of the entire model.")
    return state


def load_model(path: Path | str, *, data: Path | None = None, tokens_per_sample: int | None = None):
    """Return a checkpoint's model in evaluation mode, and its task.

    Args:
        path: the checkpoint.
        data: folder of fairseq-preprocess's output, by default the one that the model was trained on.
        tokens_per_sample: block length of a language model's data, by default the model's.

    Raises:
        UserError: the file is not a checkpoint, a parameter is not finite, the data is missing or has another vocabulary, the
            task reads no blocks, or they are longer than a table of the model's positions.
    """
    # A training may pad sequences to a multiple of a length. A single sequence then has no padding.
    overrides = {"required_seq_len_multiple": 1} | ({} if data is None else {"data": str(data)})
    state, path = load_state(path, overrides), Path(path)
    refuse_unregistered(state, path)
    folder = first_folder(str(configuration(state, "task", "data")))
    if not folder.is_dir():
        reason = "no such folder" if data else f"the data folder of {path} does not exist"
        raise FlagError("--data", folder, reason, "Give another one with --data.")
    args = state.get("args")
    of_task = deepcopy((state["cfg"] if args is None else convert_namespace_to_omegaconf(args)).task)
    if tokens_per_sample is not None:  # of the task alone: models make tables of this length
        if not hasattr(of_task, "tokens_per_sample"):
            reason = f"{path} reads sequences of the data as they are, not blocks"
            raise FlagError("--length", tokens_per_sample, reason, "Remove the flag.")
        of_task.tokens_per_sample = tokens_per_sample
    try:
        with reading_data(folder):
            task = tasks.setup_task(of_task, from_checkpoint=True)
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides, task, state=state)
    except FlagError as error:
        if error.flag == "--tokens-per-sample" and tokens_per_sample is not None:
            error.flag = "--length"
        raise
    except StateDictMismatch as error:
        error.path, error.remedy = str(path), "Copy or download it again."
        if (
            error.saved is not None and error.current is not None
        ):  # the flags are the checkpoint's, so the vocabulary differs
            error.remedy = f"Give its own data with --data, in place of {folder}."
        raise
    # buffers may be: fairseq leaves some of them as memory was
    if diverged := [name for name, weights in models[0].named_parameters() if not weights.isfinite().all()]:
        raise UserError(f"{path}: {diverged[0]} has an infinity or NaN. Give one from before the training diverged.")
    if tokens_per_sample is not None and tokens_per_sample > (limit := longest_block(models[0])):
        raise FlagError("--length", tokens_per_sample, f"{path} reads at most {limit} tokens", "Give a smaller number.")
    return models[0].eval(), task


def longest_block(model: nn.Module) -> float:
    """Return the number of positions for which a model has parameters; infinity if it computes its positions, or has none."""
    tables = [module for module in model.modules() if isinstance(module, LearnedPositionalEmbedding)]
    scores = [getattr(layer.module, "score", None) for layer in attention_layers(model)]
    limits = (getattr(one, "max_positions", None) for one in (*tables, *scores))
    return min((limit for limit in limits if limit is not None), default=math.inf)


def read_dictionary(path: Path) -> Dictionary:
    """Return a dictionary of fairseq.

    Raises:
        UserError: the file is something else, or damaged.
    """
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises this class itself
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is not a dictionary ({reason}). Give the one that fairseq-preprocess wrote."
        ) from error


def refuse_unregistered(state: dict, path: Path) -> None:
    """Refuse a checkpoint whose task or architecture is of a plugin that is not imported.

    Raises:
        InvalidCheckpoint: nothing has registered its name.
    """
    task = configuration(state, "task", "_name") or configuration(state, "task", "task")
    architecture = model_arguments(state).arch
    known = {**ARCH_MODEL_REGISTRY, **MODEL_REGISTRY}
    for kind, name, names in (("task", task, tasks.TASK_REGISTRY), ("architecture", architecture, known)):
        if name is not None and name not in names:
            remedy = f"If it is of a plugin, add --user-dir DIR.{did_you_mean(name, names)}"
            raise InvalidCheckpoint(path, f"nothing here has registered its {kind} {name}", remedy)


@contextlib.contextmanager
def reading_data(folder: Path | str) -> Iterator[None]:
    """Turn the errors of fairseq about data of another task, or about damaged files, into one that names the folder.

    Errors of other code keep their traceback.

    Raises:
        FlagError: the data cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # fairseq raises this class itself, if the data has no pair of languages
        if (type(error) is not Exception and not isinstance(error, DATA_ERRORS)) or not _reads_data(error):
            raise
        reason = f"the model's task cannot read it ({' '.join(str(error).split()) or type(error).__name__})"
        remedy = "Give the folder that fairseq-preprocess wrote for this task, or run it again."
        raise FlagError("--data", folder, reason, remedy) from error


def _reads_data(error: Exception) -> bool:
    """Return True if fairseq's tasks and data sets raised an error, or libraries that they called."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    known = [name for name in modules if name.partition(".")[0] in ("fairseq", "fairseq_lowrank")]
    return known[-1].startswith(("fairseq.data.", "fairseq.tasks.", "fairseq.file_"))


def configuration(state: dict, part: str, name: str, default=None):
    """Return a value of a checkpoint's configuration; `part` is a section such as task or model."""
    if state.get("cfg"):
        section = state["cfg"].get(part) or {}
        return section.get(name, default) if hasattr(section, "get") else getattr(section, name, default)
    return getattr(state["args"], name, default)


def attention_flags(state: dict) -> dict[str, object] | None:
    """Return the preset and the axes in a checkpoint's configuration; ``None`` for fairseq's own attention."""
    flags = given_flags(model_arguments(state))
    names = {"preset": "attention"} | {name: axis.flag for name, axis in AXES.items()}
    chosen = {name: flags[flag] for name, flag in names.items() if flag in flags}
    return {"preset": PLAIN, **chosen} if chosen else None


def sequences(task, subset: str, *, count: int, seed: int, min_length: int, max_length: int | None) -> list[dict]:
    """Return `count` samples, drawn without replacement, with all lengths (source and target) in range.

    Each sample is one sequence, so the attention matrices contain no padding.

    Raises:
        UserError: the subset is missing or has no such sequence, or the task reads several data sets at once.
    """
    with reading_data((task.cfg or task.args).data):
        try:
            task.load_dataset(subset)
        except FileNotFoundError as error:
            reason = f"the data has no such subset ({error})"
            raise FlagError("--subset", subset, reason, "Choose another one.") from error
        dataset = task.dataset(subset)
        if isinstance(dataset, RoundRobinZipDatasets):
            raise UserError(
                f"{type(task).__name__} reads several data sets at once ({', '.join(dataset.datasets)}), so a sample is not one "
                "sequence. Use a model of another task."
            )

        def read(index: int) -> dict | None:
            size = dataset.size(index)
            lengths = size if isinstance(size, (tuple, list)) else (size,)
            fits = min(lengths) >= min_length and (max_length is None or max(lengths) <= max_length)
            return dataset.collater([dataset[index]]) if fits else None

        samples = draw(len(dataset), count, seed, read)
    if not samples:
        raise UserError(
            f"no sequence of {subset!r} has a length of {min_length} to {max_length or 'any'} tokens. Change the limits of lengths."
        )
    return samples


def check_inputs(model: nn.Module, sample: dict) -> None:
    """Check that a sample holds all that a model reads.

    Raises:
        UserError: it does not, such as for models that edit a whole translation.
    """
    try:
        inspect.signature(model.forward).bind(**sample["net_input"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{type(model).__name__} reads other inputs than a sample of its data has ({error}). Use an encoder or an "
            "autoregressive model."
        ) from error


def log_probabilities(model: Any, sample: dict, *, of_target: bool = False) -> Tensor:
    """Return the log-probabilities ``[B, T, V]`` of words that a model computes on a sample.

    Args:
        of_target: those of the sample's target are enough, which saves an adaptive softmax the others.
    """
    output = model(**sample["net_input"])
    if isinstance(model, FairseqEncoderModel):
        return F.log_softmax(output[0].float(), dim=-1)
    about = {"sample": sample} if of_target else {}
    return model.get_normalized_probs(output, log_probs=True, **about)


def target_of(sample: dict) -> str | None:
    """Return the name of the target in a sample, or None."""
    return next((name for name in ("target", "lm_target") if name in sample), None)


def _in_this_thread(hook: Callable) -> Callable:
    """Return a hook that leaves calls of other threads as they are."""
    thread = threading.get_ident()
    return lambda *call: hook(*call) if threading.get_ident() == thread else None


@contextlib.contextmanager
def attention_weights(model: nn.Module, receive: Callable[[AttentionLayer, Tensor], None]) -> Iterator[None]:
    """Call `receive(layer, weights)` with each layer's mixed weights before dropout, `[H, B, T, S]`, in this thread, while open."""
    handles, restored = [], []
    for layer in attention_layers(model):

        def ask(module, args, kwargs):
            return args, {**kwargs, "need_weights": True, "need_head_weights": True}

        def give(module, args, kwargs, output, layer=layer):
            receive(layer, output[1])
            return output[0], None

        handles.append(layer.module.register_forward_pre_hook(_in_this_thread(ask), with_kwargs=True))
        handles.append(layer.module.register_forward_hook(_in_this_thread(give), with_kwargs=True))
        if getattr(layer.module, "skip_embed_dim_check", None) is False:
            # fairseq's module returns the weights of single heads only on its slower path
            layer.module.skip_embed_dim_check = True
            restored.append(layer.module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in restored:
            module.skip_embed_dim_check = False


@contextlib.contextmanager
def mean_mixing(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Average the position-wise M_t of each layer over all queries of this thread while open; the means are filled in on closing."""
    totals: dict[str, list] = {}
    handles = []
    for layer in attention_layers(model):
        mixing = getattr(layer.module, "mixing", None)
        if mixing is None or mixing.query_weight is None:
            continue

        def gather(module, args, kwargs, layer=layer):
            query = kwargs["query"] if "query" in kwargs else args[0]
            matrices = module.mixing.operation(module.project_query(query)).mixing_matrix()
            total = totals.setdefault(layer.name, [0, 0])
            total[0] = total[0] + matrices.double().sum(dim=(0, 1))
            total[1] += matrices.size(0) * matrices.size(1)

        handles.append(layer.module.register_forward_pre_hook(_in_this_thread(gather), with_kwargs=True))
    means: dict[str, Tensor] = {}
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()
    for name, (total, positions) in totals.items():
        means[name] = total / positions


def vocab_sizes(state: dict) -> dict[str, int]:
    """Return the rows of a checkpoint's input embeddings, of the encoder and the decoder in this order; empty without words."""
    rows: dict[str, int] = {}
    for name, tensor in state["model"].items():
        if match := re.fullmatch(
            r"(encoder|decoder)\.(?:.+\.)?embed_tokens\.(weight|embeddings\.\d+\.0\.weight)", name
        ):
            rows[match[1]] = rows.get(match[1], 0) + len(tensor)
    return {side: rows[side] for side in ("encoder", "decoder") if side in rows}


def vocab_size(state: dict) -> int | None:
    """Return the first of :func:`vocab_sizes`, or None without words."""
    return next(iter(vocab_sizes(state).values()), None)


def model_arguments(state: dict) -> Namespace:
    """Return the arguments that a checkpoint's model was built with, with its `arch`."""
    found = state["cfg"]["model"] if state.get("cfg") else state["args"]
    args = copy(as_namespace(found))
    if not hasattr(args, "arch"):
        args.arch = args._name
    return args
