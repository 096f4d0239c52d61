"""Steps that preparations share."""

from __future__ import annotations

import argparse
import html
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

from experiments.corpora.corpus import Argument, positive
from experiments.corpora.fetch import SETTINGS, check_source, make, source_of
from experiments.corpora.text import BytePieces, join_lines, map_lines
from fairseq_lowrank.files import read_lines, whole_file, whole_folder, write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.raw_text import MosesTokenizer, TextSettings

HEAD = Argument("--head", part="-head{}", type=positive, metavar="N", help="use N lines of each split, for a trial")
BYTES = Argument("--pieces", part="-bpe{}", type=positive, metavar="V", help="cut into V subwords instead of words")
JOIN = Argument(
    "--join",
    part="-x{}",
    affects_files=False,
    type=positive,
    metavar="N",
    help="also make the corpus whose sentences are N consecutive sentences joined",
)


SPLITS = ("train", "valid", "test")


def check_settings(args: argparse.Namespace, keep: bool = False) -> None:
    """Refuse other settings than those of --output; with `keep`, save the settings if nothing is made yet.

    An old folder has no note: it was made with the default subwords, and its name gives the other settings. The settings of
    subwords may change until subwords are learned, because a text may be too short for their number.
    """
    file = args.output / SETTINGS
    arguments = [argument for argument in args.corpus.arguments if argument.affects_files]
    given = {argument.name: getattr(args, argument.name) for argument in arguments}
    kept = dict(given)
    learned = any((args.output / name).exists() for name in ("bpe.model", "bin"))
    if file.exists():
        kept |= json.loads(file.read_text(encoding="utf-8"))
        if not learned and (changed := {name: given[name] for name in ("bpe", "subwords") if name in given}):
            kept |= changed
            if keep:
                write_lines(file, [json.dumps(kept)])
    elif learned:
        kept |= {argument.name: argument.default for argument in arguments if argument.default and not argument.part}
    elif keep:
        make(file, write_lines, file, [json.dumps(given)])
    for argument in arguments:
        if (value := given[argument.name]) != (found := kept[argument.name]):
            made, asked = (" ".join(argument.words(one)) or f"no {argument.flag}" for one in (found, value))
            raise UserError(
                f"{args.output} was made with {made}, not with {asked}. Use {made}, or remove {args.output}."
            )


def preprocess(folder: Path, *flags: str) -> None:
    """Run fairseq-preprocess with `flags`; `folder` appears when it is complete.

    Raises:
        UserError: a binarised file has more or fewer sentences than its text has lines.
    """
    from fairseq import options
    from fairseq_cli import preprocess

    import fairseq_lowrank.plugin  # noqa: F401  repairs that fairseq needs here

    disabled, handlers = logging.root.manager.disable, list(preprocess.logger.handlers)
    logging.disable(logging.INFO)  # its progress would go to our standard output
    try:
        with whole_folder(folder) as part:
            args = options.get_preprocessing_parser().parse_args([*flags, "--destdir", str(part)])
            preprocess.main(args)
            check_numbers(args)
    finally:
        logging.disable(disabled)
        for handler in set(preprocess.logger.handlers) - set(handlers):  # its log is in a folder that has moved
            preprocess.logger.removeHandler(handler)
            handler.close()


def check_numbers(args: argparse.Namespace) -> None:
    """Compare the number of sentences in each binarised file with the lines of its text.

    Args:
        args: the arguments of fairseq-preprocess.

    Raises:
        UserError: the numbers differ, so sentences would have the translations of others.
    """
    from fairseq.data import indexed_dataset
    from fairseq_cli.preprocess import dataset_dest_prefix

    languages = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
    for split in SPLITS:
        for number, prefix in enumerate(filter(None, (getattr(args, f"{split}pref") or "").split(","))):
            for language in languages:
                text = Path(f"{prefix}.{language}" if language else prefix)
                made = dataset_dest_prefix(args, f"{split}{number or ''}", language)
                sentences, lines = len(indexed_dataset.make_dataset(made, "mmap")), sum(1 for _ in read_lines(text))
                if sentences != lines:
                    raise UserError(
                        f"{text}: {lines:,} lines became {sentences:,} sentences. Remove line breaks other than newlines from it."
                    )


def binarise(args: argparse.Namespace, folder: Path, languages: tuple[str, str] | None, *flags: str) -> Path:
    """Run fairseq-preprocess on `folder`/{train,valid,test}, with parallel text or text for language modelling."""
    task = [f"--source-lang={languages[0]}", f"--target-lang={languages[1]}"] if languages else ["--only-source"]
    suffix = "" if languages else ".txt"
    prefixes = [f"--{split}pref={folder / split}{suffix}" for split in SPLITS]
    target = args.output / "bin"
    if languages and not target.exists():
        check_pairs(folder, languages)
    make(target, preprocess, target, *task, *prefixes, f"--workers={args.workers}", *flags)
    save_text_settings(args)
    return target


def save_text_settings(args: argparse.Namespace) -> None:
    """Save with binarised parallel text how its tokens are made from raw text, which `fairseq-lowrank translate` reads."""
    values, model, folder = vars(args), args.output / "bpe.model", args.output / "bin"
    languages, subwords = args.corpus.language_pair(values), args.corpus.bpe_to_remove(values)
    if languages is None or TextSettings.load(folder) or (subwords and not model.is_file()):
        return
    TextSettings(*languages, args.corpus.moses_options(values), subwords).save(folder, model)


