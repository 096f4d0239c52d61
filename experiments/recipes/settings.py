"""What recipes are asked from outside, in variables of the environment; checked before anything is done."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGEST_SEED = 2**31 - 1
# Flags that recipes set, and what sets them from outside.
OURS = {"--seed": "SEED", "--save-dir": "LOWRANK_WORK", "--user-dir": "another clone of the repository"}
# Flags that take away what a recipe needs once a training has ended, and what that is.
NEEDED = {
    "--no-save": "the checkpoint that is scored",
    "--disable-validation": "the checkpoint that does best on validation",
    "--log-format": "the log in fairseq's form 'json', that the line is made from",
}

# The variables that switch patches of fairseq on and off by their names.
PATCHES = ("LOWRANK_ENABLE", "LOWRANK_DISABLE")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The variables that the head of `examples/common.sh` explains.

    Raises (by :meth:`read`):
        ValueError: a variable has a value that means nothing; the message names both, and what would be accepted.
    """

    work: Path
    rows: tuple[str, ...] = ()
    seed: int = 1
    smoke: bool = False
    dry_run: bool = False
    alone: bool = False
    rerun: bool = False
    valid: bool = False
    threads: int = 1
    sequences: int = 16
    extra: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ("--workers", "1")
    generate: tuple[str, ...] = ("--beam", "5")
    evaluate: tuple[str, ...] = ()
    metric: str = "perplexity"
    results: Path | None = None
    output: Path | None = None
    bert: Path | None = None
    patches: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """The settings in variables; one that is empty counts as not set."""
        if not environ.get("LOWRANK_WORK"):
            raise ValueError("LOWRANK_WORK is not set: expected the folder for corpora, checkpoints and logs")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = environ.get("OMP_NUM_THREADS", "")
        given = {"results": environ.get("RESULTS"), "output": environ.get("OUTPUT"), "bert": environ.get("BERT")}
        lists = {
            name: words(environ, name.upper()) for name in ("extra", "precision", "prepare", "generate", "evaluate")
        }
        settings = cls(
            work=Path(environ["LOWRANK_WORK"]).absolute(),
            rows=words(environ, "ROWS"),
            seed=whole_number(environ, "SEED", 1, least=0, most=LARGEST_SEED),
            **{name: switch(environ, name.upper()) for name in ("smoke", "dry_run", "alone", "valid", "rerun")},
            threads=whole_number(environ, "THREADS", int(threads) if threads.isdigit() else cores),
            sequences=whole_number(environ, "SEQUENCES", 16),
            metric=choice(environ, "METRIC", ("perplexity", "loss")),
            **{name: value for name, value in lists.items() if value},
            **{name: Path(value) for name, value in given.items() if value},
            patches={name: ",".join(names) for name in PATCHES if (names := patch_names(environ, name))},
        )
        if settings.results and settings.results.is_dir():
            raise ValueError(f"RESULTS={settings.results}: expected a file, this is a folder")
        for flag in (word.partition("=")[0] for word in settings.extra):
            if flag in OURS:
                raise ValueError(f"EXTRA={environ['EXTRA']}: {flag} is the recipe's own; use {OURS[flag]}")
            if flag in NEEDED:
                raise ValueError(f"EXTRA={environ['EXTRA']}: {flag} takes away {NEEDED[flag]}: leave it out")
        return settings


def switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value}: expected 1, or 0 for off")
    return value == "1"


def choice(environ: Mapping[str, str], name: str, choices: Iterable[str]) -> str:
    """One of the choices; the first where none is given."""
    first, *others = choices
    value = environ.get(name) or first
    if value not in (first, *others):
        raise ValueError(f"{name}={value}: expected {' or '.join((first, *others))}")
    return value


def whole_number(
    environ: Mapping[str, str], name: str, default: int, *, least: int = 1, most: int | None = None
) -> int:
    value = environ.get(name, "")
    if not value:
        return default
    if not (value.isascii() and value.isdigit()) or int(value) < least or (most is not None and int(value) > most):
        span = f"from {least}" + (f" to {most}" if most is not None else "")
        raise ValueError(f"{name}={value}: expected a whole number {span}")
    return int(value)


def patch_names(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the names of patches in a variable, in alphabetical order."""
    return sorted({word.strip() for word in environ.get(name, "").split(",")} - {""})


def words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The words of a variable, quoted as in a shell."""
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise ValueError(f"{name}={environ[name]}: {str(error).lower()}") from error
