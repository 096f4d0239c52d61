"""The byte models for the claims of the documents: how rates are chosen, what is trained next, and what contrasts decide."""

import math
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY

from experiments.evidence import documents
from fairseq_lowrank.plugin import architectures
from fairseq_lowrank.tools.fairseq import architecture, parameters

ROOT = Path(__file__).resolve().parents[2]


def line(valid: float, bits: float = 2.0) -> dict:
    return {"valid_loss": valid, "value": bits * math.log(2), "parameters": 1, "tokens_per_second": 1}


def lines(**rates: float) -> dict:
    """The lines of a row "x" under seed 1: validation losses by rate, with "_" for "-"."""
    return {f"x-{rate[1:].replace('_', '-')}": {1: line(valid)} for rate, valid in rates.items()}


def test_a_best_rate_inside_those_tried_counts():
    assert documents.choose_rate("x", lines(r3e_3=2.2, r6e_3=2.0)) == ("", ["1.2e-2"])
    found = {"x-3e-3": {1: line(2.2)}, "x-6e-3": {1: line(2.0)}, "x-1.2e-2": {1: line(2.1)}}
    assert documents.choose_rate("x", found) == ("6e-3", [])


@pytest.mark.parametrize(("best", "more"), [("3e-3", "1.5e-3"), ("1.2e-2", "2.4e-2")])
def test_a_best_rate_at_an_end_needs_one_more(best, more):
    found = {f"x-{rate}": {1: line(1.0 if rate == best else 2.0)} for rate in documents.FIRST_RATES}
    assert documents.choose_rate("x", found) == (best, [more])
    found[f"x-{more}"] = {1: line(1.5)}
    assert documents.choose_rate("x", found) == (best, [])


def test_a_diverged_training_is_the_worst_rate():
    found = {f"x-{rate}": {1: line(2.0)} for rate in documents.FIRST_RATES}
    del found["x-6e-3"][1]["valid_loss"]
    found["x-3e-3"][1]["valid_loss"] = 1.0
    assert documents.choose_rate("x", found) == ("3e-3", ["1.5e-3"])


def test_trainings_come_in_order_and_end():
    found, seen = {}, []
    while following := documents.next_trainings(found):
        seed, rows = following
        seen.append(following)
        for row in rows:
            found.setdefault(row, {})[seed] = line(1.0 if "6e-3" in row else 2.0)
    assert seen[0] == (
        1,
        [f"width-{name}-{rate}" for name in ("a", "b", "8-heads", "e") for rate in documents.FIRST_RATES],
    )
    assert [seed for seed, _ in seen[:8]] == [1, 2, 3, 4, 5, 6, 2, 3]
    assert seen[6][1] == ["width-a-6e-3-6000", "width-b-6e-3-6000"]
    assert not any("6000" in row for _, rows in seen[8:] for row in rows)
    assert len(found) == 26 * 3 + 2


def test_rows_of_the_recipe_are_those_of_the_plan():
    declared = subprocess.run(
        ["bash", ROOT / "examples" / "evidence" / "documents.sh"],
        env={"PATH": "/usr/bin:/bin", "LIST_ROWS": "1", "HOME": "/tmp", "LOWRANK_WORK": "/tmp"},
        capture_output=True,
        text=True,
    ).stdout.split("row: ")[1:]
    rows = {row.strip() for row in declared}
    plan = {f"{group.split()[0]}-{name}" for group, names in documents.GROUPS.items() for name in names}
    assert rows == {f"{row}-{rate}" for row in plan for rate in documents.RATES} | {
        f"{row}-{rate}-6000" for row in documents.LONG for rate in documents.RATES
    }
    assert all(name in plan for contrast in documents.CONTRASTS for name in contrast.weights)


CONTRAST = documents.Contrast("a − b", {"a": 1, "b": -1}, "above", "below")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([], "not tested"),
        ([0.1], "one seed"),
        ([0.10, 0.11, 0.12], "above"),
        ([-0.10, -0.11, -0.12], "below"),
        ([0.02, 0.021, 0.022], "equal within 0.04"),
        ([0.03, 0.001, 0.06], "not decided"),
        ([0.055, 0.03, 0.02, 0.036, 0.04], "no claim below 0.04"),
    ],
)
def test_a_contrast_decides_by_interval_and_margin(values, verdict):
    assert documents.verdict(CONTRAST, values) == verdict


