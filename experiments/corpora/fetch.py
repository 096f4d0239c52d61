"""Search for published files in a local folder, downloads with a checked SHA-256, and folders that processes share."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import lzma
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fairseq_lowrank.files import say, whole_file, whole_folder
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import Progress
from fairseq_lowrank.records import locks

DOWNLOADS = "download"  # a folder within --output
SOURCE = "source.txt"  # within --output too: the folder that it is made from
PIECES = "pieces.txt"  # … and the checksums of the word pieces that it is cut into
SETTINGS = "settings.json"  # … and the arguments that shape it
TEXTS = "texts.json"  # … and the checksums of your own texts
NOTES = (SOURCE, PIECES, SETTINGS, TEXTS)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, path: Path, accepted: Iterable[str]) -> None:
    """Download `url` to `path`, and check that its SHA-256 is among `accepted`.

    Raises:
        UserError: the SHA-256 is another one. The message names it, so you can accept it if you trust the file. The file
            stays as `path` + ".unverified" and is not downloaded again.
    """
    unverified = path.with_name(path.name + ".unverified")
    if not unverified.exists():
        say(f"downloading {url}")
        with whole_file(unverified, "wb") as file, _opened(url) as response:
            shutil.copyfileobj(response, file)
            if (size := response.headers.get("Content-Length")) is not None and file.tell() != int(size):
                raise UserError(f"{url}: only {file.tell():,} of {int(size):,} bytes arrived. Run the command again.")
    if (found := sha256(unverified)) not in accepted:
        raise UserError(
            f"{url} has SHA-256 {found}, which is not a checksum known here. If you trust the file, add "
            f"--sha256 {found}. If not, remove {unverified}."
        )
    os.replace(unverified, path)


def _opened(url: str):
    """Open an address.

    Raises:
        NoNetwork: it cannot be reached. An answer of the server, such as 404, raises HTTPError.
    """
    try:
        return urllib.request.urlopen(url, timeout=60)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise NoNetwork(f"{url}: {error.reason}") from error


class NoNetwork(UserError):
    """An address cannot be reached."""


DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
MOST_UNPACKED = 200  # unpacked bytes for each byte of an archive; text has about ten


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip or .tgz; `folder` appears when it is complete, and nothing is written outside of it.

    Raises:
        UserError: the archive is damaged, contains paths outside of the folder, or would fill the disk.
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
        raise UserError(
            f"{archive} cannot be unpacked: it is damaged or another kind of file ({reason}). Download it again."
        ) from error


def unpack_into(archive: Path, folder: Path) -> None:
    """Unpack an archive into an existing folder; see :func:`unpack`."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise UserError(
                        f"{archive} was not unpacked: {name!r} would be written outside of it. Download it again from its publisher."
                    )
            check_room(archive, folder, sum(member.file_size for member in file.infolist()))
            file.extractall(folder)
        return
    with tarfile.open(archive) as file:
        size = 0
        for member in file:
            size += member.size
            check_room(archive, folder, size, member.size)
            file.extract(member, folder, filter="data")
        while file.fileobj.read(2**20):  # the checksum is at the end
            pass


def check_room(archive: Path, folder: Path, size: int, missing: int | None = None) -> None:
    """Refuse an archive that does not fit on the disk: it has `size` bytes unpacked, and `missing` of them are not written yet."""
    if size > MOST_UNPACKED * max(archive.stat().st_size, 10_000):
        raise UserError(
            f"{archive} was not unpacked: its {archive.stat().st_size:,} bytes would become {size:,}. Download it again from its publisher."
        )
    if (missing or size) > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"{archive} was not unpacked: it needs {missing or size:,} bytes, and {free:,} are free. Free some space."
        )


