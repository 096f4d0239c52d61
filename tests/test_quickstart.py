"""The quickstart: from nothing to BLEU in one command."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.sh"


def quickstart(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the script in the Python of these tests, from another directory."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SETUP": "0", "THREADS": "1"} | variables
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


@pytest.mark.parametrize(("gpus", "tokens"), [("0", 1024), ("1", 1024), ("8", 128)])
def test_several_gpus_share_the_batches_of_one(tmp_path, gpus, tokens):
    said = quickstart(DRY_RUN="1", GPUS=gpus, LOWRANK_WORK=str(tmp_path)).stderr
    assert f"--max-tokens {tokens} --update-freq 1 " in said


def test_the_script_ends_with_bleu_and_called_again_after_a_kill_adds_no_update(tmp_path):
    tmp_path = tmp_path / "a folder"
    first = quickstart(SMOKE="1", LOWRANK_WORK=str(tmp_path))
    assert first.returncode == 0, first.stderr
    *_, last = first.stdout.splitlines()
    assert re.fullmatch(r"BLEU = \d+\.\d", last)
    assert first.stdout.count(" reference  ") == 10
    [own] = [line for line in first.stdout.splitlines() if "fairseq-interactive" in line]
    assert shlex.split(own)[1].startswith(f"{tmp_path}/data/")
    assert "fairseq-train" in first.stdout and "--attention mixhead-b" in first.stdout
    # 3 attention sublayers of 4 heads of size 8: B is 4 × 4, W^M is 8 × 4
    assert f"(+{3 * (4 * 4 + 8 * 4)}," in first.stdout

    # as if all had been killed between the last checkpoint and fairseq-train's last words
    [run] = (tmp_path / "smoke" / "runs" / "quickstart-grammar").iterdir()
    [results] = (tmp_path / "smoke" / "quickstart").glob("*.jsonl")
    results.unlink()
    log, checkpoint, note = run / "train.log", run / "checkpoints" / "checkpoint_last.pt", run / "run.json"
    note.write_text(note.read_text().replace('"ended": true', '"ended": false'))
    before = log.read_text(), checkpoint.stat().st_mtime_ns
    again = quickstart(SMOKE="1", LOWRANK_WORK=str(tmp_path))
    assert again.stdout == first.stdout
    assert "mixhead-b (seed 1): trained already" in again.stderr
    assert (log.read_text(), checkpoint.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("flags", "more"),
    [("gqa --key-value-heads 2", -6 * 2 * 8 * (16 + 1)), ("fixedhead --head-dim 9", 6 * 20 * (4 * 16 + 3))],
)
def test_the_report_compares_with_plain_attention(monkeypatch, translation_data, flags, more):
    checkpoint_utils = pytest.importorskip("fairseq.checkpoint_utils")
    from tiny_transformer import SIZES, arguments

    report = runpy.run_path(str(SCRIPT.parent.parent / "examples" / "quickstart" / "report.py"))
    words = ["--attention", *flags.split(), "--source-lang", "de", "--target-lang", "en"]
    args = arguments("lowrank_transformer", *SIZES, *words)
    monkeypatch.setattr(checkpoint_utils, "load_checkpoint_to_cpu", lambda path: {"cfg": {"model": args}})
    kind, own, plain = report["parameters"](Path("checkpoint.pt"), translation_data)
    assert (kind, own - plain) == (flags.split()[0], more)