def segment(args: argparse.Namespace, kind: type, size: int, names: Iterable[str]) -> Path:
    """Learn subwords of `kind` on tok/train.*, and cut every tok/NAME into bpe/NAME."""
    check_settings(args, keep=True)
    names = list(names)
    tokenised, pieces, model = args.output / "tok", args.output / "bpe", args.output / "bpe.model"
    training = [tokenised / name for name in names if name.startswith("train.")]
    make(model, kind.train, training, model, size)
    for name in names:
        if not (pieces / name).exists():
            make(pieces / name, map_lines, kind(model), tokenised / name, pieces / name, args.workers)
    return pieces


def tokenise(args: argparse.Namespace, source: Path, name: str, language: str) -> Path:
    """Write tok/`name`: `source` tokenised by :class:`MosesTokenizer` with the corpus's options."""
    target = args.output / "tok" / name
    if target.exists():
        return target
    options = args.corpus.moses_options(vars(args))
    return make(target, map_lines, MosesTokenizer(language, **options), source, target, args.workers)


def read_pairs(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs of corresponding lines of two files."""
    for one, other in zip_longest(read_lines(first), read_lines(second)):
        if one is None or other is None:
            raise UserError(f"{first} and {second} have different numbers of lines. Download the corpus again.")
        yield one, other


def check_pairs(folder: Path, languages: tuple[str, str]) -> None:
    """Refuse parallel text with different numbers of lines, or with an empty split."""
    for split in SPLITS:
        files = [folder / f"{split}.{language}" for language in languages]
        first, second = (sum(1 for _ in read_lines(file)) for file in files)
        if first != second or not first:
            raise UserError(
                f"{files[0]} has {first} lines and {files[1]} has {second}: expected the same number, and at least one. Fix the corpus "
                f"and remove {folder.parent}."
            )


def write_pairs(first: Path, second: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write both sides of `pairs`; `first` appears after `second`, so if it exists, both do."""
    with whole_file(first) as one, whole_file(second) as other:
        for pair in pairs:
            one.write(f"{pair[0]}\n")
            other.write(f"{pair[1]}\n")


def join_sentences(args: argparse.Namespace, base: Path) -> Path:
    """Make the corpus in `base` again, with every --join consecutive sentences joined and the same dictionaries."""
    check_source(args, source_of(base))
    check_settings(args, keep=True)
    languages = args.corpus.languages
    check_pairs(base / "bpe", languages)
    names = [f"{split}.{language}" for split in SPLITS for language in languages]
    for source in [base / stage / name for stage in ("tok", "bpe") for name in names] + sorted(
        (base / "raw").glob("test.*")
    ):
        target = args.output / source.parent.name / source.name
        make(target, write_lines, target, join_lines(read_lines(source), args.join))
    if (model := base / "bpe.model").is_file():
        make(args.output / model.name, shutil.copyfile, model, args.output / model.name)
    dictionaries = [base / "bin" / f"dict.{language}.txt" for language in languages]
    flags = [f"--srcdict={dictionaries[0]}", f"--tgtdict={dictionaries[1]}"]
    return binarise(args, args.output / "bpe", languages, *flags)


def campaign_segments(path: Path) -> Iterator[str]:
    """Yield the sentences of an evaluation campaign's XML file, with ’ replaced by ', as in fairseq's scripts."""
    for line in read_lines(path):
        if match := re.search(r'<seg id="\d+">\s*(.*?)\s*</seg>', line):
            yield html.unescape(match[1]).replace("’", "'")


def language_model(args: argparse.Namespace, files: dict[str, Iterable[Path]], *flags: str) -> Path:
    """Binarise `files`, a list for each split, as words or, with --pieces, as subwords of bytes."""
    for split, parts in files.items():
        if not any(line.strip() for part in parts for line in read_lines(part)):
            raise UserError(f"{', '.join(map(str, parts))}: no text for {split}. Add sentences to these files.")
    check_settings(args, keep=True)
    for split, parts in files.items():
        target = args.output / "tok" / f"{split}.txt"
        make(target, write_lines, target, islice(chain.from_iterable(map(read_lines, parts)), args.head))
    if args.pieces is None:
        return binarise(args, args.output / "tok", None, *flags)
    pieces = segment(args, BytePieces, args.pieces, [f"{split}.txt" for split in files])
    dictionary = make(
        args.output / "dict.txt",
        write_dictionary,
        args.output / "dict.txt",
        BytePieces(args.output / "bpe.model"),
        pieces,
    )
    return binarise(args, pieces, None, f"--srcdict={dictionary}")


def write_dictionary(target: Path, model: BytePieces, folder: Path) -> None:
    """Write fairseq's dictionary of all subwords of a model, with their counts in `folder`/train.txt.

    fairseq-preprocess would leave out subwords that are not in the training text, so they would be unknown.
    """
    from fairseq.data import Dictionary

    counts = Counter(piece for line in read_lines(folder / "train.txt") for piece in line.split())
    dictionary = Dictionary()
    for piece in model.pieces:
        dictionary.add_symbol(piece, n=counts[piece])
    dictionary.finalize()
    with whole_file(target) as file:
        dictionary.save(file)
