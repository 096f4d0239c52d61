"""Prepare the papers' corpora for fairseq: `python -m fairseq_lowrank.data.corpora CORPUS --help`.

A preparation is a chain of files, each written whole or not at all, so that calling it again goes on where it stopped
and does nothing once it is done:

    raw/   what the publisher's files say, a sentence a line        tok/   tokenised, cleaned
    bpe/   cut into sub-words                                       bin/   fairseq's binary form

What shapes these files is kept beside them in settings.json: a folder is not made half one way, half another. Of several
processes that prepare the same corpus one does it and the others wait.
"""

from __future__ import annotations

import argparse
import html
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

from fairseq_lowrank.data.fetch import gather, locked, make
from fairseq_lowrank.data.text import (
    BytePieces,
    MosesTokenizer,
    SentencePiece,
    SubwordNMT,
    clean_pairs,
    join_lines,
    map_lines,
    read_lines,
    whole_file,
    write_lines,
)

# --- steps that every corpus shares ---

SETTINGS = ("size", "head", "pieces", "operations", "joined_dictionary")


def spell(setting: str, value: object) -> str:
    """A setting as on the command line."""
    flag = f"--{setting.replace('_', '-')}"
    return f"no {flag}" if value is None or value is False else flag if value is True else f"{flag} {value}"


def check_settings(args: argparse.Namespace, keep: bool = False) -> None:
    """Refuse settings other than those that --output was made with; with `keep`, note them where nothing is made yet.

    A folder without a note is older than these notes: made with the default sub-words, and the rest as its name says.
    """
    file = args.output / "settings.json"
    given = {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}
    kept = dict(given)
    if file.exists():
        kept |= json.loads(file.read_text())
    elif any((args.output / name).exists() for name in ("bpe.model", "bin")):
        defaults = vars(build_parser().parse_args([args.corpus]))
        kept |= {name: defaults[name] for name in ("pieces", "operations") if defaults.get(name)}
    elif keep:
        make(file, write_lines, file, [json.dumps(given)])
    for name, value in given.items():
        if value != kept[name]:
            made = spell(name, kept[name])
            raise ValueError(
                f"{args.output} was made with {made}, not with {spell(name, value)}: give {made}, or remove that folder"
            )


def preprocess(folder: Path, *flags: str) -> None:
    """fairseq-preprocess with `flags`, so that `folder` appears only when it is complete."""
    from fairseq import options
    from fairseq_cli import preprocess

    import fairseq_lowrank.plugin  # noqa: F401  repairs that fairseq needs here

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # it would mix its progress into our standard output
    try:
        preprocess.main(options.get_preprocessing_parser().parse_args([*flags, "--destdir", str(part)]))
    finally:
        logging.disable(disabled)
    os.replace(part, folder)


def binarise(args: argparse.Namespace, folder: Path, languages: tuple[str, str] | None, *flags: str) -> Path:
    """fairseq-preprocess over `folder`/{train,valid,test}: parallel text of two languages, or language modelling."""
    task = [f"--source-lang={languages[0]}", f"--target-lang={languages[1]}"] if languages else ["--only-source"]
    suffix = "" if languages else ".txt"
    prefixes = [f"--{split}pref={folder / split}{suffix}" for split in ("train", "valid", "test")]
    target = args.output / "bin"
    return make(target, preprocess, target, *task, *prefixes, f"--workers={args.workers}", *flags)


def segment(args: argparse.Namespace, kind: type, size: int, names: Iterable[str]) -> Path:
    """Learn sub-words of `kind` on tok/train.* and cut every tok/NAME into bpe/NAME."""
    check_settings(args, keep=True)
    names = list(names)
    tokenised, pieces, model = args.output / "tok", args.output / "bpe", args.output / "bpe.model"
    training = [tokenised / name for name in names if name.startswith("train.")]
    make(model, kind.train, training, model, size)
    for name in names:
        if not (pieces / name).exists():
            make(pieces / name, map_lines, kind(model), tokenised / name, pieces / name, args.workers)
    return pieces


