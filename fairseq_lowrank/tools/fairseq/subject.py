"""Checkpoints of fairseq, as subjects of a measurement."""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq.modules
import torch
from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary, data_utils
from fairseq.models.nat import FairseqNATModel
from torch import Tensor, nn

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec, MultiheadAttention
from fairseq_lowrank.files import first_folder, read_lines
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.plugin.foreign import attention_by_site
from fairseq_lowrank.plugin.layer import FairseqAttention
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq.architecture import attention_layers
from fairseq_lowrank.tools.measuring.layers import ClassifierSubject, LayerSubject
from fairseq_lowrank.tools.measuring.subject import BITS, MOST, TOKENS, enough, frequency_bits

TEXT = "text"
"""The name of the subset that :func:`binarise` writes."""


def load(
    path: Path,
    *,
    data: Path | None,
    subset: str,
    text: Path | None,
    target: Path | None,
    count: int | None,
    tokens: int = TOKENS,
    seed: int,
    min_length: int,
    max_length: int | None,
    length: int | None,
) -> LayerSubject:
    """Return a checkpoint of fairseq and sequences of its data, or of a text, as a subject.

    Args:
        text: lines in the words or subwords of the model's dictionary, separated by spaces.
        target: translations of the lines.
        count: number of sequences, by default :func:`.enough` for ``tokens``.
        length: block length of a language model's data.

    Raises:
        UserError: the checkpoint, the data, or the kind of model cannot be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        if text is not None:
            state = checkpoints.load_state(path)
            own = data or first_folder(str(checkpoints.configuration(state, "task", "data")))
            data, subset = binarise(own, text, target, Path(folder)), TEXT
        try:
            model, task = checkpoints.load_model(path, data=data, tokens_per_sample=length)
            lengths = {"min_length": min_length, "max_length": max_length}
            samples = checkpoints.sequences(task, subset, count=count or MOST, seed=seed, **lengths)
        except FlagError as error:
            if text is not None and str(error.value) == str(data):  # the temporary folder
                raise _needs_more_than(text, f"with a text alone {error.reason}") from error
            raise
        if count is None:
            sizes = [module.head_dim for *_, module in attention_layers(model)]
            samples = samples[: enough([sample["ntokens"] for sample in samples], tokens, max(sizes, default=1))]
        subject = subject_of(model, samples, task)
        subject.available = len(task.dataset(subset))
        return subject


def binarise(data: Path, text: Path, target: Path | None, folder: Path) -> Path:
    """Write a text as the subset :data:`TEXT` of binarised data with the dictionaries of ``data``, and return the folder.

    Raises:
        UserError: there are no dictionaries, or a target is missing or too much.
    """
    if not data.is_dir():
        raise FlagError("--data", data, "no such folder, and its dictionaries are needed", "Give another one.")
    for file in data.glob("dict*.txt"):
        shutil.copy(file, folder)
    source, other = data_utils.infer_language_pair(str(data)) or (None, None)
    if source is None and target is not None:
        raise FlagError("--target", target, f"{data} has one language", "Remove the flag.")
    if source is not None and target is None:
        raise FlagError("--text", text, f"{data} has pairs of sentences", "Add --target FILE, a line for each line.")
    files = {"": text} if source is None else {source: text, other: target}
    counts = {sum(1 for _ in read_lines(file)) for file in files.values()}
    if len(counts) > 1:
        raise FlagError("--target", target, f"has another number of lines than {text}", "Give a line for each line.")
    for language, file in files.items():
        ending = f".{language}" if language else ""
        names = data / f"dict{ending}.txt"
        if not names.is_file():
            raise _needs_more_than(text, f"{names} does not exist")
        dictionary = checkpoints.read_dictionary(names)
        pair = f".{source}-{other}{ending}" if language else ""
        binarizer = VocabularyDatasetBinarizer(dictionary)
        prefix = str(folder / f"{TEXT}{pair}")
        FileBinarizer.multiprocess_dataset(str(file), "mmap", binarizer, prefix, vocab_size=len(dictionary))
    return folder


def _needs_more_than(text: Path, reason: str) -> FlagError:
    return FlagError("--text", text, reason, "Measure on binarised data: remove the flag.")


def subject_of(model: nn.Module, samples: list[dict], task: Any) -> LayerSubject:
    """Return a model of fairseq and samples of one sequence each as a subject. Stock attention becomes this package's.

    Raises:
        UserError: the model has other attention, or its output is not measured here.
    """
    name = type(model).__name__
    score = scoring(model, samples[0], task)
    use_our_attention(model)
    foreign = attention_by_site(model)
    layers = attention_layers(model)
    if foreign:
        found = ", ".join(f"{kind.__name__} ({site})" for site, kind in foreign.items())
        raise UserError(f"{name} computes attention by {found}, which is not measured. Use a model without it.")
    if not layers:
        raise UserError(f"{name} has no attention with queries and keys. Use a model with attention.")
    tokens = sum(sample["ntokens"] for sample in samples) / len(samples)
    if score is None:
        return ClassifierSubject(name, layers, samples, functools.partial(_decide, model, head_of(model, task)), tokens)
    words = dictionary_of(task)

    def right(sample: dict) -> Tensor:
        target = sample[checkpoints.target_of(sample)]
        return target[target.ne(words.pad())]

    def constant(basis: list[dict], held_out: list[dict]) -> list[tuple[float, float]]:
        return frequency_bits(map(right, basis), map(right, held_out), len(words))

    return LayerSubject(name, layers, samples, score, BITS, tokens, constant)


def dictionary_of(task: Any) -> Dictionary:
    """Return the dictionary of the words that a task's models predict."""
    return task.source_dictionary if task.target_dictionary is None else task.target_dictionary


