"""Small tools for text files: read plain or gzip, write whole or not at all, tokenise, learn and apply sub-words."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from fairseq_lowrank.files import read_lines, whole_file
from fairseq_lowrank.messages import UserError


class MosesTokenizer:
    """Moses tokenisation of a line by sacremoses.

    Args:
        language: which rules for abbreviations.
        lowercase: lower-case the result.
        normalise: unify punctuation and put blanks for control characters first, as WMT's scripts do.
        aggressive: split at hyphens (`@-@`), as WMT's scripts do.
        escape: write `&apos;` for `'` and so on, as the Perl tokeniser does unless told otherwise.
    """

    def __init__(self, language: str, *, lowercase=False, normalise=False, aggressive=False, escape=True):
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        self.normaliser = MosesPunctNormalizer(language) if normalise else None
        self.tokenizer = MosesTokenizer(language)
        self.options = {"aggressive_dash_splits": aggressive, "escape": escape, "return_str": True}
        self.lowercase = lowercase

    def __call__(self, line: str) -> str:
        if self.normaliser:
            line = self.normaliser.normalize(line)
            line = "".join(" " if unicodedata.category(character)[0] == "C" else character for character in line)
        line = self.tokenizer.tokenize(line.strip(), **self.options)
        return line.lower() if self.lowercase else line


class SentencePiece:
    """Byte-pair encoding learnt by sentencepiece on text that is left as it is; `▁` stands where a word starts."""

    options: ClassVar = {}

    @staticmethod
    def spell(line: str) -> str:
        """The form in which sentencepiece sees a line."""
        return line

    @classmethod
    def train(cls, inputs: Iterable[Path], model: Path, size: int) -> None:
        """Learn a vocabulary of `size` pieces over `inputs`, or over 5 million of their lines."""
        import sentencepiece

        with whole_file(model, "wb") as file:
            try:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=(cls.spell(line) for path in inputs for line in read_lines(path)),
                    model_writer=file,
                    model_type="bpe",
                    vocab_size=size,
                    character_coverage=1.0,
                    normalization_rule_name="identity",
                    input_sentence_size=5_000_000,
                    shuffle_input_sentence=False,
                    max_sentence_length=2**30,  # longer lines than its 4,192 bytes teach it nothing, without a word
                    minloglevel=2,
                    **cls.options,
                )
            except RuntimeError as error:
                raise UserError(f"cannot learn {size} pieces from this text: {error}") from error

    def __init__(self, model: Path):
        import sentencepiece

        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def __call__(self, line: str) -> str:
        return " ".join(self.processor.encode(self.spell(line), out_type=str))


class BytePieces(SentencePiece):
    """The same over UTF-8 bytes, so that nothing is unknown: from 257 pieces (single bytes) upwards.

    Printable ASCII stands for itself and byte b for character 256 + b otherwise.
    """

    characters: ClassVar = {byte: chr(byte if 0x20 <= byte < 0x7F else 0x100 + byte) for byte in range(256)}
    options: ClassVar = {"required_chars": "".join(characters.values()).replace(" ", ""), "bos_id": -1, "eos_id": -1}

    @property
    def pieces(self) -> list[str]:
        """All pieces but the unknown one, which stands for nothing here."""
        return [self.processor.id_to_piece(index) for index in range(1, self.processor.get_piece_size())]

    @classmethod
    def spell(cls, line: str) -> str:
        return line.encode().decode("latin-1").translate(cls.characters)


class SubwordNMT:
    """Byte-pair encoding by subword-nmt, as in fairseq's own scripts; pieces inside a word end in `@@`."""

    @staticmethod
    def train(inputs: Iterable[Path], codes: Path, size: int) -> None:
        """Learn `size` merge operations over all of `inputs`."""
        from subword_nmt.learn_bpe import learn_bpe

        lines = (line for path in inputs for line in read_lines(path))
        with whole_file(codes) as file:
            try:
                learn_bpe(lines, file, size)
            except ValueError as error:
                raise UserError(f"cannot learn {size} merges: there is nothing to merge in the text") from error

    def __init__(self, codes: Path):
        from subword_nmt.apply_bpe import BPE

        with open(codes, encoding="utf-8") as file:
            self.bpe = BPE(file)

    def __call__(self, line: str) -> str:
        return self.bpe.process_line(line)


def clean_pairs(pairs: Iterable[tuple[str, str]], longest: int, ratio: float) -> Iterator[tuple[str, str]]:
    """The pairs with 1 to `longest` tokens a side, their lengths at most `ratio` apart (clean-corpus-n.perl)."""
    for pair in pairs:
        shorter, longer = sorted(len(side.split()) for side in pair)
        if shorter >= 1 and longer <= longest and longer <= ratio * shorter:
            yield pair


def join_lines(lines: Iterable[str], count: int) -> Iterator[str]:
    """Each `count` consecutive lines as one; what is left at the end is one too."""
    lines = iter(lines)
    for line in lines:
        yield " ".join([line, *(following for _, following in zip(range(count - 1), lines, strict=False))])
