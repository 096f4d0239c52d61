"""Checkpoints of earlier versions, and what they answer to fixed sentences.

``mha-translation.pt`` and ``mixhead-b-text.pt`` are files of such versions. ``states.json`` has what the other checkpoints have
otherwise: flags, names and shapes of tensors, and the saved configuration of each layer. The values of those tensors are random.
"""

import copy
import functools
import json
from pathlib import Path
from random import Random

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

import fairseq_lowrank.plugin  # noqa: F401

FOLDER = Path(__file__).parents[1] / "fixtures"
ANSWERS = FOLDER / "answers.json"
STATES = json.loads((FOLDER / "states.json").read_text())
NAMES = sorted(json.loads(ANSWERS.read_text()))
LAYER = "attention"
"""The key of a layer's configuration in the metadata of a state."""


def with_flags(state: dict, flags: dict) -> dict:
    """A copy of a checkpoint with other flags of the model."""
    state = copy.deepcopy(state)
    model = state["cfg"]["model"]
    (model if isinstance(model, dict) else vars(model)).update(flags)
    return state


@functools.cache
def load(name: str) -> dict:
    """The checkpoint with this name; callers copy what they change."""
    path = FOLDER / f"{name}.pt"
    if path.exists():
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        return state | {"cfg": OmegaConf.to_container(state["cfg"])}
    saved = STATES[name]
    state = with_flags(load(saved["base"]), saved["flags"])
    random, model = Random(name), state["model"]
    for tensor in saved["gone"]:
        del model[tensor]
    for tensor, shape in saved["tensors"].items():
        model[tensor] = torch.tensor([random.gauss(0, 0.5) for _ in range(torch.Size(shape).numel())]).view(shape)
    for module, configuration in saved["layers"].items():
        model._metadata[module][LAYER] = configuration
    return state


def write(name: str, folder: Path) -> Path:
    """The file of a checkpoint: the kept one, or one that is written to the folder."""
    path = FOLDER / f"{name}.pt"
    if not path.exists():
        path = folder / path.name
        torch.save(load(name), path)
    return path


def _dictionary(words: list[str]) -> Dictionary:
    """As fairseq-preprocess makes it of text with these words: they and padding up to 8·n symbols."""
    dictionary = Dictionary()
    for word in words:
        dictionary.add_symbol(word)
    dictionary.pad_to_multiple_(8)
    return dictionary


def task_of(name: str) -> TranslationTask | LanguageModelingTask:
    """The task of a checkpoint, with the dictionary of its text."""
    source = _dictionary(["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"])
    if name.endswith("-text"):
        return LanguageModelingTask(LanguageModelingConfig(), source)
    return TranslationTask(TranslationConfig(), source, source)


def answer(path: Path) -> list[dict]:
    """The best hypotheses of a beam search for three sentences: tokens, and scores rounded to 5 digits."""
    task = task_of(path.stem)
    source, text = task.source_dictionary, isinstance(task, LanguageModelingTask)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    sentences = [[4, 5, 6, 7, 8], [9, 11], [10, 4, 4, 9]]
    rows = torch.full((3, 6), source.pad())
    for row, words in zip(rows, sentences, strict=True):
        row[-len(words) - 1 :] = torch.tensor([*words, source.eos()])
    generator = SequenceGenerator([model.eval()], source, beam_size=3, max_len_a=0, max_len_b=8)
    lengths = torch.tensor([len(words) + 1 for words in sentences])
    if text:
        # Prefixes of two words to go on from, without padding.
        prefix = torch.tensor([words[:2] for words in sentences])
        bos = torch.full((3, 1), source.eos())
        sample = {"net_input": {"src_tokens": torch.cat((bos, prefix), 1), "src_lengths": torch.full((3,), 3)}}
        found = generator.generate([model], sample, prefix_tokens=prefix)
    else:
        found = generator.generate([model], {"net_input": {"src_tokens": rows, "src_lengths": lengths}})
    return [
        {"tokens": best[0]["tokens"].tolist(), "scores": [round(x, 5) for x in best[0]["positional_scores"].tolist()]}
        for best in found
    ]
