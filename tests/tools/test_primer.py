"""The sizes that the primer prints, on the architectures of fairseq."""

import pytest

from fairseq_lowrank import cli
from fairseq_lowrank.tools import parameters

BIG = "the primer prints 20 heads of size 64 for width 1600, but by its own rule, width / heads, they have 80"
MEDIUM = "the primer prints 16 heads of size 64 for width 1280, but by its own rule, width / heads, they have 80"


@pytest.mark.parametrize(
    "architecture, layers, width, heads, note",
    [
        ("transformer_lm_gpt", 12, 768, 12, None),
        ("transformer_lm_gpt2_small", 24, 1024, 16, None),
        ("transformer_lm_gpt2_medium", 36, 1280, 20, MEDIUM),
        ("transformer_lm_gpt2_big", 48, 1600, 25, BIG),
        ("bert_base", 12, 768, 12, None),
        ("bert_large", 24, 1024, 16, None),
    ],
)
def test_gpt2_and_bert_have_the_primers_count_of_attention_and_fairseqs_heads(architecture, layers, width, heads, note):
    found = parameters.describe(architecture, 30_522)
    assert found["attention_without_biases"] == layers * 4 * width**2  # the primer: 4 d_model^2 a layer
    (axes,) = found["axes"].values()
    assert (axes["num_heads"], axes["head_dim"]) == (heads, 64)
    assert [text.split("; ")[0] for text in found["notes"]] == ([note] if note else [])


def test_what_the_primer_prints_differently_is_said(capsys):
    assert cli.main(["params", "--arch", "transformer_lm_gpt2_big", "--vocab-size", "50257"]) == 0
    said = capsys.readouterr().out
    assert f"Note: {BIG}; transformer_lm_gpt2_big has 25 heads of size 64.\n" in said


def test_the_primer_is_silent_on_another_width():
    assert parameters.describe("transformer_lm_gpt2_big", 100, ["--decoder-embed-dim", "800"])["notes"] == []
