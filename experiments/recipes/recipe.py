"""Recipes: the rows of one table, and the run of each row with given settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from experiments.corpora.catalogue import parse_corpus_name
from experiments.corpora.fetch import sha256
from experiments.recipes.settings import Settings
from fairseq_lowrank.files import read_json
from fairseq_lowrank.messages import UserError

LOGGING = ("--no-progress-bar", "--log-format", "json")
# Flags of fairseq-train that do not change any number: logging, folders, saved checkpoints, and workers that read data.
FLAGS_WITHOUT_EFFECT = {
    *("--no-progress-bar", "--log-format", "--log-interval", "--log-file", "--tensorboard-logdir", "--wandb-project"),
    *("--save-dir", "--user-dir", "--num-workers", "--no-epoch-checkpoints", "--keep-interval-updates"),
    *("--keep-last-epochs", "--keep-best-checkpoints"),
}
# Other spellings of fairseq's flags that recipes read.
ALIASES = {"-a": "--arch", "-s": "--source-lang", "-t": "--target-lang", "--max-sentences": "--batch-size"}


@dataclass(frozen=True)
class Row:
    """A declared row or pre-training: its name, the name of its corpus, and its flags of fairseq-train.

    A row that is fine-tuned has a name LABEL@TASK, so a table's row LABEL has a training for each task.

    Args:
        base: the pre-training from which the row is fine-tuned, or which this pre-training continues.
        checkpoint: a published checkpoint that replaces the pre-training.
    """

    name: str
    corpus: str
    flags: tuple[str, ...]
    base: str = ""
    checkpoint: str = ""

    @property
    def label(self) -> str:
        return self.name.partition("@")[0]


RECORDS = ("paper", "table", "split", "plugin", "fit", "common", "pretraining", "row")


def _pairs(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"FIT={text}: expected a number of training pairs.")
    return int(text)


def records(text: str) -> Iterator[list[str]]:
    """Yield the records that `examples/common.sh` sends: the number of words and then the words, each ended by NUL."""
    words = iter(text.split("\0")[:-1])
    for count in words:
        yield [next(words) for _ in range(int(count))]


@dataclass
class Recipe:
    """The rows of `table` of `paper`; `common` are flags of all rows, and `split` is the name of the test set.

    `plugin` is the folder of the repository that is fairseq's user directory: ours, or one that imports ours. With `fit`, lines
    also have the losses of sentences, on this number of training pairs and on the validation and test sets.
    """

    kind: str
    root: Path
    paper: str = ""
    table: str = ""
    split: str = "test"
    plugin: str = "fairseq_lowrank"
    fit: int = 0
    common: tuple[str, ...] = ()
    rows: dict[str, Row] = field(default_factory=dict)
    bases: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, kind: str, root: Path, records: Iterable[Sequence[str]]) -> Recipe:
        """Build a recipe from records of words.

        A record is one of `paper`, `table`, `split`, `plugin` and `fit` with a value, `common FLAG…`, and `row` or,
        before the rows that need it, `pretraining` with NAME CORPUS BASE CHECKPOINT FLAG…. BASE and CHECKPOINT may be empty.

        Raises:
            UserError: a record is unknown, a row is declared twice, or has an unknown corpus or base, or `fit` is not a number.
        """
        recipe = cls(kind, root)
        for key, *values in records:
            match key, values:
                case "row" | "pretraining", [name, corpus, base, checkpoint, *flags]:
                    recipe.declare(key, Row(name, corpus, tuple(flags), base, checkpoint))
                case "common", flags:
                    recipe.common = tuple(flags)
                case "paper", [name]:
                    recipe.paper = name
                case "table", [name]:
                    recipe.table = name
                case "split", [name]:
                    recipe.split = name
                case "plugin", [folder]:
                    recipe.plugin = folder
                case "fit", [pairs]:
                    recipe.fit = _pairs(pairs)
                case _:
                    raise UserError(
                        f"{shlex.join([key, *values])}: is not a record of a recipe. Use {', '.join(RECORDS)}."
                    )
        if missing := [name for name in ("paper", "table", "rows") if not getattr(recipe, name)]:
            raise UserError(f"the recipe declares no {' and no '.join(missing)}. Add what is missing.")
        for row in recipe.rows.values():
            recipe.check_common(row)
        return recipe

    def check_common(self, row: Row) -> None:
        """Refuse a row with a flag that the common flags, which come later, would replace.

        Raises:
            UserError: with the flag and both values.
        """
        common = effective_flags(self.common)
        for name, value in effective_flags(row.flags).items():
            if common.get(name, value) != value:
                raise UserError(
                    f"row '{row.name}' has {name} {value}, and COMMON has {name} {common[name]}, which wins. "
                    f"Take {name} out of COMMON and give it in each row."
                )

    def declare(self, key: str, row: Row) -> None:
        """Add a row or a pre-training.

        Raises:
            UserError: the name is declared twice, or the corpus or the base is unknown.
        """
        rows = self.rows if key == "row" else self.bases
        if row.name in rows:
            raise UserError(f"{key} '{row.name}' is declared twice. Rename one of them.")
        try:
            parse_corpus_name(row.corpus)
        except ValueError as error:
            raise UserError(f"{key} '{row.name}': {error}") from error
        if row.base and row.base not in self.bases:
            raise UserError(f"{key} '{row.name}': no pre-training '{row.base}' is declared. Declare it first.")
        rows[row.name] = row

    def start_from(self, folder: Path, work: Path) -> None:
        """Let rows that start from a published model start from another one, in a table named for it.

        Args:
            folder: a published BERT in transformers' layout, which `python -m experiments bert import` reads.
            work: where its checkpoint will be.

        Raises:
            ValueError: the folder holds no BERT, or no row starts from a published model.
        """
        from experiments.bert.published import check_config, model_flags, present

        config = read_json(present(folder / "config.json"))
        check_config(config, folder)
        sizes = [flag for flag in model_flags(config) if not flag.startswith(("--tokens-per-sample", "--segments"))]
        name = folder.resolve().name
        published = {base.name for base in self.bases.values() if base.checkpoint}
        if not published:
            raise UserError(f"BERT={folder}: no row of this recipe starts from a published BERT. Remove BERT.")
        self.table += f"-{name}"
        for base in published:
            row = self.bases[base]
            checkpoint = str(work / name / "model.pt")
            self.bases[base] = replace(row, flags=(*row.flags, *sizes), checkpoint=checkpoint)
        for row in [row for row in self.rows.values() if row.base in published]:
            corpus, values = parse_corpus_name(row.corpus)
            form = corpus.variant_name(values | {"pieces_of": None, "bert": name})
            self.rows[row.name] = replace(row, corpus=form, flags=(*row.flags, *sizes))

    def select(self, settings: Settings) -> list[Row]:
        """Return the rows of ROWS, by names or labels; by default all rows, or the first and the last for a smoke run."""
        labels = {
            row.label: [other for other, one in self.rows.items() if one.label == row.label]
            for row in self.rows.values()
        }
        asked = [name for word in settings.rows for name in ([word] if word in self.rows else labels.get(word, [word]))]
        names = tuple(asked) or tuple(self.rows)
        if settings.smoke and not settings.rows:
            names = (names[0], names[-1])
        for name in names:
            if name not in self.rows:
                raise UserError(
                    f"ROWS={' '.join(settings.rows)}: no row '{name}' here. Choose from {' '.join(self.rows)}."
                )
        return [self.rows[name] for name in dict.fromkeys(names)]

    def run(self, row: Row, settings: Settings) -> Run:
        """Return the run of a row: corpus, flags, folders, and the run that it starts from."""
        seed = ("--seed", str(settings.seed))
        base = self.pretraining(self.bases[row.base], settings) if row.base else None
        corpus, work = row.corpus, settings.work
        if settings.smoke:
            pieces_of = base.corpus if base and not base.published else None
            corpus, work = smoke_corpus(self.kind, corpus, pieces_of), work / "smoke"
        flags = [
            *row.flags,
            *self.common,
            *training_flags(corpus),
            *settings.precision,
            *seed,
            *LOGGING,
            *settings.extra,
        ]
        if settings.smoke:
            published = base is not None and base.published is not None
            flags += smoke_fine_tuning(flags, whole=True) if published else SMOKE[self.kind](flags)
        root_dir = work / "runs" / f"{self.paper}-{self.table}"
        data, plugin = settings.work / "data" / corpus, self.root / self.plugin
        own, results = (os.path.abspath(self.results(one)) for one in (replace(settings, results=None), settings))
        apart = "" if results == own else results
        return Run(
            row.name,
            settings.seed,
            corpus,
            tuple(flags),
            data,
            root_dir,
            plugin,
            base,
            patches=settings.patches,
            apart=apart,
            smoke=settings.smoke,
        )

    def pretraining(self, row: Row, settings: Settings) -> Run:
        """Return the run of a pre-training, which all tables of the paper share; its seed is always 1."""
        flags = [*row.flags, *settings.precision, "--seed", "1", *LOGGING]
        corpus, work, published = row.corpus, settings.work, Path(row.checkpoint) if row.checkpoint else None
        if settings.smoke and not settings.bert:
            corpus, work, published = smoke_corpus("language-model", corpus), work / "smoke", None
            flags += smoke_masked_language_model(flags)
            if any(other.base == row.name for other in self.bases.values()):
                flags += ["--tokens-per-sample", "32", "--max-update", "5"]
        root_dir = work / "runs" / f"{self.paper}-pretraining"
        data, plugin = settings.work / "data" / corpus, self.root / self.plugin
        base = self.pretraining(self.bases[row.base], settings) if row.base else None
        return Run(
            row.name,
            1,
            corpus,
            tuple(flags),
            data,
            root_dir,
            plugin,
            base,
            published=published,
            patches=settings.patches,
            continues=base is not None,
        )

    def results(self, settings: Settings) -> Path:
        """Return the file to which lines are appended."""
        trial = settings.work / "smoke" if settings.smoke else self.root
        return settings.results or trial / "results" / f"{self.paper}.jsonl"


@dataclass(frozen=True)
class Run:
    """A training. The name of its folder has a fingerprint of the flags that affect numbers, so other flags have another folder.

    Args:
        base: the run that this one starts from.
        published: a published checkpoint that replaces this run.
        patches: the variables that switch patches of fairseq on and off, and their values.
        continues: True if the run also continues the optimizer and the count of updates of `base`.
        apart: the results file, if it is not the recipe's own: a row is trained for each file.
        smoke: True for a trial, whose line does not count as a result.
    """

    row: str
    seed: int
    corpus: str
    flags: tuple[str, ...]
    data: Path
    root_dir: Path
    plugin: Path
    base: Run | None = None
    published: Path | None = None
    patches: Mapping[str, str] = field(default_factory=dict)
    continues: bool = False
    apart: str = ""
    smoke: bool = False

    @cached_property
    def fingerprint(self) -> str:
        what = [self.corpus, sorted(effective_flags(self.flags).items())]
        if self.base and self.base.published:  # the file may not exist in a dry run
            what.append(checksum(self.base.published) if self.base.published.is_file() else self.base.published.name)
        elif self.base:
            what.append(self.base.fingerprint)
        what += [more for more in (self.patches, self.apart) if more]
        what = json.dumps(what)
        return hashlib.sha256(what.encode()).hexdigest()[:8]

    @property
    def folder(self) -> Path:
        return self.root_dir / f"{self.row}-seed{self.seed}-{self.fingerprint}"

    @property
    def bin(self) -> Path:
        """Return the folder of binarised data; if the corpus is a path, this path."""
        return self.data if self.corpus.startswith("/") else self.data / "bin"

    @property
    def corpus_name(self) -> str:
        """Return the name of the corpus in lines of results."""
        return Path(self.corpus).name

    @property
    def stale_dirs(self) -> list[Path]:
        """Return folders of the same row and seed with other flags, or of a version without fingerprints."""
        names = re.compile(rf"{re.escape(self.row)}-seed{self.seed}(-[0-9a-f]{{8}})?")
        folders = self.root_dir.iterdir() if self.root_dir.is_dir() else ()
        return sorted(path for path in folders if names.fullmatch(path.name) and path != self.folder)

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / "checkpoint_best.pt"

    @property
    def last(self) -> Path:
        if self.published:
            return self.published
        return self.folder / "checkpoints" / "checkpoint_last.pt"

    def __str__(self) -> str:
        return f"{self.row} (seed {self.seed})"


def tokens_of_update(flags: Sequence[str]) -> int:
    """Return the number of tokens of an update on one GPU at most, or of padded sentences about."""
    found = effective_flags(flags)

    def number(name: str, default: int) -> int:
        value = found.get(name, "").split(",")[0]  # --update-freq has one for each epoch
        return int(value) if value.isdigit() else default  # fairseq-train refuses others

    step = number("--max-tokens", number("--batch-size", 32) * number("--tokens-per-sample", 128))
    return max(1, step * number("--update-freq", 1))


def parse_flags(flags: Sequence[str]) -> dict[str, str]:
    """Return the flags, each with its values in one string; the last of a repeated flag."""
    found: dict[str, str] = {}
    name = ""
    for word in flags:
        if re.match("--?[a-zA-Z]", word):
            name, equals, value = word.partition("=")
            name = ALIASES.get(name, name)
            found[name] = value if equals else ""
        else:
            found[name] = f"{found.get(name, '')} {shlex.quote(word)}".strip()
    return found


def effective_flags(flags: Sequence[str]) -> dict[str, str]:
    """Return the flags that affect numbers, each with its values in one string; the last of a repeated flag."""
    return {name: value for name, value in parse_flags(flags).items() if name not in FLAGS_WITHOUT_EFFECT}


def differences(flags: Sequence[str], others: Sequence[str]) -> str:
    """Return the flags that affect numbers and differ between two trainings, with the second's values in brackets."""
    ours, theirs = effective_flags(flags), effective_flags(others)

    def spell(values: dict[str, str], name: str) -> str:
        return f"{name} {values[name]}".strip() if name in values else f"no {name}"

    return ", ".join(
        f"{spell(ours, name)} ({spell(theirs, name).removeprefix(name).strip() or 'given'})"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    )


