"""The sizes that the primer prints, compared with the architectures of fairseq."""

import pytest

from experiments.papers.values import load_papers
from fairseq_lowrank.tools.fairseq import parameters

ROWS = {row["architecture"]: row["settings"] for row in load_papers()["primer"]["tables"]["variations"]["rows"]}
# The primer prints 16 and 20 heads of size 64 here. By its own rule, width / heads, these heads have size 80.
MISPRINTED = ("transformer_lm_gpt2_medium", "transformer_lm_gpt2_big")


@pytest.mark.parametrize(
    "architecture, layers, width, heads",
    [
        ("transformer_lm_gpt", 12, 768, 12),
        ("transformer_lm_gpt2_small", 24, 1024, 16),
        ("transformer_lm_gpt2_medium", 36, 1280, 20),
        ("transformer_lm_gpt2_big", 48, 1600, 25),
        ("bert_base", 12, 768, 12),
        ("bert_large", 24, 1024, 16),
    ],
)
def test_architecture_has_the_sizes_of_the_primer(architecture, layers, width, heads):
    found = parameters.describe(architecture, 30_522)
    assert found["attention_without_biases"] == layers * 4 * width**2  # the primer: 4 d_model^2 a layer
    (axes,) = found["axes"].values()
    assert (axes["num_heads"], axes["head_dim"]) == (heads, 64)
    printed = ROWS[architecture]
    assert (printed["embed-dim"], printed["head-dim"]) == (width, 64)
    assert (printed["attention-heads"] == heads) == (architecture not in MISPRINTED)
