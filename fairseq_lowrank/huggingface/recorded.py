"""The choice of attention that a folder records."""

from __future__ import annotations

from pathlib import Path

from fairseq_lowrank.attention.states import refuse_unknown_options
from fairseq_lowrank.files import read_json
from fairseq_lowrank.huggingface.choice import chosen_axes
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import AXES

WEIGHTS, CONFIG = "lowrank_attention.safetensors", "lowrank_attention.json"
"""The files of mixing alone, without the rest of a model."""


def recorded_attention(folder: Path) -> dict | None:
    """Return the arguments of :func:`apply_attention` that a folder records, or None.

    Raises:
        UserError: the folder holds two choices that differ.
    """
    records = {path.name: record for path in (folder / CONFIG, folder / "config.json") if (record := record_in(path))}
    if len(records) == 2:
        own, whole = (chosen_axes(record) for record in records.values())
        if own != whole:
            differing = next(name for name in own if own[name] != whole[name])
            raise UserError(
                f"{folder} holds two choices of attention: {differing} is {own[differing]!r} in {CONFIG}, and "
                f"{whole[differing]!r} in config.json. Delete {CONFIG} and {WEIGHTS}, or give a folder with one of them."
            )
    return next(iter(records.values()), None)


def record_in(path: Path) -> dict | None:
    """Return the arguments of :func:`apply_attention` that one file records, or None."""
    if not path.is_file():
        return None
    content = read_json(path)
    record = content if path.name == CONFIG else content.get("lowrank_attention")
    if record is None:
        return None
    unknown = record.keys() - AXES.keys() - {"sites", "layers", "modules", "mixing_queries"}
    try:
        refuse_unknown_options(record, unknown)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    known = {name: value for name, value in record.items() if name not in {"modules", *unknown}}
    return {"mixing_queries": "rotated"} | known  # 0.2.0 recorded none
