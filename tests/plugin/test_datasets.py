"""fairseq's binarised data: a damaged index is refused in one line, before memory is taken for it."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.data import data_utils, indexed_dataset

from fairseq_lowrank.plugin.loading import UserError

SENTENCES = [[4, 5, 6, 2], [7, 2], [8, 9, 2]]


def write(folder, impl="mmap"):
    """The prefix of a small data set."""
    prefix = str(folder / "train")
    builder = indexed_dataset.MMapIndexedDatasetBuilder if impl == "mmap" else indexed_dataset.IndexedDatasetBuilder
    data = builder(prefix + ".bin", dtype=np.int32)
    for sentence in SENTENCES:
        data.add_item(torch.tensor(sentence))
    data.finalize(prefix + ".idx")
    return prefix


def load(prefix, impl):
    return data_utils.load_indexed_dataset(prefix, None, dataset_impl=impl)


def change(file, offset, form, value):
    data = bytearray(Path(file).read_bytes())
    struct.pack_into(form, data, offset, value)
    Path(file).write_bytes(data)


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_data_loads_as_it_was_written(tmp_path, impl):
    dataset = load(write(tmp_path, impl), impl)
    if impl == "cached":
        dataset.prefetch(range(3))
    assert [dataset[index].tolist() for index in range(3)] == SENTENCES


# version, type, count, three lengths and three places
MAPPED = {
    "another version": (9, "<Q", 2, "no index of fairseq's mmap format"),
    "floating-point numbers": (17, "<B", 6, "its type, number 6, are no integers"),
    "a type that is none": (17, "<B", 99, "its type, number 99, are no integers"),
    "2 sentences of 3": (18, "<Q", 2, "does not hold the 2 sentences"),
    "a hostile count": (18, "<Q", 2**61, "does not hold the 2,305,843,009,213,693,952 sentences"),
    "a negative length": (26, "<i", -4, "a sentence of -4 tokens"),
    "a hostile length": (26, "<i", 2**31 - 1, "a sentence of 2,147,483,647 tokens"),
    "another length": (34, "<i", 4, "train.bin is cut short"),
    "a negative place": (38, "<q", -8, "do not lie one behind the other"),
    "a place of another": (46, "<q", 0, "do not lie one behind the other"),
    "a place beyond the end": (54, "<q", 2**60, "do not lie one behind the other"),
}


@pytest.mark.parametrize("damage", MAPPED)
def test_a_damaged_index_is_refused(tmp_path, damage):
    offset, form, value, reason = MAPPED[damage]
    prefix = write(tmp_path)
    change(prefix + ".idx", offset, form, value)
    with pytest.raises(UserError, match=reason) as refused:
        load(prefix, "mmap")
    assert "\n" not in str(refused.value)


OLDER = {
    "floating-point numbers": (16, "<Q", 7, "its type, number 7, are no integers"),
    "tokens of another size": (24, "<Q", 8, "holds something else than sentences"),
    "a hostile count": (32, "<Q", 2**61, "holds something else than sentences"),
    "a negative place": (88, "<q", -8, "do not lie one behind the other"),
    "a hostile length": (112, "<q", 2**40, "a sentence of 1,099,511,627,776 tokens"),
}


@pytest.mark.parametrize("impl", ["lazy", "cached"])
@pytest.mark.parametrize("damage", OLDER)
def test_a_damaged_index_of_the_older_format_is_refused(tmp_path, damage, impl):
    offset, form, value, reason = OLDER[damage]
    prefix = write(tmp_path, impl)
    change(prefix + ".idx", offset, form, value)
    with pytest.raises(UserError, match=reason):
        load(prefix, impl)


def test_a_hostile_count_of_the_older_format_takes_no_memory(tmp_path):
    prefix = write(tmp_path, "lazy")
    for offset in (32, 40):
        change(prefix + ".idx", offset, "<Q", 2**50)
    with pytest.raises(UserError, match="does not hold the 1,125,899,906,842,624 sentences"):
        load(prefix, "lazy")


@pytest.mark.parametrize("impl", ["mmap", "cached"])
@pytest.mark.parametrize("ending", [".idx", ".bin"])
@pytest.mark.parametrize("size", [0, 20, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, impl, ending, size):
    prefix = write(tmp_path, impl)
    file = Path(prefix + ending)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError) as refused:
        load(prefix, impl)
    assert "\n" not in str(refused.value)
