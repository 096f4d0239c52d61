"""Sizes that bound each other: rank of the embedding, depth and attention width against the width."""

import pytest
from architectures import arguments

from fairseq_lowrank import cli
from fairseq_lowrank.tools.fairseq.architecture import build_model
from fairseq_lowrank.tools.fairseq.sizes import compare_sizes

LM = "lowrank_transformer_lm"


def compared(architecture, *flags, vocab_size=1000):
    args = arguments(architecture, flags)
    return {(row.place, row.size.partition(" ")[0]): row for row in compare_sizes(build_model(args, vocab_size), args)}


@pytest.mark.parametrize(
    ("architecture", "flags", "vocab_size", "rank"),
    [
        (LM, [], 400, 400),
        (LM, [], 512, 512),
        (LM, ["--embed-rank", "16"], 2000, 16),
        (LM, ["--embed-rank", "16", "--embed-kernel", "4"], 2000, 64),
        ("lowrank_transformer_lm_wiki103", [], 267744, 1024),  # the bands of an adaptive input together
    ],
)
def test_rank_of_the_embedding_against_the_width(architecture, flags, vocab_size, rank):
    row = compared(architecture, *flags, vocab_size=vocab_size)["decoder", "rank"]
    assert row.value == rank and bool(row.note) == (rank < row.bound)


def test_bands_of_ten_words_and_one_of_size_four():
    sizes = ["--decoder-embed-dim", "64", "--decoder-output-dim", "16", "--decoder-input-dim", "64"]
    bands = ["--adaptive-input", "--adaptive-input-cutoff", "10,20"]
    assert compared(LM, *sizes, *bands)["decoder", "rank"].value == 24


@pytest.mark.parametrize(("layers", "shallow"), [(5, True), (6, False)])
def test_depth_against_the_logarithm_of_the_width(layers, shallow):
    row = compared(f"{LM}_wiki103_vanilla", "--decoder-layers", str(layers))["decoder", "layers"]  # width 512 > 3⁵
    assert (row.value, row.bound, bool(row.note)) == (layers, 5.7, shallow)


@pytest.mark.parametrize(("flags", "inner"), [([], 512), (["--attention", "fixedhead", "--head-dim", "256"], 1024)])
def test_attention_width_against_the_width(flags, inner):
    row = compared("lowrank_transformer_iwslt_de_en", *flags)["cross attention", "heads"]
    assert (row.value, row.bound, bool(row.note)) == (inner, 512, inner > 512)


def test_the_command_prints_each_comparison(capsys):
    flags = ["--embed-rank", "16", "--attention", "fixedhead", "--head-dim", "128"]
    assert cli.main(["params", "--arch", LM, "--vocab-size", "100", *flags]) == 0
    printed = capsys.readouterr().out
    assert "decoder: rank of the embedding 16, width 512. More layers help more than more width" in printed
    assert "decoder: layers 6, log₃ of the width 5.7\n" in printed
    assert "decoder attention: heads × head size 8 × 128 = 1024, width 512. Parameters beyond" in printed
