"""Translation of raw text by a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_lowrank.files import LINE_BREAK, say
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.raw_text import MODEL, RawText, TextSettings
from fairseq_lowrank.subwords import is_lowercase, kind_of_dictionary
from fairseq_lowrank.tools.fairseq.checkpoints import load_model

LINES_AT_ONCE = 1024
MAX_TOKENS = 4096  # of a batch


class Translator:
    """A model that translates raw text.

    The settings of the text (Moses, subwords) are those that scripts/prepare.sh saved with the data.

    Args:
        checkpoint: the model.
        data: folder of the binarised data (default: the one that the model was trained on).
        moses: tokenise by Moses's rules, for data without settings; lower-case if the dictionary has no capital letter.
        subwords: model of the subwords (sentencepiece's, or the codes of subword-nmt), for data without settings.

    Raises:
        UserError: the model is not one of translation, or the model of its subwords is missing.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        data: Path | str | None = None,
        moses: bool = False,
        subwords: Path | None = None,
    ):
        model, task = load_model(Path(checkpoint), data=None if data is None else Path(data))
        if not isinstance(task, TranslationTask):
            raise UserError(f"{checkpoint} is not a model of translation. Give one that --task translation trained.")
        self.task, self.model = task, model
        self.text = raw_text(task, moses, subwords)
        model.prepare_for_inference_(FairseqConfig())
        if torch.cuda.is_available():
            model.cuda()
        self.longest = utils.resolve_max_positions(task.max_positions(), model.max_positions())[0]

    def translate(
        self, lines: Sequence[str], *, beam: int = 5, lenpen: float = 1.0, longest: int = 200
    ) -> Iterator[str]:
        """Yield a translation for each line; an empty line has an empty one.

        Args:
            lines: sentences of the source language.
            beam: the number of hypotheses of the search.
            lenpen: the exponent of the length by which scores are divided; more gives longer translations.
            longest: the most tokens of a translation. How many translations have them is said on standard error.

        Raises:
            UserError: a line has more tokens than the model allows; then nothing is translated.
        """
        sentences = [self._encode(line, number) for number, line in enumerate(lines, start=1)]
        symbol = self.task.source_dictionary.unk()
        unknown = sum(int(sentence.eq(symbol).sum()) for sentence in sentences)
        tokens = sum(len(sentence) - 1 for sentence in sentences)
        if 10 * unknown > tokens:
            say(
                f"{unknown:,} of {tokens:,} tokens are unknown to the model. Check the language, --moses and --subwords."
            )
        longest = min(longest, self.model.max_decoder_positions() - 1)
        settings = GenerationConfig(beam=beam, lenpen=lenpen, max_len_b=longest)
        generator, cut = self.task.build_generator([self.model], settings), 0
        with Progress("translating", len(sentences), "lines") as progress:
            for first in range(0, len(sentences), LINES_AT_ONCE):
                for translation, length in self._translate(
                    sentences[first : first + LINES_AT_ONCE], generator, progress
                ):
                    cut += length >= longest
                    yield translation
        if cut:
            say(
                f"{cut:,} of {len(sentences):,} translations have {longest:,} tokens, the most that were allowed, and may be cut "
                "off. Split the lines, or raise --max-len-b."
            )

    def _encode(self, line: str, number: int) -> Tensor:
        """Return the numbers of the tokens of a line, with the end of the sentence."""
        tokens = self.text.encode(LINE_BREAK.sub(" ", line))
        sentence = self.task.source_dictionary.encode_line(tokens, add_if_not_exist=False).long()
        if len(sentence) > self.longest:
            raise UserError(
                f"line {number} has {len(sentence):,} tokens, and the model allows {self.longest:,}. Split the line."
            )
        return sentence

    @torch.inference_mode()
    def _translate(self, sentences: list[Tensor], generator, progress: Progress) -> Iterator[tuple[str, int]]:
        """Yield the translations of sentences, in their order, and their numbers of tokens."""
        full = [number for number, sentence in enumerate(sentences) if len(sentence) > 1]
        chosen = [sentences[number] for number in full]
        found = [("", 0)] * len(sentences)
        progress.update(len(sentences) - len(full))
        if full:
            lengths = torch.tensor([len(sentence) for sentence in chosen])
            batches = self.task.get_batch_iterator(
                self.task.build_dataset_for_inference(chosen, lengths),
                max_tokens=max(MAX_TOKENS, int(lengths.max())),
                disable_iterator_cache=True,
            )
            device = next(self.model.parameters()).device
            for batch in batches.next_epoch_itr(shuffle=False):
                sample = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
                hypotheses = self.task.inference_step(generator, [self.model], sample)
                for number, (best, *_) in zip(sample["id"].tolist(), hypotheses, strict=True):
                    tokens = self.task.target_dictionary.string(best["tokens"].cpu())
                    found[full[number]] = self.text.decode(tokens), len(best["tokens"]) - 1
                progress.update(sample["id"].numel())
        progress.hide()
        yield from found


def raw_text(task: TranslationTask | LanguageModelingTask, moses: bool, subwords: Path | None) -> RawText:
    """Return the two directions between raw text and tokens for the data of a task.

    The text of a language model is English for Moses's rules. Its words are cut only if the model of the subwords is given.

    Args:
        task: the task, with the folder of its data.
        moses, subwords: see :class:`Translator`.

    Raises:
        UserError: the words of the data were cut, and the model of the subwords is not known; or a model is given for whole words.
    """
    chosen: Any = task.cfg or task.args  # fairseq keeps those of a language model in args
    folder = Path(utils.split_paths(chosen.data)[0])
    if translates := hasattr(chosen, "source_lang"):
        languages = {"source": chosen.source_lang, "target": chosen.target_lang}
        dictionary = folder / f"dict.{chosen.source_lang}.txt"
    else:
        languages, dictionary = {"source": "en", "target": "en"}, folder / "dict.txt"
    cut = kind_of_dictionary(dictionary) if translates or subwords else None
    settings = TextSettings.load(folder) or TextSettings(**languages, subwords=cut)
    if moses and settings.moses is None:
        settings = replace(settings, moses={"lowercase": is_lowercase(dictionary)})
    settings = replace(settings, **languages)
    model = folder / MODEL if subwords is None else subwords
    if settings.subwords is None and subwords is not None:
        raise FlagError("--subwords", subwords, f"the words in {folder} are not cut", "Remove the flag.")
    if settings.subwords and not model.is_file():
        if subwords is None:
            raise UserError(
                f"{folder} has subwords of {settings.subwords}, and not their model. Give it with --subwords FILE, and "
                "--moses if the text was tokenised."
            )
        raise FlagError("--subwords", model, "there is no such file", "Give the model of the subwords.")
    return RawText(settings, model)