def test_only_seeds_that_chose_no_rate_are_tested():
    found = {f"a-{rate}": {1: line(1.0 if rate == "6e-3" else 2.0)} for rate in documents.FIRST_RATES}
    found["a-6e-3"] |= {2: line(1.0, 2.5), 3: line(1.0, 2.25)}
    assert documents.bits("a", found) == pytest.approx({2: 2.5, 3: 2.25})


@pytest.fixture(autouse=True)
def controls(plugins_leave):
    utils.import_user_module(Namespace(user_dir=str(ROOT / "examples" / "evidence" / "controls")))


def arguments(arch: str, *flags: str) -> Namespace:
    words = ["--decoder-normalize-before", "--tokens-per-sample", "256", "--attention", "mha", *flags]
    return architecture.parse_architecture(arch, words)


def decoder_of(arch: str, *flags: str) -> torch.nn.Module:
    """The decoder of a model whose weights have memory, which those of `architecture.build_model` have not."""
    torch.manual_seed(1)
    args, model = arguments(arch, *flags), ARCH_MODEL_REGISTRY[arch]
    return model.build_model(args, architectures.stand_in_task(model, args, architectures.SizedDictionary(96))).decoder


def size(layers: int, width: int, ffn: int, heads: int) -> list[str]:
    widths = [word for name in ("embed", "input", "output") for word in (f"--decoder-{name}-dim", str(width))]
    numbers = {"layers": layers, "ffn-embed-dim": ffn, "attention-heads": heads}
    return widths + [word for name, value in numbers.items() for word in (f"--decoder-{name}", str(value))]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["--head-dim", "32", *size(4, 64, 256, 8)], size(4, 92, 352, 4)),
        (["--head-dim", "32", *size(4, 64, 256, 8)], size(4, 64, 640, 8)),
        (size(2, 128, 512, 8), size(8, 64, 256, 4)),
        (["--attention", "mhe-mul", *size(4, 64, 256, 4)], size(4, 64, 186, 4)),
        (["--attention", "mhe-mul", *size(4, 64, 256, 16)], size(4, 64, 168, 16)),
    ],
    ids=["wide heads and width", "wide heads and feed-forward", "wide and deep", "narrow, 4 heads", "narrow, 16 heads"],
)
def test_compared_rows_have_equal_weights_outside_embeddings(first, second, plugins_leave):
    counts = [
        parameters.count(architecture.build_model(arguments("lowrank_transformer_lm", *flags), 96))
        for flags in (first, second)
    ]
    one, other = (count["total"] - count["embeddings"] for count in counts)
    assert one == pytest.approx(other, rel=0.01)


def test_a_factored_embedding_starts_with_the_variance_of_a_whole_one(plugins_leave):
    width, flags = 128, size(1, 128, 16, 8)
    deviations = {"whole": decoder_of("lowrank_transformer_lm", *flags).embed_tokens.weight.std().item()}
    for rank in (4, 16, width):
        decoder = decoder_of("transformer_lm_factored", "--embed-rank", str(rank), *flags)
        deviations[rank] = decoder.project_in_dim(decoder.embed_tokens.weight).std().item()
        assert torch.linalg.matrix_rank(decoder.project_in_dim(decoder.embed_tokens.weight)) <= rank
        assert decoder.output_projection.weight.shape == (96, width)
    assert list(deviations.values()) == pytest.approx([width**-0.5] * 4, rel=0.15)


@pytest.mark.parametrize(
    ("here", "values", "outcome"),
    [
        ("points", [0.10, 0.11, 0.12], "as it says"),
        ("points", [-0.10, -0.11, -0.12], "the opposite"),
        ("points", [-0.1, 0.1, 0.05], "no difference seen"),
        ("bits", [0.02, 0.021, 0.022], "no claim below 0.04"),
        ("points", [0.1], "–"),
    ],
)
def test_a_claim_is_judged_by_sign_and_size(here, values, outcome):
    assert documents.Claim("a document", "a claim", here, "small", {"": values}).outcome() == outcome
