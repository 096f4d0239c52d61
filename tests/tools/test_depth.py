"""Depth against width: the log₃ rule as a curve."""

import csv
import json

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.tools.advice import depth
from fairseq_lowrank.tools.advice.checks import Stack


def at(stack, width):
    (point,) = [point for point in depth.curve(stack) if point["width"] == width]
    return point


@pytest.mark.parametrize("power", [3, 5, 6])
def test_the_rule_needs_as_many_layers_as_the_width_has_factors_of_three(power):
    stack = Stack("decoder", layers=12, width=3**power, heads=1, rank=3**power)
    assert at(stack, 3**power)["log3_width"] == power


def test_a_narrower_model_of_as_many_parameters_is_deeper_and_width_beyond_the_rank_idles():
    stack = Stack("decoder", layers=24, width=512, heads=8, rank=128)
    assert at(stack, 128)["same_size_layers"] == 24 * 4**2 and at(stack, 512)["same_size_layers"] == 24
    assert at(stack, 64)["effective_width"] == 64 and at(stack, 4096)["effective_width"] == 128


def test_the_command_draws_the_curve_for_each_stack(tmp_path, capsys):
    sizes = ["--decoder-layers", "4", "--decoder-embed-dim", "512", "--embed-rank", "64"]
    line = ["advise", "--arch", "lowrank_transformer_lm", "--vocab-size", "100", "--length", "9", *sizes]
    assert cli.main([*line, "--output", str(tmp_path)]) == 0
    assert "L layers are enough for a width below 3^L = 81" in " ".join(capsys.readouterr().out.split())
    with open(tmp_path / "advise.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (own,) = [row for row in rows if row["width"] == "512"]
    assert own["log3_width"] == "5.678" and own["effective_width"] == "64"
    assert len(json.loads((tmp_path / "advise.json").read_text())["depth"]) == len(rows)
    assert (tmp_path / "advise-depth.png").read_bytes().startswith(b"\x89PNG")


def test_models_of_two_stacks_have_two_panels():
    encoder, decoder = (Stack(name, 6, 512, 8, 512) for name in ("encoder", "decoder"))
    figure = depth.plot_depth([encoder, decoder], "transformer")
    assert [panel.get_title() for panel in figure.axes] == ["transformer, encoder", "transformer, decoder"]
    lines = {line.get_label().split(":")[0] for line in figure.axes[0].lines}
    assert {"L = log₃ d", "as many parameters in the layers", "L = 6, d = 512"} <= lines
