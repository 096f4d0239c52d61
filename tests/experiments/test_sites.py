"""The lists of `params --list` say what building each model says."""

import csv
import sys

import pytest

from experiments import sites
from fairseq_lowrank import cli
from fairseq_lowrank.cli.params import SITES

FAIRSEQ = ["bart_base", "bert_base", "fconv_lm", "lstm", "roberta_enc_dec", "s2t_conformer", "transformer_align"]
TRANSFORMERS = ["AutoformerModel", "BartModel", "BertModel", "LlamaModel", "XLNetModel"]


def listed(name):
    with (SITES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in csv.reader(file)]


def test_the_list_of_fairseq_is_what_its_models_say():
    rows = sites.of_fairseq(FAIRSEQ)
    assert set(rows) <= set(listed("fairseq")) and len(rows) == len(FAIRSEQ)


def test_the_list_of_transformers_is_what_its_models_say():
    transformers = pytest.importorskip("transformers")
    header, *rows = listed("transformers")
    if header[0] != f"transformers {transformers.__version__}":
        pytest.skip("the list is of another version")
    found = sites.of_transformers(TRANSFORMERS)
    assert set(found) <= set(rows) and len(found) == len(TRANSFORMERS)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["fairseq", "transformers"])
def test_a_list_is_complete(name):
    rows = {"fairseq": sites.of_fairseq, "transformers": sites.of_transformers}[name]()
    assert rows == listed(name)[1:]


def test_params_lists_models_without_building_them(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fairseq", None)
    assert cli.main(["params", "--list", "fairseq", "bart_base", "lstm", "s2t_conformer"]) == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert rows["bart_base"] == "encoder decoder cross" and rows["lstm"] == "– decoder: AttentionLayer"
    assert rows["s2t_conformer"] == "decoder cross encoder: MultiheadAttention"
    assert rows["2"] == "of 3 take other attention"
    assert cli.main(["params", "--list", "fairseq", "bart_bas"]) == 2
    assert (
        "bart_bas in the list of fairseq 0.12.3.1. Give other names. Did you mean 'bart_base'?"
        in capsys.readouterr().err
    )
    assert cli.main(["params", "--list", "transformers", "--vocab-size", "9"]) == 2
    assert "--vocab-size: does not work with --list" in capsys.readouterr().err
