"""The tokenizer of exported models: raw text as ``fairseq-lowrank translate`` reads and writes it, and fairseq's vocabularies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from fairseq_lowrank.files import LINE_BREAK
from fairseq_lowrank.huggingface.exported.configuration import CODE, NamedByFolders, write_code
from fairseq_lowrank.raw_text import MODEL, SETTINGS, RawText, TextSettings

FILES = {
    "vocab_file": "vocab.json",
    "target_vocab_file": "target_vocab.json",
    "text_file": SETTINGS,
    "subwords_file": MODEL,
}


class LowrankTokenizer(NamedByFolders, PreTrainedTokenizer):
    """A tokenizer by Moses's rules and subwords, with one vocabulary for the source and one for the target.

    Texts of the source are encoded, and those of the target with ``text_target=``. Ids are decoded by the vocabulary of the
    target. A special token in a text is a word of the text, as in fairseq.

    Args:
        vocab_file: the words of the source, in the order of their numbers.
        target_vocab_file: those of the target, if they differ.
        text_file: the settings of :class:`~fairseq_lowrank.raw_text.TextSettings`.
        subwords_file: the model of the subwords, if words are cut.
        starts_with: the token before a text, if there is one; language models have it.
        ends_with_eos: whether the end of the sentence follows a text.
    """

    vocab_files_names = FILES
    _auto_map = {"AutoTokenizer": [f"{Path(CODE).stem}.LowrankTokenizer", None]}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        target_vocab_file: str | None = None,
        text_file: str | None = None,
        subwords_file: str | None = None,
        starts_with: str | None = None,
        ends_with_eos: bool = True,
        **kwargs: Any,
    ) -> None:
        self.paths = {"vocab_file": vocab_file, "target_vocab_file": target_vocab_file}
        self.paths |= {"text_file": text_file, "subwords_file": subwords_file}
        self.source_words = _read(vocab_file)
        self.target_words = self.source_words if target_vocab_file is None else _read(target_vocab_file)
        self.source_numbers, self.target_numbers = (
            {word: number for number, word in enumerate(words)} for words in (self.source_words, self.target_words)
        )
        settings = None if text_file is None else TextSettings.load(Path(text_file).parent)
        settings = settings or TextSettings("", "")
        model = Path(subwords_file or MODEL)
        self.source_text = RawText(settings, model)
        self.target_text = RawText(replace(settings, source=settings.target), model)
        self.starts_with, self.ends_with_eos = starts_with, ends_with_eos
        self._switch_to_input_mode()
        kwargs.setdefault("split_special_tokens", True)
        super().__init__(starts_with=starts_with, ends_with_eos=ends_with_eos, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.source_words)

    def get_vocab(self) -> dict[str, int]:
        return self.source_numbers | self.added_tokens_encoder

    def _switch_to_input_mode(self) -> None:
        self.numbers, self.text = self.source_numbers, self.source_text

    def _switch_to_target_mode(self) -> None:
        self.numbers, self.text = self.target_numbers, self.target_text

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.text.encode(LINE_BREAK.sub(" ", text)).split()

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.numbers.get(token, self.numbers.get(str(self.unk_token)))

    def _convert_id_to_token(self, index: int) -> str:
        return self.target_words[index]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        first = [] if self.starts_with is None else [self.numbers[self.starts_with]]
        end: Any = [self.eos_token_id] if self.ends_with_eos else []
        return [*first, *token_ids_0, *(token_ids_1 or ()), *end]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Return 1 for each token of :meth:`build_inputs_with_special_tokens` that is not of a text, else 0."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens)
        count = len(token_ids_0) + len(token_ids_1 or ())
        return [1] * (self.starts_with is not None) + [0] * count + [1] * self.ends_with_eos

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.source_text.decode(" ".join(tokens))

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of tokens; ``skip_special_tokens`` leaves unknown words, as fairseq does."""
        ids: Iterable[int] = [token_ids] if isinstance(token_ids, int) else token_ids
        special: set[Any] = {self.bos_token_id, self.pad_token_id, self.eos_token_id}
        skipped = special if skip_special_tokens else set()
        kept: Any = [number for number in ids if number not in skipped]
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(kept))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        write_code(save_directory)
        saved = []
        for kind, path in self.paths.items():
            if path is not None:
                target = Path(save_directory) / f"{f'{filename_prefix}-' if filename_prefix else ''}{FILES[kind]}"
                if Path(path).resolve() != target.resolve():
                    shutil.copyfile(path, target)
                saved.append(str(target))
        return tuple(saved)


def _read(path: str) -> list[str]:
    return json.loads(Path(path).read_text(encoding="utf-8"))
