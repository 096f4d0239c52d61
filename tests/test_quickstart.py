"""The quickstart: from nothing to BLEU in one command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import python_of_shells

pytestmark = pytest.mark.usefixtures("quick_starts")

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.sh"


def quickstart(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the script in the Python of these tests, from another directory."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SETUP": "0", "THREADS": "1"} | python_of_shells() | variables
    return subprocess.run([SCRIPT, *arguments], env=environment, cwd="/", capture_output=True, text=True)


def test_help_explains_the_options():
    shown = quickstart("--help")
    assert shown.returncode == 0
    for word in ("--data", "--attention", "SMOKE=1", "SETUP=0"):
        assert word in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "wmt"], "--data wmt: expected grammar or multi30k"),
        (["--attention"], "--attention needs a value"),
        (["--fast"], "unknown argument '--fast'"),
        (["--attention", "mixhead-c"], "--attention mixhead-c: expected one of mha"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message, tmp_path):
    refused = quickstart(*arguments, LOWRANK_WORK=str(tmp_path))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_wrong_settings_are_refused_in_one_line(tmp_path):
    refused = quickstart(THREADS="0", LOWRANK_WORK=str(tmp_path))
    assert (refused.returncode, refused.stderr) == (2, "THREADS=0: expected a whole number from 1\n")


@pytest.mark.parametrize(("gpus", "tokens"), [("0", 1024), ("1", 1024), ("8", 128)])
def test_several_gpus_share_the_batches_of_one(tmp_path, gpus, tokens):
    said = quickstart(DRY_RUN="1", GPUS=gpus, LOWRANK_WORK=str(tmp_path)).stderr
    assert f"--max-tokens {tokens} --update-freq 1 " in said


def test_both_models_are_compared_and_a_kill_adds_no_update(tmp_path):
    tmp_path = tmp_path / "a folder"
    first = quickstart(SMOKE="1", LOWRANK_WORK=str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert first.stdout.count(" reference  ") == 10
    header, own, plain, difference, _, note = first.stdout.splitlines()[-6:]
    assert header.split() == ["--attention", "parameters", "validation", "loss", "BLEU"] and "one seed" in note
    number = r" +(\d[\d,]*) +(\d+\.\d{3}) +(\d+\.\d\d)"
    own, plain = (re.fullmatch(name + number, line) for name, line in (("mixhead-a", own), ("mha", plain)))
    # 3 attention sublayers of 4 heads: M is 4 × 4
    size, baseline = (int(found[1].replace(",", "")) for found in (own, plain))
    assert size - baseline == 3 * 4 * 4
    assert f" +48 (+{48 / baseline:.2%}) " in difference
    assert f"{float(own[2]) - float(plain[2]):+.3f}" in difference
    assert "--attention mixhead-a" in first.stdout and "--attention mha" in first.stdout
    [sentence] = [line for line in first.stdout.splitlines() if "fairseq-lowrank translate" in line]
    translated = subprocess.run(
        ["bash", "-c", sentence],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (translated.returncode, translated.stdout.count("\n")) == (0, 1), translated.stderr

    # as if all had been killed between the last checkpoint and fairseq-train's last words
    [run] = (tmp_path / "smoke" / "runs" / "quickstart-grammar").glob("mixhead-a*")
    [results] = (tmp_path / "smoke" / "quickstart").glob("*.jsonl")
    results.unlink()
    log, checkpoint, note = run / "train.log", run / "checkpoints" / "checkpoint_last.pt", run / "run.json"
    note.write_text(note.read_text().replace('"ended": true', '"ended": false'))
    before = log.read_text(), checkpoint.stat().st_mtime_ns
    again = quickstart(SMOKE="1", LOWRANK_WORK=str(tmp_path))
    assert again.stdout == first.stdout
    assert "mixhead-a (seed 1): trained already" in again.stderr and "mha (seed 1): trained already" in again.stderr
    assert (log.read_text(), checkpoint.stat().st_mtime_ns) == before


def test_results_are_kept_in_the_clone(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("scripts", "examples", "experiments", "fairseq_lowrank"):
        (clone / name).symlink_to(SCRIPT.parent.parent / name)
    environment = {name: value for name, value in os.environ.items() if name != "LOWRANK_WORK"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SETUP": "0", "DRY_RUN": "1"}
    environment |= python_of_shells()
    said = subprocess.run([clone / "scripts" / "quickstart.sh"], env=environment, capture_output=True, text=True)
    assert said.returncode == 0 and f"--save-dir {clone}/work/runs/" in said.stderr