def head_of(model: nn.Module, task: Any) -> str | None:
    """Return the name of the head that predicts labels or numbers, or None."""
    head = getattr(task.cfg, "classification_head_name", None)
    return head if head is not None and head in getattr(model, "classification_heads", {}) else None


def _decide(model: nn.Module, head: str, sample: dict) -> tuple[Tensor, Tensor]:
    """Return the scores ``[N, C]`` of a classifier and the labels ``[N]``."""
    scores, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
    return scores.flatten(0, -2), sample["target"].view(-1)


def scoring(model: nn.Module, sample: dict, task: Any) -> Callable[[dict], tuple[float, float]] | None:
    """Return the function that computes the bits of a sample and its number of words; None for a classifier.

    Raises:
        UserError: the model writes no words in order, or the data has no words or labels to compare with.
    """
    name = type(model).__name__
    if isinstance(model, FairseqNATModel):
        raise UserError(
            f"{name} writes all words at once, so it has no loss of each word. Use an autoregressive model."
        )
    target = checkpoints.target_of(sample)
    if target is None or not torch.is_tensor(sample[target]) or "net_input" not in sample:
        raise UserError(f"{name}: its data has no words or labels to compare with. Use data with a target.")
    if head_of(model, task) is not None:
        if getattr(task.cfg, "regression_target", False):
            raise UserError(f"{name} predicts numbers, not labels, so it makes no decisions. Use a classifier.")
        return None
    inputs = sample["net_input"]
    read = inputs.get("prev_output_tokens", inputs.get("src_tokens"))
    if sample[target].is_floating_point() or read is None or sample[target].shape != read.shape:
        raise UserError(
            f"{name}: its task ({type(task).__name__}) has no words as targets. Use a model that predicts words."
        )
    padding = dictionary_of(task).pad()

    def bits(sample: dict) -> tuple[float, float]:
        right = sample[target]
        chosen = right.ne(padding)
        logs = checkpoints.log_probabilities(model, sample, of_target=True)
        nats = -logs[chosen].gather(-1, right[chosen][:, None]).double().sum().item()
        return nats / math.log(2), float(chosen.sum())

    return bits


def use_our_attention(model: nn.Module) -> None:
    """Replace fairseq's own attention by plain attention of this package with the same weights."""
    for name, module in list(model.named_modules()):
        if type(module) is fairseq.modules.MultiheadAttention:
            parent, _, attribute = name.rpartition(".")
            layer = _same_layer(module)
            layer.site = next(each.site for each in attention_layers(model) if each.name == name)
            setattr(model.get_submodule(parent), attribute, layer)


def _same_layer(module: fairseq.modules.MultiheadAttention) -> MultiheadAttention:
    config = AttentionConfig(
        AttentionSpec(),
        module.embed_dim,
        module.num_heads,
        kdim=module.kdim,
        vdim=module.vdim,
        bias=module.q_proj.bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        self_attention=module.self_attention,
        encoder_decoder_attention=module.encoder_decoder_attention,
    )
    layer = FairseqAttention(config)
    layer.load_state_dict(module.state_dict())
    return layer.to(module.out_proj.weight.dtype).eval()
