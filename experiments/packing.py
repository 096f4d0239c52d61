"""Keep all logs of a folder of results in one archive.

Recipes write a log next to their results, as `logs/TABLE/ROW-seedN.log.gz`. The archive has it as `logs/TABLE/ROW-seedN.log`.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from pathlib import Path

from fairseq_lowrank.files import whole_file

ARCHIVE = "logs.tar.xz"


def read_logs(folder: Path) -> dict[str, bytes]:
    """Return the logs in the archive of a folder of results by their names; empty if there is no archive."""
    path, found = folder / ARCHIVE, {}
    if path.exists():
        with tarfile.open(path, "r:xz") as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None  # the archive has no folders
                found[member.name] = file.read()
    return found


def read_log(folder: Path, name: str) -> bytes | None:
    """Return the text of the log that a line in a folder of results names, or None if it is not kept."""
    file = folder / name
    return gzip.decompress(file.read_bytes()) if file.exists() else read_logs(folder).get(_packed(name))


def _packed(name: str) -> str:
    return name.removesuffix(".gz")


def pack_logs(folder: Path) -> list[str]:
    """Move each `.log.gz` of a folder of results into its archive, and return their names there.

    A log with the name of another one in the archive is appended to it, as logs of controlled tasks are. The same logs give the
    same bytes.
    """
    loose = {_packed(file.relative_to(folder).as_posix()): file for file in sorted(folder.rglob("*.log.gz"))}
    if not loose:
        return []
    logs = read_logs(folder)
    for name, file in loose.items():
        text = gzip.decompress(file.read_bytes())
        if logs.get(name) != text:
            logs[name] = logs.get(name, b"") + text
    with (
        whole_file(folder / ARCHIVE, "wb") as file,
        tarfile.open(fileobj=file, mode="w:xz", preset=9 | lzma.PRESET_EXTREME) as archive,
    ):
        for name in sorted(logs):
            member = tarfile.TarInfo(name)
            member.size = len(logs[name])
            archive.addfile(member, io.BytesIO(logs[name]))
    for file in loose.values():
        file.unlink()
        for parent in file.relative_to(folder).parents:
            if parent.name and not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
    return list(loose)
