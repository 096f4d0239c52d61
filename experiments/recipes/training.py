"""A run's training: started once with its flags recorded, continued from where it stopped, never trained past its end."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from experiments.machine import machine
from experiments.recipes.recipe import Run, differences, effective_flags, tokens_of_update
from experiments.recipes.settings import Settings
from fairseq_lowrank.files import say, whole_file
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import provenance
from fairseq_lowrank.records.locks import locked

LOCK, MANIFEST = "lock", "run.json"  # files in a run's folder

Execute = Callable[..., None]
MOST_UPDATES = 50
"""The greatest number of updates between two lines of a training's log."""


@contextmanager
def lock(folder: Path) -> Iterator[int | None]:
    """Keep other processes from a run while the block runs: the locked file, or None if another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, wait=False) as handle:
        yield handle


def is_locked(folder: Path) -> bool:
    """Return True if another process is at a run."""
    if not (folder / LOCK).exists():
        return False
    with lock(folder) as handle:
        return handle is None


def train(run: Run, settings: Settings, root: Path, execute: Execute, keep: int | None = None) -> None:
    """Train a run to its end, unless its training has ended.

    fairseq-train, if it were started again, would add an update before it looks at the end.

    Raises:
        UserError: the folder holds a training by other code, with other flags or on other data, or one that kept no best
            checkpoint.
    """
    checkpoints = run.folder / "checkpoints"
    words = ["fairseq-train", str(run.bin), "--user-dir", str(run.plugin)]
    words += ["--save-dir", str(checkpoints), "--log-interval", str(log_interval(run)), *run.flags]
    if run.base and not run.continues:
        words += ["--finetune-from-model", str(run.base.last)]
    elif run.base and not run.last.exists():
        words += ["--restore-file", str(run.base.last), "--reset-dataloader"]
    if not settings.dry_run:
        check_code(run, root, rerun=settings.rerun)
        check_data(run)
        if has_ended(run):
            if not run.best.exists():
                raise UserError(
                    f"{run}: trained, but {checkpoints} has no {run.best.name} to score. Move {run.folder} away."
                )
            say(f"{run}: trained already, see {run.folder}")
            return
        record_start(run, settings, root)
    patches = {} if settings.dry_run or linear_of(run, settings) == "torch" else {"patches": "onednn-linear"}
    execute(words, run.log, keep, **patches)
    if not settings.dry_run:
        write_manifest(run.folder, read_manifest(run.folder) | {"ended": True})


def linear_of(run: Run, settings: Settings) -> str:
    """Return what computes the linear layers of a training, "torch" or "onednn". A training that resumes keeps its own."""
    if (manifest := read_manifest(run.folder)) and run.last.exists():
        return manifest.get("linear", "torch")
    return faster_linear(settings.threads) if settings.linear == "auto" else settings.linear


@functools.cache
def faster_linear(threads: int) -> str:
    """Return "onednn" if a measurement of 0.1 s says that it is faster than torch on this processor. GPUs keep torch's own."""
    import torch

    from fairseq_lowrank.linear import is_faster

    if torch.cuda.is_available():
        return "torch"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return "onednn" if is_faster() else "torch"
    finally:
        torch.set_num_threads(before)


