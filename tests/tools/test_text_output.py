"""Commands that print text need neither matplotlib nor scipy, and with --output only for pictures."""

import builtins
import sys

import pytest

from fairseq_lowrank import cli

LM = ["--arch", "lowrank_transformer_lm", "--vocab-size", "100"]
COMMANDS = {
    "params": LM,
    "average": ["{mixhead-a}", "{mixhead-a}", "--output", "{folder}/average.pt"],
    "convert": ["{stock}", "--attention", "mixhead-a", "--output", "{folder}/converted.pt"],
    "env": [],
    "inspect": ["{mixhead-a}"],
    "launch": ["--workers", "2", "--dry-run", "--", "fairseq-train", "data"],
    "inspect --spectrum": ["{mixhead-a}", "--sequences", "1"],
    "user-dir": [],
}


@pytest.fixture
def without_drawing(monkeypatch):
    """As if matplotlib and scipy were not installed for this package (fairseq itself imports scipy)."""
    imported = builtins.__import__

    def refusing(name, globals=None, *args, **options):
        ours = ((globals or {}).get("__name__") or "").startswith("fairseq_lowrank")
        if ours and name.partition(".")[0] in ("matplotlib", "scipy", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, globals, *args, **options)

    monkeypatch.delitem(sys.modules, "fairseq_lowrank.tools.pictures", raising=False)
    monkeypatch.delattr("fairseq_lowrank.tools.pictures", raising=False)
    monkeypatch.setattr(builtins, "__import__", refusing)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_text_without_matplotlib(command, trained, tmp_path, capsys, request):
    words = COMMANDS[command]
    files = {name: trained(name) for name in ("mixhead-a", "stock") if f"{{{name}}}" in words}
    request.getfixturevalue("without_drawing")
    words = [word.format(folder=tmp_path, **files) for word in words]
    assert cli.main([*command.split(), *words]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


def test_pictures_alone_need_matplotlib(without_drawing, tmp_path, capsys):
    params = ["params", *LM, "--output", str(tmp_path / "out")]
    assert cli.main(params) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["params.csv", "params.json"]
    sweep = ["--sweep", "layers", "--methods", "mha"]
    assert cli.main(["params", *LM, *sweep, "--output", str(tmp_path / "sweep")]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err
