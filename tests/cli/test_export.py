"""Arguments of ``export`` that are refused before a checkpoint is read."""

import importlib.util

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.files import whole_file, whole_folder
from fairseq_lowrank.messages import UserError


def made(folder):
    """An empty file in place of a checkpoint."""
    (folder / "empty.pt").touch()
    return str(folder / "empty.pt")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_length_penalty_that_is_not_finite_is_refused(value, tmp_path, capsys):
    words = ["export", made(tmp_path), str(tmp_path / "out"), "--to", "transformers", "--lenpen", value]
    assert cli.main(words) == 2
    assert f"--lenpen {value}: expected a finite number" in capsys.readouterr().err


def test_a_missing_target_is_named_before_the_model_is_read(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ctranslate2" else find(name, *rest)
    )
    assert cli.main(["export", made(tmp_path), str(tmp_path / "out"), "--to", "ctranslate2"]) == 2
    assert "--to ctranslate2: it is not installed" in capsys.readouterr().err


def test_a_folder_inside_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(UserError, match="file: is a file, so it cannot be the folder of out"),
        whole_folder(tmp_path / "file" / "out"),
    ):
        pass


def test_of_two_that_make_one_folder_the_first_is_whole_and_the_second_refused(tmp_path):
    with (
        pytest.raises(UserError, match="out: another process has made it meanwhile"),
        whole_folder(tmp_path / "out") as two,
    ):
        (two / "of two").touch()
        with whole_folder(tmp_path / "out") as one:
            (one / "of one").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "of one"]


def test_of_two_that_write_one_file_each_writes_it_whole(tmp_path):
    path = tmp_path / "file"
    with whole_file(path) as two:
        two.write("of two")
        with whole_file(path) as one:
            one.write("of one, longer")
        assert path.read_text() == "of one, longer"
    assert path.read_text() == "of two" and [*tmp_path.iterdir()] == [path]
