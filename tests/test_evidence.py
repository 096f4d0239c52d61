"""The recipes of the evidence: controls that differ in what they are for, and in nothing else."""

import os
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import models, options, utils
from tiny_transformer import make_task

from experiments.evidence import predictions
from experiments.evidence.tables import read_planned
from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.parts import PARTS
from fairseq_lowrank.tools import inspection
from fairseq_lowrank.tools.fairseq import architecture
from fairseq_lowrank.tools.fairseq.parameters import count

EVIDENCE = Path(__file__).resolve().parent.parent / "examples" / "evidence"
PREDICTIONS = {one["id"] for group in predictions.groups() for one in group["predictions"]}


@pytest.fixture
def controls(plugins_leave):
    utils.import_user_module(Namespace(user_dir=str(EVIDENCE / "controls")))


SMALL_ENCODER, SMALL_DECODER = (
    [
        *(f"--{side}-layers", "2", f"--{side}-embed-dim", "16", f"--{side}-ffn-embed-dim", "16"),
        *(f"--{side}-attention-heads", "4"),
    ]
    for side in ("encoder", "decoder")
)
SMALL = [*SMALL_ENCODER, *SMALL_DECODER, "--share-all-embeddings"]


def build(*flags, task="translation", sizes=SMALL):
    words = ["data", "--task", task, "--lr", "0.1", *sizes, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(task), input_args=words)
    torch.manual_seed(1)
    return models.build_model(args, make_task())


@pytest.mark.parametrize(
    ("plain", "small_start", "options_of_model", "layers"),
    [
        ("lowrank_transformer_iwslt_de_en", "transformer_small_start_iwslt_de_en", {}, 6),
        (
            "lowrank_transformer_lm",
            "transformer_lm_small_start",
            {"task": "language_modeling", "sizes": SMALL_DECODER},
            2,
        ),
    ],
)
def test_a_small_start_is_mha_to_the_bit_but_for_half_the_output_weights(
    controls, plain, small_start, options_of_model, layers
):
    ours, small = (build("--arch", arch, **options_of_model).state_dict() for arch in (plain, small_start))
    assert ours.keys() == small.keys()
    halved = [name for name in ours if name.endswith("out_proj.weight")]
    assert len(halved) == layers
    for name, tensor in ours.items():
        assert torch.equal(small[name], tensor / 2 if name in halved else tensor), name


def test_projections_of_values_alone_learn_at_the_number_of_heads_times_the_rate(controls):
    lm = {"task": "language_modeling", "sizes": SMALL_DECODER}
    model = build("--arch", "transformer_lm_value_rate", "--optimizer", "adam", **lm)
    plain = build("--arch", "lowrank_transformer_lm", **lm).state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    scales = {name: getattr(parameter, "optim_overrides", {}) for name, parameter in model.named_parameters()}
    scales = {name: own["optimizer"]["lr_scale"] for name, own in scales.items() if own}
    values = [f"decoder.layers.{layer}.self_attn.v_proj.{name}" for layer in (0, 1) for name in ("weight", "bias")]
    assert scales == dict.fromkeys(values, 4.0)


def test_of_a_frozen_bert_mixing_pooler_and_head_learn_alone(controls):
    for attention, mixes in (("mixhead-b", True), ("mha", False)):
        model = build(
            "--arch", "bert_frozen_base", "--attention", attention, task="masked_lm", sizes=SMALL_ENCODER
        )  # fmt: skip
        model.register_classification_head("head", num_classes=2)
        learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        mixing = {name for name, _ in model.named_parameters() if ".mixing." in name}
        # the head and the encoder share the pooler
        head = {"classification_heads.head.out_proj.weight", "classification_heads.head.out_proj.bias"}
        assert bool(mixing) == mixes
        assert learns == mixing | head | {"encoder.pooler.weight", "encoder.pooler.bias"}


