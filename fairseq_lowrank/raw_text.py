"""Raw text and the tokens of a prepared corpus: Moses's rules, and subwords.

A corpus for translation has two files next to its binarised data: text.json (:class:`TextSettings`) and, if words are cut,
subwords.model.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fairseq_lowrank.files import write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.moses import detokeniser
from fairseq_lowrank.subwords import SentencePieces, joined

SETTINGS, MODEL = "text.json", "subwords.model"


class MosesTokenizer:
    """A function that tokenises a line by Moses's rules, by sacremoses.

    Args:
        language: the language, for its abbreviations.
        lowercase: if True, lower-case the result.
        normalise: if True, first normalise punctuation and replace control characters by blanks, as in WMT's scripts.
        aggressive: if True, split at hyphens (`@-@`), as in WMT's scripts.
        escape: if True, write `&apos;` for `'` and so on, the default of the Perl tokeniser.
    """

    def __init__(
        self,
        language: str,
        *,
        lowercase: bool = False,
        normalise: bool = False,
        aggressive: bool = False,
        escape: bool = True,
    ):
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


class MergedSubwords:
    """A function that cuts lines into subwords of subword-nmt, `@@` at the end of all but the last subword of a word."""

    def __init__(self, codes: Path):
        from subword_nmt.apply_bpe import BPE

        try:
            with open(codes, encoding="utf-8") as file, contextlib.redirect_stderr(io.StringIO()):
                self.bpe = BPE(file)
        except (SystemExit, ValueError) as error:  # subword-nmt ends the program over a line that it did not write
            raise UserError(f"{codes} has no codes of subword-nmt. Give the file that its learn-bpe wrote.") from error

    def __call__(self, line: str) -> str:
        return self.bpe.process_line(line)


SUBWORDS: dict[str, Callable[[Path], Callable[[str], str]]] = {
    "sentencepiece": SentencePieces,
    "subword_nmt": MergedSubwords,
}
"""The kinds of subwords, by the value of `--remove-bpe` that joins them."""


@dataclass(frozen=True)
class TextSettings:
    """The way in which the tokens of parallel text were made from raw text.

    Args:
        source, target: the languages.
        moses: options of :class:`MosesTokenizer`; None if words were separated by blanks.
        subwords: a name in :data:`SUBWORDS`; None if words were not cut.
    """

    source: str
    target: str
    moses: Mapping[str, bool] | None = None
    subwords: str | None = None

    def __post_init__(self) -> None:
        if self.subwords not in (None, *SUBWORDS):
            raise ValueError(f"subwords is {self.subwords!r}, expected one of {', '.join(SUBWORDS)}, or null")
        known = MosesTokenizer.__init__.__kwdefaults__ or {}
        if self.moses is not None and not (isinstance(self.moses, Mapping) and self.moses.keys() <= known.keys()):
            raise ValueError(f"moses is {self.moses!r}, expected null or an object with {', '.join(known)}")
        if not all(isinstance(language, str) for language in (self.source, self.target)):
            raise ValueError("source and target: expected names of languages")

    def save(self, folder: Path, model: Path) -> None:
        """Write the settings to a folder of binarised data, and copy the model of the subwords."""
        if self.subwords:
            shutil.copyfile(model, folder / MODEL)
        write_lines(folder / SETTINGS, [json.dumps(asdict(self))])

    @classmethod
    def load(cls, folder: Path) -> TextSettings | None:
        """Return the settings in a folder of binarised data; None if it has none.

        Raises:
            UserError: the file is damaged.
        """
        file = folder / SETTINGS
        if not file.is_file():
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("expected an object of names and values")
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}). Prepare the corpus again.") from error


class RawText:
    """The two directions between raw text and tokens: :meth:`encode` for the source, :meth:`decode` for the target.

    Args:
        settings: the settings of the corpus.
        model: the file of the subwords' model, if `settings` name subwords.
    """

    def __init__(self, settings: TextSettings, model: Path):
        self.settings = settings
        steps: list[Callable[[str], str]] = []
        self.detokenise: Callable[[list[str]], str] = " ".join
        if settings.moses is not None:
            steps.append(MosesTokenizer(settings.source, **settings.moses))
            self.detokenise = detokeniser(settings.target)
        if settings.subwords:
            steps.append(SUBWORDS[settings.subwords](model))
        self.steps = steps

    def encode(self, line: str) -> str:
        """Return the tokens of a sentence of the source language, with blanks between them."""
        for step in self.steps:
            line = step(line)
        return line

    def decode(self, tokens: str) -> str:
        """Return the sentence of the target language that has these tokens."""
        return self.detokenise(joined(tokens, self.settings.subwords).split())
