"""How fairseq's commands end: in one line where something is wrong, and with every flag in --help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fairseq")

from fairseq import options
from fairseq.dataclass.configs import CommonConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs import commands

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.usefixtures("quick_starts")
def test_programs_get_the_exceptions_of_fairseq():
    """Also those of a command's main function, and of its console entry point."""
    script = """
import sys
import fairseq_lowrank.plugin
from fairseq import checkpoint_utils
from fairseq_cli import train
from fairseq.dataclass.configs import FairseqConfig
sys.argv = ["fairseq-train", "/nothing", "--arch", "transformer", "--cpu", "--restore-file", "/nothing.pt"]
for call in (lambda: checkpoint_utils.load_checkpoint_to_cpu("nope.pt"), lambda: train.main(FairseqConfig()), train.cli_main):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
"""
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3 and done.stdout.split()[-1] == "UserError"


@pytest.mark.usefixtures("quick_starts")
def test_uncaught_exceptions_of_other_programs_are_pythons():
    done = run(sys.executable, "-c", "import fairseq_lowrank.plugin\nraise fairseq_lowrank.messages.UserError('mine')")
    assert (
        done.returncode == 1 and "Traceback" in done.stderr and done.stderr.splitlines()[-1].endswith("UserError: mine")
    )


TRAIN = ["--user-dir", "fairseq_lowrank", "--arch", "transformer", "--cpu", "--restore-file", "/nothing.pt"]


@pytest.mark.parametrize("command", [["fairseq-train"], ["python", "-m", "fairseq_cli.train"]], ids=" ".join)
def test_command_ends_a_mistake_in_one_line(command, tmp_path):
    where = Path(sys.executable)
    command = [where.with_name(command[0]), *command[1:]]
    done = run(*command, "/nothing", *TRAIN, "--save-dir", tmp_path / "saved")
    assert done.returncode == 2 and not (tmp_path / "saved").exists()
    assert "Traceback" not in done.stderr and ": error: --restore-file /nothing.pt: " in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("quick_starts")
def test_variable_shows_the_traceback_of_a_mistake():
    done = run(Path(sys.executable).with_name("fairseq-train"), "/nothing", *TRAIN, LOWRANK_TRACEBACK="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr and ": error: --restore-file /nothing.pt: " in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("quick_starts")
def test_command_shows_an_unexpected_exception_in_full(translation_data, tmp_path):
    """Its traceback, with the place in fairseq, and then one last line."""
    (tmp_path / "file").touch()
    line = [*TRAIN[:-2], "--max-tokens", 9, "--log-file", tmp_path / "file" / "x"]
    done = run(Path(sys.executable).with_name("fairseq-train"), translation_data, *line)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "FileHandler" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("fairseq-train: error: ")


SPAWNING = """
import torch.multiprocessing
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.commands import Worker, as_command

def fail(index, *args):
    raise {error}

if __name__ == "__main__":
    with as_command():
        torch.multiprocessing.spawn(Worker(fail), nprocs=1)
"""


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(("error", "code", "tracebacks"), [("UserError('mine')", 2, 0), ("KeyError('theirs')", 1, 1)])
def test_spawned_workers_end_like_commands(tmp_path, error, code, tracebacks):
    script = tmp_path / "script.py"
    script.write_text(SPAWNING.format(error=error))
    done = run(sys.executable, script, PYTHONPATH=str(REPOSITORY))
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == bool(tracebacks)
    assert "script.py: error: " in done.stderr
    assert ("mine" if code == 2 else "theirs") in done.stderr


@pytest.mark.usefixtures("quick_starts")
def test_help_shows_the_attention_flags_and_those_of_the_architecture(fairseq_command, capsys):
    plugin = ["--user-dir", REPOSITORY / "fairseq_lowrank"]
    with pytest.raises(SystemExit) as exit:
        fairseq_command("train", *plugin, "--help")
    assert not exit.value.code
    without = capsys.readouterr().out
    done = run(Path(sys.executable).with_name("fairseq-train"), *plugin, "--arch", "lowrank_transformer_lm", "--help")
    assert done.returncode == 0, done.stderr
    chosen = done.stdout
    assert "--head-mixing" in without and "--head-mixing" in chosen
    assert "--encoder-layers" in without
    assert "--embed-rank" in chosen
    assert "--encoder-layers" not in chosen


@pytest.mark.parametrize(("error", "code"), [(UserError("no such\n data"), 2), (ValueError("unexpected"), 1)])
def test_hydra_job_ends_like_a_command(capsys, error, code):
    job = JobReturn(status=JobStatus.FAILED)
    job.return_value = error
    with pytest.raises(SystemExit) as exit:
        job.return_value  # noqa: B018 (a property)
    assert exit.value.code == code
    said = capsys.readouterr().err
    assert ("Traceback" in said or "ValueError" in said) == (code == 1) and ": error: " in said.splitlines()[-1]


def test_command_names_the_key_that_a_configuration_does_not_have(capsys):
    config = OmegaConf.structured(CommonConfig)
    with pytest.raises(ConfigKeyError) as unknown:
        config["atention"] = "mha"
    with pytest.raises(SystemExit):
        commands.end(unknown.value)
    assert "Key 'atention' not in 'CommonConfig'" in capsys.readouterr().err.splitlines()[-1]


def test_hydra_job_returns_its_result():
    job = JobReturn(status=JobStatus.COMPLETED)
    job.return_value = 3
    assert job.return_value == 3


def test_parser_takes_words_that_are_not_text():
    """As fairseq's does: fairseq's own tests pass None for a folder."""
    words = ["--arch", "transformer_lm", "--task", "dummy_lm", "--max-tokens", "9", "--save-dir", None]
    assert options.parse_args_and_arch(options.get_training_parser(), words).save_dir == "None"


def test_parser_takes_the_command_line_if_it_gets_none(monkeypatch):
    monkeypatch.setattr("sys.argv", ["program", "--path", __file__, "--task", "dummy_lm"])
    assert options.parse_args_and_arch(options.get_eval_lm_parser()).path == __file__


@pytest.mark.usefixtures("quick_starts")
def test_each_of_two_workers_ends_with_a_code_that_is_not_0(tmp_path):
    noted = """
import json, os, sys
from fairseq_cli import train
from fairseq_lowrank.repairs.commands import as_command
try:
    with as_command():
        train.cli_main()
except SystemExit as exit:
    with open(f"{sys.argv[-1]}/{os.environ['RANK']}", "w") as file:
        json.dump(exit.code, file)
    raise
"""
    (tmp_path / "worker.py").write_text(noted)
    done = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "worker.py"),
        *("/nothing", *TRAIN, "--save-dir", tmp_path),
        PYTHONPATH=str(REPOSITORY),
    )
    assert done.returncode != 0
    codes = [json.loads((tmp_path / rank).read_text()) for rank in "01" if (tmp_path / rank).exists()]
    assert codes
    assert set(codes) == {2}
    assert "worker.py: error: --restore-file /nothing.pt: " in done.stderr