def test_columns_of_column_sums_stay_at_1_whatever_is_learned(controls):
    torch.manual_seed(1)
    layer = build_attention("mha", 16, 4, mixing="column-sums", self_attention=True)
    other = build_attention("mixhead-a", 16, 4, self_attention=True)
    x = torch.randn(5, 2, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(5):
        output, _ = layer(x, x, x)
        optimizer.zero_grad()
        (output - x).square().mean().backward()
        optimizer.step()
    matrix = layer.mixing.operation(x).weight
    assert (matrix - torch.eye(4)).abs().max() > 0.05
    torch.testing.assert_close(matrix.sum(0), torch.ones(4))
    other.load_state_dict({**layer.state_dict(), "mixing.weight": matrix})
    weights = layer(x, x, x, need_head_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    torch.testing.assert_close(layer(x, x, x)[0], other(x, x, x)[0])


def test_common_mode_adds_the_sum_of_all_heads(controls, monkeypatch):
    torch.manual_seed(1)
    layer = build_attention("mha", 16, 4, mixing="common-mode", self_attention=True)
    plain = build_attention("mha", 16, 4, self_attention=True)
    plain.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "mixing" not in name})
    x = torch.randn(5, 2, 16)
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0])  # starts as mha
    own, common = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        layer.mixing.weight.copy_(torch.stack([own, common], dim=1))
    mixed, heads = (one(x, x, x, need_head_weights=True)[1] for one in (layer, plain))
    own, common = own[:, None, None, None], common[:, None, None, None]
    torch.testing.assert_close(mixed, own * heads + common * heads.sum(0))
    (shown,) = inspection.inspect(layer.state_dict(prefix="encoder.layers.0.self_attn."))
    torch.testing.assert_close(torch.tensor(shown["matrix"]), layer.mixing.operation(x).weight)
    monkeypatch.delitem(PARTS["mixing"], "common-mode")
    (shown,) = inspection.inspect(layer.state_dict(prefix="encoder.layers.0.self_attn."))
    assert "matrix" not in shown and shown["norms"] == {
        "mixing.weight": pytest.approx(layer.mixing.weight.norm().item())
    }


def test_inspection_of_column_sums_shows_m_or_says_that_it_shows_the_weight(controls, monkeypatch):
    model = build("--arch", "lowrank_transformer_iwslt_de_en", "--head-mixing", "column-sums")
    mixing = model.decoder.layers[1].self_attn.mixing
    torch.nn.init.normal_(mixing.weight)

    def shown():
        return next(
            layer for layer in inspection.inspect(model.state_dict()) if layer["name"] == "decoder.layers.1.self_attn"
        )

    assert shown()["kind"] == "M"
    assert shown()["column_sums"] == pytest.approx([1] * 4)
    torch.testing.assert_close(torch.tensor(shown()["matrix"]), mixing.operation(None).weight)
    monkeypatch.delitem(PARTS["mixing"], "column-sums")
    assert shown()["kind"] == "W"
    torch.testing.assert_close(torch.tensor(shown()["matrix"]), mixing.weight)


def test_inspection_of_mixed_scores_follows_the_rule_too(controls, monkeypatch):
    monkeypatch.setitem(PARTS["score_mixing"], "column-sums", PARTS["mixing"]["column-sums"])
    layer = build_attention("mha", 16, 4, self_attention=True, score_mixing="column-sums")
    torch.nn.init.normal_(layer.score_mixing.weight)

    state = layer.state_dict(prefix="encoder.layers.0.self_attn.")

    def shown():
        (one,) = inspection.inspect(state)
        return one

    assert shown()["score_mixing"]["kind"] == "L" and shown()["score_mixing"]["column_sums"] == pytest.approx([1] * 4)
    monkeypatch.delitem(PARTS["score_mixing"], "column-sums")
    assert shown()["score_mixing"]["kind"] == "W"
    state["encoder.layers.0.self_attn.score_mixing.weight"] = torch.ones(3, 4)
    assert "score_mixing" not in shown() and "score_mixing.weight" in shown()["norms"]


def test_column_sums_start_as_mha(controls):
    ours, theirs = (
        build("--arch", "lowrank_transformer_iwslt_de_en", *flags) for flags in ([], ["--head-mixing", "column-sums"])
    )
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    assert torch.equal(theirs.decoder.layers[0].self_attn.mixing.operation(None).weight, torch.eye(4))


@pytest.fixture(scope="module")
def declared():
    """``declared(recipe)``: by row the folder for ``--user-dir``, and its flags from ``--arch`` on."""
    # recipes say which plugin their rows have and whether losses are told, and nothing outside does
    given = {"DRY_RUN": "1", "THREADS": "1", "LOWRANK_WORK": "/nowhere", "PLUGIN": "elsewhere", "FIT": "many"}
    found = {}

    def read(recipe: str) -> dict[str, tuple[str, list[str]]]:
        if recipe not in found:
            command = ["bash", EVIDENCE / recipe]
            done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True)
            words = [shlex.split(line) for line in done.stderr.splitlines() if line.startswith("+ fairseq-train ")]
            found[recipe] = {
                Path(line[line.index("--save-dir") + 1]).parent.name.split("-seed")[0]: (
                    line[line.index("--user-dir") + 1],
                    line[line.index("--arch") :],
                )
                for line in words
            }
        return found[recipe]

    return read


PIECES = 5872  # of Multi30k's dictionary


@pytest.mark.parametrize(("row", "control"), [("h32-fixedhead", "h32-mha-wide"), ("h4-mhe-mul", "h4-mha-narrow")])
def test_controls_of_equal_parameters_have_them(declared, row, control):
    rows = declared("above_head_size.sh")

    def parameters(name: str) -> int:
        _, (_, arch, *flags) = rows[name]
        return count(architecture.build_model(architecture.parse_architecture(arch, flags), PIECES))["total"]

    assert parameters(control) == pytest.approx(parameters(row), rel=0.005)
    assert abs(parameters("h4-mha") / parameters(row) - 1) > 0.05


