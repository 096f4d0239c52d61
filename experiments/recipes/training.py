"""A run's training: started once with its flags noted, gone on with where it stopped, never trained past its end."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.recipes import provenance
from experiments.recipes.recipe import Run, differences, last_values
from experiments.recipes.settings import Settings
from fairseq_lowrank.files import read_lines, say, whole_file

Execute = Callable[..., None]


@contextmanager
def lock(folder: Path) -> Iterator[int | None]:
    """Keep other processes from a run while the block runs: the locked file, or None if another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another process is at a run."""
    if not (folder / "lock").exists():
        return False
    with lock(folder) as handle:
        return handle is None


def train(run: Run, settings: Settings, root: Path, execute: Execute, keep: int | None = None) -> None:
    """Train a run to its end, unless it is there: fairseq-train started again would add an update before it looks.

    Raises:
        ValueError: the folder holds a training with other flags or on other data, or one that kept no best checkpoint.
    """
    checkpoints = run.folder / "checkpoints"
    words = ["fairseq-train", str(run.data / "bin"), "--user-dir", str(run.plugin)]
    words += ["--save-dir", str(checkpoints), *run.flags]
    if run.base:
        words += ["--finetune-from-model", str(run.base.last)]
    if not settings.dry_run:
        check_data(run)
        if has_ended(run):
            if not run.best.exists():
                raise ValueError(f"{run}: trained, but {checkpoints} lacks {run.best.name}, which is scored")
            say(f"{run}: trained already, see {run.folder}")
            return
        note_start(run, settings, root)
    execute(words, run.log, keep)


def dictionaries(run: Run) -> str:
    """The SHA-256 of the dictionaries of what a run is trained on: their counts tell one text from another."""
    digest = hashlib.sha256()
    for file in sorted((run.data / "bin").rglob("dict*.txt")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_data(run: Run) -> None:
    """Refuse a run whose corpus was prepared anew from another text since its training began.

    Raises:
        ValueError: the dictionaries are not those of the training. One of before they were noted is not refused.
    """
    note = read_note(run.folder) or {}
    if note.get("dictionaries", ours := dictionaries(run)) != ours:
        raise ValueError(
            f"{run.folder} holds a training on another text than {run.data} has now, with other dictionaries: move that "
            "folder away to train anew"
        )


def has_ended(run: Run) -> bool:
    """Whether a run's training came to its end, by its log or by the updates and epochs of its last checkpoint."""
    if not run.last.exists():
        return False
    if run.log.exists():
        said = [
            line for line in read_lines(run.log) if line.startswith("+ fairseq-train") or "done training in" in line
        ]
        if said and not said[-1].startswith("+"):
            return True
    ends = {name: last_values(run.flags).get(f"--max-{name}", "") for name in ("update", "epoch")}
    if not any(value.isdigit() for value in ends.values()):
        return False
    return reached(run.last, **{name: int(value) for name, value in ends.items() if value.isdigit()})


def reached(checkpoint: Path, *, update: int = 0, epoch: int = 0) -> bool:
    """Whether a checkpoint has that many updates, or finished that many epochs; 0: no such end."""
    from fairseq_lowrank.tools.checkpoints import load_state

    try:
        state = load_state(checkpoint)
    except ValueError:  # damaged: fairseq-train says so, and what to do
        return False
    updates = state["optimizer_history"][-1]["num_updates"]
    # after an epoch's end the next one's number is saved, with no iterations
    next_epoch = state["extra_state"]["train_iterator"]["epoch"]
    return bool(update and updates >= update) or bool(epoch and next_epoch > epoch)


def note_start(run: Run, settings: Settings, root: Path) -> None:
    """Write down with which flags, code and machine a training starts, or goes on, before it does."""
    note = read_note(run.folder)
    if note is None:
        if run.last.exists():
            raise ValueError(f"{run.last} is of a training whose flags are not known: move {run.folder} away")
        note = {"corpus": run.corpus, "dictionaries": dictionaries(run), "flags": list(run.flags), "starts": []}
        for folder in run.others:
            say(f"{run}: {folder} holds this row with other flags: {difference(run, folder)}")
    elif wrong := difference(run, run.folder):
        raise ValueError(f"{run.folder} holds a training with other flags: {wrong}")
    note["starts"].append(
        {
            "commit": provenance.commit(root),
            "machine": provenance.machine(settings.threads),
            "versions": provenance.versions(),
            "alone": settings.alone,
            "date": datetime.date.today().isoformat(),
        }
    )
    with whole_file(run.folder / "run.json") as file:
        json.dump(note, file, indent=1, ensure_ascii=False)


def read_note(folder: Path) -> dict | None:
    """What :func:`note_start` wrote in a run's folder."""
    file = folder / "run.json"
    if not file.exists():
        return None
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(note["flags"], list) and isinstance(note["starts"], list) and isinstance(note["corpus"], str):
            return note
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{file} is damaged: move {folder} away")


def difference(run: Run, folder: Path) -> str:
    """In what a run differs from the training in a folder, that one's values in brackets; empty where in nothing."""
    note, flags = read_note(folder), None
    if note is None:
        old = folder / "trained"  # of a version that noted flags at the end
        flags = old.read_text(encoding="utf-8").split() if old.exists() else None
    corpus: Sequence[str] = ()
    if note is not None:
        flags = note["flags"]
        if note["corpus"] != run.corpus:
            corpus = [f"corpus {run.corpus} ({note['corpus']})"]
    if not flags:
        return "which ones is not known"
    return ", ".join(filter(None, [*corpus, differences(run.flags, flags)]))
