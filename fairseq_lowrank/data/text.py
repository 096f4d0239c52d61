"""Small tools for text files: read plain or gzip, write whole or not at all, tokenise, learn and apply sub-words."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def say(message: str) -> None:
    """Print one line of progress to standard error."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator:
    """Open `path` + ".part" for writing and rename it to `path` only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def open_text(path: Path) -> TextIO:
    """Open a UTF-8 file for reading, gzip or plain by its name."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")


def read_lines(path: Path) -> list[str]:
    """The lines of a file without their ends; only a newline ends a line (never U+2028 and its like)."""
    with open_text(path) as file:
        return [line.rstrip("\r\n") for line in file]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with whole_file(path) as file:
        file.writelines(f"{line}\n" for line in lines)


class MosesTokenizer:
    """Moses tokenisation (sacremoses) of lower-cased text; special characters are kept, not written as `&apos;`."""

    def __init__(self, language: str, lowercase: bool = True):
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        self.normalise = MosesPunctNormalizer(language).normalize
        self.tokenize = MosesTokenizer(language).tokenize
        self.lowercase = lowercase

    def __call__(self, line: str) -> str:
        line = self.tokenize(self.normalise(line.strip()), return_str=True, escape=False)
        return line.lower() if self.lowercase else line


def train_sentencepiece(inputs: Iterable[Path], model: Path, vocab_size: int) -> None:
    """Learn joint byte-pair encoding over `inputs` (tokenised text, left as it is) with sentencepiece."""
    import sentencepiece

    with whole_file(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(str(path) for path in inputs),
            model_writer=file,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            num_threads=1,
            minloglevel=2,
        )


def encode_sentencepiece(model: Path, source: Path, target: Path) -> None:
    """Write `source` cut into the model's pieces, separated by spaces."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    write_lines(target, (" ".join(processor.encode(line, out_type=str)) for line in read_lines(source)))
