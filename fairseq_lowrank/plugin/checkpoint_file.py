"""A checkpoint file, checked before anything in it is made: a small file must not become gigabytes, nor a damaged one weights.

torch's own reader trusts the numbers in a file. Here a zip archive (torch 1.6 and later) is held to its directory and its
checksums, and the pickle in it, or the older format's, is first read into an outline that allocates nothing: each
storage must be in the file, each tensor within its storage, and what is nested must stay small when it is spread out.
The older format has no checksums; of it the sizes and the outline are checked.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

import torch

MOST_PICKLED = 2**24  # bytes of a pickle, the tensors' data not among them: 10,000 tensors take two million
MOST_ENTRIES = 1_000_000  # of all that it holds, each thing counted as often as it is referred to
MOST_SETTINGS = 20_000  # entries of the configuration
LONGEST_SETTING = 2**16  # characters
REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")  # of a setting to another, as fairseq writes them
DEEPEST = 100
MOST_SHARED = 16  # bytes of all tensors by bytes of the file: tied embeddings are one storage under several names


class Unfit(ValueError):
    """Why a file is not a checkpoint that can be loaded."""


class Unsafe(Unfit):
    """What a file holds that no checkpoint needs."""


def check(path: str | os.PathLike) -> None:
    """Find out, in the memory of the pickle alone, whether torch may read the file at ``path``.

    Raises:
        Unfit: it may not, and why.
        OSError: there is no such file.
    """
    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # what torch goes by
        file.seek(0)
        try:
            outline = read_archive(file, path) if archive else read_legacy(file)
            check_entries(outline)
        except (Unfit, OSError):
            raise
        except Exception as error:  # a parser of anything at all may stumble over anything at all
            raise Unfit("it is damaged, cut short or another kind of file") from error


def read_archive(file: BinaryIO, path: str | os.PathLike) -> Outline:
    """The outline of a zip archive's pickle; every member must lie in the file as it is and match its checksum."""
    with zipfile.ZipFile(file) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    names = {member.filename.lower() for member in members}  # torch's reader does not tell case apart
    if len(names) < len(members):
        raise Unfit("several of its parts have one name")
    if any(
        member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size for member in members
    ):
        raise Unfit("its parts are compressed, which those of a checkpoint never are")
    reader, pickled, storages, end = torch._C.PyTorchFileReader(os.fspath(path)), None, {}, 0
    for member in members:
        name = member.filename.partition("/")[2]
        file.seek(member.header_offset)
        start = member.header_offset + 30 + sum(struct.unpack("<26x2H", file.read(30)))
        # both readers must mean the same bytes, and no bytes may be used twice
        if (start, member.file_size) != (reader.get_record_offset(name), reader.get_record_size(name)):
            raise Unfit("its directory is ambiguous")
        if member.header_offset < end:
            raise Unfit("its parts overlap")
        end = start + member.file_size
        check_sum(file, start, member)
        if name == "data.pkl":
            if member.file_size > MOST_PICKLED:
                raise Unfit(f"its pickle has {member.file_size:,} bytes, more than {MOST_PICKLED:,}")
            file.seek(start)
            pickled = file.read(member.file_size)
        elif name.startswith("data/"):
            storages[name.removeprefix("data/")] = member.file_size
    if pickled is None:
        raise Unfit("it is a zip archive, but none of torch's")
    outline = Outline(io.BytesIO(pickled), most_bytes=MOST_SHARED * end, storages=storages)
    outline.load()
    return outline


def check_sum(file: BinaryIO, start: int, member: zipfile.ZipInfo) -> None:
    file.seek(start)
    checksum, left, buffer = 0, member.file_size, memoryview(bytearray(2**20))
    while left:
        read = file.readinto(buffer[: min(left, len(buffer))])
        if not read:
            raise Unfit("it is cut short")
        checksum, left = zlib.crc32(buffer[:read], checksum), left - read
    if checksum != member.CRC:
        raise Unfit(f"it is damaged: {member.filename} does not match its checksum")


