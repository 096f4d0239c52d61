"""A folder that CTranslate2 reads, by its own converter, from a model whose attention is plain or becomes plain."""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found, import-untyped, unused-ignore]
import numpy as np
import torch
from ctranslate2.converters import FairseqConverter  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from fairseq_lowrank.messages import FlagError, UserError, flag_name
from fairseq_lowrank.parts import AXES, MODULE_AXES, PLAIN, AttentionConfig, AttentionSpec
from fairseq_lowrank.plugin.flags import FLAGS, AttentionOptions, as_namespace
from fairseq_lowrank.tools.exported import Hypothesis, scored
from fairseq_lowrank.tools.fairseq.architecture import attention_layers
from fairseq_lowrank.tools.fairseq.checkpoints import model_arguments
from fairseq_lowrank.tools.fairseq.conversion import convert
from fairseq_lowrank.tools.fairseq.export import FairseqModel, choices_of

WAYS = (
    "Two ways are left: export with --to transformers, which takes this attention; or train with --attention mha, which "
    "CTranslate2 computes."
)


TRANSFORMERS = "Export with --to transformers, or train without the flag."


def check_flags(state: dict) -> None:
    """Check the flags of a checkpoint, before its model and its data are read.

    Args:
        state: see :func:`~fairseq_lowrank.tools.fairseq.checkpoints.load_state`.

    Raises:
        FlagError: CTranslate2 has no such model.
    """
    args = model_arguments(state)
    values = vars(args)
    if "encoder_layers" in values:
        output, size = values.get("decoder_output_dim"), args.decoder_embed_dim
        if output not in (None, size):
            reason = f"CTranslate2's translation models end with the embedding size, {size}"
            raise FlagError("--decoder-output-dim", output, reason, TRANSFORMERS)
        if values.get("no_decoder_final_norm") and args.decoder_normalize_before:
            reason = "CTranslate2's pre-norm models have a LayerNorm there"
            raise FlagError("--no-decoder-final-norm", "", reason, TRANSFORMERS)
    chosen = AttentionOptions.from_args(args)
    spec, sizes = chosen.spec, {}
    for site in chosen.sites:
        stack = "encoder" if site == "encoder" else "decoder"
        if f"{stack}_attention_heads" in values:
            sizes[site] = values[f"{stack}_embed_dim"], values[f"{stack}_attention_heads"]
    for name, (width, heads) in ((name, size) for name in ("head_dim", "value_dim") for size in sizes.values()):
        if spec.is_default("projection") and (size := getattr(spec, name)) not in (None, width // heads):
            reason = f"CTranslate2 computes heads of size {width // heads}, the embedding size divided by the heads"
            raise FlagError(flag_name(name), size, reason, TRANSFORMERS)
    for width, heads in sizes.values():
        _check_parts(spec, AttentionConfig(spec, width, heads, self_attention=True, max_positions=1), state["model"])


def _check_parts(spec: AttentionSpec, config: AttentionConfig, tensors: dict[str, Tensor]) -> None:
    """Check that each part folds into plain attention, or is as it began.

    Raises:
        FlagError: one is not.
    """
    for axis, part in spec.parts:
        if axis not in MODULE_AXES or part.folds or (axis == "mixing" and not spec.is_default("projection")):
            continue
        start = config.build(axis).state_dict()
        for name, tensor in tensors.items():
            _, found, key = name.rpartition(f".{axis}.")
            if found and not (key in start and torch.allclose(tensor.float(), start[key].float())):
                flag, reason = AXES[axis].flag.replace("_", "-"), "CTranslate2 computes plain attention alone"
                remedy = "Export with --to transformers, or train with --attention mha."
                raise FlagError(f"--{flag}", getattr(spec, axis), reason, remedy)


def write(model: FairseqModel, folder: Path) -> None:
    """Convert a model to plain attention, and write it with CTranslate2's converter.

    Raises:
        UserError: the attention computes more than plain attention, or the converter refuses the model.
    """
    state = plain_state(model)
    args = stock_arguments(model, model_arguments(state))
    with tempfile.TemporaryDirectory(dir=folder.parent) as place, torch.serialization.safe_globals([Namespace]):
        path = Path(place) / "model.pt"
        with open(path, "wb") as file:  # given a path, torch hides that a disk is full
            torch.save({"args": args, "model": with_biases(state["model"])}, file)
        try:
            FairseqConverter(str(path), args.data).convert(str(folder), force=True)
        except ValueError as error:
            raise UserError(f"CTranslate2's converter refuses the model: {error}") from error


def plain_state(model: FairseqModel) -> dict:
    """Return the checkpoint with plain attention of the same outputs.

    Raises:
        UserError: the attention computes more than plain attention.
    """
    if not any(choices_of(layer.module) for layer in attention_layers(model.model)):
        return model.state
    try:
        state, _ = convert(model.state, attention=PLAIN)
    except UserError as error:
        raise UserError(f"CTranslate2 computes plain attention alone. {error} {WAYS}") from error
    if sizes := AttentionOptions.from_args(model_arguments(state)).spec.choices:
        text = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise UserError(f"CTranslate2 computes heads of the embedding size divided by their number, not {text}. {WAYS}")
    return state


def stock_arguments(model: FairseqModel, args: Namespace) -> Namespace:
    """Return the arguments of the same model of stock fairseq, and those of its task, as CTranslate2's converter reads them."""
    task = model.state["cfg"]["task"] if model.state.get("cfg") else model.state["args"]
    name = "translation" if model.translates else "language_modeling"
    settings = vars(as_namespace(task)) | {key: value for key, value in vars(args).items() if key not in FLAGS}
    settings |= {"task": name, "arch": "transformer" if model.translates else "transformer_lm", "data": str(model.data)}
    return Namespace(**{key: value for key, value in settings.items() if key != "_name"})


def with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with a bias of 0 for each projection of attention without one, which stock attention has."""
    result = dict(tensors)
    for name, weight in tensors.items():
        if re.search(r"attn\.(q|k|v|out)_proj\.weight$", name):
            result.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(len(weight)))
    return result


class CTranslate2Model:
    """A folder of :func:`write`, with its search; a :class:`~fairseq_lowrank.tools.exported.Reader`."""

    def __init__(self, model: FairseqModel, folder: Path) -> None:
        self.model = model
        kind: Any = ctranslate2.Translator if model.translates else ctranslate2.Generator
        self.reader = kind(str(folder), device="cpu", intra_threads=torch.get_num_threads())

    def encode(self, line: str) -> list[int]:
        """Return the numbers of the tokens of a line of raw text, by fairseq: the folder has no tokenizer."""
        return self.model.encode(line)

    @property
    def own_search(self) -> bool:
        return self.model.translates

    def search(self, sentences: Sequence[list[int]]) -> list[Hypothesis]:
        """Translate sentences, or score a language model's text."""
        if not self.model.translates:
            return [self._score(sentence) for sentence in sentences]
        found = self.reader.translate_batch(
            self._sources(sentences),
            beam_size=self.model.beam,
            length_penalty=self.model.lenpen,
            max_decoding_length=self.model.longest,
            max_input_length=0,
            return_end_token=True,
            return_scores=True,
        )
        return [
            Hypothesis([self.model.target.index(word) for word in best.hypotheses[0]], best.scores[0]) for best in found
        ]

    def scores(self, sentences: Sequence[list[int]], translations: Sequence[list[int]]) -> list[float]:
        """Return the scores of given translations, or of a language model's texts."""
        if not self.model.translates:
            return [self._score(sentence).score for sentence in sentences]
        words = [[self.model.target[number] for number in tokens[:-1]] for tokens in translations]
        found = self.reader.score_batch(self._sources(sentences), words, max_input_length=0)
        return [sum(each.log_probs) / len(each.log_probs) ** self.model.lenpen for each in found]

    def _sources(self, sentences: Sequence[list[int]]) -> list[list[str]]:
        """Return the words of sentences without the end, which the converted model adds."""
        return [[self.model.source[number] for number in sentence[:-1]] for sentence in sentences]

    def _score(self, sentence: list[int]) -> Hypothesis:
        words = [self.model.source[number] for number in sentence]
        logprobs = self.reader.forward_batch([words], return_log_probs=True)
        return scored(torch.as_tensor(np.array(logprobs))[0], torch.tensor(sentence))
