"""fairseq's binarised data: refused in one line where it is damaged, before memory is taken for it."""

import functools
import struct
from pathlib import Path

import numpy
from fairseq.data import indexed_dataset
from fairseq.data.indexed_dataset import MMapIndexedDataset

from fairseq_lowrank.messages import UserError

BATCH = 2**20  # sentences whose places are compared at once


# fairseq believes an index: a float type gives wrong tokens, a count or a size takes memory, and a place that is none
# ends in an error of numpy's far from its cause.
def check_binarised_data() -> None:
    """Let no index be read whose sentences are not all there, one behind the other, in its data."""
    mapped, older = indexed_dataset.MMapIndexedDataset, indexed_dataset.IndexedDataset
    initialise, read_index = mapped._do_init, older.read_index

    @functools.wraps(initialise)
    def _do_init(self, path):
        check_mapped(path)
        initialise(self, path)

    @functools.wraps(read_index)
    def read_checked_index(self, path):
        check_older(path)
        read_index(self, path)

    mapped._do_init, older.read_index = _do_init, read_checked_index


def check_mapped(prefix: str) -> None:
    """Check ``prefix``.idx of ``--dataset-impl mmap``, the default: a type, a count, and each sentence's length and place.

    Raises:
        UserError: it does not describe what ``prefix``.bin holds.
    """
    index = Path(f"{prefix}.idx")
    magic, version, code, count = header(index, "<9sQBQ")
    if magic != indexed_dataset.MMapIndexedDataset.Index._HDR_MAGIC or version != 1:
        raise UserError(f"{index} is no index of fairseq's mmap format: is --dataset-impl right?")
    size = integer_type(index, code).itemsize
    if index.stat().st_size != 26 + 12 * count:
        raise UserError(f"{index} is damaged: it does not hold the {count:,} sentences that it announces")
    if not count:
        raise UserError(f"{index} holds no sentences")
    lengths = numpy.memmap(index, numpy.int32, "r", 26, (count,))
    places = numpy.memmap(index, numpy.int64, "r", 26 + 4 * count, (count,))
    check_places(index, lengths, places, size, 0)


def check_older(prefix: str) -> None:
    """Check ``prefix``.idx of ``--dataset-impl lazy`` and ``cached``, which counts dimensions and tokens, not bytes.

    Raises:
        UserError: it does not describe what ``prefix``.bin holds.
    """
    index = Path(f"{prefix}.idx")
    magic, version, code, size, count, dimensions = header(index, "<8s5Q")
    if magic != indexed_dataset.IndexedDataset._HDR_MAGIC or version != 1:
        raise UserError(f"{index} is no index of fairseq's older format: is --dataset-impl right?")
    if integer_type(index, code).itemsize != size or dimensions != count:
        raise UserError(f"{index} is damaged, or holds something else than sentences")
    if index.stat().st_size != 48 + 8 * (3 * count + 2):
        raise UserError(f"{index} is damaged: it does not hold the {count:,} sentences that it announces")
    rows = numpy.memmap(index, numpy.int64, "r", 48, (3 * count + 2,))
    ordinals, places, lengths = rows[: count + 1], rows[count + 1 : 2 * count + 2], rows[2 * count + 2 :]
    if not numpy.array_equal(ordinals, numpy.arange(count + 1)):
        raise UserError(f"{index} is damaged, or holds something else than sentences")
    check_places(index, lengths, places[:-1], 1, size)


def header(index: Path, form: str) -> tuple:
    with open(index, "rb") as file:
        data = file.read(struct.calcsize(form))
    if len(data) < struct.calcsize(form):
        raise UserError(f"{index} is cut short")
    return struct.unpack(form, data)


def integer_type(index: Path, code: int) -> numpy.dtype:
    kind = numpy.dtype(indexed_dataset._code_to_dtype.get(code, float))
    if kind.kind not in "iu":
        raise UserError(f"{index} is damaged: tokens of its type, number {code}, are no integers")
    return kind


def check_places(index: Path, lengths: numpy.ndarray, places: numpy.ndarray, size: int, unit: int) -> None:
    """Compare sentences' places with the sum of ``size`` × length before them; a place counts ``unit`` bytes (0: one)."""
    data = index.with_suffix(".bin")
    if not data.is_file():
        raise UserError(f"{data}: no such file, though {index.name} is there")
    most, end = data.stat().st_size // (unit or 1), 0
    for first in range(0, len(lengths), BATCH):
        batch = numpy.array(lengths[first : first + BATCH], dtype=numpy.int64)
        if batch.min() < 0 or batch.max() > most:
            raise UserError(
                f"{index} is damaged: a sentence of {batch.min() if batch.min() < 0 else batch.max():,} tokens"
            )
        ends = end + numpy.cumsum(batch * size)
        if not numpy.array_equal(places[first : first + BATCH], ends - batch * size):
            raise UserError(f"{index} is damaged: its sentences do not lie one behind the other")
        end = int(ends[-1])
        if end > most:
            raise UserError(
                f"{data} is cut short, or {index.name} is of other data: it should hold {end * (unit or 1):,} bytes"
            )
    if not end:
        raise UserError(f"{data} holds no tokens")


# A dataset whose index is refused was never opened, and says so in a traceback when it is thrown away.
def close_what_was_opened() -> None:
    """Let datasets and indices that could not be opened go without a word."""
    for kind, opened in ((MMapIndexedDataset, "_bin_buffer_mmap"), (MMapIndexedDataset.Index, "_bin_buffer_mmap")):

        def close(self, opened=opened, close=kind.__del__):
            if hasattr(self, opened):
                close(self)

        kind.__del__ = close
