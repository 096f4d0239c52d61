"""A transformer of fairseq as another library needs it: sizes, tensors, vocabularies, raw text and search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.transformer import TransformerDecoder, TransformerDecoderBase
from fairseq.modules import LearnedPositionalEmbedding
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from torch import nn

from fairseq_lowrank.attention import AXES, AttentionConfig, AttentionSpec, MultiheadAttention
from fairseq_lowrank.files import LINE_BREAK, read_lines
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts import METHODS
from fairseq_lowrank.plugin.embedding import ConvolvedEmbedding
from fairseq_lowrank.raw_text import MODEL
from fairseq_lowrank.tools.exported import Exported, Hypothesis, scored
from fairseq_lowrank.tools.fairseq import checkpoints
from fairseq_lowrank.tools.fairseq.translation import raw_text

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "relu_squared": "relu2",
    "tanh": "tanh",
    "linear": "linear",
}
"""The name in transformers of each activation of fairseq."""
LONGEST = GenerationConfig().max_len_b
"""The limit of fairseq-generate on the tokens of a translation."""
LONGEST_CHECKED = 128  # tokens of a sentence for translation


class FairseqModel:
    """A checkpoint of a translation model or a language model, with its search.

    Args:
        path: the checkpoint.
        state: what it holds, if it has been read.
        data, moses, subwords: see :class:`~fairseq_lowrank.tools.fairseq.translation.Translator`.
        beam, lenpen, max_len_b: settings of the search, as fairseq-generate has them.

    Raises:
        UserError: another model has no export.
    """

    def __init__(
        self,
        path: Path,
        *,
        state: dict | None = None,
        data: Path | None = None,
        moses: bool = False,
        subwords: Path | None = None,
        beam: int = 5,
        lenpen: float = 1.0,
        max_len_b: int = LONGEST,
    ) -> None:
        self.path, self.beam, self.lenpen = path, beam, lenpen
        self.state = checkpoints.load_state(path) if state is None else state
        self.args = checkpoints.model_arguments(self.state)
        self.model, self.task = checkpoints.load_model(path, data=data)
        self.translates = isinstance(self.task, TranslationTask)
        if not self.translates and not isinstance(self.task, LanguageModelingTask):
            raise UserError(
                f"{path}: a model of {type(self.task).__name__}. Give one of --task translation or language_modeling."
            )
        check_model(self.model, self.args)
        self.text = raw_text(self.task, moses, subwords)
        self.data = data or Path(str(self._setting("data")).split(":")[0])
        self.subwords = (subwords or self.data / MODEL) if self.text.settings.subwords else None
        self.source, self.target = self.task.source_dictionary, self.task.target_dictionary
        generation = GenerationConfig(beam=beam, lenpen=lenpen, max_len_b=max_len_b)
        self.generator = self.task.build_generator([self.model], generation) if self.translates else None
        self.longest = min(max_len_b, self.model.max_decoder_positions() - 1)

    def _setting(self, name: str) -> Any:
        """Return a setting of the task."""
        return checkpoints.configuration(self.state, "task", name)

    @property
    def start(self) -> int:
        """The number of the token before a text of a language model."""
        return self.source.bos() if self._setting("add_bos_token") else self.source.eos()

    def encode(self, line: str) -> list[int]:
        """Return the numbers of the tokens of a line of raw text."""
        tokens = self.text.encode(LINE_BREAK.sub(" ", line))
        numbers = self.source.encode_line(tokens, add_if_not_exist=False, append_eos=self.translates).tolist()
        return numbers if self.translates else [self.start, *numbers]

    def sentences(self, subset: str, count: int) -> list[list[int]]:
        """Return sentences of a subset of the data, drawn with a fixed seed."""
        limit = min(LONGEST_CHECKED, *self.model.max_positions()) if self.translates else None
        found = checkpoints.sequences(self.task, subset, count=count, seed=1, min_length=2, max_length=limit)
        return [sample["net_input"]["src_tokens"][0].tolist() for sample in found]

    def lines(self, file: Path, count: int) -> tuple[list[str], list[list[int]]]:
        """Return the first lines of raw text that are not empty, and the numbers of their tokens."""
        lines = [line for line in read_lines(file) if line.strip()][:count]
        if not lines:
            raise FlagError("--check", file, "the file has no sentence", "Give a text with a sentence per line.")
        sentences = [self.encode(line) for line in lines]
        limit = self.model.max_positions()[0] if self.translates else self.model.max_positions()
        for line, sentence in zip(lines, sentences, strict=True):
            if len(sentence) > limit:
                reason = f"the line {line[:40]!r} has {len(sentence):,} tokens, and the model allows {limit:,}"
                raise FlagError("--check", file, reason, "Split the line.")
        return lines, sentences

    @torch.inference_mode()
    def search(self, sentences: Sequence[list[int]]) -> list[Hypothesis]:
        """Translate sentences as fairseq-generate does, or score a language model's text."""
        if not self.translates:
            return [self._score(sentence) for sentence in sentences]
        tensors = [torch.tensor(sentence) for sentence in sentences]
        tokens = data_utils.collate_tokens(tensors, self.source.pad(), left_pad=self._setting("left_pad_source"))
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
        found = self.task.inference_step(self.generator, [self.model], sample)
        return [Hypothesis(best["tokens"].tolist(), float(best["score"])) for best, *_ in found]

    def _score(self, sentence: list[int]) -> Hypothesis:
        tokens = torch.tensor([sentence])
        return scored(self.model(tokens)[0][0], tokens[0])

    def exported(self) -> Exported:
        """Return the model as another library needs it."""
        model, decoder = self.model, self.model.decoder
        config = stack_sizes(decoder, "decoder") | {
            "vocab_size": len(self.target),
            "max_target_positions": decoder.max_target_positions,
            "decoder_input_dim": decoder.embed_tokens.embedding_dim,
            "decoder_output_dim": decoder.output_projection.in_features,
            "final_norm": decoder.layer_norm is not None,
            "activation_function": ACTIVATIONS[self.args.activation_fn],
            "scale_embedding": decoder.embed_scale != 1,
            "token_positions": decoder.embed_positions is not None,
            "layernorm_embedding": decoder.layernorm_embedding is not None,
            "share_decoder_input_output_embed": decoder.output_projection.weight is decoder.embed_tokens.weight,
            "pad_token_id": self.target.pad(),
            "bos_token_id": self.target.bos() if self.translates else self.start,
            "eos_token_id": self.target.eos(),
            "decoder_start_token_id": self.target.eos(),
            "is_encoder_decoder": self.translates,
        }
        if self.translates:
            encoder = model.encoder
            shared = decoder.embed_tokens.weight is encoder.embed_tokens.weight
            config |= stack_sizes(encoder, "encoder") | {
                "source_vocab_size": len(self.source),
                "max_source_positions": encoder.max_source_positions,
                "share_all_embeddings": shared and config["share_decoder_input_output_embed"],
            }
        config["tie_word_embeddings"] = config["share_decoder_input_output_embed"]
        special = {name: self.target[getattr(self.target, name)()] for name in ("bos", "pad", "eos", "unk")}
        same = self.source.symbols == self.target.symbols
        ignored = ("version", "_float_tensor")  # buffers of fairseq that no computation reads
        return Exported(
            config=config,
            tensors={name: t for name, t in model.state_dict().items() if name.rpartition(".")[2] not in ignored},
            source=self.source.symbols,
            target=self.source.symbols if same else self.target.symbols,
            special=special,
            text=self.text.settings,
            subwords=self.subwords,
            pads_left=bool(self._setting("left_pad_source")) if self.translates else True,
            beam=self.beam,
            lenpen=self.lenpen,
            longest=self.longest,
            card=self._card(),
        )

    def _card(self) -> list[str]:
        """Return the lines of a model card on the method, the training and its scores."""
        chosen = checkpoints.attention_flags(self.state)
        lines = [f"- architecture of fairseq: `{self.args.arch}`"]
        if chosen is None:
            lines.append("- attention: fairseq's own, plain multi-head attention")
        else:
            preset = str(chosen.pop("preset"))
            sites = getattr(self.args, "attention_sites", None)
            method = METHODS[preset]
            lines.append(f"- attention: `{preset}`, {method.title}: `{method.formula}`")
            lines += [f"- source: {paper.title} ({paper.authors}), {paper.url}" for paper in method.papers]
            lines += [f"- {AXES[axis].flag.replace('_', ' ')}: `{value}`" for axis, value in chosen.items()]
            lines += [f"- attention sites: {sites}"] if sites else []
        history = self.state.get("optimizer_history") or [{}]
        if (updates := history[-1].get("num_updates")) is not None:
            lines.append(f"- updates: {updates:,}")
        extra = self.state.get("extra_state") or {}
        metric = checkpoints.configuration(self.state, "checkpoint", "best_checkpoint_metric", "loss")
        if (best := extra.get("best")) is not None and math.isfinite(best):
            lines.append(f"- best {metric} on the validation data: {best:.4g}")
        return lines


