"""What a corpus declares, and the names of its forms, such as iwslt14, multi30k-x10 or wikitext-103-bpe2000.

A form's name is that of its corpus with a part for each of those arguments that make another folder; spelling a name
(:meth:`Corpus.form`) and reading one (:meth:`Corpus.values`) are inverse to each other.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def work_folder() -> Path:
    """Where everything is made that is not given another place: $LOWRANK_WORK."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LOWRANK_WORK") or Path(cache) / "fairseq_lowrank")


def published_folder() -> Path:
    """Where published files are looked for: $LOWRANK_DATA."""
    return Path(os.environ.get("LOWRANK_DATA") or "../shared/data")


def positive(text: str) -> int:
    """A number of things, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)


class Argument:
    """An argument of a preparation.

    Args:
        flag, options: as argparse takes them; a switch (`action="store_true"`), one of `choices`, or a number.
        part: how it shows in a form's name, such as `-head{}`; empty where it does not.
        kept: True if it shapes the files of a folder, and so is saved with them.
        value: the regular expression of what shows in a name where that is neither a switch nor a choice.
        shown: what of a value shows in a name.
    """

    def __init__(
        self,
        flag: str,
        *,
        part: str = "",
        kept: bool = True,
        value: str = "[1-9][0-9]*",
        shown: Callable[[object], object] = lambda value: value,
        **options,
    ):
        self.flag, self.part, self.kept, self.value, self.options = flag, part, kept, value, options
        self.shown = shown
        self.name = flag.removeprefix("--").replace("-", "_")
        self.is_switch = options.get("action") == "store_true"
        self.default = options.get("default", False if self.is_switch else None)

    @property
    def pattern(self) -> str:
        """Matches the part; choices are always told, all else where it is given."""
        if "choices" in self.options:
            return self.part.format(rf"(?P<{self.name}>{'|'.join(map(re.escape, self.options['choices']))})")
        if self.is_switch:
            return f"(?P<{self.name}>{self.part})?"
        return rf"(?:{self.part.format(rf'(?P<{self.name}>{self.value})')})?"

    @property
    def usage(self) -> str:
        """The part as a message shows it."""
        if "choices" in self.options:
            choices = "|".join(self.options["choices"])
            return self.part.format(f"({choices})" if "|" in choices else choices)
        return f"[{self.part.format('N')}]"

    def spell(self, value: object) -> str:
        """The part for a value."""
        return "" if value is None or value is False else self.part.format(self.shown(value))

    def read(self, text: str | None) -> object:
        """The value that the part's text stands for."""
        if self.is_switch:
            return text is not None
        return text if text is None else self.options.get("type", str)(text)

    def words(self, value: object) -> list[str]:
        """A value as on the command line."""
        return [] if value is None or value is False else [self.flag] if value is True else [self.flag, str(value)]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus as its module declares it, under the name CORPUS.

    Args:
        name: also of its folders.
        prepare: given the parsed arguments, makes the folder `args.output` and returns what is printed; its docstring is
            the corpus's description.
        arguments: in addition to those that all corpora have; the parts of names are in this order.
        languages: source and target of parallel text.
        remove_bpe: what fairseq-generate is to undo, in its words.
        published: the folder of published files under $LOWRANK_DATA, for the parsed arguments and that path; and how
            the help says it.
        trial: for the form that trials of recipes take instead of a large one, values of arguments; None: another corpus.
        stand_in: that other corpus, where it is not the usual one of the kind of recipe.
        training: given a form's values of arguments, the flags of fairseq-train that its task asks for.
    """

    name: str
    prepare: Callable[[argparse.Namespace], Path]
    arguments: tuple[Argument, ...] = ()
    languages: tuple[str, str] | None = None
    remove_bpe: str | None = None
    published: Callable[[argparse.Namespace, Path], str] | None = None
    published_help: str = ""
    trial: Mapping[str, object] | None = None
    stand_in: Callable[[Mapping[str, object]], str] | None = None
    training: Callable[[Mapping[str, object]], Sequence[str]] | None = None

    def undo(self, values: Mapping[str, object]) -> str | None:
        """Return what fairseq-generate is to undo in a form of the corpus, in its words."""
        return self.remove_bpe

    @property
    def parts(self) -> list[Argument]:
        """The arguments that show in names."""
        return [argument for argument in self.arguments if argument.part]

    @property
    def usage(self) -> str:
        """The names of all forms."""
        return self.name + "".join(argument.usage for argument in self.parts)

    def form(self, values: Mapping[str, object]) -> str:
        """The name of the form made with these values of arguments; what shows in no name is passed over."""
        return self.name + "".join(argument.spell(values.get(argument.name)) for argument in self.parts)

    def values(self, name: str) -> dict[str, object] | None:
        """The values of the arguments that show in a form's name; None where it is not of this corpus."""
        match = re.fullmatch(self.name + "".join(argument.pattern for argument in self.parts), name)
        return match and {argument.name: argument.read(match[argument.name]) for argument in self.parts}

    def words(self, values: Mapping[str, object]) -> list[str]:
        """Values of arguments as on the command line."""
        return [word for argument in self.arguments for word in argument.words(values.get(argument.name))]