def log_interval(run: Run) -> int:
    """Return the number of updates between two lines of the log: at least ten lines in an epoch, and in a short training.

    Without data, as in a dry run, it is :data:`MOST_UPDATES`. A token of the data has two or four bytes.
    """
    tokens = max((file.stat().st_size // 4 for file in run.bin.rglob("train*.bin")), default=0)
    updates = tokens // tokens_of_update(run.flags) if tokens else 10 * MOST_UPDATES
    longest = effective_flags(run.flags).get("--max-update", "")
    if longest.isdigit() and int(longest):
        updates = min(updates, int(longest))
    return max(1, min(MOST_UPDATES, updates // 10))


def code_of(run: Run, root: Path) -> str:
    """Return the identity of the code that trains a run: that of the package, and of the recipe's plugin."""
    return provenance.code(root / "fairseq_lowrank", run.plugin)


def starts_of(run: Run) -> list[dict]:
    """Return the starts of a training that its next one continues: none if they have left no checkpoint."""
    manifest = read_manifest(run.folder)
    return manifest["starts"] if manifest and run.last.exists() else []


def is_of_this_code(run: Run, root: Path) -> bool:
    """Return True if the training of a run was started by the code that runs now, or has no checkpoint.

    Trainings from before code was noted are of the code of their commit.
    """
    if not (starts := starts_of(run)):
        return True
    start = starts[-1]
    if "code" not in start:
        return start["commit"] == provenance.commit(root)
    return start["code"] == code_of(run, root)


def check_code(run: Run, root: Path, *, rerun: bool = False) -> None:
    """Refuse a run whose training was started by other code, or with `rerun` put that training aside.

    Raises:
        UserError: other code started the training.
    """
    if is_of_this_code(run, root):
        return
    if not rerun:
        theirs = starts_of(run)[-1]["commit"]
        raise UserError(
            f"{run.folder}: trained by the code of commit {theirs}, and the code here is that of commit "
            f"{provenance.commit(root)}. Check out the first one, or train again with RERUN=1, which keeps the old training "
            "in the folder 'earlier' there."
        )
    put_aside(run.folder)


def put_aside(folder: Path) -> None:
    """Move a training to the first free number in the folder `earlier` of its folder."""
    earlier = folder / "earlier"
    place = next(place for number in count(1) if not (place := earlier / str(number)).exists())
    place.mkdir(parents=True)
    # The manifest goes last: after an interruption the rest is still refused.
    files = sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST)
    for path in files:
        if path.name not in (LOCK, earlier.name):
            path.rename(place / path.name)
    say(f"{folder}: the training by other code is in {place} now")


def data_hash(run: Run, *patterns: str) -> str:
    """Return the SHA-256 of the files of a run's binarised corpus that match patterns.

    By default these are its dictionaries, and the indexes with the lengths of its sentences: they tell one text from another.
    """
    digest = hashlib.sha256()
    for pattern in patterns or ("dict*.txt", "*.idx"):
        for file in sorted(run.bin.rglob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def data_of_training(run: Run) -> dict[str, str]:
    """Return the hashes of what a training reads of its corpus. A test set that changes leaves the training as it is."""
    return {
        "dictionaries": data_hash(run, "dict*.txt"),
        "sentences": data_hash(run, "train*.idx", "valid*.idx"),
    }


def check_data(run: Run) -> None:
    """Refuse a run whose corpus was prepared again from another text since its training began.

    Raises:
        UserError: the dictionaries or the sentences are not those of the training. What it did not note is not compared.
    """
    manifest = read_manifest(run.folder) or {}
    for name, ours in data_of_training(run).items() if run.last.exists() else ():
        if manifest.get(name, ours) != ours:
            raise UserError(
                f"{run.folder} was trained with other {name} than {run.data} has now. Move that folder away to train from scratch."
            )


def has_ended(run: Run) -> bool:
    """Return True if a training came to its end, by its manifest or by the updates and epochs of its last checkpoint."""
    if not run.last.exists():
        return False
    if (read_manifest(run.folder) or {}).get("ended"):
        return True
    ends = {name: effective_flags(run.flags).get(f"--max-{name}", "") for name in ("update", "epoch")}
    if not any(value.isdigit() for value in ends.values()):
        return False
    return reached(run.last, **{name: int(value) for name, value in ends.items() if value.isdigit()})


def reached(checkpoint: Path, *, update: int = 0, epoch: int = 0) -> bool:
    """Return True if a checkpoint has that many updates, or finished that many epochs; 0: no such end."""
    from fairseq_lowrank.tools.fairseq.checkpoints import load_state

    try:
        state = load_state(checkpoint)
    except ValueError:  # damaged: fairseq-train says so, and what to do
        return False
    updates = state["optimizer_history"][-1]["num_updates"]
    # after an epoch's end the next one's number is saved, with no iterations
    next_epoch = state["extra_state"]["train_iterator"]["epoch"]
    return bool(update and updates >= update) or bool(epoch and next_epoch > epoch)


def record_start(run: Run, settings: Settings, root: Path) -> None:
    """Note the flags, the code and the machine of a training before it starts or continues."""
    manifest, linear = read_manifest(run.folder), linear_of(run, settings)
    if manifest is None:
        if run.last.exists():
            raise UserError(f"{run.last} is of a training whose flags are not known: move {run.folder} away")
        manifest = {"corpus": run.corpus, "flags": list(run.flags)}
        manifest |= {"patches": dict(run.patches), "results": run.apart}
        for folder in run.stale_dirs:
            say(f"{run}: {folder} holds this row with other flags: {difference(run, folder)}")
    elif wrong := difference(run, run.folder):
        raise UserError(
            f"{run.folder} has a training with other flags: {wrong}. Use its flags, or move that folder away."
        )
    if not run.last.exists():  # an earlier start has no part in this training
        manifest |= data_of_training(run) | {"starts": []}
    manifest["linear"] = linear
    manifest["starts"].append(
        {
            **provenance.origin(root / "fairseq_lowrank", run.plugin),
            "machine": machine(settings.threads),
            "alone": settings.alone,
        }
    )
    write_manifest(run.folder, manifest)


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the manifest of a run's folder."""
    with whole_file(folder / MANIFEST) as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)


def read_manifest(folder: Path) -> dict | None:
    """Return what :func:`write_manifest` wrote in a run's folder, or None."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if (
            isinstance(manifest["flags"], list)
            and isinstance(manifest["starts"], list)
            and isinstance(manifest["corpus"], str)
        ):
            return manifest
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is damaged: move {folder} away")


def difference(run: Run, folder: Path) -> str:
    """Return the differences of a run to the training in a folder, with that one's values in brackets; empty if there are none."""
    manifest = read_manifest(folder)
    if manifest is None:
        return "which ones is not known"
    found = []
    if manifest["corpus"] != run.corpus:
        found.append(f"corpus {run.corpus} ({manifest['corpus']})")
    found.append(differences(run.flags, manifest["flags"]))
    ours = {**run.patches, "RESULTS": run.apart}
    theirs = {**manifest.get("patches", {}), "RESULTS": manifest.get("results", "")}
    found += [
        f"{name}={ours.get(name, '')} ({theirs.get(name, '')})"
        for name in sorted({*ours, *theirs})
        if ours.get(name, "") != theirs.get(name, "")
    ]
    return ", ".join(filter(None, found))
