"""Your own text, under a name that you choose, and binarised data of others."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

from experiments.corpora.corpus import Argument, Corpus, positive, work_folder
from experiments.corpora.fetch import SETTINGS, TEXTS, has_begun, make, sha256
from experiments.corpora.steps import SPLITS, binarise, check_settings, segment, tokenise
from experiments.corpora.text import SentencePiece, SubwordNMT
from fairseq_lowrank.files import read_lines, say, write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.subwords import kind_of_dictionary

SUBWORDS = {"sentencepiece": SentencePiece, "subword-nmt": SubwordNMT}
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"


class Own(Corpus):
    """Corpora of your own text: you choose the name of each, and its settings are saved in its folder."""

    @property
    def usage(self) -> str:
        return "the NAME of `prepare.sh own --name NAME`"

    def variant_name(self, values: Mapping[str, object]) -> str:
        return str(values["name"])

    def values(self, name: str) -> dict[str, object] | None:
        note = work_folder() / "data" / name / SETTINGS
        if not (re.fullmatch(NAME, name) and note.is_file()):
            return None
        found = json.loads(note.read_text(encoding="utf-8"))
        return found if found.get("name") == name else None

    def bpe_to_remove(self, values: Mapping[str, object]) -> str | None:
        return str(values["subwords"]).replace("-", "_") if values["bpe"] else None

    def language_pair(self, values: Mapping[str, object]) -> tuple[str, str] | None:
        return (str(values["source_lang"]), str(values["target_lang"])) if values["source_lang"] else None

    def moses_options(self, values: Mapping[str, object]) -> Mapping[str, bool] | None:
        return {} if values["moses"] else None

    def check(self, args: argparse.Namespace) -> None:
        """Refuse a folder that was made from other texts; texts that are not there any more are not needed."""
        files, note = paths(args), args.output / TEXTS
        if not all(file.is_file() for file in files.values()):
            return
        found = {name: sha256(file) for name, file in files.items()}
        if not has_begun(args.output):
            write_lines(note, [json.dumps(found)])
        elif note.is_file() and (kept := json.loads(note.read_text(encoding="utf-8"))) != found:
            changed = ", ".join(str(file) for name, file in files.items() if kept.get(name) != found[name])
            raise UserError(
                f"{changed}: changed since {args.output} was made. Remove that folder, or give another --name."
            )


def paths(args: argparse.Namespace) -> dict[str, Path]:
    """Return the paths of the texts by their names in a prepared folder."""
    folder = args.data if args.data_given else Path()
    languages = [args.source_lang, args.target_lang] if args.source_lang and args.target_lang else [""]
    return {
        f"{split}.{language or 'txt'}": folder / f"{getattr(args, split)}{language and '.'}{language}"
        for split in SPLITS
        for language in languages
    }


def sources(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files of text by their names in a prepared folder, after reading all of them once.

    Raises:
        UserError: a file is missing, empty or not UTF-8, or the two sides of a split have different numbers of lines.
    """
    if bool(args.source_lang) != bool(args.target_lang):
        raise UserError(
            "--source-lang and --target-lang: one is missing. Give both for translation, or none for a language model."
        )
    languages = [args.source_lang, args.target_lang] if args.source_lang else [""]
    found = paths(args)
    for split in SPLITS:
        prefix, counts = getattr(args, split), []
        for language in languages:
            file = found[f"{split}.{language or 'txt'}"]
            if not file.is_file():
                raise UserError(
                    f"--{split} {prefix}: {file} is not a file. Give the path without the language, or the file of a language model."
                )
            try:
                counts.append(sum(1 for _ in read_lines(file)))
            except ValueError as error:
                raise UserError(f"--{split} {prefix}: {error}. Convert the file to UTF-8.") from error
        if len(set(counts)) > 1 or not counts[0]:
            lines = " and ".join(
                f"{count:,} lines of {language or 'text'}" for count, language in zip(counts, languages, strict=True)
            )
            raise UserError(f"--{split} {prefix}: {lines}. Give files with equally many lines, and at least one.")
    return found


