"""`python -m experiments.corpora NAME …`: prepare a corpus, or a variant of it such as brown-head500."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from pathlib import Path

from experiments.corpora.catalogue import CORPORA, is_taken, parse_corpus_name
from experiments.corpora.corpus import Corpus, positive, published_folder, work_folder
from experiments.corpora.fetch import check_source, locked, source_of
from experiments.corpora.pieces import PIECES_OF, check_pieces
from experiments.corpora.steps import JOIN, check_settings, join_sentences, save_text_settings
from fairseq_lowrank.messages import UserError, missing_package_hint

PROGRAM = "scripts/prepare.sh"


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    names = ", ".join(corpus.usage for corpus in CORPORA.values())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Prepare a corpus for fairseq, and print the folder of the binarised corpus.",
        epilog=f"NAME is a corpus, or the name of a variant's folder: {names}.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="NAME")
    for name, corpus in CORPORA.items():
        one = subparsers.add_parser(
            name,
            prog=f"{PROGRAM} {name}",
            help=corpus.prepare.__doc__.splitlines()[0],
            description=corpus.prepare.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.set_defaults(corpus=corpus)
        add_arguments(one, corpus)
    return parser


def add_arguments(parser: argparse.ArgumentParser, corpus: Corpus) -> None:
    """Add the arguments that all corpora have, and those of `corpus`."""
    published = corpus.published_help or corpus.name
    parser.add_argument("--data", type=Path, help=f"folder with the corpus (default: $LOWRANK_DATA/{published})")
    parser.add_argument("--output", type=Path, help=f"folder to write to (default: $LOWRANK_WORK/data/{corpus.usage})")
    parser.add_argument(
        "--download", action="store_true", help="download files that --data does not have from the publisher"
    )
    parser.add_argument(
        "--sha256",
        action="append",
        default=[],
        metavar="HASH",
        help="SHA-256 of a downloaded file to accept, in addition to the known ones",
    )
    parser.add_argument("--workers", type=positive, default=1, help="number of processes (default: %(default)s)")
    for argument in corpus.arguments:
        parser.add_argument(argument.flag, **argument.options)


def expand(argv: list[str]) -> list[str]:
    """Return the command line with a variant's name at its start replaced by the corpus and its arguments."""
    if not argv or argv[0].startswith("-") or argv[0] in CORPORA:
        return argv
    corpus, values = parse_corpus_name(argv[0])
    return [corpus.name, *corpus.words(values), *argv[1:]]


def locate(args: argparse.Namespace) -> None:
    """Set the default folders in `args`; each variant of a corpus has a separate folder."""
    corpus: Corpus = args.corpus
    data = published_folder()
    args.data_given, args.is_taken = args.data is not None, is_taken
    if getattr(args, PIECES_OF.name, None):
        args.bert = None  # not read
    args.data = args.data or data / (corpus.published(args, data) if corpus.published else corpus.name)
    args.output = args.output or work_folder() / "data" / corpus.variant_name(vars(args) | {JOIN.name: None})


def folder(argv: list[str]) -> Path:
    """Return the output folder of a command line."""
    args = build_parser().parse_args(expand(argv))
    locate(args)
    return args.output.with_name(args.output.name + JOIN.format_part(getattr(args, JOIN.name, None)))


def changes(argv: list[str]) -> list[str]:
    """Return the flags of a command line that change the files but are not part of a variant's name."""
    args, plain = (build_parser().parse_args(expand(words)) for words in (argv, argv[:1]))
    return [
        argument.flag
        for argument in args.corpus.arguments
        if not argument.part and getattr(args, argument.name) != getattr(plain, argument.name)
    ]


def prepare(args: argparse.Namespace) -> Path:
    """Prepare the corpus of `args` if it does not exist, and return its folder."""
    with locked(args.output):
        for part in args.output.glob("*.part"):  # of a process that was killed, because no other one has the lock
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        check_settings(args)
        args.corpus.check(args)
        if PIECES_OF in args.corpus.arguments:
            check_pieces(args)
        if args.data_given and args.data.exists() and source_of(args.output) is not None:
            check_source(args, str(args.data.resolve()))
        done = args.output / "bin"
        made = done if done.exists() else args.corpus.prepare(args)
        if made == done:  # an old folder may lack them
            save_text_settings(args)
        if sentences := getattr(args, JOIN.name, None):
            base, args.output = args.output, args.output.with_name(args.output.name + JOIN.format_part(sentences))
            made = join_sentences(args, base)
    return made


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    try:
        argv = expand(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        parser.error(str(error))
    args = parser.parse_args(argv)
    locate(args)
    try:
        print(prepare(args))
    except (UserError, UnicodeError, OSError, ModuleNotFoundError) as error:
        message = missing_package_hint(error) if isinstance(error, ModuleNotFoundError) else error
        print(f"{PROGRAM} {args.corpus.name}: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