# --- the changes of a smoke run: the corpus (Multi30k, a part of Brown), sizes and lengths ---


def smoke_translation(flags: Sequence[str]) -> list[str]:
    width = 8 * int(last_value(flags, "--encoder-attention-heads", "4"))
    sizes = {"layers": 1, "embed-dim": width, "ffn-embed-dim": 64}
    stacks = [f"--{stack}-{size} {value}" for size, value in sizes.items() for stack in ("encoder", "decoder")]
    return f"{' '.join(stacks)} --max-tokens 1024 --update-freq 1 --max-update 20 --warmup-updates 5".split()


def smoke_language_model(flags: Sequence[str]) -> list[str]:
    # with a free head size, heads need not divide the width
    width = 64 if "--head-dim" in flags else 8 * int(last_value(flags, "--decoder-attention-heads", "8"))
    small = [*["--decoder-layers", "1"]]
    small += [word for size in ("embed", "input", "output") for word in (f"--decoder-{size}-dim", str(width))]
    small += ["--decoder-ffn-embed-dim", "64", "--tokens-per-sample", "32", "--max-tokens", "512"]
    small += ["--update-freq", "1", "--max-update", "10", "--warmup-updates", "2"]
    if {"adaptive_loss", "--adaptive-input"} & set(flags):
        small += ["--adaptive-input-cutoff", "200,1000", "--adaptive-softmax-cutoff", "200,1000"]
    return small + (["--embed-rank", "4"] if "--embed-rank" in flags else [])


