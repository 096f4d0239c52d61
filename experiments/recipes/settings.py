"""Settings of recipes from variables of the environment, checked before anything runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_lowrank.messages import UserError

LARGEST_SEED = 2**31 - 1
# Flags that recipes set, and the variables for them.
FLAGS_OF_RECIPES = {"--seed": "SEED", "--save-dir": "LOWRANK_WORK", "--user-dir": "another clone of the repository"}
# Flags that remove an output of the training that a recipe needs.
CONFLICTING_FLAGS = {
    "--no-save": "the checkpoint to score",
    "--no-last-checkpoints": "the checkpoint from which a training resumes",
    "--checkpoint-suffix": "the usual name of the checkpoint to score",
    "--disable-validation": "the checkpoint with the best validation score",
    "--log-format": "the log in fairseq's format 'json'",
}
# Flags that would make another score than the line says, or none, in the variables that may have them.
OTHER_SCORES = {"--path": "scores another checkpoint", "--gen-subset": "scores another split than the line says"}
FLAGS_OF_SCORES = {
    "GENERATE": OTHER_SCORES
    | {
        "--quiet": "leaves out the hypotheses to score",
        "--results-path": "writes the hypotheses to another file than the one that is scored",
        "--score-reference": "scores the references",
    },
    "EVALUATE": OTHER_SCORES,
}

# The variables that switch patches of fairseq on and off by their names.
PATCHES = ("LOWRANK_ENABLE", "LOWRANK_DISABLE")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The variables that the head of `examples/common.sh` explains.

    Raises (by :meth:`read`):
        UserError: a variable has a value that is not accepted; the message names variable, value and accepted values.
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
    jobs: int = 1
    seeds: tuple[int, ...] = ()
    sequences: int = 16
    extra: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ("--workers", "1")
    generate: tuple[str, ...] = ("--beam", "5")
    evaluate: tuple[str, ...] = ()
    metric: str = "perplexity"
    linear: str = "auto"
    gpus: int = 1
    results: Path | None = None
    output: Path | None = None
    bert: Path | None = None
    patches: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from variables; an empty variable counts as not set."""
        if not environ.get("LOWRANK_WORK"):
            raise UserError("LOWRANK_WORK is not set. Set it to a folder for corpora, checkpoints and logs.")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_once = environ.get("JOBS", "") not in ("", "1")
        own = environ.get("OMP_NUM_THREADS", "")
        default_threads = 1 if at_once else int(own) if own.isdecimal() and int(own) else cores
        threads = whole_number(environ, "THREADS", default_threads)
        as_many = {"JOBS": ""} if environ.get("JOBS") == "cores" else environ
        seed = whole_number(environ, "SEED", 1, least=0, most=LARGEST_SEED)
        seeds = [
            whole_number({"SEEDS": one}, "SEEDS", 1, least=0, most=LARGEST_SEED) for one in words(environ, "SEEDS")
        ]
        given = {"results": environ.get("RESULTS"), "output": environ.get("OUTPUT"), "bert": environ.get("BERT")}
        lists = {
            name: words(environ, name.upper()) for name in ("extra", "precision", "prepare", "generate", "evaluate")
        }
        settings = cls(
            work=Path(environ["LOWRANK_WORK"]).absolute(),
            rows=words(environ, "ROWS"),
            seed=seed,
            seeds=tuple(dict.fromkeys(seeds)),
            **{name: switch(environ, name.upper()) for name in ("smoke", "dry_run", "alone", "valid", "rerun")},
            threads=threads,
            jobs=whole_number(as_many, "JOBS", max(1, cores // threads) if as_many is not environ else 1),
            sequences=whole_number(environ, "SEQUENCES", 16),
            gpus=whole_number(environ, "COST_GPUS", 1),
            linear=choice(environ, "LINEAR", ("auto", "torch", "onednn")),
            metric=choice(environ, "METRIC", ("perplexity", "loss")),
            **{name: value for name, value in lists.items() if value},
            **{name: Path(value) for name, value in given.items() if value},
            patches={name: ",".join(names) for name in PATCHES if (names := patch_names(environ, name))},
        )
        if settings.results and settings.results.is_dir():
            raise UserError(f"RESULTS={settings.results}: is a folder. Give the name of a file.")
        if settings.alone and settings.jobs > 1:
            raise UserError(
                f"ALONE=1: JOBS={environ['JOBS']} trains rows at the same time. Set JOBS=1, or leave ALONE out."
            )
        for name, given_words in (("GENERATE", settings.generate), ("EVALUATE", settings.evaluate)):
            for flag in meant(given_words, FLAGS_OF_SCORES[name]):
                raise UserError(f"{name}={environ[name]}: {flag} {FLAGS_OF_SCORES[name][flag]}. Remove the flag.")
        for flag in meant(settings.extra, FLAGS_OF_RECIPES):
            raise UserError(f"EXTRA={environ['EXTRA']}: the recipe sets {flag}. Use {FLAGS_OF_RECIPES[flag]}.")
        for flag in meant(settings.extra, CONFLICTING_FLAGS):
            raise UserError(
                f"EXTRA={environ['EXTRA']}: {flag} removes {CONFLICTING_FLAGS[flag]}, which the recipe needs. Remove the flag."
            )
        return settings


def meant(given: Iterable[str], flags: Iterable[str]) -> list[str]:
    """Return those of the flags that words give, whole or shortened as argparse allows."""
    names = [word.partition("=")[0] for word in given]
    return [flag for flag in flags for name in names if len(name) > len("--") and flag.startswith(name)]


def switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{name}={value}: expected 1, or 0 for off")
    return value == "1"


def choice(environ: Mapping[str, str], name: str, choices: Iterable[str]) -> str:
    """Return one of the choices; the first if the variable is not set."""
    first, *others = choices
    value = environ.get(name) or first
    if value not in (first, *others):
        raise UserError(f"{name}={value}: expected {' or '.join((first, *others))}")
    return value


def whole_number(
    environ: Mapping[str, str], name: str, default: int, *, least: int = 1, most: int | None = None
) -> int:
    value = environ.get(name, "")
    if not value:
        return default
    if not (value.isascii() and value.isdigit()) or int(value) < least or (most is not None and int(value) > most):
        span = f"from {least}" + (f" to {most}" if most is not None else "")
        raise UserError(f"{name}={value}: expected a whole number {span}")
    return int(value)


def patch_names(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the names of patches in a variable, in alphabetical order."""
    return sorted({word.strip() for word in environ.get(name, "").split(",")} - {""})


def words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the words of a variable, with quotes as in a shell."""
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise UserError(f"{name}={environ[name]}: {str(error).lower()}. Write it as in a shell.") from error
