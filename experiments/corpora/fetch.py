"""Making a corpus's files: finding what is published, in a local folder or by download with a checked SHA-256."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import lzma
import os
import shutil
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from experiments import locks
from fairseq_lowrank.files import say, whole_file, whole_folder
from fairseq_lowrank.messages import UserError

DOWNLOADS = "download"  # a folder within --output
SOURCE = "source.txt"  # within --output too: the folder that it is made from
PIECES = "pieces.txt"  # … and the checksums of the word pieces that it is cut into
SETTINGS = "settings.json"  # … and the arguments that shape it
NOTES = (SOURCE, PIECES, SETTINGS)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, path: Path, accepted: Iterable[str]) -> None:
    """Fetch `url` into `path`, whose SHA-256 must be among `accepted`.

    Raises:
        UserError: it is not. The message says what it is, so that someone who has checked it another way can accept
            it; the file stays as `path` + ".unverified" and is not fetched again.
    """
    unverified = path.with_name(path.name + ".unverified")
    if not unverified.exists():
        say(f"downloading {url}")
        with whole_file(unverified, "wb") as file, urllib.request.urlopen(url, timeout=60) as response:
            shutil.copyfileobj(response, file)
            if (size := response.headers.get("Content-Length")) is not None and file.tell() != int(size):
                raise UserError(f"{url}: {file.tell():,} of {int(size):,} bytes came; call this again")
    if (found := sha256(unverified)) not in accepted:
        raise UserError(
            f"{url} has SHA-256 {found}, which is not a checksum known here. If you trust the file, say so with "
            f"--sha256 {found}; if not, remove {unverified}"
        )
    os.replace(unverified, path)


DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
MOST_UNPACKED = 200  # unpacked bytes for each byte of an archive: text comes to ten


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or .tgz so that `folder` appears only when it is complete; nothing is written outside it.

    Raises:
        UserError: the archive is damaged, would write elsewhere, or would fill the disk.
    """
    try:
        with whole_folder(folder) as part:
            unpack_into(archive, part)
    except (
        *DAMAGED,
        NotImplementedError,
        RuntimeError,
    ) as error:  # the last two: encrypted, or packed in an unknown way
        reason = " ".join(str(error).split())
        raise UserError(f"{archive} cannot be unpacked, it is damaged or another kind of file: {reason}") from error


def unpack_into(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder that is there; see :func:`unpack`."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise UserError(f"{archive} was not unpacked: {name!r} would be written outside of it")
            check_room(archive, folder, sum(member.file_size for member in file.infolist()))
            file.extractall(folder)
        return
    with tarfile.open(archive) as file:
        size = 0
        for member in file:
            size += member.size
            check_room(archive, folder, size, member.size)
            file.extract(member, folder, filter="data")
        while file.fileobj.read(2**20):  # the checksum stands at the very end
            pass


def check_room(archive: Path, folder: Path, size: int, missing: int | None = None) -> None:
    """Refuse an archive that needs more space than the disk has: `size` bytes unpacked, `missing` of them not written yet."""
    if size > MOST_UNPACKED * max(archive.stat().st_size, 10_000):
        raise UserError(f"{archive} was not unpacked: its {archive.stat().st_size:,} bytes would become {size:,}")
    if (missing or size) > (free := shutil.disk_usage(folder).free):
        raise UserError(f"{archive} was not unpacked: it needs {missing or size:,} bytes, and {free:,} are free")


def make(target: Path, recipe: Callable[..., None], *arguments, **options) -> Path:
    """Run `recipe(*arguments, **options)`, which writes `target`, unless `target` is there already."""
    if not target.exists():
        say(f"making {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        recipe(*arguments, **options)
    return target


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of `folder`, made if need be, while the block runs; wait for one that is in there."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as stack:  # the folder may be removed meanwhile, see below
            handle = stack.enter_context(
                locks.locked(
                    folder,
                    os.O_RDONLY,
                    waiting=lambda: say(f"waiting for another process, which is making {folder}"),
                )
            )
            # One that made nothing has removed the folder, and a lock of what is gone keeps nobody out of a new one.
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                lock = stack.pop_all()
                break
    with lock:
        try:
            yield
        finally:
            if not has_begun(folder):  # before another process may note what it makes its own of
                for note in NOTES:
                    (folder / note).unlink(missing_ok=True)
            # Only an empty folder goes: nothing was made. It goes before the lock does, else another process may be in it.
            with suppress(OSError):
                folder.rmdir()


def find(folders: Iterable[Path], names: str) -> Path | None:
    """The first file anywhere in `folders` that matches one of the patterns `names` (a|b|c), plain or gzipped."""
    for folder in folders:
        for name in names.split("|"):
            for pattern in (name, f"{name}.gz"):
                if matches := sorted(path for path in folder.rglob(pattern) if path.is_file()):
                    return matches[0]
    return None


def source_of(output: Path) -> str | None:
    """The folder that a corpus was begun from; None where nothing says so."""
    note = output / SOURCE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def has_begun(output: Path) -> bool:
    """Return True if a folder holds more than notes and downloads."""
    made = (path for path in output.rglob("*") if path.is_file() and path.name not in NOTES)
    return any(output / DOWNLOADS not in path.parents for path in made)


def check_source(args: argparse.Namespace, source: str | None) -> None:
    """Refuse to continue in --output from another source folder; note the source folder if nothing is made yet."""
    begun, note = source_of(args.output), args.output / SOURCE
    if source is None or begun == source:
        return
    if not has_begun(args.output):
        note.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(note) as file:
            file.write(f"{source}\n")
    elif begun is not None:  # folders are older than these notes
        raise UserError(
            f"{args.output} was begun from {begun}, not from {source}: give --data {begun}, or remove that folder"
        )


def gather(args: argparse.Namespace, names: Iterable[str], urls: dict[str, str | None], note: str = "") -> list[Path]:
    """The files matching `names`, from --data or, with --download, from `urls`.

    `urls` gives each address its SHA-256, or None where it is not known; archives are unpacked.

    Raises:
        UserError: files are missing, and the message names them and says where they come from; or --output was begun from
            others.
    """
    names, fetched = list(names), args.output / DOWNLOADS
    folders = [args.data, fetched]
    if args.download and any(find(folders, name) is None for name in names):
        for url, checksum in urls.items():
            file = fetched / url.rsplit("/", 1)[-1]
            make(file, download, url, file, {*args.sha256, checksum})
            if file.suffix in (".zip", ".tgz") or ".tar." in file.name:
                unpacked = file.with_name(file.name + ".d")
                make(unpacked, unpack, file, unpacked)
    found = {name: find(folders, name) for name in names}
    if missing := [name.replace("|", " or ") for name, path in found.items() if path is None]:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise UserError(
            f"{args.data} lacks {', '.join(missing[:10])}{more}. Say where they are with --data FOLDER"
            + (f", or fetch them with --download from {', '.join(urls)}{note}" if urls else f"; they come from {note}")
            + f"; from a recipe or the quickstart: LOWRANK_DATA=FOLDER, with them in FOLDER/{args.data.name}"
            + (', or PREPARE="--download"' if urls else "")
        )
    own = any(args.data in path.parents for path in found.values())
    check_source(args, str((args.data if own else fetched).resolve()))
    return list(found.values())
