"""The declaration of a corpus, and the names of its variants, such as iwslt14, multi30k-x10 or wikitext-103-bpe2000.

A variant's name is the corpus's name with a part for each argument that makes another folder. :meth:`Corpus.variant_name` and
:meth:`Corpus.values`, which reads a name, are inverse to each other.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def work_folder() -> Path:
    """Return the default folder for everything that is made: $LOWRANK_WORK."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LOWRANK_WORK") or Path(cache) / "fairseq_lowrank")


def published_folder() -> Path:
    """Return the folder of published files: $LOWRANK_DATA, else `data` of the clone, else ../shared/data if it is there."""
    if given := os.environ.get("LOWRANK_DATA"):
        return Path(given)
    clone = Path(__file__).parents[2]
    own, shared = clone / "data", clone.parent / "shared" / "data"
    return shared if shared.is_dir() and not own.is_dir() else own


def positive(text: str) -> int:
    """Return a positive number from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number >= 1")
    return int(text)


class Argument:
    """An argument of a preparation.

    Args:
        flag, options: the arguments of argparse; a switch (`action="store_true"`), one of `choices`, or a number.
        part: its part of a variant's name, such as `-head{}`; empty if it is not in the name.
        affects_files: True if it changes the files of a folder, and so is saved with them.
        value: the regular expression of its value in a name, if it is neither a switch nor a choice.
        shown: a function from a value to its text in a name.
    """

    def __init__(
        self,
        flag: str,
        *,
        part: str = "",
        affects_files: bool = True,
        value: str = "[1-9][0-9]*",
        shown: Callable[[object], object] = lambda value: value,
        **options,
    ):
        self.flag, self.part, self.affects_files, self.value, self.options = flag, part, affects_files, value, options
        self.shown = shown
        self.name = flag.removeprefix("--").replace("-", "_")
        self.is_switch = options.get("action") == "store_true"
        self.default = options.get("default", False if self.is_switch else None)

    @property
    def pattern(self) -> str:
        """Return a regular expression for the part; a choice is always in the name, other values if they are given."""
        if "choices" in self.options:
            return self.part.format(rf"(?P<{self.name}>{'|'.join(map(re.escape, self.options['choices']))})")
        if self.is_switch:
            return f"(?P<{self.name}>{self.part})?"
        return rf"(?:{self.part.format(rf'(?P<{self.name}>{self.value})')})?"

    @property
    def usage(self) -> str:
        """Return the part for messages."""
        if "choices" in self.options:
            choices = "|".join(self.options["choices"])
            return self.part.format(f"({choices})" if "|" in choices else choices)
        return f"[{self.part.format('N')}]"

    def format_part(self, value: object) -> str:
        """Return the part of the name for a value."""
        return "" if value is None or value is False else self.part.format(self.shown(value))

    def read(self, text: str | None) -> object:
        """Return the value for the text in a name."""
        if self.is_switch:
            return text is not None
        return text if text is None else self.options.get("type", str)(text)

    def words(self, value: object) -> list[str]:
        """Return the words of the command line for a value."""
        return [] if value is None or value is False else [self.flag] if value is True else [self.flag, str(value)]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus, which its module declares under the name CORPUS.

    Args:
        name: the name of the corpus and of its folders.
        prepare: a function that makes the folder `args.output` from the parsed arguments, and returns the folder to print. Its
            docstring is the corpus's description.
        arguments: arguments in addition to those of all corpora; the parts of names have the same order.
        languages: source and target language of parallel text.
        moses: options of :class:`~fairseq_lowrank.raw_text.MosesTokenizer`, by which raw parallel text is tokenised.
        remove_bpe: the value of `--remove-bpe` for fairseq-generate.
        published: a function from the parsed arguments and $LOWRANK_DATA to the name of the folder of published files.
        published_help: the name of this folder in the help.
        smoke_values: values of arguments for smoke runs of recipes; None if they use another corpus.
        smoke_corpus: a function that returns the other corpus, if it is not the usual one of the recipe's kind.
        training: a function from a variant's values to the flags of fairseq-train that its task needs.
        download: megabytes of the published files, roughly; 0 if nothing is downloaded.
    """

    name: str
    prepare: Callable[[argparse.Namespace], Path]
    arguments: tuple[Argument, ...] = ()
    languages: tuple[str, str] | None = None
    moses: Mapping[str, bool] | None = None
    remove_bpe: str | None = None
    published: Callable[[argparse.Namespace, Path], str] | None = None
    published_help: str = ""
    smoke_values: Mapping[str, object] | None = None
    smoke_corpus: Callable[[Mapping[str, object]], str] | None = None
    training: Callable[[Mapping[str, object]], Sequence[str]] | None = None
    download: int = 0

    def bpe_to_remove(self, values: Mapping[str, object]) -> str | None:
        """Return the value of `--remove-bpe` for a variant of the corpus."""
        return self.remove_bpe

    def language_pair(self, values: Mapping[str, object]) -> tuple[str, str] | None:
        """Return source and target language of a variant of the corpus; None if it is no parallel text."""
        return self.languages

    def moses_options(self, values: Mapping[str, object]) -> Mapping[str, bool] | None:
        """Return the options of Moses's rules for a variant of the corpus; None if words are separated by blanks."""
        return self.moses

    def check(self, args: argparse.Namespace) -> None:
        """Refuse a folder that was made from other files than there are now.

        Raises:
            UserError: the files have changed.
        """

    @property
    def parts(self) -> list[Argument]:
        """Return the arguments that are part of names."""
        return [argument for argument in self.arguments if argument.part]

    @property
    def usage(self) -> str:
        """Return a pattern of the names of all variants."""
        return self.name + "".join(argument.usage for argument in self.parts)

    def variant_name(self, values: Mapping[str, object]) -> str:
        """Return the name of the variant with these values of arguments; values without a part are ignored."""
        return self.name + "".join(argument.format_part(values.get(argument.name)) for argument in self.parts)

    def values(self, name: str) -> dict[str, object] | None:
        """Return the values of the arguments in a variant's name; None if the name is not of this corpus."""
        match = re.fullmatch(self.name + "".join(argument.pattern for argument in self.parts), name)
        return match and {argument.name: argument.read(match[argument.name]) for argument in self.parts}

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Return the words of the command line for values of arguments."""
        return [word for argument in self.arguments for word in argument.words(values.get(argument.name))]