def tokenise(args: argparse.Namespace, source: Path, name: str, language: str, **options) -> Path:
    """Write tok/`name`: `source` tokenised as MosesTokenizer does with `options`."""
    target = args.output / "tok" / name
    if target.exists():
        return target
    return make(target, map_lines, MosesTokenizer(language, **options), source, target, args.workers)


def read_pairs(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    """The lines of two files that belong together."""
    for one, other in zip_longest(read_lines(first), read_lines(second)):
        if one is None or other is None:
            raise ValueError(f"{first} and {second} do not have equally many lines")
        yield one, other


def write_pairs(first: Path, second: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write both sides of `pairs`; `first` appears last, so that its presence means that both are there."""
    with whole_file(first) as one, whole_file(second) as other:
        for pair in pairs:
            one.write(f"{pair[0]}\n")
            other.write(f"{pair[1]}\n")


def join_sentences(args: argparse.Namespace, base: Path, languages: tuple[str, str]) -> Path:
    """The corpus prepared in `base` with every --join consecutive sentences as one, and the same dictionaries."""
    check_settings(args, keep=True)
    names = [f"{split}.{language}" for split in ("train", "valid", "test") for language in languages]
    for source in [base / stage / name for stage in ("tok", "bpe") for name in names] + sorted(
        (base / "raw").glob("test.*")
    ):
        target = args.output / source.parent.name / source.name
        make(target, write_lines, target, join_lines(read_lines(source), args.join))
    dictionaries = [base / "bin" / f"dict.{language}.txt" for language in languages]
    flags = [f"--srcdict={dictionaries[0]}", f"--tgtdict={dictionaries[1]}"]
    return binarise(args, args.output / "bpe", languages, *flags)


# --- Multi30k ---

MULTI30K_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
MULTI30K = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}


def multi30k(args: argparse.Namespace) -> Path:
    """Multi30k task 1 (Elliott et al., 2016), German to English: lower-cased, tokenised, joint BPE and dictionary."""
    files = gather(args, MULTI30K, {MULTI30K_URL + name: checksum for name, checksum in MULTI30K.items()})
    names = [f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en")]
    for name, file in zip(names, files, strict=True):
        tokenise(args, file, name, name[-2:], lowercase=True, normalise=True, escape=False)
    pieces = segment(args, SentencePiece, args.pieces, names)
    return binarise(args, pieces, ("de", "en"), "--joined-dictionary")


# --- IWSLT'14 ---

IWSLT14_URLS = {"http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz": None}
# In the order in which fairseq's script concatenates them.
IWSLT14_TEST = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def campaign_segments(path: Path) -> Iterator[str]:
    """The sentences of an evaluation campaign's XML file."""
    for line in read_lines(path):
        if match := re.search(r'<seg id="\d+">\s*(.*?)\s*</seg>', line):
            yield html.unescape(match[1]).replace("’", "'")


def campaign_training(path: Path) -> Iterator[str]:
    """The sentences of a campaign's train.tags file: titles and descriptions too, other tagged lines not."""
    for line in read_lines(path):
        if not re.search("<(url|talkid|keywords)>", line):
            yield re.sub("</?(title|description)>", "", line).strip()


def iwslt14_test(args: argparse.Namespace) -> None:
    names = [f"IWSLT1[46].{part}.de-en.{language}.xml" for language in ("de", "en") for part in IWSLT14_TEST]
    files = gather(args, names, IWSLT14_URLS)
    count = len(IWSLT14_TEST)
    for language, parts in (("de", files[:count]), ("en", files[count:])):
        raw = args.output / "raw" / f"test.{language}"
        make(raw, write_lines, raw, chain.from_iterable(map(campaign_segments, parts)))
        tokenise(args, raw, f"test.{language}", language, lowercase=True)


def iwslt14_training(args: argparse.Namespace) -> None:
    """tok/train and tok/valid: tokenised, 1 to 175 tokens, length ratio at most 1.5, each 23rd pair for validation."""
    names = [f"train.tags.de-en.{language}" for language in ("de", "en")]
    files = gather(args, names, IWSLT14_URLS, "; the evaluation XML alone is enough for the test set, with --test-only")
    tokenised = []
    for file, language in zip(files, ("de", "en"), strict=True):
        raw = args.output / "raw" / f"train.{language}"
        make(raw, write_lines, raw, campaign_training(file))
        tokenised.append(tokenise(args, raw, f"all.{language}", language, lowercase=True))
    for split in ("train", "valid"):
        first, second = (args.output / "tok" / f"{split}.{language}" for language in ("de", "en"))
        pairs = enumerate(clean_pairs(read_pairs(*tokenised), longest=175, ratio=1.5), start=1)
        chosen = (pair for number, pair in pairs if (number % 23 == 0) == (split == "valid"))
        make(first, write_pairs, first, second, chosen)


def iwslt14(args: argparse.Namespace) -> Path:
    """IWSLT'14 German to English as fairseq's users know it: lower-cased, Moses-tokenised, 10k joint BPE.

    With separate dictionaries, fairseq's default, they have the 8,848 and 6,632 types of the Mixhead paper. The test
    set is dev2010, TEDX dev2012, tst2010, tst2011 and tst2012 concatenated.
    """
    iwslt14_test(args)
    if args.test_only:
        return args.output / "tok"
    iwslt14_training(args)
    names = [f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en")]
    pieces = segment(args, SubwordNMT, args.operations, names)
    return binarise(args, pieces, ("de", "en"), *(["--joined-dictionary"] if args.joined_dictionary else []))


# --- WMT'14 ---

WMT14_URLS = {
    "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz": None,
    "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz": None,
    "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz": None,
    "http://data.statmt.org/wmt17/translation-task/dev.tgz": None,
    "http://statmt.org/wmt14/test-full.tgz": None,
}
WMT14_TRAINING = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")


def wmt14(args: argparse.Namespace) -> Path:
    """WMT'14 English to German: Europarl, Common Crawl and News Commentary v9; newstest2013 and newstest2014.

    Normalised, tokenised with hyphens split, 1 to 250 tokens, length ratio at most 1.5, joint BPE and dictionary.
    """
    languages = ("en", "de")
    training = [f"{part}.{language}" for language in languages for part in WMT14_TRAINING]
    evaluation = [
        f"newstest{name}-{kind}.{language}.sgm"
        for name, kinds in (("2013", ("src", "ref")), ("2014-deen", ("src", "ref")))
        for kind, language in zip(kinds, languages, strict=True)
    ]
    files = gather(args, training + evaluation, WMT14_URLS)
    tokenised = []
    options = {"normalise": True, "aggressive": True}
    for index, language in enumerate(languages):
        raw = args.output / "raw" / f"train.{language}"
        parts = files[index * len(WMT14_TRAINING) :][: len(WMT14_TRAINING)]
        make(raw, write_lines, raw, chain.from_iterable(map(read_lines, parts)))
        tokenised.append(tokenise(args, raw, f"all.{language}", language, **options))
    first, second = (args.output / "tok" / f"train.{language}" for language in languages)
    make(first, write_pairs, first, second, clean_pairs(read_pairs(*tokenised), longest=250, ratio=1.5))
    names = [f"{split}.{language}" for split in ("valid", "test") for language in languages]
    for name, file in zip(names, files[len(training) :], strict=True):
        raw = args.output / "raw" / name
        make(raw, write_lines, raw, campaign_segments(file))
        tokenise(args, raw, name, name[-2:], **options)
    names += [f"train.{language}" for language in languages]
    pieces = segment(args, SubwordNMT, args.operations, names)
    return binarise(args, pieces, languages, "--joined-dictionary")


# --- language modelling ---

WIKITEXT_URL = "https://wikitext.smerity.com/wikitext-{}-v1.zip"
WIKITEXT_LINES = {"2": 36_718, "103": 1_801_350}  # of the training part
WIKITEXT_SHA256 = {
    "2": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "103": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    "2-raw": "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    "103-raw": "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
}
LM1B_URL = "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
LM1B_SHA256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"

BROWN = {
    "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/brown.zip": (
        "9b275f9b3b95d7bd66ccfb7cd259f445a13bbe5d1f4107aba09fd3e8364bafa6"
    )
}


def language_model(args: argparse.Namespace, files: dict[str, Iterable[Path]], *flags: str) -> Path:
    """Binarise `files`, a list for each split, in words or, with --pieces, in sub-words of bytes."""
    for split, parts in files.items():
        if not any(line.strip() for part in parts for line in read_lines(part)):
            raise ValueError(f"{', '.join(map(str, parts))}: no text for {split}")
    check_settings(args, keep=True)
    for split, parts in files.items():
        target = args.output / "tok" / f"{split}.txt"
        make(target, write_lines, target, islice(chain.from_iterable(map(read_lines, parts)), args.head))
    if args.pieces is None:
        return binarise(args, args.output / "tok", None, *flags)
    return binarise(args, segment(args, BytePieces, args.pieces, [f"{split}.txt" for split in files]), None)


def wikitext(args: argparse.Namespace) -> Path:
    """WikiText-2 or -103 (Merity et al., 2017): word tokens as published; the raw edition where --pieces is given."""
    edition = args.size if args.pieces is None else f"{args.size}-raw"
    ending = "tokens" if args.pieces is None else "raw"
    splits = ("train", "valid", "test")
    names = [f"wiki.{split}.{ending}|{split}.txt" for split in splits]
    files = gather(args, names, {WIKITEXT_URL.format(edition): WIKITEXT_SHA256[edition]})
    lines = sum(1 for _ in read_lines(files[0]))
    for size, published in WIKITEXT_LINES.items():
        if size != args.size and lines == published:
            raise ValueError(f"--size {args.size}: {files[0]} has the {lines:,} lines of WikiText-{size}")
    return language_model(args, {split: [file] for split, file in zip(splits, files, strict=True)})


def lm1b(args: argparse.Namespace) -> Path:
    """One Billion Word benchmark (Chelba et al., 2014): words seen three times or more, or sub-words with --pieces.

    The first held-out part is the test set, as is usual since Jozefowicz et al. (2016), the second is for validation.
    """
    training = [f"news.en-{number:05}-of-00100" for number in range(1, 100)]
    heldout = [f"news.en.heldout-{number:05}-of-00050" for number in (1, 0)]
    files = gather(args, training + heldout, {LM1B_URL: LM1B_SHA256})
    return language_model(args, {"train": files[:-2], "valid": files[-2:-1], "test": files[-1:]}, "--thresholdsrc=3")


def brown_document(path: Path) -> Iterator[str]:
    """The sentences of a file of NLTK's copy, whose words carry their tags as word/tag."""
    for line in read_lines(path):
        if words := line.split():
            yield " ".join(word.rsplit("/", 1)[0] for word in words)


def brown_split(documents: list[Path], split: str) -> Iterator[str]:
    """The documents of a split, an empty line behind each: of 20, the 8th is for the test, the 14th for validation."""
    splits = {7: "test", 13: "valid"}
    for number, path in enumerate(documents):
        if splits.get(number % 20, "train") == split:
            yield from chain(brown_document(path), [""])


def brown(args: argparse.Namespace) -> Path:
    """The Brown corpus, split by document, a sentence a line: cased words, or sub-words with --pieces.

    Takes NLTK's copy (500 files, ca01 to cr09) or train.txt, valid.txt and test.txt made from it.
    """
    splits = ("train", "valid", "test")
    [found] = gather(args, ["train.txt|cr09"], BROWN)
    if found.name == "cr09":
        documents = sorted(path for path in found.parent.iterdir() if re.fullmatch(r"c[a-r]\d\d", path.name))
        if len(documents) != 500:
            raise ValueError(f"{found.parent} holds {len(documents)} of the Brown corpus's 500 documents")
        for split in splits:
            raw = args.output / "raw" / f"{split}.txt"
            make(raw, write_lines, raw, brown_split(documents, split))
        files = [args.output / "raw" / f"{split}.txt" for split in splits]
    else:
        files = gather(args, [f"{split}.txt" for split in splits], BROWN)
    return language_model(args, {split: [file] for split, file in zip(splits, files, strict=True)})


# --- command line ---


def positive(text: str) -> int:
    """A number of things, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)


CORPORA = {"multi30k": multi30k, "iwslt14": iwslt14, "wmt14": wmt14, "wikitext": wikitext, "lm1b": lm1b, "brown": brown}
FOLDERS = {"wikitext": "wikitext-SIZE, with --pieces wikitext-SIZE-raw"}
LANGUAGES = {"multi30k": ("de", "en"), "iwslt14": ("de", "en"), "wmt14": ("en", "de")}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    for name, function in CORPORA.items():
        description = function.__doc__.splitlines()[0]
        one = subparsers.add_parser(
            name,
            prog=f"scripts/prepare_{name}.sh",
            help=description,
            description=function.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument(
            "--data", type=Path, help=f"folder with the corpus (default: $LOWRANK_DATA/{FOLDERS.get(name, name)})"
        )
        one.add_argument("--output", type=Path, help="where to write (default: $LOWRANK_WORK/data/NAME)")
        one.add_argument("--download", action="store_true", help="fetch what --data lacks from the publisher")
        one.add_argument(
            "--sha256",
            action="append",
            default=[],
            metavar="HASH",
            help="a downloaded file to accept, beside known ones",
        )
        one.add_argument("--workers", type=positive, default=1, help="processes (default: %(default)s)")
        if name in ("multi30k", "iwslt14"):
            one.add_argument(
                "--join", type=positive, metavar="N", help="also make the corpus of N sentences in a row as one"
            )
        if name == "multi30k":
            one.add_argument(
                "--pieces", type=positive, default=6000, help="size of the joint BPE (default: %(default)s)"
            )
        if name in ("iwslt14", "wmt14"):
            operations = {"iwslt14": 10000, "wmt14": 40000}[name]
            one.add_argument(
                "--operations", type=positive, default=operations, help="joint BPE merges (default: %(default)s)"
            )
        if name == "iwslt14":
            one.add_argument("--joined-dictionary", action="store_true", help="one dictionary for both languages")
            one.add_argument("--test-only", action="store_true", help="only the test set, tokenised, from its XML")
        if name == "wikitext":
            one.add_argument("--size", choices=("2", "103"), default="103", help="which one (default: %(default)s)")
        if name in ("wikitext", "lm1b", "brown"):
            one.add_argument("--pieces", type=positive, metavar="V", help="cut into V sub-words instead of words")
            one.add_argument("--head", type=positive, metavar="N", help="take N lines of each split, for a trial")
    return parser


def locate(args: argparse.Namespace) -> None:
    """Fill in the default folders of `args`, whose names tell apart the forms of a corpus."""
    name = args.corpus
    if name == "wikitext":
        name += f"-{args.size}" + ("" if args.pieces is None else "-raw")
    data = Path(os.environ.get("LOWRANK_DATA") or "../shared/data")
    work = Path(os.environ.get("LOWRANK_WORK") or Path.home() / ".cache" / "fairseq_lowrank")
    # The test set of IWSLT'14 is also part of later campaigns' development data, which often stand alone.
    folder = "ted-de-en" if name == "iwslt14" and not (data / name).exists() else name
    args.data = args.data or data / folder
    if args.corpus not in LANGUAGES:
        name = args.corpus + (f"-{args.size}" if args.corpus == "wikitext" else "")
        name += "" if args.head is None else f"-head{args.head}"
        name += "" if args.pieces is None else f"-bpe{args.pieces}"
    elif getattr(args, "joined_dictionary", False):
        name += "-joined"
    args.output = args.output or work / "data" / name


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    locate(args)
    try:
        with locked(args.output):
            check_settings(args)
            done = args.output / "bin"
            made = done if done.exists() else CORPORA[args.corpus](args)
            if getattr(args, "join", None):
                base, args.output = args.output, args.output.with_name(f"{args.output.name}-x{args.join}")
                made = join_sentences(args, base, LANGUAGES[args.corpus])
    except (ValueError, OSError) as error:
        print(f"prepare_{args.corpus}.sh: error: {error}", file=sys.stderr)
        return 2
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
