"""Lengths of the sequences of binarised data, and the size of its vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy
from fairseq.data import data_utils

from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.plugin.flags import SITES
from fairseq_lowrank.tools.fairseq.checkpoints import DATA_ERRORS, read_dictionary


def read_lengths(folder: Path, subset: str) -> dict[str, numpy.ndarray]:
    """Return the lengths in tokens (end of sentence included) of binarised data: `source` and `target`, or `text`.

    Raises:
        UserError: the data does not exist or is damaged.
    """
    source, target = _language_pair(folder)
    pair = [f"{subset}.{source}-{target}.{language}" for language in (source, target)]
    names = dict(zip(("source", "target"), pair, strict=True)) if source else {"text": subset}
    found = {}
    for name, prefix in names.items():
        try:
            data = data_utils.load_indexed_dataset(str(folder / prefix), None)
        except DATA_ERRORS as error:
            raise UserError(f"{folder / prefix}.idx is damaged or cut short. Run fairseq-preprocess again.") from error
        if data is None:
            raise FlagError("--data", folder, f"has no {prefix}.idx", "Add --length N, or give other data.")
        found[name] = numpy.array(data.sizes)  # a copy: the file's memory goes with the data set
    return found


def read_vocab_sizes(folder: Path) -> tuple[int, ...]:
    """Return the size of the dictionary, or of those of source and target, fairseq's special symbols included."""
    source, target = _language_pair(folder)
    files = [folder / name for name in ((f"dict.{source}.txt", f"dict.{target}.txt") if source else ("dict.txt",))]
    for file in files:
        if not file.is_file():
            raise FlagError("--data", folder, f"has no {file.name}", "Add --vocab-size N.")
    return tuple(len(read_dictionary(file)) for file in files)


def _language_pair(folder: Path) -> tuple[str | None, str | None]:
    if not folder.is_dir():
        raise FlagError("--data", folder, "no such folder", "Give a folder that fairseq-preprocess wrote.")
    return data_utils.infer_language_pair(str(folder)) or (None, None)


def lengths_by_site(lengths: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """Return the length n of each site, such that heads of size n − 1 can produce all its matrices.

    n is the number of keys, or the number of queries plus one if that is smaller. The softmax ignores a constant in each row,
    which saves one dimension if there are at least as many queries as keys.
    """
    if "text" in lengths:
        return dict.fromkeys(SITES, lengths["text"])
    source, target = lengths["source"], lengths["target"]
    return {"encoder": source, "decoder": target, "cross": numpy.minimum(source, target + 1)}
