"""A published BERT in the layout of transformers, as a checkpoint of fairseq with its dictionary and word pieces."""

from __future__ import annotations

import json
import pickle
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

from fairseq_lowrank.files import read_lines, write_lines
from fairseq_lowrank.models.bert import LowrankBertModel
from fairseq_lowrank.tools.architecture import parse
from fairseq_lowrank.tools.wordpieces import WordPieces

# fairseq's names of transformers' activations that it has.
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
# What stands for fairseq's special symbols, in the order of their numbers; the tasks add <mask> as the last word.
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
# Parts that a file has whole or not at all: their tensors, and what begins anew without them.
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
# Saved by some versions though it is no parameter.
NUMBERS = "bert.embeddings.position_ids"
# An output matrix of its own, where words are not tied; where they are, these repeat others.
UNTIED = {OUTPUT: "encoder.lm_head.weight", "cls.predictions.decoder.bias": "encoder.lm_head.bias"}


@dataclass
class PublishedBert:
    """What a folder holds: its configuration, its tensors by transformers' names, its vocabulary, and how it is cut.

    Args:
        config: of config.json.
        tensors: of model.safetensors or pytorch_model.bin, as of BertForPreTraining.
        words: the lines of vocab.txt.
        normalisation: of words, see :class:`~fairseq_lowrank.tools.wordpieces.WordPieces`.
    """

    config: dict
    tensors: dict[str, Tensor]
    words: list[str]
    normalisation: dict[str, bool | None]

    @classmethod
    def read(cls, folder: Path) -> PublishedBert:
        """Read a folder as transformers' save_pretrained writes it, with vocab.txt.

        Raises:
            ValueError: a file is missing, damaged, or holds more than tensors, or the configuration asks for what
                is not BERT as published.
        """
        config = read_json(folder / "config.json")
        check_config(config, folder)
        words = list(read_lines(present(folder / "vocab.txt")))
        return cls(config, read_tensors(folder), words, read_normalisation(folder, words))

    @property
    def rows(self) -> list[int]:
        """For each word of fairseq's dictionary, <mask> the last, its row in the published embeddings.

        Raises:
            ValueError: a special symbol is missing, or there are more words than rows.
        """
        numbers = {word: number for number, word in enumerate(self.words)}
        if missing := [symbol for symbol in (*SPECIAL, MASK) if symbol not in numbers]:
            raise ValueError(f"vocab.txt lacks {', '.join(missing)}")
        if len(self.words) > (size := self.config["vocab_size"]):
            raise ValueError(
                f"vocab.txt has {len(self.words):,} words; expected at most {size:,}, config.json's vocab_size"
            )
        special = [numbers[symbol] for symbol in SPECIAL]
        mask = numbers[MASK]
        return [*special, *(number for number in range(size) if number not in (*special, mask)), mask]

    @property
    def dictionary(self) -> list[str]:
        """The lines of fairseq's dict.txt: all words but special ones.

        A row has a word that no text has where vocab.txt has none for it, repeats one, or has one that fairseq cannot read.
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
    if not path.is_file():
        raise ValueError(
            f"{path} is not there: expected config.json, vocab.txt, and model.safetensors or pytorch_model.bin"
        )
    return path


def read_json(path: Path) -> dict:
    try:
        content = json.loads(present(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def check_config(config: dict, folder: Path) -> None:
    """Refuse a model that computes something else than BERT as published.

    Raises:
        ValueError: a setting that is refused, named with what would be accepted.
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
            raise ValueError(f"{where}: {name} is {value!r}; expected {' or '.join(map(repr, accepted))}")
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "type_vocab_size"),
    ):
        if type(value := config.get(name)) is not int or value < 1:
            raise ValueError(f"{where}: {name} is {value!r}; expected a whole number, at least 1")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of pytorch_model.bin, in float32 under the names of BertForPreTraining."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        tensors = read_safetensors(safe)
    else:
        try:
            tensors = torch.load(present(pickled), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{pickled} is damaged, or holds more than tensors: {' '.join(str(error).split())[:200]}"
            ) from error
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError(f"{pickled} holds more than tensors by name")
    bare = not any(name.startswith("bert.") for name in tensors)  # BertModel alone
    old = {".gamma": ".weight", ".beta": ".bias"}

    def named(name: str) -> str:
        for end, new in old.items():
            if name.endswith(end):
                name = name.removesuffix(end) + new
        return f"bert.{name}" if bare else name

    return {named(name): tensor.float() for name, tensor in tensors.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_normalisation(folder: Path, words: list[str]) -> dict[str, bool | None]:
    """How words are written before they are cut: by tokenizer_config.json, else in lower case where the vocabulary is."""
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    if not config.get("do_basic_tokenize", True):
        raise ValueError(f"{file}: do_basic_tokenize is false; expected BERT's own way to find words")
    lower = not any(word != word.lower() for word in words if not word.startswith("["))
    return {
        "lowercase": bool(config.get("do_lower_case", lower)),
        "strip_accents": config.get("strip_accents"),
        "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
    }


def model_flags(config: dict) -> list[str]:
    """The flags of fairseq-train that make a model of this configuration."""
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
    """Names of the tensors that every BERT has, transformers' and fairseq's."""
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
    """A fairseq checkpoint of architecture `lowrank_bert_base` and these sizes, for fine-tuning and further pre-training.

    Args:
        published: what is converted.
        data: the folder of the dictionary, which is the task's data in the checkpoint.

    Returns:
        The checkpoint, and lines that say what is in it.

    Raises:
        ValueError: a tensor is missing, has another shape than the configuration says, or is one too many.
    """
    args = parse("lowrank_bert_base", model_flags(published.config), task="masked_lm")
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
    """The tensors that the model has, by transformers' names with fairseq's; and notes on what is left out or lacking."""
    wanted = dict(names(layers))
    notes = []
    for head, parts in HEADS.items():
        if any(name in tensors for name in parts):
            wanted |= parts
        else:
            notes.append(f"not in the file, so drawn at random: {head}")
    if not tied and BIAS in wanted:
        del wanted[BIAS]
        wanted |= UNTIED
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"the model lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    others = [name for name in tensors if name not in (*wanted, *UNTIED, BIAS, NUMBERS)]
    if strange := [name for name in others if name.startswith(("bert.", "cls."))]:
        raise ValueError(f"the model has {strange[0]}, which config.json says nothing of")
    if others:
        notes.append(f"left out: {', '.join(others)}")
    return {name: (ours, tensors[name]) for name, ours in wanted.items()}, notes


def placed(name: str, tensor: Tensor, like: Tensor, rows: Tensor) -> Tensor:
    """A published tensor as fairseq has it: words in its order, positions behind the two rows that it never reads.

    Raises:
        ValueError: its shape is not that of the configuration.
    """
    unread = Dictionary().pad() + 1 if name == POSITIONS else 0
    expected = [len(like) - unread, *like.shape[1:]]
    if list(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {expected} by config.json")
    if name in (WORDS, BIAS, *UNTIED):
        return tensor[rows]
    return torch.cat((like.new_zeros(unread, *like.shape[1:]), tensor)) if unread else tensor


def fresh_model(args: Namespace, published: PublishedBert) -> LowrankBertModel:
    dictionary = Dictionary()
    for line in published.dictionary:
        dictionary.add_symbol(line.rsplit(" ", 1)[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LowrankBertModel.build_model(args, MaskedLMTask(args, dictionary))


def checkpoint(args: Namespace, model: LowrankBertModel) -> dict:
    """What fairseq-train would have saved before its first update, without an optimizer."""
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