def own(args: argparse.Namespace) -> Path:
    """Prepare your own text: parallel text of two languages for translation, or one file per split for a language model.

    The files of a split are PREFIX.LANG, or PREFIX if you give no languages; plain or gzip (.gz with a language model). With --data
    they are in that folder. Words are separated by blanks, unless --moses tokenises the text or --bpe cuts it into subwords. Give the name of the corpus to
    recipes: CORPUS=NAME examples/own/compare.sh.
    """
    if not re.fullmatch(NAME, args.name) or args.is_taken(args.name):
        raise UserError(
            f"--name {args.name}: another corpus has this name, or it is not a name. Use letters, digits, '.', '_' and '-'."
        )
    if args.joined_dictionary and not args.source_lang:
        raise UserError("--joined-dictionary: a language model has one dictionary. Remove the flag.")
    files = sources(args)
    check_settings(args, keep=True)
    for name, file in files.items():
        language = name.partition(".")[2]
        if args.moses:
            raw = args.output / "raw" / name
            make(raw, write_lines, raw, read_lines(file))
            tokenise(args, raw, name, language if args.source_lang else "en")
        else:
            make(args.output / "tok" / name, write_lines, args.output / "tok" / name, read_lines(file))
    text = segment(args, SUBWORDS[args.subwords], args.bpe, files) if args.bpe else args.output / "tok"
    languages = args.corpus.language_pair(vars(args))
    made = binarise(args, text, languages, *(["--joined-dictionary"] if args.joined_dictionary else []))
    for split in SPLITS:
        say(summary(made, split, languages))
    return made


MAX_POSITIONS = 1024  # fairseq's default for --max-source-positions and --max-target-positions


def summary(folder: Path, split: str, languages: tuple[str, str] | None) -> str:
    """Return a line with the numbers of a binarised split: sentences, empty ones, the longest, and unknown tokens.

    For parallel text also the number of pairs that are longer than fairseq's models allow by default.
    """
    import numpy
    from fairseq.data import Dictionary, indexed_dataset

    lengths, unknown = [], 0
    for language in languages or ("",):
        ending = f".{language}" if language else ""
        prefix = folder / (f"{split}.{'-'.join(languages)}{ending}" if languages else split)
        dataset = indexed_dataset.make_dataset(str(prefix), "mmap")
        lengths.append(numpy.array(dataset.sizes))  # a copy, since the sizes are in a file that the dataset closes
        symbol = Dictionary.load(str(folder / f"dict{ending}.txt")).unk()
        unknown += sum(int(sentence.eq(symbol).sum()) for sentence in dataset)
    longest, shortest = numpy.maximum.reduce(lengths), numpy.minimum.reduce(lengths)  # with the end of the sentence
    tokens = sum(int(sizes.sum()) - len(sizes) for sizes in lengths)
    numbers = [
        f"{len(longest):,} {'pairs' if languages else 'lines'}",
        f"{int((shortest == 1).sum()):,} empty",
        f"longest {int(longest.max()) - 1:,} tokens",
        *([f"{int((longest > MAX_POSITIONS).sum()):,} above {MAX_POSITIONS:,}"] if languages else []),
        f"{unknown:,} of {tokens:,} tokens unknown",
    ]
    return f"{split}: {', '.join(numbers)}"


def training(values: Mapping[str, object]) -> list[str]:
    """Return the flags of fairseq-train for the corpus: its languages, or the task of a language model."""
    if not values["source_lang"]:
        return ["--task", "language_modeling"]
    return ["--source-lang", str(values["source_lang"]), "--target-lang", str(values["target_lang"])]


CORPUS = Own(
    name="own",
    prepare=own,
    arguments=(
        Argument("--name", required=True, metavar="NAME", help="name of the corpus for recipes and folders"),
        *(
            Argument(
                f"--{split}", affects_files=True, required=True, metavar="PREFIX", help=f"files of the {split} split"
            )
            for split in SPLITS
        ),
        Argument("--source-lang", metavar="LANG", help="language to translate from (default: a language model's text)"),
        Argument("--target-lang", metavar="LANG", help="language to translate to"),
        Argument("--moses", action="store_true", help="tokenise raw text by Moses's rules"),
        Argument(
            "--bpe",
            type=positive,
            metavar="N",
            help="cut words into subwords: N pieces of sentencepiece, or N merges of subword-nmt",
        ),
        Argument(
            "--subwords",
            choices=tuple(SUBWORDS),
            default="sentencepiece",
            help="tool for subwords (default: %(default)s)",
        ),
        Argument("--joined-dictionary", action="store_true", help="one dictionary for both languages"),
    ),
    smoke_values={},
    training=training,
)


class Binarised(Corpus):
    """A folder that fairseq-preprocess made; its dictionaries show how words were cut."""

    def bpe_to_remove(self, values: Mapping[str, object]) -> str | None:
        kinds = map(kind_of_dictionary, sorted(Path(self.name).glob("dict.*.txt")))
        return next(filter(None, kinds), None)


def binarised(folder: str) -> Corpus:
    """Return the corpus of a folder that fairseq-preprocess made."""
    return Binarised(name=folder, prepare=check_binarised, smoke_values={})


def check_binarised(folder: Path) -> None:
    """Refuse a folder that has no binarised data.

    Raises:
        UserError: the folder has no dictionary.
    """
    if not any(folder.glob("dict*.txt")):
        raise UserError(
            f"CORPUS {folder}: has no dict.txt or dict.LANG.txt. Give a folder that fairseq-preprocess made."
        )
