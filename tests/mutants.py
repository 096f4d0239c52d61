"""Make wrong changes of the code, one at a time, and list those that the named tests do not notice.

::

    python -m tests.mutants            every change of tests/mutants.toml: hours
    python -m tests.mutants --quick    one change of each file
    python -m tests.mutants --only statistics --only "M is transposed"
    python -m tests.mutants --resume mutants.log    keeps results as they come; run it again to continue

The tree is copied to a temporary folder for each change, so your files stay as they are. The exit code is 1 if a change survives.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
LIMIT = 900
"""Seconds after which tests that run have noticed a change, such as an endless loop."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. It has others if it cannot import or find a test."""
NOTICED = "noticed"


@dataclass(frozen=True)
class Mutant:
    """A wrong change.

    Args:
        file: path of the file, from the root.
        name: what is wrong, in a few words.
        old: text that occurs once in the file.
        new: text in its place.
        tests: arguments of pytest for the tests that must notice.
    """

    file: str
    name: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def apply(self, root: Path) -> None:
        """Change the file of a tree."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


def read_mutants() -> list[Mutant]:
    """Return the wrong changes of tests/mutants.toml."""
    files = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [
        Mutant(file, name, *change[:2], tests=change[2] if len(change) > 2 else changes["tests"])
        for file, changes in files.items()
        for name, change in changes.items()
        if name != "tests"
    ]


def run_tests(tests: str, mutant: Mutant | None = None) -> int | None:
    """Return pytest's exit code in a copy of the tree, with one wrong change or none. It is None after :data:`LIMIT`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "results"))
        if mutant is not None:
            mutant.apply(copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            return subprocess.run(
                command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def read_noticed(log: Path | None) -> set[str]:
    """Return the changes that an earlier run noticed, by the lines of its log."""
    if log is None or not log.exists():
        return set()
    lines = (line.partition(": ") for line in log.read_text(encoding="utf-8").splitlines())
    return {change for said, _, change in lines if said.startswith(NOTICED)}


def run_group(tests: str, mutants: list[Mutant], log: Path | None) -> list[Mutant]:
    """Run the same tests for each change, print and log what they say, and return those that survive or were not tested."""
    if run_tests(tests) != PASSED:
        print(f"not tested: {tests} fails without a change", flush=True)
        return mutants
    survivors = []
    for mutant in mutants:
        said = {PASSED: "survived", FAILED: NOTICED, None: f"{NOTICED} (time limit)"}.get(
            run_tests(tests, mutant), "broken"
        )
        print(f"{said}: {mutant}", flush=True)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{said}: {mutant}\n")
        if not said.startswith(NOTICED):
            survivors.append(mutant)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only the first change of each file")
    parser.add_argument("--only", action="append", metavar="TEXT", help="changes whose file or name has this text")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of groups of changes that run at once (default: 1)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="file of results: leave out what it says was noticed, and append to it",
    )
    args = parser.parse_args()
    chosen = [mutant for mutant in read_mutants() if not args.only or any(text in str(mutant) for text in args.only)]
    if args.quick:
        chosen = list({mutant.file: mutant for mutant in reversed(chosen)}.values())[::-1]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: no change has this text. See {LIST.name}.")
    noticed = read_noticed(args.resume)
    groups: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        if str(mutant) not in noticed:
            groups.setdefault(mutant.tests, []).append(mutant)
    with ThreadPoolExecutor(args.jobs) as pool:
        survivors = [
            mutant for group in pool.map(run_group, groups, groups.values(), repeat(args.resume)) for mutant in group
        ]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} changes were noticed")
    for mutant in survivors:
        print(f"  not noticed: {mutant} ({mutant.tests})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