@pytest.mark.parametrize("table", ["fast-start", "joined-by-ten", "above-head-size"])
def test_named_contrasts_are_between_rows_of_the_recipe(declared, table):
    rows = declared(f"{table.replace('-', '_')}.sh")
    named = read_planned("contrasts", table)
    assert named
    for one in named:
        assert set(one["rows"]) <= set(rows), one
        assert (one["metric"], one["split"] in ("fit", "valid", "test")) == ("bits", True)
        assert one["name"].split()[0] in PREDICTIONS


def test_contrasts_at_mixings_rate_are_between_rows_of_the_recipe(declared):
    rows = declared("fast_start.sh")
    for one in read_planned("contrasts_at_mixings_rate", "fast-start"):
        assert set(one["rows"]) <= set(rows), one
        assert one["name"].split()[0] in PREDICTIONS


@pytest.mark.parametrize(
    ("recipe", "row", "plain", "added"),
    [
        ("fast_start.sh", "h4-gain-x4-2e-3", "h4-gain-2e-3", ["--mixing-lr-scale", "4"]),
        ("fast_start.sh", "h32-gain-x8-2e-3", "h32-gain-2e-3", ["--mixing-lr-scale", "8"]),
        ("fast_start.sh", "h32-gain-x32-2e-3", "h32-gain-2e-3", ["--mixing-lr-scale", "32"]),
        ("fast_start.sh", "h4-common-mode-2e-3", "h4-mha-2e-3", ["--head-mixing", "common-mode"]),
        ("fast_start.sh", "h32-common-mode-2e-3", "h32-mha-2e-3", ["--head-mixing", "common-mode"]),
        ("fast_start.sh", "h4-mixhead-a-x2-2e-3", "h4-mixhead-a-2e-3", ["--mixing-lr-scale", "2"]),
        ("fast_start.sh", "h32-mixhead-a-x0.5-2e-3", "h32-mixhead-a-2e-3", ["--mixing-lr-scale", "0.5"]),
        ("fast_start.sh", "h4-mixhead-a-self-2e-3", "h4-mixhead-a-2e-3", ["--attention-sites", "encoder,decoder"]),
        ("fast_start.sh", "h32-mixhead-a-self-2e-3", "h32-mixhead-a-2e-3", ["--attention-sites", "encoder,decoder"]),
        ("fast_start.sh", "h4-gated-head-half-2e-3", "h4-gated-head-2e-3", ["--gate-start", "half"]),
        ("head_maps.sh", "h4-headmix-x4", "h4-headmix", ["--mixing-lr-scale", "4"]),
        ("head_maps.sh", "h32-headmix-x32", "h32-headmix", ["--mixing-lr-scale", "32"]),
        ("above_head_size.sh", "h4-gain-x4", "h4-mixhead-a", None),
        ("above_head_size.sh", "h32-gain-x8", "h32-gain", ["--mixing-lr-scale", "8"]),
    ],
)
def test_rows_at_mixings_rate_add_one_flag_to_a_row(declared, recipe, row, plain, added):
    flags, expected = declared(recipe)[row][1], list(declared(recipe)[plain][1])
    at = expected.index("--attention") + 1
    if added is None:  # gain with 4 heads is no row there
        expected[at], added = "gain", ["--mixing-lr-scale", "4"]
    assert flags == [*expected[: at + 1], *added, *expected[at + 1 :]]


def test_rows_have_the_plugin_of_their_recipe(declared):
    assert declared("above_head_size.sh")["h4-mha"][0].endswith("/fairseq_lowrank")
    assert declared("fast_start.sh")["h4-mha-2e-3"][0].endswith("/examples/evidence/controls")
    controls = declared("above_head_size_controls.sh")
    assert all(words[0].endswith("/examples/evidence/controls") for words in controls.values())
    # head maps are tried on the language model of the other recipe
    rows = {
        name: (declared("head_maps.sh")[name][1], declared("language_model.sh")[name][1])
        for name in ("h4-mha", "h32-mha")
    }
    assert all(sorted(here) == sorted(there) for here, there in rows.values())
    # which differ from a row of the table in the control alone
    small_start = {"lowrank_transformer_iwslt_de_en", "transformer_small_start_iwslt_de_en"}
    for name, plain, changed in [
        ("h32-column-sums", "h32-mha", {"--head-mixing", "column-sums"}),
        ("h32-small-start", "h32-mha", small_start),
        ("h32-mixhead-a-small-start", "h32-mixhead-a", small_start),
        ("h32-fixedhead-small-start", "h32-fixedhead", small_start),
        ("h32-mha-1e-3", "h32-mha", {"2e-3", "1e-3"}),
    ]:
        flags, plain_flags = controls[name][1], declared("above_head_size.sh")[plain][1]
        assert set(flags) ^ set(plain_flags) == changed
