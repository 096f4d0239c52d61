"""Safe loading of files of ``torch.save``: only tensors and allowed classes, after a check for damage."""

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import torch

from fairseq_lowrank import versions
from fairseq_lowrank.messages import InvalidCheckpoint

LEGACY = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)  # torch before 1.6: a format without checksums


def load(file: BinaryIO, allowed: Sequence[Any] = ()) -> Any:
    """Return the content of a file of ``torch.save``, on the CPU.

    Raises:
        InvalidCheckpoint: the file is damaged, is of another kind, or contains a class that is not ``allowed``.
    """
    versions.warn_of_loading_risk()
    with torch.serialization.safe_globals(list(allowed)):
        try:
            if not (legacy := file.read(len(LEGACY)) == LEGACY):
                check_archive(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
            if any(tensor.nbytes > tensor.untyped_storage().nbytes() for tensor in tensors(content)):
                raise zipfile.BadZipFile("a tensor has more elements than its storage")
        except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError) as error:
            reason = f"it is damaged, cut short or another kind of file ({error})"
            raise InvalidCheckpoint(file.name, reason, "Copy or download it again.") from error
        except pickle.UnpicklingError as error:  # torch's message advises to switch its safety off
            file.seek(0)
            classes = [] if legacy else torch.serialization.get_unsafe_globals_in_checkpoint(file)
            reason = f"it contains {', '.join(classes) or 'damaged parts or classes'}, which no checkpoint needs"
            remedy = "Use a checkpoint that has only tensors and settings."
            raise InvalidCheckpoint(file.name, reason, remedy) from error
    return content


def check_archive(file: BinaryIO) -> None:
    """Raise BadZipFile for an entry that does not match its checksum or is not a plain stored file."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            plain = not (entry.compress_type or entry.flag_bits & 1 or entry.external_attr)
            if not plain or entry.file_size != entry.compress_size:
                raise zipfile.BadZipFile(f"{entry.filename} is compressed, encrypted or a folder")
        if name := archive.testzip():
            raise zipfile.BadZipFile(f"{name} does not match its checksum")


def tensors(content: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    waiting, seen = [content], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(part.values() if isinstance(part, dict) else part)
