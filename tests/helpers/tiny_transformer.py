"""Tiny models, built from command-line flags as fairseq-train builds them, without data."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_lowrank.attention import AXES, METHODS, PRESETS
from fairseq_lowrank.parts import MODULE_AXES
from fairseq_lowrank.plugin import attention

WORDS = 20
SIZES = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
]


def needs_self_attention(preset):
    """Return True if a method is refused in cross attention because of its parts."""
    return any(part.needs_self_attention() for axis, part in METHODS[preset].parts.items() if axis in MODULE_AXES)


def preset_flags(preset, sites=("encoder", "decoder", "cross")):
    """Return the flags that choose a preset in a model with these sites of attention.

    A number that the preset needs is that of its last example. A method that needs self-attention leaves out cross
    attention.
    """
    method, flags = METHODS[preset], ["--attention", preset]
    if method.needs is not None:
        axis = method.needs.axis
        flags += [f"--{AXES[axis].flag.replace('_', '-')}", str(method.examples[-1][axis])]
    if "cross" in sites and needs_self_attention(preset):
        flags += ["--attention-sites", ",".join(site for site in sites if site != "cross")]
    return flags


def first_of_all(*presets, leave_out=()):
    """Parameters for a test of whole commands: these presets, and the others in the grid.

    Every preset decodes, learns and is saved in tests/models/test_transformer.py and in tests/attention.
    """
    others = [
        pytest.param(preset, marks=pytest.mark.grid) for preset in PRESETS if preset not in (*presets, *leave_out)
    ]
    return [*presets, *others]


def arguments(arch, *flags):
    """The parsed arguments of ``fairseq-train data --arch ARCH FLAGS``."""
    return options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", arch, *map(str, flags)])


def make_task():
    dictionary = Dictionary()
    for word in range(WORDS):
        dictionary.add_symbol(f"word{word}")
    return TranslationTask(TranslationConfig(), dictionary, dictionary)


def build(arch, *flags, task=None):
    """An untrained model of seed 1, ready for inference; pass TINY or the like for sizes."""
    torch.manual_seed(1)
    task = task or make_task()
    return task.build_model(arguments(arch, *flags)).eval()


class DictionaryOfSize(Dictionary):
    """Only the size of a vocabulary."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __len__(self):
        return self.size


def build_language_model(task, arch, vocab_size, *flags, device="meta"):
    """An untrained language model of seed 1 for fairseq's task of that name, by default without memory."""
    words = ["data", "--task", task, "--arch", arch, "--tokens-per-sample", "32", *map(str, flags)]
    args = options.parse_args_and_arch(options.get_training_parser(task), words)
    # its configuration without hydra, which takes half a second
    config = models.MODEL_DATACLASS_REGISTRY[models.ARCH_MODEL_NAME_REGISTRY[arch]].from_namespace(args)
    cls = models.ARCH_MODEL_REGISTRY[arch]
    dictionary = DictionaryOfSize(vocab_size)
    made = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    torch.manual_seed(1)
    with torch.device(device):
        return attention.build_with_chosen_attention(cls, config, made, lambda config: cls.build_model(config, made))


def shake(model):
    """Move every parameter away from its start, so that no term is hidden by a zero or an identity."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def sentences(dictionary, *lengths, left_pad):
    """Random sentences ``[B, T]`` of so many words and a final </s>, padded; the same words for the same lengths."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.full((len(lengths), max(lengths) + 1), dictionary.pad())
    for row, length in zip(rows, lengths, strict=True):
        words = torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=generator)
        sentence = torch.cat((words, torch.tensor([dictionary.eos()])))
        if left_pad:
            row[-len(sentence) :] = sentence
        else:
            row[: len(sentence)] = sentence
    return rows
