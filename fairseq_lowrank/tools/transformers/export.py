"""A folder that transformers reads, from a model of fairseq."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from fairseq_lowrank.huggingface.exported import (
    LowrankConfig,
    LowrankForCausalLM,
    LowrankForSeq2SeqLM,
    LowrankTokenizer,
)
from fairseq_lowrank.huggingface.exported.tokenization import FILES
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.raw_text import MODEL, SETTINGS
from fairseq_lowrank.tools.exported import Exported, Hypothesis, scored


def write(exported: Exported, folder: Path) -> None:
    """Write configuration, weights, settings of generation and tokenizer.

    Raises:
        UserError: the model has tensors that the exported model lacks, or the other way round; or the weights cannot be written.
    """
    kind: Any = LowrankForSeq2SeqLM if exported.translates else LowrankForCausalLM
    model = kind(LowrankConfig(architectures=[kind.__name__], **exported.config))
    ours, given = (
        {name: tuple(t.shape) for name, t in each.items()} for each in (model.state_dict(), exported.tensors)
    )
    if differing := sorted(name for name in ours.keys() | given.keys() if ours.get(name) != given.get(name)):
        where = "the checkpoint" if differing[0] in given else "the exported model"
        raise UserError(
            f"{differing[0]}: {where} has this tensor in another shape or alone, so a flag of the model has no export "
            "(such as --scale-attn, --quant-noise-pq or --no-cross-attention). Keep the model in fairseq."
        )
    model.load_state_dict(exported.tensors)
    model.generation_config = generation_of(exported)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise UserError(f"the weights cannot be written: {error}. Free some space, or choose another place.") from error
    tokenizer_of(exported, folder).save_pretrained(folder)


def generation_of(exported: Exported) -> GenerationConfig:
    """Return the settings of generation that search as fairseq-generate does."""
    ids = {name: exported.config[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    search = {
        "num_beams": exported.beam,
        "length_penalty": exported.lenpen,
        "early_stopping": True,
        "suppress_tokens": [exported.config["pad_token_id"]],
        "max_length": exported.longest + 2,  # with the start and the end
    }
    if not exported.translates:
        return GenerationConfig(**ids, **search)
    start = exported.config["decoder_start_token_id"]
    return GenerationConfig(**ids, **search, decoder_start_token_id=start, min_new_tokens=1)


def tokenizer_of(exported: Exported, folder: Path) -> LowrankTokenizer:
    """Write the files of the tokenizer, and return it."""
    files = {"vocab_file": exported.source}
    if exported.target is not exported.source:
        files["target_vocab_file"] = exported.target
    for name, words in files.items():
        (folder / FILES[name]).write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    (folder / SETTINGS).write_text(json.dumps(asdict(exported.text)) + "\n", encoding="utf-8")
    if exported.subwords is not None:
        shutil.copyfile(exported.subwords, folder / MODEL)
    paths = {name: str(folder / FILES[name]) for name in files}
    if exported.subwords is not None:
        paths["subwords_file"] = str(folder / MODEL)
    longest = exported.config["max_source_positions" if exported.translates else "max_target_positions"]
    return LowrankTokenizer(
        **paths,
        text_file=str(folder / SETTINGS),
        starts_with=None if exported.translates else exported.source[exported.config["bos_token_id"]],
        ends_with_eos=exported.translates,
        padding_side="left" if exported.pads_left else "right",
        model_max_length=longest,
        **{f"{name}_token": word for name, word in exported.special.items()},
    )


class TransformersModel:
    """A folder of :func:`write`, read as a user reads it, with its search; a :class:`~fairseq_lowrank.tools.exported.Reader`."""

    own_search = False

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        config = LowrankConfig.from_pretrained(folder)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder).eval()

    def encode(self, line: str) -> list[int]:
        """Return the numbers of the tokens of a line of raw text."""
        return self.tokenizer(line).input_ids

    @torch.inference_mode()
    def search(self, sentences: Sequence[list[int]]) -> list[Hypothesis]:
        """Translate sentences with the settings of the folder, or score a language model's text."""
        if not self.model.config.is_encoder_decoder:
            return [self._score(torch.tensor([sentence])) for sentence in sentences]
        batch = self.tokenizer.pad({"input_ids": list(sentences)}, return_tensors="pt")
        found = self.model.generate(**batch, return_dict_in_generate=True, output_scores=True)
        end = self.model.config.eos_token_id
        tokens = [row[1:] for row in found.sequences.tolist()]
        tokens = [row[: row.index(end) + 1] if end in row else row for row in tokens]
        return [Hypothesis(*pair) for pair in zip(tokens, found.sequences_scores.tolist(), strict=True)]

    @torch.inference_mode()
    def scores(self, sentences: Sequence[list[int]], translations: Sequence[list[int]]) -> list[float]:
        """Return the scores of given translations, or of a language model's texts."""
        model, result = self.model, []
        if not model.config.is_encoder_decoder:
            return [self._score(torch.tensor([sentence])).score for sentence in sentences]
        for sentence, tokens in zip(sentences, translations, strict=True):
            target = torch.tensor([[model.config.decoder_start_token_id, *tokens]])
            logits = model(input_ids=torch.tensor([sentence]), decoder_input_ids=target).logits[0]
            mean = scored(logits, target[0]).score
            result.append(mean * len(tokens) ** (1 - model.generation_config.length_penalty))
        return result

    def _score(self, tokens: torch.Tensor) -> Hypothesis:
        """Compute the second half of a text after the first, which is in the cache."""
        half = tokens.size(1) // 2
        first = self.model(tokens[:, :half], use_cache=True)
        second = self.model(tokens[:, half:], past_key_values=first.past_key_values)
        return scored(torch.cat([first.logits, second.logits], dim=1)[0], tokens[0])
