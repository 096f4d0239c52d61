"""The fields of a line of results, with their types. A line is a dict, because it may have more fields than these."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fairseq_lowrank.messages import UserError

# The default of a field that a line need not have.
ABSENT: Any = None


@dataclass
class Point:
    """A point of a learning curve, with losses in bits."""

    updates: float
    train_loss: float | None
    valid_loss: float | None


@dataclass
class Origin:
    """The code and the machine that started a training."""

    commit: str | None
    machine: dict | str
    versions: dict
    code: str = ABSENT


@dataclass
class Loss:
    """The loss of a split in bits per token, with each sentence's part of it or the number of sentences."""

    bits: float
    sentence_values: list[float] = ABSENT
    sentences: int = ABSENT


@dataclass
class Line:
    """A score of a row under a seed. The first four fields are the least that a line needs to be compared."""

    row: str
    seed: int
    metric: str
    value: float
    # what every training has
    paper: str = ABSENT
    table: str | int = ABSENT
    architecture: str = ABSENT
    flags: str | list = ABSENT
    updates: float = ABSENT
    parameters: float = ABSENT
    split: str = ABSENT
    tokens_per_second: float | None = ABSENT
    versions: dict = ABSENT
    smoke: bool = ABSENT
    date: str = ABSENT
    # what trainings of recipes have; older lines have fewer of these
    commit: str | None = ABSENT
    code: str = ABSENT
    machine: dict | str = ABSENT
    earlier_starts: list[Origin] = ABSENT
    patches: dict = ABSENT
    alone: bool = ABSENT
    position: int = ABSENT
    log: str = ABSENT
    curve: list[Point] = ABSENT
    attention_parameters: float | None = ABSENT
    task: str = ABSENT
    corpus: str = ABSENT
    data: str = ABSENT
    pretraining: dict = ABSENT
    # further scores, and values for tests over sentences
    tokens: float | None = ABSENT
    tokenised_bleu: float | None = ABSENT
    valid_tokenised_bleu: float | None = ABSENT
    valid_perplexity: float | None = ABSENT
    valid_loss: float | None = ABSENT
    next_sentence_accuracy: float | None = ABSENT
    scoring: str = ABSENT
    scores: dict[str, float] = ABSENT
    measures: dict = ABSENT
    losses: dict[str, Loss] = ABSENT
    sentences: int = ABSENT
    sentence_values: list[float] = ABSENT
    sentence_counts: list[list[int]] = ABSENT


# The fields of a measurement without a training, which has no architecture, and of a training. Old trainings have no commit.
MEASUREMENT = ("paper", "table", "smoke", "commit")
TRAINING = (
    *("paper", "table", "architecture", "flags", "updates", "parameters", "split", "tokens_per_second", "versions"),
    *("smoke", "date"),
)


NAMES = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}
NAMES |= {bool: "true or false", NoneType: "null"}


@functools.cache
def fields(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return get_type_hints(kind)


@functools.cache
def required(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's fields without a default."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING)


def check(value: object, kind: Any, name: str = "") -> None:
    """Raise UserError unless `value`, read from JSON, is of a type or has the fields of a class; further fields are allowed."""
    record, outer, inner = dataclasses.is_dataclass(kind), get_origin(kind) or kind, get_args(kind)
    kinds = inner if outer in (Union, UnionType) else (dict if record else outer,)
    if not any(_is(value, one) for one in kinds):
        expected = " or ".join(NAMES[one] for one in kinds if one is not NoneType)
        raise UserError(f"{name} is {json.dumps(value)[:40]}, expected {expected}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} is {value}, expected a finite number")
    if isinstance(value, list) and inner and outer is list:
        for place, one in enumerate(value):
            check(one, inner[0], f"{name}[{place}]")
    elif isinstance(value, dict) and inner and outer is dict:
        for key, one in value.items():
            check(one, inner[1], f"{name}.{key}")
    elif isinstance(value, dict) and record:
        if missing := [field for field in required(kind) if field not in value]:
            raise UserError(f"{name}{' ' * bool(name)}has no {', '.join(missing)}. Add what is missing.")
        for field, own in fields(kind).items():
            if field in value:
                check(value[field], own, f"{name}.{field}" if name else field)


def _is(value: object, kind: type) -> bool:
    """Return True if a value is of a type; a whole number is also a number, and true is neither."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