def make(target: Path, recipe: Callable[..., None], *arguments, **options) -> Path:
    """Run `recipe(*arguments, **options)`, which writes `target`, unless `target` exists."""
    if not target.exists():
        say(f"making {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with Progress(f"making {target.name}"):
            recipe(*arguments, **options)
    return target


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` while the block runs, after waiting for another process; create the folder if it does not exist."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), ExitStack() as stack:  # another process may remove the folder, see below
            handle = stack.enter_context(
                locks.locked(
                    folder,
                    os.O_RDONLY,
                    waiting=lambda: say(f"waiting for another process, which is making {folder}"),
                )
            )
            # Another process may have removed the folder. A lock of the removed folder does not lock a new one.
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                lock = stack.pop_all()
                break
    with lock:
        try:
            yield
        finally:
            if not has_begun(folder):  # before another process writes its notes
                for note in NOTES:
                    (folder / note).unlink(missing_ok=True)
            # Remove the folder if it is empty, before the lock is released: then no other process can be in it.
            with suppress(OSError):
                folder.rmdir()


def find(folders: Iterable[Path], names: str) -> Path | None:
    """Return the first file in `folders` that matches one of the patterns `names` (a|b|c), plain or gzipped."""
    for folder in folders:
        for name in names.split("|"):
            for pattern in (name, f"{name}.gz"):
                if matches := sorted(path for path in folder.rglob(pattern) if path.is_file()):
                    return matches[0]
    return None


def source_of(output: Path) -> str | None:
    """Return the folder from which a corpus was made; None if there is no note of it."""
    note = output / SOURCE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def has_begun(output: Path) -> bool:
    """Return True if a folder has more than notes and downloads."""
    made = (path for path in output.rglob("*") if path.is_file() and path.name not in NOTES)
    return any(output / DOWNLOADS not in path.parents for path in made)


def check_source(args: argparse.Namespace, source: str | None) -> None:
    """Refuse to continue in --output from another source folder; save the source folder if nothing is made yet."""
    begun, note = source_of(args.output), args.output / SOURCE
    if source is None or begun == source:
        return
    if not has_begun(args.output):
        note.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(note) as file:
            file.write(f"{source}\n")
    elif begun is not None:  # old folders have no such note
        raise UserError(
            f"{args.output} was begun from {begun}, not from {source}. Add --data {begun}, or remove {args.output}."
        )


def gather(args: argparse.Namespace, names: Iterable[str], urls: dict[str, str | None], note: str = "") -> list[Path]:
    """Return the files that match `names`, from --data or, with --download, from `urls`.

    `urls` has the SHA-256 of each address, or None if it is not known. Archives are unpacked, those in --data too.

    Raises:
        UserError: files are missing (the message names them and their sources), or --output was begun from other files.
    """
    names, fetched = list(names), args.output / DOWNLOADS
    folders = [args.data, fetched]
    if any(find(folders, name) is None for name in names):
        for url, checksum in urls.items():
            file = fetched / url.rsplit("/", 1)[-1]
            here = args.data / file.name
            if not (args.download or here.is_file()):
                continue
            try:
                source = here.resolve().as_uri() if here.is_file() else url
                make(file, download, source, file, {*args.sha256, checksum})
            except NoNetwork as error:
                size = f"{args.corpus.download:,} MB in all, " if args.corpus.download else ""
                raise UserError(
                    f"No network. Put {file.name} ({size}{url}) into {args.data}, and run the same command."
                ) from error
            if file.suffix in (".zip", ".tgz") or ".tar." in file.name:
                unpacked = file.with_name(file.name + ".d")
                make(unpacked, unpack, file, unpacked)
    found = {name: find(folders, name) for name in names}
    if missing := [name.replace("|", " or ") for name, path in found.items() if path is None]:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise UserError(
            f"{args.data} lacks {', '.join(missing[:10])}{more}. Give their folder with --data FOLDER"
            + (
                f", or add --download to fetch them from {', '.join(urls)}{note}"
                if urls
                else f"; they come from {note}"
            )
            + f". From a recipe or the quickstart, set LOWRANK_DATA=FOLDER, with the files in FOLDER/{args.data.name}"
            + (', or PREPARE="--download".' if urls else ".")
        )
    own = any(args.data in path.parents for path in found.values())
    check_source(args, str((args.data if own else fetched).resolve()))
    return list(found.values())
