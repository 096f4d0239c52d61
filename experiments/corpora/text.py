"""Subwords, and the selection of sentence pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import ClassVar

from fairseq_lowrank.files import read_lines, replace_line_breaks, whole_file, write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import tracked
from fairseq_lowrank.raw_text import MergedSubwords


class SentencePiece:
    """Byte-pair encoding by sentencepiece, without normalisation of the text; `▁` marks the start of a word."""

    options: ClassVar = {}

    @staticmethod
    def encode_line(line: str) -> str:
        """Return the text that sentencepiece gets for a line."""
        return line

    @classmethod
    def train(cls, inputs: Iterable[Path], model: Path, size: int) -> None:
        """Learn a vocabulary of `size` pieces on `inputs`, or on 5 million of their lines."""
        import sentencepiece

        with whole_file(model, "wb") as file:
            try:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=(cls.encode_line(line) for path in inputs for line in read_lines(path)),
                    model_writer=file,
                    model_type="bpe",
                    vocab_size=size,
                    character_coverage=1.0,
                    normalization_rule_name="identity",
                    input_sentence_size=5_000_000,
                    shuffle_input_sentence=False,
                    max_sentence_length=2**30,  # by default, lines above 4,192 bytes are ignored without a message
                    minloglevel=2,
                    **cls.options,
                )
            except RuntimeError as error:
                raise UserError(
                    f"cannot learn {size} pieces from this text: {error}. Choose another number."
                ) from error

    def __init__(self, model: Path):
        import sentencepiece

        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def __call__(self, line: str) -> str:
        return " ".join(self.processor.encode(self.encode_line(line), out_type=str))


class BytePieces(SentencePiece):
    """Byte-pair encoding of UTF-8 bytes, without unknown characters; it needs at least 257 pieces, the single bytes.

    Printable ASCII does not change; any other byte b becomes the character 256 + b.
    """

    characters: ClassVar = {byte: chr(byte if 0x20 <= byte < 0x7F else 0x100 + byte) for byte in range(256)}
    options: ClassVar = {"required_chars": "".join(characters.values()).replace(" ", ""), "bos_id": -1, "eos_id": -1}

    @property
    def pieces(self) -> list[str]:
        """Return all pieces except the unknown one, which never occurs."""
        return [self.processor.id_to_piece(index) for index in range(1, self.processor.get_piece_size())]

    @classmethod
    def encode_line(cls, line: str) -> str:
        return line.encode().decode("latin-1").translate(cls.characters)


class SubwordNMT(MergedSubwords):
    """Byte-pair encoding by subword-nmt, as in fairseq's own scripts; a piece that is not the last of its word ends in `@@`."""

    @staticmethod
    def train(inputs: Iterable[Path], codes: Path, size: int) -> None:
        """Learn `size` merge operations on all of `inputs`."""
        from subword_nmt.learn_bpe import learn_bpe

        lines = (line for path in inputs for line in read_lines(path))
        with whole_file(codes) as file:
            try:
                learn_bpe(lines, file, size)
            except ValueError as error:
                raise UserError(f"cannot learn {size} merges: the text has nothing to merge. Use more text.") from error


def clean_pairs(pairs: Iterable[tuple[str, str]], longest: int, ratio: float) -> Iterator[tuple[str, str]]:
    """Yield the pairs whose sides have 1 to `longest` tokens, and whose lengths have at most this ratio (clean-corpus-n.perl)."""
    for pair in pairs:
        shorter, longer = sorted(len(side.split()) for side in pair)
        if shorter >= 1 and longer <= longest and longer <= ratio * shorter:
            yield pair


def join_lines(lines: Iterable[str], count: int) -> Iterator[str]:
    """Yield every `count` consecutive lines as one; the last one may have fewer."""
    lines = iter(lines)
    for line in lines:
        yield " ".join([line, *(following for _, following in zip(range(count - 1), lines, strict=False))])


def map_lines(function: Callable[[str], str], source: Path, target: Path, workers: int = 1) -> None:
    """Write `function(line)` for each line of `source`, with several processes if `workers` > 1."""
    total = sum(1 for _ in read_lines(source)) if source.is_file() else None  # a pipe cannot be read twice
    about = (f"making {target.name}", "lines", total)
    lines = replace_line_breaks(read_lines(source), target)
    if workers == 1:
        write_lines(target, tracked(map(function, lines), *about))
    else:
        with Pool(workers) as pool:
            write_lines(target, tracked(pool.imap(function, lines, chunksize=2000), *about))
