"""Theorem 2: a layer with fixed heads that no standard layer equals."""

import csv
import json

import pytest
import torch

from experiments import __main__ as experiments
from experiments import fixed_heads
from fairseq_lowrank.attention import build_attention


def drawn(embed_dim=8, heads=4, head_dim=4):
    return fixed_heads.theorem_layer(embed_dim, heads, head_dim, generator=torch.Generator().manual_seed(2))


def test_the_layer_has_the_theorems_conditions():
    layer = drawn()
    forms = layer.query @ layer.key.mT
    assert all(torch.equal(form, forms[0]) for form in forms) and torch.linalg.matrix_rank(forms[0]) == 4
    assert torch.linalg.matrix_rank((layer.value @ layer.output).sum(0)) == 8


def test_it_is_the_packages_layer_of_fixed_heads():
    ours = drawn()
    layer = build_attention("fixedhead", 8, 4, head_dim=4, self_attention=True, bias=False).double()
    with torch.no_grad():
        for name, weight in {"q_proj": ours.query, "k_proj": ours.key, "v_proj": ours.value}.items():
            getattr(layer, name).weight.copy_(weight.mT.reshape(16, 8))
        layer.out_proj.weight.copy_(ours.output.reshape(16, 8).mT)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected, _ = layer(*[x.transpose(0, 1)] * 3, need_weights=False)
    torch.testing.assert_close(ours(x), expected.transpose(0, 1))


def test_one_small_head_is_enough_on_inputs_of_its_rank():
    """The construction of the module's docstring: inputs of rank r ≤ d/h."""
    target, generator = drawn(), torch.Generator().manual_seed(3)
    basis = fixed_heads.random_basis(2, 8, generator=generator)  # d/h = 2
    form = basis @ (target.query[0] @ target.key[0].mT) @ basis.mT / 2 * 2**0.5  # the scales are √4 and √2
    outputs = basis @ (target.value @ target.output).sum(0)
    small = fixed_heads.Layer((basis.mT @ form)[None], basis.mT[None], basis.mT[None], outputs[None])
    x = fixed_heads.inputs(6, 5, basis, generator=generator)
    torch.testing.assert_close(small(x), target(x))
    elsewhere = torch.randn(6, 5, 8, dtype=torch.float64, generator=generator)
    assert fixed_heads.errors(small, target, elsewhere)[0] > 0.1


def test_standard_heads_stay_away_from_fixed_ones_unless_inputs_have_a_low_rank():
    fits = fixed_heads.experiment(4, 8, 4, 4, [8, 2], steps=300)
    error = {(fit.head_dim, fit.input_rank): fit.error for fit in fits}
    assert error[2, 8] > 0.15 and error[2, 8] > 2 * error[4, 8]
    assert error[2, 2] < error[2, 8] / 5


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--heads 3", "heads that divide the embedding size"),
        ("--head-dims 2", "d/h < head size <= d"),
        ("--head-dims 4 8", "--head-dims 4 8: --theorem 2 needs one size"),
        ("--input-rank 17", "input ranks [17]: expected 1 to 16"),
        ("--matrices 3", "--matrices 3: works only with --theorem 1"),
    ],
)
def test_sizes_of_which_the_theorem_says_nothing_are_refused(flags, message, capsys):
    assert experiments.main(["representation", "--theorem", "2", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_a_table_and_files(tmp_path, capsys):
    flags = ["--theorem", "2", "--length", "3", "--embed-dim", "4", "--heads", "4", "--head-dims", "2", "--steps", "2"]
    assert experiments.main(["representation", *flags, "--input-rank", "4", "1", "--output", str(tmp_path)]) == 0
    assert "inputs of rank 1" in capsys.readouterr().out
    with open(tmp_path / "representation-layers.csv", newline="") as file:
        assert [row["head_dim"] for row in csv.DictReader(file)] == ["1", "2", "1", "2"]
    assert json.loads((tmp_path / "representation-layers.json").read_text())["theorem"] == 2
