"""Conversion of a published BERT of transformers to a checkpoint of fairseq with its dictionary and subwords."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import OmegaConf
from torch import Tensor

from experiments.corpora.wordpieces import WordPieces
from fairseq_lowrank.files import read_json, read_lines, write_lines
from fairseq_lowrank.messages import InvalidCheckpoint, UserError
from fairseq_lowrank.models.bert import LowrankBertModel
from fairseq_lowrank.repairs import checkpoint_file
from fairseq_lowrank.tools.fairseq.architecture import parse_architecture

# fairseq's names of transformers' activations.
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
# BERT's names of fairseq's special symbols, in the order of their numbers; the tasks add <mask> as the last word.
SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
MASK = "[MASK]"

LAYER = {
    **{f"attention.self.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
# Heads that a file may not have: transformers' and fairseq's names of their tensors.
BIAS = "cls.predictions.bias"
HEADS = {
    "the pooler": {f"bert.pooler.dense.{part}": f"encoder.pooler.{part}" for part in ("weight", "bias")},
    "the masked-word head": {
        BIAS: "encoder.lm_head.bias",
        **{f"cls.predictions.transform.dense.{part}": f"encoder.lm_head.dense.{part}" for part in ("weight", "bias")},
        **{
            f"cls.predictions.transform.LayerNorm.{part}": f"encoder.lm_head.layer_norm.{part}"
            for part in ("weight", "bias")
        },
    },
    "the next-sentence head": {f"cls.seq_relationship.{part}": f"encoder.next_sentence.{part}" for part in ("weight", "bias")},
}  # fmt: skip
WORDS, OUTPUT = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
LAYER_NAME = re.compile(r"bert\.encoder\.layer\.(\d+)\.")
# Sizes of the configuration, each with a tensor and the axis that has this size.
SHOWN_BY = {
    "vocab_size": (WORDS, 0),
    "hidden_size": (WORDS, 1),
    "max_position_embeddings": (POSITIONS, 0),
    "type_vocab_size": ("bert.embeddings.token_type_embeddings.weight", 0),
    "intermediate_size": ("bert.encoder.layer.0.intermediate.dense.weight", 0),
}
# Some versions save this buffer.
NUMBERS = "bert.embeddings.position_ids"
# A separate output matrix, if words are not tied. If they are, these tensors repeat others.
UNTIED = {OUTPUT: "encoder.lm_head.weight", "cls.predictions.decoder.bias": "encoder.lm_head.bias"}


@dataclass
class PublishedBert:
    """The content of a folder: a configuration, tensors by transformers' names, a vocabulary and its normalisation.

    Args:
        config: the content of config.json.
        tensors: the tensors of model.safetensors or pytorch_model.bin, by the names of BertForPreTraining.
        words: the lines of vocab.txt.
        normalisation: options of :class:`~experiments.corpora.wordpieces.WordPieces`.
    """

    config: dict
    tensors: dict[str, Tensor]
    words: list[str]
    normalisation: dict[str, bool | None]

    @classmethod
    def read(cls, folder: Path) -> PublishedBert:
        """Read a folder as transformers' save_pretrained writes it, with vocab.txt.

        Raises:
            UserError: a file is missing or damaged, or the model is not BERT as published.
        """
        config = read_json(present(folder / "config.json"))
        check_config(config, folder)
        tensors = read_tensors(folder)
        check_sizes(config, tensors, folder)
        words = list(read_lines(present(folder / "vocab.txt")))
        return cls(config, tensors, words, read_normalisation(folder, words))

    @property
    def rows(self) -> list[int]:
        """Return the row in the published embeddings of each word of fairseq's dictionary, <mask> last.

        Raises:
            UserError: a special symbol is missing, or there are more words than rows.
        """
        numbers = {word: number for number, word in enumerate(self.words)}
        if missing := [symbol for symbol in (*SPECIAL, MASK) if symbol not in numbers]:
            raise UserError(f"vocab.txt has no {', '.join(missing)}. Use the vocabulary of the model.")
        if len(self.words) > (size := self.config["vocab_size"]):
            raise UserError(
                f"vocab.txt has {len(self.words):,} words, and vocab_size of config.json is {size:,}. Use files of one model."
            )
        special = [numbers[symbol] for symbol in SPECIAL]
        mask = numbers[MASK]
        return [*special, *(number for number in range(size) if number not in (*special, mask)), mask]

    @property
    def dictionary(self) -> list[str]:
        """Return the lines of fairseq's dict.txt: all words except special ones.

        A row gets a made-up word if vocab.txt has no word for it, repeats one, or has one that fairseq cannot read.
        """
        last = {word: number for number, word in enumerate(self.words)}
        reserved = {*Dictionary().symbols, "<mask>"}

        def name(row: int) -> str:
            word = self.words[row] if row < len(self.words) else ""
            readable = word.split() == [word] and word not in reserved and not word.startswith("#fairseq:")
            if readable and last[word] == row:
                return word
            substitute = f"madeupword{row:04d}"
            while substitute in last:
                substitute += "_"
            return substitute

        return [f"{name(row)} 1" for row in self.rows[len(SPECIAL) : -1]]


def present(path: Path) -> Path:
    """Return the path if the file exists.

    Raises:
        UserError: there is no such file.
    """
    if not path.is_file():
        raise UserError(
            f"{path} does not exist. Give a folder with config.json, vocab.txt, and model.safetensors or pytorch_model.bin."
        )
    return path


def check_config(config: dict, folder: Path) -> None:
    """Check that a configuration describes BERT as published.

    Raises:
        UserError: a setting has another value.
    """
    where = folder / "config.json"
    for name, default, accepted in (
        ("model_type", "bert", ("bert",)),
        ("hidden_act", "gelu", tuple(ACTIVATIONS)),
        ("position_embedding_type", "absolute", ("absolute",)),
        ("is_decoder", False, (False,)),
        ("add_cross_attention", False, (False,)),
        ("pruned_heads", {}, ({}, None)),
    ):
        if (value := config.get(name, default)) not in accepted:
            raise UserError(
                f"{where}: {name} is {value!r}. Use a BERT for which it is {' or '.join(map(repr, accepted))}."
            )
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "type_vocab_size"),
    ):
        if type(value := config.get(name)) is not int or value < 1:
            raise UserError(f"{where}: {name} is {value!r}; expected a whole number >= 1.")
    if (width := config["hidden_size"]) % (heads := config["num_attention_heads"]):
        raise UserError(f"{where}: hidden_size is {width}, which {heads} heads do not divide. Use files of one model.")


def check_sizes(config: dict, tensors: dict[str, Tensor], folder: Path) -> None:
    """Compare the sizes of a configuration with the tensors, before a model of these sizes is built.

    Raises:
        UserError: a size differs, or a tensor that shows it is missing.
    """
    layers = {match[1] for name in tensors if (match := LAYER_NAME.match(name))}
    found = {"num_hidden_layers": len(layers)}
    for name, (key, axis) in SHOWN_BY.items():
        if key not in tensors or tensors[key].dim() != 2:
            raise UserError(f"{folder}: the model has no matrix {key}. Give a BERT with all its layers.")
        found[name] = tensors[key].size(axis)
    for name, size in found.items():
        if config[name] != size:
            raise UserError(
                f"{folder / 'config.json'}: {name} is {config[name]}, and the tensors have {size}. Use files of one model."
            )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, or of pytorch_model.bin, under the names of BertForPreTraining.

    Raises:
        UserError: the file is missing or damaged, or contains more than tensors.
    """
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        tensors = read_safetensors(safe)
    else:
        with open(present(pickled), "rb") as file:
            tensors = checkpoint_file.load(file)
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise InvalidCheckpoint(pickled, "it contains more than tensors by name", "Give the weights of a BERT.")
    bare = not any(name.startswith("bert.") for name in tensors)  # BertModel alone
    old = {".gamma": ".weight", ".beta": ".bias"}

    def named(name: str) -> str:
        for end, new in old.items():
            if name.endswith(end):
                name = name.removesuffix(end) + new
        return f"bert.{name}" if bare else name

    return {named(name): tensor for name, tensor in tensors.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise InvalidCheckpoint(path, str(error), "Download it again.") from error


def read_normalisation(folder: Path, words: list[str]) -> dict[str, bool | None]:
    """Return the normalisation of words in tokenizer_config.json; else lower case if the vocabulary is in lower case."""
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    if not config.get("do_basic_tokenize", True):
        raise UserError(
            f"{file}: do_basic_tokenize is false. Use a model with BERT's own tokenizer, for which it is true."
        )
    lower = not any(word != word.lower() for word in words if not word.startswith("["))
    return {
        "lowercase": bool(config.get("do_lower_case", lower)),
        "strip_accents": config.get("strip_accents"),
        "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
    }


def model_flags(config: dict) -> list[str]:
    """Return the flags of fairseq-train that build a model of this configuration."""
    dropout = config.get("hidden_dropout_prob", 0.1)
    flags = {
        "encoder_layers": config["num_hidden_layers"],
        "encoder_embed_dim": config["hidden_size"],
        "encoder_ffn_embed_dim": config["intermediate_size"],
        "encoder_attention_heads": config["num_attention_heads"],
        "max_positions": config["max_position_embeddings"],
        "tokens_per_sample": config["max_position_embeddings"],
        "num_segment": config["type_vocab_size"],
        "layer_norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation_fn": ACTIVATIONS[config.get("hidden_act", "gelu")],
        "dropout": dropout,
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "pooler_dropout": dropout if config.get("classifier_dropout") is None else config["classifier_dropout"],
        "segments": "pair",
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def names(layers: int) -> Iterator[tuple[str, str]]:
    """Yield the names of the tensors that every BERT has: transformers' and fairseq's."""
    yield WORDS, "encoder.sentence_encoder.embed_tokens.weight"
    yield POSITIONS, "encoder.sentence_encoder.embed_positions.weight"
    yield "bert.embeddings.token_type_embeddings.weight", "encoder.embed_segments.weight"
    for part in ("weight", "bias"):
        yield f"bert.embeddings.LayerNorm.{part}", f"encoder.sentence_encoder.layernorm_embedding.{part}"
        for layer in range(layers):
            for theirs, ours in LAYER.items():
                yield (
                    f"bert.encoder.layer.{layer}.{theirs}.{part}",
                    f"encoder.sentence_encoder.layers.{layer}.{ours}.{part}",
                )


def convert(published: PublishedBert, data: Path) -> tuple[dict, list[str]]:
    """Return a fairseq checkpoint of architecture `lowrank_bert_base`, and notes on its content.

    Args:
        published: the model to convert.
        data: the folder of the dictionary, which is the task's data in the checkpoint.

    Raises:
        UserError: a tensor is missing or unknown, does not have the configuration's shape, or is not finite.
    """
    args = parse_architecture("lowrank_bert_base", model_flags(published.config), task="masked_lm")
    args.data = str(data)
    args.untie_weights_roberta = not published.config.get("tie_word_embeddings", True)
    found, notes = take(published.tensors, published.config["num_hidden_layers"], tied=not args.untie_weights_roberta)
    rows = torch.tensor(published.rows)
    model = fresh_model(args, published)
    state = model.state_dict()
    for theirs, (ours, tensor) in found.items():
        state[ours] = placed(theirs, tensor, state[ours], rows)
    if not args.untie_weights_roberta:
        state["encoder.lm_head.weight"] = state["encoder.sentence_encoder.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return checkpoint(args, model), notes


def take(tensors: dict[str, Tensor], layers: int, *, tied: bool) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Return transformers' name, fairseq's name and tensor of each parameter, and notes on tensors left out or missing."""
    wanted = dict(names(layers))
    notes = []
    for head, parts in HEADS.items():
        if any(name in tensors for name in parts):
            wanted |= parts
        else:
            notes.append(f"not in the file, so initialised at random: {head}")
    if not tied and BIAS in wanted:
        del wanted[BIAS]
        wanted |= UNTIED
    if missing := [name for name in wanted if name not in tensors]:
        raise UserError(
            f"the model has no {missing[0]}"
            + (f", and {len(missing) - 1} more are missing" if missing[1:] else "")
            + ". Use files of one model."
        )
    others = [name for name in tensors if name not in (*wanted, *UNTIED, BIAS, NUMBERS)]
    if strange := [name for name in others if name.startswith(("bert.", "cls."))]:
        raise UserError(f"the model has {strange[0]}, which config.json does not describe. Use files of one model.")
    if others:
        notes.append(f"left out: {', '.join(others)}")
    return {name: (ours, tensors[name]) for name, ours in wanted.items()}, notes


def placed(name: str, tensor: Tensor, like: Tensor, rows: Tensor) -> Tensor:
    """Return a published tensor in fairseq's layout: words in fairseq's order, positions after two unused rows.

    Raises:
        UserError: the shape differs from the configuration's, or the numbers are not finite floating-point numbers.
    """
    unread = Dictionary().pad() + 1 if name == POSITIONS else 0
    expected = [len(like) - unread, *like.shape[1:]]
    if list(tensor.shape) != expected:
        raise UserError(
            f"{name} has shape {list(tensor.shape)}, and config.json gives {expected}. Use files of one model."
        )
    if not tensor.is_floating_point():
        raise UserError(
            f"{name} has numbers of type {tensor.dtype}. Use a model with floating-point numbers, such as float32."
        )
    tensor = tensor.float()
    if not tensor.isfinite().all():
        raise UserError(
            f"{name} has numbers that are not finite in float32. Use a model whose training did not diverge."
        )
    if name in (WORDS, BIAS, *UNTIED):
        return tensor[rows]
    return torch.cat((like.new_zeros(unread, *like.shape[1:]), tensor)) if unread else tensor


def fresh_model(args: Namespace, published: PublishedBert) -> LowrankBertModel:
    """Return a model of these arguments with the published vocabulary, initialised with a fixed seed."""
    dictionary = Dictionary()
    for line in published.dictionary:
        dictionary.add_symbol(line.rsplit(" ", 1)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LowrankBertModel.build_model(args, MaskedLMTask(args, dictionary))


def checkpoint(args: Namespace, model: LowrankBertModel) -> dict:
    """Return a checkpoint like that of fairseq-train before its first update, without an optimizer."""
    cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(args), resolve=True, enum_to_str=True)
    return {
        "args": None,
        "cfg": cfg,
        "model": model.state_dict(),
        "criterion": None,
        "optimizer_history": [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2}},
    }


def write(published: PublishedBert, folder: Path) -> None:
    """Write dict.txt and wordpieces.json."""
    write_lines(folder / "dict.txt", published.dictionary)
    WordPieces.save(published.words, folder / "wordpieces.json", **published.normalisation)
