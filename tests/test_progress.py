"""Lines of progress, by a clock that only the test moves."""

from pathlib import Path
from threading import Thread

import pytest

from experiments.corpora.text import map_lines
from fairseq_lowrank import cli, files, progress
from fairseq_lowrank.progress import Progress, tracked


class Clock:
    """Seconds that pass in threads of progress only when the test lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def tick(self) -> None:
        """Let ten seconds pass, and all running steps tell their progress."""
        self.now += progress.INTERVAL
        for step in list(Progress.running):
            if step.bar is None:
                step.ended.ticks = 1
                step._tell()


class Ended:
    """An event whose waits end by the clock: false as often as the test says, then true."""

    ticks = 0

    def wait(self, seconds: float) -> bool:
        assert seconds == progress.INTERVAL
        self.ticks -= 1
        return self.ticks < 0

    def set(self) -> None:
        self.ticks = 0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    monkeypatch.setattr(progress, "Event", Ended)
    return found


def said(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_line_each_ten_seconds_has_an_estimate(clock, capsys):
    with Progress("model", 30, "passes", rough=True) as step:
        clock.tick()
        step.update(5)
        clock.tick()
        clock.tick()
    assert said(capsys) == [
        "model: 0 of about 30 passes in 10 s",
        "model: 5 of about 30 passes in 20 s, about 100 s left",
        "model: 5 of about 30 passes in 30 s, about 150 s left",
    ]


def test_more_than_the_total_has_no_estimate(clock):
    step = Progress("words", 2, "words", rough=True)
    step.done = 3
    clock.now += 10
    assert step.text() == "words: 3 of about 2 words in 10 s"


def test_short_step_is_silent(capsys):
    assert list(tracked(range(3), "reading", "lines")) == [0, 1, 2]
    assert not said(capsys) and not Progress.running


def test_without_a_total_there_is_no_estimate(clock, capsys):
    for _ in tracked(iter("ab"), "reading", "lines"):
        clock.tick()
    assert said(capsys) == ["reading: 10 s so far", "reading: 1 lines in 20 s"]


def test_only_the_innermost_step_prints(clock, capsys):
    with Progress("measure"):
        clock.tick()
        for _ in tracked([1], "reading", "texts"):
            clock.tick()
        clock.tick()
    assert said(capsys) == ["measure: 10 s so far", "reading: 0 of 1 texts in 10 s", "measure: 30 s so far"]


def test_failed_step_prints_no_more(clock):
    with pytest.raises(ValueError), Progress("measure") as step:
        raise ValueError
    assert not Progress.running and not step.thread.is_alive()


def test_thread_prints_while_the_step_runs(monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with Progress("step") as step:
        while not (text := capsys.readouterr().err):
            pass
    assert isinstance(step.thread, Thread) and text.startswith("step: 0 s so far\n")


def test_terminal_gets_a_bar_and_no_lines(clock, monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("model", 2, "passes") as step:
        clock.tick()
        step.update()
        step.hide()
        assert step.bar.n == 1
    assert "passes in" not in capsys.readouterr().err


def commands_that_show_time() -> dict[str, bool]:
    return {name: getattr(module, "SHOWS_TIME", True) for name, module in cli.command_modules(cli).items()}


def test_every_command_but_those_with_output_shows_its_time():
    assert [name for name, shows in commands_that_show_time().items() if not shows] == [
        "hydra-train",
        "launch",
        "translate",
    ]


def test_silent_command_says_how_long_it_runs(clock, monkeypatch, capsys):
    monkeypatch.setattr("fairseq_lowrank.cli.env.run", lambda args: clock.tick())
    assert cli.main(["env"]) == 0
    assert said(capsys) == ["env: 10 s so far"]


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_of_a_text_are_counted(workers, clock, capsys, tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("a\nb\nc\n")
    updates = []
    monkeypatch.setattr(Progress, "update", lambda step, count=1: updates.append(step.total))
    map_lines(str.upper, source, target, workers)
    assert target.read_text() == "A\nB\nC\n" and updates == [3, 3, 3]


def test_there_is_no_second_mechanism():
    root = Path(progress.__file__).parents[1]
    sources = [path for folder in ("fairseq_lowrank", "experiments") for path in (root / folder).rglob("*.py")]
    users = {path.relative_to(root).as_posix() for path in sources if "import tqdm" in path.read_text()}
    # the second one shows the loss of a row in a terminal, and says a line for each row
    assert users == {"fairseq_lowrank/progress.py", "experiments/commands/controlled.py"}


class Writes(list):
    """A stream that notes each write."""

    write = list.append

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_lines_of_threads_do_not_mix(clock, monkeypatch):
    """A thread may be stopped between two writes, so each line is one."""
    written = Writes()
    monkeypatch.setattr("sys.stderr", written)
    files.say("wrote a file")
    with Progress("model", 30, "passes"):
        clock.tick()
    assert written == ["wrote a file\n", "model: 0 of 30 passes in 10 s\n"]
