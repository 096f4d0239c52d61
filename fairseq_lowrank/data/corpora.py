"""Prepare the papers' corpora for fairseq: `python -m fairseq_lowrank.data.corpora CORPUS --help`.

A preparation is a chain of files, each written whole or not at all, so a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fairseq_lowrank.data.text import (
    MosesTokenizer,
    encode_sentencepiece,
    read_lines,
    say,
    train_sentencepiece,
    whole_file,
    write_lines,
)

MULTI30K_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
MULTI30K_SHA256 = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, path: Path, expected: str) -> None:
    """Fetch `url` into `path`; a file whose SHA-256 is not `expected` is thrown away and refused."""
    say(f"downloading {url}")
    with whole_file(path, "wb") as file:
        with urllib.request.urlopen(url) as response:
            shutil.copyfileobj(response, file)
        file.flush()
        if (found := sha256(Path(file.name))) != expected:
            raise ValueError(f"{url} has SHA-256 {found}, expected {expected}: not kept")


def make(target: Path, recipe: Callable[..., None], *arguments) -> Path:
    """Run `recipe(*arguments)`, which writes `target`, unless `target` is there already."""
    if not target.exists():
        say(f"making {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        recipe(*arguments)
    return target


def preprocess(folder: Path, *flags: str) -> None:
    """Run fairseq-preprocess with `flags` so that `folder` appears only when it is complete."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "fairseq_cli.preprocess", *flags, "--destdir", str(part)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ValueError(f"fairseq-preprocess failed:\n{done.stdout[-2000:]}")
    os.replace(part, folder)


def tokenise(source: Path, target: Path, language: str) -> None:
    write_lines(target, map(MosesTokenizer(language), read_lines(source)))


def multi30k(args: argparse.Namespace) -> Path:
    """German-English image captions (Elliott et al., 2016), task 1: lower-cased, tokenised, joint BPE."""
    source = args.data
    missing = [name for name in MULTI30K_SHA256 if not (source / name).is_file()]
    if missing and args.download:
        source = args.output / "raw"
        for name in MULTI30K_SHA256:
            make(source / name, download, MULTI30K_URL + name, source / name, MULTI30K_SHA256[name])
    elif missing:
        raise ValueError(
            f"{source} lacks {', '.join(missing)}. Give the folder with --data, or fetch the files from "
            f"{MULTI30K_URL} with --download"
        )
    tokenised, pieces = args.output / "tok", args.output / "bpe"
    splits = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    for split, name in splits.items():
        for language in ("de", "en"):
            target = tokenised / f"{split}.{language}"
            make(target, tokenise, source / f"{name}.{language}.gz", target, language)
    model = args.output / "bpe.model"
    training = [tokenised / "train.de", tokenised / "train.en"]
    make(model, train_sentencepiece, training, model, args.pieces)
    for split in splits:
        for language in ("de", "en"):
            name = f"{split}.{language}"
            make(pieces / name, encode_sentencepiece, model, tokenised / name, pieces / name)
    prefixes = [f"--{'train' if split == 'train' else split}pref={pieces / split}" for split in splits]
    flags = ["--source-lang=de", "--target-lang=en", "--joined-dictionary", "--workers=1", *prefixes]
    return make(args.output / "bin", preprocess, args.output / "bin", *flags)


CORPORA = {"multi30k": multi30k}


def main(argv: list[str] | None = None) -> int:
    work = Path(os.environ.get("LOWRANK_WORK") or Path.home() / ".cache" / "fairseq_lowrank")
    data = Path(os.environ.get("LOWRANK_DATA") or "../shared/data")
    parser = argparse.ArgumentParser(prog="prepare", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="corpus", required=True)

    one = subparsers.add_parser("multi30k", help=multi30k.__doc__, description=multi30k.__doc__)
    one.add_argument("--pieces", type=int, default=6000, help="joint BPE pieces (default: %(default)s)")
    one.add_argument("--download", action="store_true", help="fetch the corpus when --data lacks it")
    one.add_argument("--data", type=Path, default=data / "multi30k", help="folder with the raw .gz files (%(default)s)")
    one.add_argument("--output", type=Path, default=work / "data" / "multi30k", help="where to write (%(default)s)")

    args = parser.parse_args(argv)
    try:
        print(CORPORA[args.corpus](args))
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {args.corpus}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