def smoke_encoder(flags: Sequence[str]) -> list[str]:
    # with a free head size, heads need not divide the width
    width = 32 if "--head-dim" in flags else 4 * int(last_value(flags, "--encoder-attention-heads", "24"))
    small = ["--encoder-layers", "1", "--encoder-embed-dim", str(width), "--encoder-ffn-embed-dim", "64"]
    small += ["--max-positions", "128", *smoke_updates(flags)]
    return small + (["--head-dim", "8"] if "--head-dim" in flags else [])


def smoke_updates(flags: Sequence[str]) -> list[str]:
    few = ["--update-freq", "1", "--max-update", "10", "--warmup-updates", "2"]
    return few + (["--total-num-update", "10"] if "--total-num-update" in flags else [])


def smoke_masked_language_model(flags: Sequence[str]) -> list[str]:
    return [*smoke_encoder(flags), "--tokens-per-sample", "64", "--max-tokens", "1024"]


def smoke_fine_tuning(flags: Sequence[str], *, whole: bool = False) -> list[str]:
    """Return a small and short form of the flags. With `whole` the model keeps the sizes of its published checkpoint."""
    small = [*(smoke_updates(flags) if whole else smoke_encoder(flags)), "--batch-size", "8"]
    return small + (["--window", "128"] if "question_answering" in flags else [])


