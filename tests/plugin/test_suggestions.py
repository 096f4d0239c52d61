"""A misspelled name ends in a message with the nearest one."""

import argparse

import pytest

pytest.importorskip("fairseq")

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.plugin.flags import add_attention_args


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        (["--attention", "mixhed-a"], "mixhead-a"),
        (["--head-mixing", "statik"], "static"),
        (["--attention", "zzz"], None),
    ],
)
def test_a_misspelled_flag_value_gets_the_nearest(flags, meant, capsys):
    parser = argparse.ArgumentParser()
    add_attention_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(flags)
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flags[0]}: invalid choice: {flags[1]!r} (choose from" in line
    assert f"Did you mean {meant!r}? If it is of a plugin" in line if meant else "Did you mean" not in line


@pytest.mark.parametrize(
    ("preset", "axes", "meant"),
    [
        ("mixhed-b", {}, "mixhead-b"),
        ("mha", {"activation": "sigsoft"}, "sigsoftmax"),
        ("mha", {"mixng": "static"}, "mixing"),
    ],
)
def test_a_misspelled_name_in_python_gets_the_nearest(preset, axes, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        build_attention(preset, 8, 2, **axes)