def check_model(model: Any, args: Any) -> None:
    """Check that a model is fairseq's transformer, without parts that no export has.

    Tensors that have no place in the exported model are found later, when they are loaded.

    Raises:
        UserError: the model is another one.
    """
    decoder: Any = getattr(model, "decoder", None)
    if type(decoder) not in (TransformerDecoder, TransformerDecoderBase):
        raise FlagError("--arch", args.arch, "no export knows this model", "Use a transformer or a transformer_lm.")
    if decoder.adaptive_softmax is not None:
        raise UserError(
            "--adaptive-softmax-cutoff: no export has an adaptive softmax. Train the model without it to export it."
        )
    stacks = [decoder, *([model.encoder] if hasattr(model, "encoder") else [])]
    if any(type(stack.embed_tokens) is not nn.Embedding for stack in stacks):
        raise UserError(
            f"{args.arch}: its embedding is a {type(decoder.embed_tokens).__name__}, which no export has. Use one matrix "
            "for all words, without --adaptive-input and --character-embeddings."
        )
    if getattr(decoder, "cross_self_attention", False):
        raise UserError("--cross-self-attention: no export has it. Train the model without it to export it.")
    if isinstance(getattr(decoder, "project_in_dim", None), ConvolvedEmbedding):
        raise UserError("--embed-kernel: no export has it. Train the model without it to export it.")
    if args.activation_fn not in ACTIVATIONS:
        raise FlagError(
            "--activation-fn", args.activation_fn, "no export has it", f"Use one of {', '.join(ACTIVATIONS)}."
        )