SMOKE = {
    "translation": smoke_translation,
    "language-model": smoke_language_model,
    "masked-language-model": smoke_masked_language_model,
    "fine-tuning": smoke_fine_tuning,
}
SMOKE_CORPUS = {
    "translation": "multi30k",
    "language-model": "brown",
    "masked-language-model": "brown",
    "fine-tuning": "rte",
}


def smoke_corpus(kind: str, name: str, pieces_of: str | None = None) -> str:
    """Return the small variant of a corpus, or of a small corpus in its place, with the same joining and subwords.

    A corpus for fine-tuning has the subwords of `pieces_of`, the small corpus of the pre-training.
    """
    corpus, values = parse_corpus_name(name)
    if corpus.smoke_values is None:
        other = corpus.smoke_corpus(values) if corpus.smoke_corpus else SMOKE_CORPUS[kind]
        corpus, fixed = parse_corpus_name(other)
        values |= {name: value for name, value in fixed.items() if value}
    if pieces := values.get("pieces"):
        values["pieces"] = min(pieces, 2000)
    if pieces_of:
        values |= {"pieces_of": pieces_of, "bert": None}
    return corpus.variant_name(values | corpus.smoke_values)


@cache
def checksum(path: Path) -> str:
    """Return the SHA-256 of a published checkpoint, which does not change during a recipe."""
    return sha256(path)


def training_flags(name: str) -> Sequence[str]:
    """Return the flags of fairseq-train that a corpus's task needs."""
    corpus, values = parse_corpus_name(name)
    return corpus.training(values) if corpus.training else ()


def last_value(flags: Sequence[str], name: str, default: str) -> str:
    """Return the value of a flag; the last one if it is repeated."""
    return parse_flags(flags).get(name, default)
