"""How fairseq's commands end: in one line where something is wrong, and with every flag in --help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from fairseq import options
from fairseq.distributed import utils as distributed_utils
from hydra.core.utils import JobReturn, JobStatus

from fairseq_lowrank.messages import UserError, explanation

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
    )


def raised(error, cause=None):
    try:
        try:
            raise error
        except Exception as first:
            if cause is None:
                raise
            raise cause from first
    except Exception as last:
        return last


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n  b"), "a b"),
        (FileNotFoundError(2, "No such file or directory", "x.pt"), "x.pt: No such file or directory"),
        (raised(UserError("heads differ"), Exception("cannot load;")), "cannot load; heads differ"),
        (raised(UserError("heads differ"), ValueError("lowrank: heads differ")), "heads differ"),
        (
            Exception("-- Process 0 terminated:\nTraceback (most recent call last):\n  x\nValueError: y\n"),
            "ValueError: y",
        ),
    ],
)
def test_an_exception_is_told_in_one_line(error, line):
    assert explanation(error) == line


def test_an_exception_without_words_of_its_own_is_told_by_its_class_and_place():
    line = explanation(raised(KeyError("x")))
    assert line.startswith("KeyError: 'x' (plugin/test_commands.py:")
    assert line.endswith("; LOWRANK_TRACEBACK=1 shows the traceback)")


def test_the_hook_of_the_process_stays_as_it_was():
    script = "import sys; hook = sys.excepthook; import fairseq_lowrank.plugin; assert sys.excepthook is hook"
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


def test_programs_that_call_fairseq_get_its_exceptions():
    script = """
import fairseq_lowrank.plugin
from argparse import Namespace
from fairseq import checkpoint_utils
from fairseq_cli import train
from fairseq.dataclass.configs import FairseqConfig
for call in (lambda: checkpoint_utils.load_checkpoint_to_cpu("nope.pt"), lambda: train.main(FairseqConfig())):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
"""
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("command", [["fairseq-train"], ["python", "-m", "fairseq_cli.train"]], ids=" ".join)
def test_help_shows_the_attention_flags_and_those_of_the_architecture(command):
    where = Path(sys.executable)
    command = [where.with_name(command[0]), *command[1:], "--user-dir", "fairseq_lowrank"]
    without, chosen = run(*command, "--help"), run(*command, "--arch", "lowrank_transformer_lm", "--help")
    for done in without, chosen:
        assert done.returncode == 0, done.stderr
        assert "--head-mixing" in done.stdout
    assert "--encoder-layers" in without.stdout
    assert "--embed-rank" in chosen.stdout
    assert "--encoder-layers" not in chosen.stdout


def test_a_job_of_hydras_ends_in_one_line(capsys):
    job = JobReturn(status=JobStatus.FAILED)
    job.return_value = ValueError("no such\n data")
    with pytest.raises(SystemExit) as exit:
        job.return_value  # noqa: B018 (a property)
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(": error: no such data\n")
    job = JobReturn(status=JobStatus.COMPLETED)
    job.return_value = 3
    assert job.return_value == 3


def test_parsing_happens_in_one_wrapper():
    assert not hasattr(options.parse_args_and_arch.__wrapped__, "__wrapped__")


def test_each_of_two_workers_ends_with_a_code_that_is_not_0(tmp_path):
    noted = """
import json, os, sys
from fairseq_cli import train
try:
    train.cli_main()
except SystemExit as exit:
    with open(f"{sys.argv[-1]}/{os.environ['RANK']}", "w") as file:
        json.dump(exit.code, file)
    raise
"""
    (tmp_path / "worker.py").write_text(noted)
    arguments = ["--user-dir", "fairseq_lowrank", "--arch", "transformer", "--cpu", "--max-tokens", "9", "-s", "de"]
    done = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "worker.py"),
        *("/nothing", *arguments, "--save-dir", tmp_path),
        PYTHONPATH=str(REPOSITORY),
    )
    assert done.returncode != 0
    codes = [json.loads((tmp_path / rank).read_text()) for rank in "01" if (tmp_path / rank).exists()]
    assert codes
    assert set(codes) == {2}
    assert "worker.py: error: /nothing: expected a folder that fairseq-preprocess wrote" in done.stderr


def test_call_main_is_wrapped_once_however_often_commands_are_looked_for():
    from fairseq_lowrank.plugin.commands import end_commands_in_one_line

    before = distributed_utils.call_main
    end_commands_in_one_line()
    assert distributed_utils.call_main is before