def stack_sizes(stack: Any, name: str) -> dict[str, Any]:
    """Return the sizes and choices of an encoder or a decoder."""
    layer = stack.layers[0]
    sites = {name: layer.self_attn}
    if getattr(layer, "encoder_attn", None) is not None:
        sites["cross"] = layer.encoder_attn
    sizes = {
        "layers": len(stack.layers),
        "embed_dim": layer.embed_dim,
        "ffn_embed_dim": layer.fc1.out_features,
        "attention_heads": layer.self_attn.num_heads,
        "normalize_before": layer.normalize_before,
        "learned_pos": isinstance(stack.embed_positions, LearnedPositionalEmbedding),
    }
    result: dict[str, Any] = {f"{name}_{key}": value for key, value in sizes.items()}
    result |= {f"{site}_attention": choices_of(attention) for site, attention in sites.items()}
    result["attention_bias"] = layer.self_attn.out_proj.bias is not None
    result["dropout"] = layer.dropout_module.p
    result["attention_dropout"] = layer.self_attn.dropout_module.p
    result["activation_dropout"] = layer.activation_dropout_module.p
    return result


def choices_of(attention: nn.Module) -> dict[str, Any]:
    """Return the choices of an attention layer that differ from plain attention.

    Raises:
        UserError: the layer has options that an exported model does not write down.
    """
    if not isinstance(attention, MultiheadAttention):
        return {}
    plain = AttentionConfig(AttentionSpec(), attention.embed_dim, attention.num_heads)
    for name in ("add_bias_kv", "add_zero_attn", "qk_norm"):
        if getattr(attention.config, name) != getattr(plain, name):
            raise UserError(f"{name}: no export has it. Train the model without it to export it.")
    return attention.spec.choices