def read_legacy(file: BinaryIO) -> Outline:
    """The outline of a file of torch before 1.6: five pickles, then each storage behind its number of elements."""
    size = os.fstat(file.fileno()).st_size
    limited = Limited(file)
    magic, protocol, _ = (Outline(limited).load() for _ in range(3))
    if (magic, protocol) != (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION):
        raise Unfit("it is damaged, cut short or another kind of file")
    outline = Outline(limited, most_bytes=MOST_SHARED * size)
    outline.load()
    if sorted(Outline(limited).load()) != sorted(outline.stored):
        raise Unfit("it is damaged: it lists other tensors than it holds")
    if sum(8 + storage.nbytes for storage in outline.stored.values()) > size - file.tell():
        raise Unfit("it is damaged or cut short: its tensors are larger than the file")
    return outline


class Limited:
    """A file of which no more than a pickle may have is read."""

    def __init__(self, file: BinaryIO):
        self.file, self.left = file, MOST_PICKLED

    def read(self, count: int) -> bytes:
        return self.take(self.file.read(min(count, self.left + 1)))

    def readline(self) -> bytes:
        return self.take(self.file.readline(self.left + 1))

    def take(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise Unfit(f"its pickle has more than {MOST_PICKLED:,} bytes")
        return data


# --- the outline: what stands in it for what the pickle would make ---


class Name:
    """A class or function, not looked up."""

    def __init__(self, module: str, name: str):
        self.module, self.name, self.full = module, name, f"{module}.{name}"


class Made:
    """What a class or function would make: what it is called with, its state, and its entries if it is a dictionary."""

    def __init__(self, *parts):
        self.parts, self.entries = list(parts), {}

    def __setitem__(self, key, value):
        self.entries[key] = value


class Storage:
    def __init__(self, itemsize: int, count: int):
        self.itemsize, self.nbytes = itemsize, itemsize * count


class Tensor:
    """Checked when it is named; nothing more need be known of it."""


class NumberType:
    """numpy's type of numbers or booleans, ``f8`` for example."""

    def __init__(self, code: str):
        match = re.fullmatch(r"[biufc](\d{1,2})", code)
        if match is None:
            raise Unfit(f"it holds an array of {code[:20]!r}")
        self.itemsize = int(match[1])


class Array:
    """numpy's, empty until its state, the numbers among it, is set."""


PLAIN = (str, int, float, bytes, type(None), Name)
# all that torch.save writes for what checkpoints hold
OPCODES = [
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    *(pickle.BINPERSID, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.NONE, pickle.NEWFALSE, pickle.NEWTRUE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINSTRING, pickle.LONG1, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT),
    pickle.LONG_BINPUT,
]


class Outline(pickle._Unpickler):  # the one in Python, which can be told what each opcode does
    """Reads a pickle into dictionaries, lists and stand-ins; nothing that it names is imported or called.

    Args:
        file: where the pickle stands.
        most_bytes: of all tensors together.
        storages: the sizes in bytes of an archive's storages, or None for the older format, which tells them itself.
    """

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in OPCODES}  # noqa: RUF012 (as in pickle)

    def __init__(self, file: BinaryIO | Limited, most_bytes: int = 0, storages: dict[str, int] | None = None):
        super().__init__(file, encoding="utf-8")
        self.left, self.storages = most_bytes, storages
        self.root: object = None
        self.stored: dict[str, Storage] = {}
        self.views: dict[str, Storage] = {}
        self.parents: list[object] = []

    def load(self) -> object:
        self.root = super().load()
        return self.root

    def find_class(self, module: str, name: str) -> Name:
        return Name(module, name)

    def persistent_load(self, key: tuple) -> Storage:
        kind, typed, name, _, count, *view = key
        if kind != "storage" or len(view) != (self.storages is None):
            raise Unfit("it is damaged: it refers to what is no tensor's data")
        storage = Storage(itemsize(typed), whole(count))
        if self.storages is not None and self.storages.get(name) != storage.nbytes:
            raise Unfit(f"it is damaged: {count:,} elements of a tensor lie in {self.storages.get(name, 0):,} bytes")
        storage = self.stored.setdefault(name, storage)
        if not view or view[0] is None:
            return storage
        name, offset, count = view[0]
        part = Storage(itemsize(typed), whole(count))
        if whole(offset) * part.itemsize + part.nbytes > storage.nbytes:
            raise Unfit("it is damaged: a part of a tensor's data lies beyond its end")
        return self.views.setdefault(name, part)

    def call(self, function: Name, args: tuple) -> object:
        """What stands for the result of a call; those are refused that could make more than they are given."""
        match function.full:
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_qtensor":
                return self.tensor(*args[:4])
            case "torch._utils._rebuild_tensor_v3":
                return self.tensor(*args[:4], itemsize(args[6]))
            case "torch._tensor._rebuild_from_type_v2":
                rebuild, kind, inner, state = args
                return Made(self.call(rebuild, inner), kind, state)
            case "numpy._core.multiarray._reconstruct" | "numpy.core.multiarray._reconstruct" if args[1] == (0,):
                return Array()
            case "numpy._core.multiarray.scalar" | "numpy.core.multiarray.scalar":
                kind, data = args
                if not isinstance(kind, NumberType) or not isinstance(data, bytes) or len(data) != kind.itemsize:
                    raise Unfit("it is damaged: it holds a number of numpy's that is none")
                return 0.0
            case "numpy.dtype":
                return NumberType(args[0])
            case "_codecs.encode":
                text, _ = args if args[1] == "latin1" else (None, None)
                return text.encode("latin1")
        module, _, _ = function.module.partition(".")
        if (module in ("torch", "numpy") and function.full not in INERT) or (
            function.name == "bytearray" and any(isinstance(argument, int) for argument in args)
        ):
            raise Unsafe(function.full)
        return Made(*args)

    def tensor(self, storage: Storage, offset: int, size: tuple, stride: tuple, itemsize: int | None = None) -> Tensor:
        """Refuse a tensor that reaches beyond its storage, or repeats it."""
        each = itemsize or storage.itemsize
        if len(size) > 64:
            raise Unfit(f"it is damaged: it holds a tensor of {len(size):,} dimensions")
        count = math.prod(map(whole, size))
        last = whole(offset) + sum((length - 1) * whole(step) for length, step in zip(size, stride, strict=True))
        if count and (last + 1) * each > storage.nbytes:
            raise Unfit(f"it is damaged: a tensor of shape {list(size)} lies in {storage.nbytes:,} bytes")
        if count * each > storage.nbytes:
            raise Unfit(f"it holds a tensor of shape {list(size)} that repeats {storage.nbytes:,} bytes")
        self.left -= count * each
        if self.left < 0:
            raise Unfit("its tensors share their data so often that they would grow beyond measure")
        return Tensor()

    def load_call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Name) or not isinstance(args, tuple):
            raise Unfit("it is damaged: it calls what is no function")
        self.append(self.call(function, args))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        match target:
            case Made():
                if (
                    isinstance(state, dict) and "_parent" in state
                ):  # nodes of a configuration know what they are part of
                    state = dict(state)
                    self.parents.append(state.pop("_parent"))
                target.parts.append(state)
            case NumberType() if all(part is None for part in state[2:5]):
                pass  # the order of its bytes; no structure
            case Array():
                _, shape, numbers, _, data = state
                if len(shape) > 64 or math.prod(map(whole, shape)) * numbers.itemsize != len(data):
                    raise Unfit(f"it is damaged: an array of shape {list(shape)[:64]} lies in {len(data):,} bytes")
            case _:
                raise Unfit("it is damaged: it gives a state to what has none")

    def load_entries(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, PLAIN):  # to hash what is nested a million deep ends the process
                raise Unfit("it is damaged: it holds a dictionary whose keys are no names or numbers")
            self.stack[-1][key] = value

    def load_entry(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.load_mark()
        self.stack.extend((key, value))
        self.load_entries()

    dispatch.update({pickle.REDUCE[0]: load_call, pickle.NEWOBJ[0]: load_call, pickle.BUILD[0]: load_build})
    dispatch.update({pickle.SETITEM[0]: load_entry, pickle.SETITEMS[0]: load_entries})


# calls of torch and numpy that make nothing large
INERT = {
    *("torch.Size", "torch.device", "torch.serialization._get_layout"),
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
}


def whole(number: int) -> int:
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise Unfit("it is damaged: it holds a tensor of a negative or boundless size")
    return number


def itemsize(name: Name) -> int:
    """Bytes of an element of torch's type or storage ``name``."""
    if name.module not in ("torch", "torch.storage"):
        raise Unfit(f"it is damaged: {name.full} is no kind of numbers")
    if name.name == "UntypedStorage":
        return 1
    kind = getattr(torch, name.name)
    return (kind if isinstance(kind, torch.dtype) else torch.serialization.StorageType(name.name).dtype).itemsize


# --- how much it would become ---


def check_entries(outline: Outline) -> None:
    """Refuse what grows beyond measure once its references are followed, and settings that are computed when they are read."""
    top = outline.root.entries if isinstance(outline.root, Made) else outline.root
    if isinstance(top, dict):
        check_settings([unreferenced(top.get("cfg")), top.get("args")])
    made: set[int] = set()
    spread(outline.root, MOST_ENTRIES, lambda part: made.add(id(part)))
    if any(parent is not None and id(parent) not in made for parent in outline.parents):
        raise Unfit("it is damaged: its configuration is part of something else")


def spread(root: object, most: int, visit: Callable[[object], object] = id) -> int:
    """Visit all that ``root`` holds, each thing as often as it is referred to, and count it."""
    count, waiting = 0, [(root, 0)]
    while waiting:
        part, depth = waiting.pop()
        visit(part)
        count += 1
        match part:
            case dict():
                parts = part.values()
            case list() | tuple() | set():
                parts = part
            case Made():
                parts = [*part.parts, *part.entries.values()]
            case _:
                continue
        if depth == DEEPEST or count + len(parts) > most:
            raise Unfit(f"it holds more than {most:,} entries, or they are nested more than {DEEPEST} deep")
        waiting.extend((inner, depth + 1) for inner in parts)
    return count


def unreferenced(configuration: object) -> object:
    """A configuration without its references from one setting to another, counted as what they refer to."""
    if not isinstance(configuration, dict):
        return configuration
    rest, count = {}, 0
    for name, section in configuration.items():
        rest[name] = section
        if not isinstance(section, dict):
            continue
        rest[name] = dict(section)
        for key, value in section.items():
            if isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
                other = configuration.get(reference[1])
                target = other.get(reference[2]) if isinstance(other, dict) else None
                check_settings(target)
                count += spread(target, MOST_SETTINGS)
                del rest[name][key]
        if count > MOST_SETTINGS:
            raise Unfit(f"its configuration refers to more than {MOST_SETTINGS:,} entries")
    return rest


def check_settings(settings: object) -> None:
    def check_text(part: object) -> None:
        if isinstance(part, (str, bytes)) and len(part) > LONGEST_SETTING:
            raise Unfit(f"its configuration holds a text of {len(part):,} characters")
        if isinstance(part, str) and "${" in part:
            raise Unfit(
                f"its configuration holds {part[:80]!r}, which would be computed here, from environment variables for example"
            )

    spread(settings, MOST_SETTINGS, check_text)
