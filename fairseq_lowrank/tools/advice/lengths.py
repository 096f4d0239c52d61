"""How long the sequences of binarised data are, and how large its vocabulary is."""

from __future__ import annotations

from pathlib import Path

import numpy
from fairseq.data import Dictionary, data_utils

from fairseq_lowrank.plugin.flags import SITES


def read_lengths(folder: Path, subset: str) -> dict[str, numpy.ndarray]:
    """Lengths in tokens (end of sentence included) of binarised data: `source` and `target`, or `text`.

    Raises:
        ValueError: no such data.
    """
    source, target = _language_pair(folder)
    pair = [f"{subset}.{source}-{target}.{language}" for language in (source, target)]
    names = dict(zip(("source", "target"), pair, strict=True)) if source else {"text": subset}
    found = {}
    for name, prefix in names.items():
        try:
            data = data_utils.load_indexed_dataset(str(folder / prefix), None)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"{folder / prefix}.idx cannot be read as fairseq's: it is damaged or cut short"
            ) from error
        if data is None:
            raise ValueError(f"{folder} holds no {prefix}.idx: --data takes a folder of fairseq-preprocess")
        found[name] = numpy.array(data.sizes)  # a copy: the file's memory goes with the data set
    return found


def read_vocab_size(folder: Path) -> int:
    """Size of the dictionary (the source's where there are two), fairseq's special symbols included."""
    source, _ = _language_pair(folder)
    file = folder / (f"dict.{source}.txt" if source else "dict.txt")
    if not file.is_file():
        raise ValueError(f"--data {folder} holds no {file.name}: give --vocab-size")
    return len(Dictionary.load(str(file)))


def _language_pair(folder: Path) -> tuple[str | None, str | None]:
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: no such folder")
    return data_utils.infer_language_pair(str(folder)) or (None, None)


def lengths_by_site(lengths: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """The length n of each site, whose matrices heads of n − 1 can all produce: keys, or of fewer queries one more.

    A constant a row, which the softmax ignores, takes a dimension off scores that have as many rows as columns at least.
    """
    if "text" in lengths:
        return dict.fromkeys(SITES, lengths["text"])
    source, target = lengths["source"], lengths["target"]
    return {"encoder": source, "decoder": target, "cross": numpy.minimum(source, target + 1)}
