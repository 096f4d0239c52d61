"""What recipes ask for: rows run one after another, the report of a paper, spectra of rows."""

from __future__ import annotations

import datetime
import gzip
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.corpora import __main__ as corpora
from experiments.corpora.own import check_binarised
from experiments.engine import Engine, Key, refuse_dirty
from experiments.packing import read_log
from experiments.recipes import cost, sizes
from experiments.recipes.commands import Commands
from experiments.recipes.jobs import Job, run_jobs
from experiments.recipes.recipe import Recipe, Run, checksum, differences, last_value
from experiments.recipes.scoring import SMOKE_FIT, losses, parameters, score, scoring_flags
from experiments.recipes.settings import Settings
from experiments.recipes.training import (
    LOCK,
    check_data,
    data_hash,
    has_ended,
    is_locked,
    is_of_this_code,
    lock,
    read_manifest,
    starts_of,
    train,
)
from fairseq_lowrank.files import read_lines, say, whole_file
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import provenance
from fairseq_lowrank.records.logs import read_training_log
from fairseq_lowrank.records.results import append_result, check, check_writable
from fairseq_lowrank.records.schema import Origin, fields
from fairseq_lowrank.records.sentences import VALUES


class RunLocked(Exception):
    """Another process is at a row that is needed."""


class RecipeEngine(Engine[Run]):
    """Runs the rows of a recipe under its settings; `commands` are :class:`Commands`, or what stands for them."""

    def __init__(self, recipe: Recipe, settings: Settings, commands: Commands | None = None):
        super().__init__(recipe.paper, recipe.table, recipe.results(settings))
        self.recipe, self.settings, self.root = recipe, settings, recipe.root
        self.commands = commands or Commands(dry_run=settings.dry_run, threads=settings.threads)
        self.prepared: set[str] = set()
        self.shown: list[Run] = []  # pre-trainings of a dry run
        self.imported = False
        self.data: dict[Path, str] = {}  # of lines that are done

    def runs(self) -> list[Run]:
        rows = self.recipe.select(self.settings)
        return [self.recipe.run(row, settings) for settings in self.of_each_seed() for row in rows]

    def of_each_seed(self) -> list[Settings]:
        """Return the settings with each seed that is asked for."""
        return [replace(self.settings, seed=seed) for seed in self.settings.seeds or (self.settings.seed,)]

    def run_at_once(self, declared: str) -> int:
        """Run the selected rows that have no line yet, several at the same time. Return an exit status.

        Each runs in a process of its recipe with one row and one seed; what rows share is made first.

        Args:
            declared: the text that declares the recipe.
        """
        jobs = {}
        command = [
            sys.executable,
            "-m",
            "experiments.recipes",
            "--kind",
            self.recipe.kind,
            "--root",
            str(self.root),
            "rows",
        ]
        for run in self.left():
            check_writable(self.results)
            if self.make_ready(run):
                own = {"ROWS": shlex.quote(run.row), "SEED": str(run.seed), "SEEDS": "", "JOBS": "1"}
                own["THREADS"] = str(self.settings.threads)
                name = run.row if len(self.settings.seeds) < 2 else f"{run.row}, seed {run.seed}"
                jobs[name] = Job(command, os.environ | own)
        return run_jobs(jobs, self.settings.jobs, declared)

    def lock_file(self, run: Run) -> Path:
        return run.folder / LOCK

    def finished(self, complain: Callable[[str], None] = say) -> dict[Key, dict]:
        """Return the lines that this table has, by their keys; in a dry run none, so that every row is shown."""
        return {} if self.settings.dry_run else super().finished(complain)

    def say_done(self, run: Run, line: dict) -> None:
        flags = shlex.split(line["flags"]) if isinstance(line["flags"], str) else line["flags"]
        others = []
        if other := differences(run.flags, flags):
            others.append(f" with other flags: {other}")
        if (corpus := line.get("corpus", run.corpus_name)) != run.corpus_name:
            others.append(f" on {corpus}, not on {run.corpus_name}")
        elif "data" in line and run.bin.is_dir():  # in another clone it may not be prepared
            if run.bin not in self.data:
                self.data[run.bin] = data_hash(run)
            if line["data"] != self.data[run.bin]:
                others.append(f" on other sentences or dictionaries than {run.data} has now")
        wanted = list(scoring_flags(self.recipe.kind, self.settings))
        if "scoring" in line and (found := shlex.split(line["scoring"])) != wanted:
            others.append(f" scored with {shlex.join(found) or 'no flags'}, not with {shlex.join(wanted) or 'none'}")
        if self.recipe.kind == "language-model" and line["metric"] != self.settings.metric:
            others.append(f" scored by {line['metric']}, not by {self.settings.metric}")
        if "patches" in line and line["patches"] != dict(run.patches):
            others.append(f" with the patches {line['patches']}, not with {dict(run.patches)}")
        say(f"{run}: done already{','.join(others)}, see {self.results}; RESULTS=OTHER.jsonl runs it all the same")

    def run_row(self, run: Run) -> None:
        """Run a row; in a dry run, show its commands."""
        if not self.settings.dry_run:
            super().run_row(run)
        elif self.make_ready(run):
            self.train(run)

    def make_ready(self, run: Run) -> bool:
        """Prepare the data of a run and train what it starts from; return False if another process is training that.

        Raises:
            UserError: the code is in no commit.
        """
        self.refuse_dirty()
        if run.base and not self.find_published(run.base) and run.base not in self.shown:
            self.prepare(run.base)
        self.prepare(run)
        return run.base is None or self.train_only(run.base)

    def train(self, run: Run, handle: int | None = None) -> None:
        """Train and score a run, and append its line.

        Raises:
            UserError: the code, or that of an earlier start, is in no commit.
        """
        self.refuse_dirty(run)
        train(run, self.settings, self.root, self.commands, handle)
        found = score(self.recipe.kind, run, self.settings, self.commands)
        if not self.settings.dry_run:
            self.import_plugin()
            self.record(run, found)

    def refuse_dirty(self, *runs: Run) -> None:
        """Refuse code that is in no commit: that of now, and that of earlier starts of runs. Trials may have such code."""
        if not (self.settings.dry_run or self.settings.smoke):
            starts = [start for run in runs for start in starts_of(run)]
            refuse_dirty(provenance.commit(self.root), *(start["commit"] for start in starts))

    def find_published(self, run: Run) -> bool:
        """Return True if a published checkpoint stands for a pre-training; import it first if BERT names its folder.

        Raises:
            UserError: the checkpoint is not there.
        """
        if run.published and self.settings.bert and not self.imported:
            output = run.published.parent
            if not self.settings.dry_run:
                output.parent.mkdir(parents=True, exist_ok=True)
            words = ["python", "-m", "experiments", "bert", "import", str(self.settings.bert)]
            self.commands([*words, "--output", str(output), "--force"], Path(f"{output}.log"))
            self.imported = True
        if run.published and not (self.settings.dry_run or run.published.is_file()):
            raise UserError(
                f"{run.published} does not exist. Make it from a published BERT: python -m experiments bert import FOLDER --output "
                f"{run.published.parent}"
            )
        return bool(run.published)

    def train_only(self, run: Run) -> bool:
        """Train a run without a line, unless it is published or trained; return False if another process is training it."""
        if self.find_published(run):
            return True
        if self.settings.dry_run:
            if run not in self.shown:
                if run.base:
                    self.train_only(run.base)
                self.shown.append(run)
                train(run, self.settings, self.root, self.commands)
            return True
        if has_ended(run) and is_of_this_code(run, self.root):
            check_data(run)
            return True
        if run.base and not self.train_only(run.base):
            return False
        with lock(run.folder) as handle:
            if handle is None:
                say(f"{run}: another process is training it")
                return False
            train(run, self.settings, self.root, self.commands, handle)
        return True

    def import_plugin(self) -> None:
        """Bring what this recipe's models are made of into this process."""
        from fairseq_lowrank.cli import import_plugin

        import_plugin(self.root / self.recipe.plugin)

    def prepare(self, run: Run) -> None:
        """Prepare what a run is trained on.

        Raises:
            UserError: PREPARE has flags that make another form of the corpus, put it elsewhere, or, except for a trial, make
                other data under the same name.
        """
        if run.corpus.startswith("/"):
            if not self.settings.dry_run:
                check_binarised(run.bin)
        elif self.settings.dry_run or run.corpus not in self.prepared:
            words = [run.corpus, *self.settings.prepare]
            if (made := corpora.folder(words)) != corpora.folder(words[:1]):
                raise UserError(
                    f"PREPARE='{shlex.join(self.settings.prepare)}' makes {made.name}, and {run.row} is trained on {run.corpus}. "
                    "Remove arguments that make another form of a corpus, or put it elsewhere."
                )
            if (changed := corpora.changes(words)) and not self.settings.smoke:
                raise UserError(
                    f"PREPARE='{shlex.join(self.settings.prepare)}': {', '.join(changed)} changes the data but not the name "
                    f"{run.corpus}, so results could not be told apart. Remove it."
                )
            self.commands.prepare(words)
            self.prepared.add(run.corpus)

    def record(self, run: Run, found: dict) -> None:
        """Keep the logs of a run and of what it starts from, and append its line."""
        trained = read_training_log(run.log)
        curve, valid_perplexity = trained.pop("epochs"), trained.pop("valid_perplexity")
        if found["metric"] in ("perplexity", "loss"):
            found["valid_perplexity"] = valid_perplexity
        if trained["valid_loss"] is None:
            del trained["valid_loss"]
        manifest = read_manifest(run.folder)
        *earlier, last = starts = manifest["starts"]
        origin = fields(Origin)
        earlier = [{key: start[key] for key in origin if key in start} for start in earlier]
        last = {key: last[key] for key in origin if key in last}  # older starts have no hash of the code
        earlier = [start for start in earlier if start != last]
        line = {
            "paper": self.recipe.paper,
            "table": self.recipe.table,
            "row": self.recipe.rows[run.row].label,
            **({"task": run.row.partition("@")[2], "pretraining": pretraining(run.base)} if run.base else {}),
            "position": list(self.recipe.rows).index(run.row),  # among the recipe's rows, for reports
            "architecture": last_value(run.flags, "--arch", ""),
            "corpus": run.corpus_name,
            "data": data_hash(run),
            "flags": shlex.join(run.flags),
            "seed": run.seed,
            **trained,
            **parameters(run.best, run.bin),
            **self.losses_of(run),
            "split": self.recipe.split,
            "scoring": shlex.join(scoring_flags(self.recipe.kind, self.settings)),
            **found,
            **last,
            "patches": dict(run.patches),
            "linear": manifest.get("linear", "torch"),
            **({"earlier_starts": earlier} if earlier else {}),
            "alone": all(start["alone"] for start in starts),
            "smoke": self.settings.smoke,
            "date": datetime.date.today().isoformat(),
            "log": "",
            "curve": curve,
        }
        try:
            check(line)
        except ValueError as error:
            raise UserError(f"{run}: nothing is recorded: {error}") from error
        base, place = run.base, line.get("pretraining")
        while base and not base.published:
            place["log"] = self.keep_log(base)
            base, place = base.base, place.get("continued")
        line["log"] = self.keep_log(run)
        append_result(self.results, as_kept(line, self.settings))
        about = f"{line['parameters']:,} parameters" + (", smoke run" if line["smoke"] else "")
        print(f"{run.row}: {line['metric']} {line['value']} ({about}), in {self.results}", flush=True)

    def losses_of(self, run: Run) -> dict:
        """Return the field of a line for the loss of each sentence, if the recipe asks for it."""
        if not self.recipe.fit:
            return {}
        import torch

        # as the commands have, so that rows at the same time do not share cores
        before = torch.get_num_threads()
        torch.set_num_threads(self.settings.threads)
        try:
            return {"losses": losses(run, min(self.recipe.fit, SMOKE_FIT) if self.settings.smoke else self.recipe.fit)}
        finally:
            torch.set_num_threads(before)

    def keep_log(self, run: Run) -> str:
        """Pack a run's log next to the results, without this machine's paths. Return its path from the results' folder.

        A log of that name that another run left stays: this one's name then carries the run's fingerprint. The command
        ``python -m experiments pack`` moves kept logs into an archive.
        """
        folder = Path("logs") / run.root_dir.name
        places = {sys.prefix: "$VIRTUAL_ENV", str(Path(sys.prefix).resolve()): "$VIRTUAL_ENV"}
        places |= {str(self.settings.work): "$LOWRANK_WORK", str(self.root): "$ROOT"}
        text = "".join(f"{line}\n" for line in read_lines(run.log, errors="replace"))
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        data = text.encode()
        kept = folder / f"{run.row}-seed{run.seed}.log.gz"
        if (other := read_log(self.results.parent, kept.as_posix())) not in (None, data):
            kept = folder / f"{run.row}-seed{run.seed}-{run.fingerprint}.log.gz"
        elif other == data:
            return kept.as_posix()
        with whole_file(self.results.parent / kept, "wb") as file:
            file.write(gzip.compress(data, mtime=0))
        return kept.as_posix()

    def report(self, options: Sequence[str]) -> int:
        """Report the results of this paper next to the published values."""
        self.refuse_busy(self.runs())
        return self.tool("python -m experiments report", str(self.results), "--paper", self.recipe.paper, *options)

    def compare(self, options: Sequence[str]) -> int:
        """Compare rows of this table."""
        table = ["--paper", self.recipe.paper, "--table", self.recipe.table]
        return self.tool("fairseq-lowrank compare", str(self.results), *table, *options)

    def sizes(self) -> None:
        """Print how large the models of the rows asked for are."""
        self.import_plugin()
        for line in sizes.lines(self.runs()):
            print(line, flush=True)

    def cost(self) -> None:
        """Print what the rows asked for cost, roughly."""
        self.import_plugin()
        for line in cost.lines(self.runs(), self.settings.gpus):
            print(line, flush=True)

    def spectra(self, name: str, rows: Sequence[str]) -> int:
        """Compute spectra of the attention of rows on the test set, in the folder `name` next to the lines of results.

        Each seed has a folder: that of another seed than 1 is `name`-seedN. Return 0, or the exit status of a command that failed.

        With the word `--random-mixing`, they are those of `python -m experiments random-mixing`. A row that has its line but no
        checkpoint here, as in a clone of the repository, is trained for it.
        """
        command = "fairseq-lowrank inspect --spectrum"
        if "--random-mixing" in rows:
            command, rows = "python -m experiments random-mixing", [row for row in rows if row != "--random-mixing"]
        for row in rows:
            if row not in self.recipe.rows:
                raise UserError(f"no row '{row}' here. Choose from {' '.join(self.recipe.rows)}.")
        output = self.settings.output or self.results.parent
        options = ["--labels", *rows, "--subset", "test", "--sequences", str(self.settings.sequences)]
        for settings in self.of_each_seed():
            runs = [self.recipe.run(self.recipe.rows[row], settings) for row in rows]
            for run in runs if not self.settings.dry_run else ():
                if not (run.best.exists() and has_ended(run)) and self.make_ready(run):
                    self.train_only(run)
            self.refuse_busy(runs)
            folder = f"{output}/{name}" + ("" if settings.seed == 1 else f"-seed{settings.seed}")
            if code := self.tool(command, *(str(run.best) for run in runs), *options, "--output", folder):
                return code
        return 0

    def refuse_busy(self, runs: Iterable[Run]) -> None:
        """Raise RunLocked if another process is at one of these runs."""
        for run in runs if not self.settings.dry_run else ():
            if is_locked(run.folder):
                again = "call this again when that has ended"
                raise RunLocked(f"{self.recipe.paper} {self.recipe.table}: another process is at {run}; {again}")

    def tool(self, command: str, *words: str) -> int:
        """Print a command of the package or of the experiments and run it, unless this is a dry run."""
        Commands.show([*command.split(), *words])
        if self.settings.dry_run:
            return 0
        from experiments import __main__ as experiments
        from fairseq_lowrank import cli

        self.import_plugin()
        program, *rest = command.removeprefix("python -m ").split()
        return (cli.main if program == "fairseq-lowrank" else experiments.main)([*rest, *words])


def as_kept(line: dict, settings: Settings) -> dict:
    """Return a line as it is appended. The results of the repository have no values of single sentences: no page needs them."""
    if settings.results is None and not settings.smoke:
        return {name: value for name, value in line.items() if name not in VALUES}
    return line


def pretraining(run: Run) -> dict:
    """Return what a line says of the pre-training that its run starts from."""
    if run.published:
        return {"row": run.row, "published": run.published.parent.name, "sha256": checksum(run.published)}
    trained = read_training_log(run.log)
    loss = trained["epochs"][-1]["valid_loss"]
    flags = {"corpus": run.corpus, "flags": shlex.join(run.flags)}
    before = {"continued": pretraining(run.base)} if run.base else {}
    return {"row": run.row, **flags, "updates": trained["updates"], "valid_loss": loss, **before}
