import json

import pytest
from architectures import arguments
from torch import nn

from fairseq_lowrank import cli
from fairseq_lowrank.attention import AXES, PRESETS
from fairseq_lowrank.cli import params
from fairseq_lowrank.cli._output import axes_table
from fairseq_lowrank.tools.fairseq import checkpoints, parameters
from fairseq_lowrank.tools.fairseq.architecture import attention_layers, build_model

TRANSLATION = "lowrank_transformer_wmt_en_de"


def counts(architecture, vocab_size, *flags):
    return parameters.count(build_model(arguments(architecture, flags), vocab_size))


def both_sides(**sizes):
    return [
        word
        for side in ("encoder", "decoder")
        for name, size in sizes.items()
        for word in (f"--{side}-{name}", str(size))
    ]


@pytest.mark.parametrize(
    "preset, millions",
    [
        ("mha", 28.31),
        ("mhe-mul", 8.88),
        ("mhe-add", 8.88),
        ("sha", 8.85),
        ("el", 14.16),
        ("mqa", 15.34),
        ("skv", 21.23),
    ],
)
def test_attention_of_the_posters_encoder(preset, millions):
    sizes = ["--encoder-layers", "12", "--encoder-embed-dim", "768", "--encoder-attention-heads", "12"]
    decoder = ["--decoder-layers", "1", "--decoder-embed-dim", "768", "--decoder-attention-heads", "12"]
    found = counts(TRANSLATION, 100, *sizes, *decoder, "--no-attention-bias", "--attention", preset)
    assert round(found["sites"]["encoder"] / 1e6, 2) == millions


@pytest.mark.parametrize(
    "layers, width, heads, mha, mhe",
    [
        (6, 512, 8, 18.87, 6.52),
        (6, 512, 16, 18.87, 5.63),
        (6, 512, 4, 18.87, 8.29),
        (4, 512, 8, 12.58, 4.34),
        (8, 512, 8, 25.17, 8.69),
        (6, 768, 12, 42.47, 13.31),
        (6, 1024, 16, 75.50, 22.47),
    ],
)
def test_attention_of_the_posters_translation_models(layers, width, heads, mha, mhe):
    args = arguments(TRANSLATION, both_sides(**{"layers": layers, "embed-dim": width, "attention-heads": heads}))
    for preset, millions in (("mha", mha), ("mhe-mul", mhe)):
        args.attention = preset
        found = parameters.count(build_model(args, 100))
        assert round(found["attention_without_biases"] / 1e6, 2) == millions
        assert sum(found["sites"].values()) == found["attention"]


@pytest.mark.parametrize(
    "architecture, vocab_size, flags, millions",
    [
        ("lowrank_transformer_lm_wiki103", 267744, [], 246.9),
        ("transformer_lm_baevski_wiki103", 267744, [], 246.9),
        ("lowrank_transformer_lm_wiki103", 267744, ["--attention", "fixedhead", "--head-dim", "256"], 314.1),
        ("lowrank_transformer_lm_wiki103", 267744, ["--attention", "fixedhead", "--head-dim", "512"], 448.4),
        ("lowrank_transformer_lm_wiki103_vanilla", 267744, [], 156.0),
        ("lowrank_transformer_lm_wiki2", 33278, [], 67.5),
        ("lowrank_transformer_lm_gbw", 793470, [], 330.8),
        ("roberta_large", 30522, ["--tokens-per-sample", "512"], 335.2),
    ],
)
def test_whole_models(architecture, vocab_size, flags, millions):
    found = counts(architecture, vocab_size, *flags)
    assert found["total"] / 1e6 == pytest.approx(millions, abs=0.05)
    assert sum(found[part] for part in ("attention", "feed_forward", "embeddings", "other")) == found["total"]


@pytest.mark.parametrize(
    "architecture, flags, extra",
    [
        ("lowrank_transformer_lm_wiki103_vanilla", ["--attention", "mixhead-a"], 384),
        ("lowrank_transformer_lm_wiki103_vanilla", ["--attention", "mixhead-b"], 3456),
        ("lowrank_transformer_lm_wiki103", ["--attention", "mixhead-a"], 1024),
        ("lowrank_transformer_lm_wiki103", ["--attention", "mixhead-b"], 17408),
        ("lowrank_transformer_lm_wiki103", ["--attention", "mixhead-a", "--head-dim", "64"], 1024),
        ("lowrank_transformer_lm_wiki103", ["--attention", "mixhead-b", "--head-dim", "64"], 9216),
        ("lowrank_transformer_lm_wiki103", ["--head-mixing", "static"], 1024),
        ("lowrank_transformer_lm_wiki103", ["--attention-activation", "sigsoftmax"], 0),
        ("transformer_lm_baevski_wiki103", [], 0),
        ("lowrank_synthesizer_lm_wiki103", ["--attention", "mixhead-b"], 17408),
        (
            "lowrank_transformer_lm_wiki103_vanilla",
            ["--attention-score", "synthesizer-random"],
            6 * (8 * 1024**2 - 2 * 513 * 512),
        ),
    ],
)
def test_parameters_over_plain_attention(architecture, flags, extra):
    assert parameters.describe(architecture, 100_000, flags)["extra"] == extra


def test_both_vectors_of_relative_positions_are_counted_beside_the_projections():
    flags = ["--task", "segment_lm", "--decoder-layers", "2", "--attention", "mixhead-b"]
    found = counts("lowrank_transformer_xl_wiki2", 100, *flags)
    projections, mixing = 5 * 410 * 410, 10 * 10 + 41 * 10
    assert found["attention_without_biases"] == found["attention"] == 2 * (projections + 2 * 410 + mixing)


def test_what_feeds_nothing_is_counted_apart():
    flags = ["--tokens-per-sample", "512"]
    data = parameters.describe("lowrank_synthesizer_lm_wiki103", 267_744, flags)
    assert (data["total"], data["unused"]) == (247_990_272, 16 * 1024 * 1025)
    assert "without unused parameters  231,196,672" in params.as_text(data)
    assert parameters.describe("transformer_lm_baevski_wiki103", 267_744, flags)["unused"] == 0


def test_an_architecture_that_asks_the_task_for_its_output_dictionary_is_counted():
    small, large = (parameters.describe("lightconv_lm", size)["embeddings"] for size in (1000, 1001))
    assert large > small


def test_fixedhead_is_compared_with_heads_of_width_over_heads():
    flags = ["--attention", "fixedhead", "--head-dim", "256"]
    extra = parameters.describe("lowrank_transformer_lm_wiki103", 267744, flags)["extra"]
    assert round(extra / 1e6, 1) == round(314.1 - 246.9, 1)


def test_extra_is_unknown_where_heads_do_not_divide_the_width():
    flags = ["--attention", "fixedhead", "--head-dim", "64", "--decoder-attention-heads", "7"]
    assert parameters.describe("lowrank_transformer_lm_wiki103", 267744, flags)["extra"] is None


def test_every_axis_is_shown_at_every_site():
    flags = ["--attention", "mqa", "--score-mixing", "static", "--value-dim", "32", "--attention-sites", "decoder"]
    axes = parameters.describe(TRANSLATION, 1000, flags)["axes"]
    assert list(axes) == ["encoder", "decoder", "cross"] and all(set(AXES) < set(of_site) for of_site in axes.values())
    sizes = {"value_dim": 32, "key_value_heads": 1, "score_mixing": "static", "class": "not classified"}
    assert axes["decoder"] == axes["encoder"] | sizes | {"projection": "multi-query"}
    assert axes["encoder"] == axes["cross"] == parameters.describe("transformer_wmt_en_de", 1000)["axes"]["encoder"]
    # the table leaves out options of other parts
    other = axes["decoder"] | {"projection": "latent", "latent_dim": 8}
    table = axes_table({"decoder": axes["decoder"], "cross": other}).splitlines()
    assert [row.split() for row in table if row.startswith("latent_dim")] == [["latent_dim", "8"]]
    assert not [row for row in table if row.startswith(("diff_version", "gate_start"))]


def test_nothing_is_allocated():
    model = build_model(arguments("lowrank_transformer_lm_gbw"), 793470)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_attention_layers_are_found_at_every_site_in_order():
    model = build_model(arguments(TRANSLATION, ["--encoder-layers", "2", "--decoder-layers", "3"]), 100)
    found = [(layer.site, layer.layer) for layer in attention_layers(model)]
    decoder = [(site, layer) for layer in range(3) for site in ("decoder", "cross")]
    assert found == [("encoder", 0), ("encoder", 1), *decoder]


def test_shared_parameters_count_once():
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.output_projection = nn.Linear(4, 10, bias=False)
    model.output_projection.weight = model.embed.weight
    model.norm = nn.LayerNorm(4)
    found = parameters.count(model)
    assert (found["total"], found["embeddings"], found["other"]) == (48, 40, 8)


def test_the_output_matrix_and_what_leads_to_the_width_are_of_embeddings():
    tied, untied = (
        parameters.count(build_model(arguments("roberta_base", flags), 1000))
        for flags in ([], ["--untie-weights-roberta"])
    )
    assert untied["embeddings"] - tied["embeddings"] == 768 * 1000 and untied["other"] == tied["other"]
    whole, low = (
        parameters.count(build_model(arguments("lowrank_transformer_lm", flags), 1000))
        for flags in ([], ["--embed-rank", "4"])
    )
    # of two untied matrices one has rank 4
    assert whole["embeddings"] - low["embeddings"] == 512 * 1000 - 4 * (512 + 1000) and whole["other"] == low["other"]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--attention mhe-mul", [56, 32]),
        ("--attention gqa --key-value-heads 2", [96, 64]),
        ("--attention mixhead-b", [128]),
        ("--attention fixedhead --head-dim 256", [128, 256]),
        ("--attention-sites encoder --attention mixhead-a", [128]),
    ],
)
def test_fair_baselines_have_equal_parameters_or_cache(flags, sizes):
    model = build_model(arguments("transformer_iwslt_de_en", flags.split()), 1000)
    found = parameters.fair_baselines("transformer_iwslt_de_en", 1000, flags.split())
    assert [row["head_dim"] for row in found] == sizes
    for row in found:
        built = build_model(arguments("transformer_iwslt_de_en", row["flags"].split()), 1000)
        total = parameters.count(built)["total"]
        assert total == row["total"] and total == pytest.approx(parameters.count(model)["total"], abs=12 * 513)
        assert all(layer.module.cached_numbers == row["cached"] for layer in attention_layers(built))
    ours = {layer.module.cached_numbers for layer in attention_layers(model) if hasattr(layer.module, "cached_numbers")}
    assert found[-1]["cached"] in ours


@pytest.mark.parametrize(
    "flags, kind",
    [
        ("--attention mha", "equal"),
        ("--attention mha --head-dim 64", "QK"),
        ("--attention mha --head-dim 8", "restricted"),
        ("--attention fixedhead --head-dim 64", "QK"),
        ("--attention gqa --key-value-heads 2", "restricted"),
        ("--attention mha --head-mixing static", "OV"),
        ("--attention mha --head-output gate --gate-start half", "OV"),
        ("--attention collaborative", "QK"),
        ("--attention collaborative --shared-dim 4", "restricted"),
        ("--attention mfa --head-dim 64", "QK"),
        ("--attention mfa --head-dim 8", "restricted"),
        ("--attention mla", "restricted"),
        ("--attention tpa", "patterns"),
        ("--attention mha --attention-activation sigsoftmax", "not classified"),
    ],
)
def test_the_class_of_a_layer_depends_on_axes_and_sizes(flags, kind):
    sizes = ["--decoder-layers", "1", "--decoder-attention-heads", "16"]
    axes = parameters.describe("transformer_lm", 100, [*sizes, *flags.split()])["axes"]
    assert axes["decoder"]["class"] == kind


def test_the_command_prints_the_class_of_each_site(capsys):
    flags = ["--attention", "xsa", "--attention-sites", "encoder,decoder"]
    assert cli.main(["params", "--arch", "transformer_iwslt_de_en", "--vocab-size", "100", *flags]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[1:] for line in printed.splitlines() if line.startswith("class  ")] == [["OV", "OV", "equal"]]
    assert "class OV: " in printed and "class equal: " in printed


def test_the_sizes_of_a_projection_are_those_that_were_built():
    assert parameters.describe("transformer_lm", 100, ["--attention", "mla"])["axes"]["decoder"]["latent_dim"] == 256
    assert parameters.describe("transformer_lm", 100, ["--attention", "lrkv"])["axes"]["decoder"]["factor_rank"] == 16


def test_a_sweep_has_every_preset(monkeypatch):
    monkeypatch.setattr(parameters, "SWEEPS", {"layers": (1,)})
    rows = parameters.sweep(TRANSLATION, 100, "layers", methods=list(PRESETS))
    found = {row["attention_kind"]: row["attention_without_biases"] for row in rows}
    assert found.keys() == PRESETS.keys() - {"gqa"}  # which needs a number of heads
    assert found["xsa"] - found["mha"] == 2 * 8
    assert found["gated-head"] - found["mha"] == 3 * 8 * 512


def test_a_sweep_over_heads_keeps_the_head_size(monkeypatch):
    monkeypatch.setattr(parameters, "SWEEPS", {"heads": (2, 4)})
    methods = ("mha", "mixhead-a", "sha")
    rows = parameters.sweep("lowrank_transformer_lm_wiki103_vanilla", 1000, "heads", methods=methods)
    found = {(row["attention_kind"], row["heads"]): row["attention_without_biases"] for row in rows}
    for heads in (2, 4):
        assert found["mha", heads] == 6 * 4 * (64 * heads) ** 2
        assert found["sha", heads] == 6 * (3 * 64 * heads * 64 + (64 * heads) ** 2)
    legend = parameters.plot_sweep(rows, "heads", "any", 8, 64).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["mha, mixhead-a", "sha"]


def test_a_sweep_keeps_the_head_size_of_each_stack_and_passes_over_axes_that_were_given(monkeypatch):
    monkeypatch.setattr(parameters, "SWEEPS", {"layers": (3,)})
    methods = ("mha", "sha", "mixhead-a", "fixedhead")
    sizes = ["--encoder-attention-heads", "4", "--decoder-attention-heads", "8", "--encoder-embed-dim", "512"]
    axes = ["--attention-projection", "single", "--head-mixing", "positionwise"]
    rows = parameters.sweep(TRANSLATION, 1000, "layers", [*sizes, *axes], methods=methods)
    found = {row["attention_kind"]: row["total"] for row in rows}
    layers = ["--encoder-layers", "3", "--decoder-layers", "3"]
    for preset in ("mha", "sha", "mixhead-a"):
        flags = [*sizes, *layers, "--attention", preset]
        assert found[preset] == parameters.describe(TRANSLATION, 1000, flags)["total"]
    flags = [*sizes, *layers, "--attention", "fixedhead", "--head-dim", "64"]
    assert found["fixedhead"] == parameters.describe(TRANSLATION, 1000, flags)["total"]


def test_a_sweep_leaves_out_sizes_that_other_flags_do_not_allow(monkeypatch):
    monkeypatch.setattr(parameters, "SWEEPS", {"heads": (2, 8)})
    flags = ["--embed-rank", "300", "--tokens-per-sample", "64"]
    chosen = {"methods": ("mha",), "task": "language_modeling"}
    rows = parameters.sweep("lowrank_transformer_lm", 1000, "heads", flags, **chosen)
    assert [row["heads"] for row in rows] == [8]


def test_a_sweep_over_head_sizes_leaves_out_what_is_refused(monkeypatch):
    monkeypatch.setattr(parameters, "SWEEPS", {"head-dim": (32, 64)})
    methods = ("el", "mqa")
    rows = parameters.sweep("lowrank_transformer_lm_wiki103_vanilla", 1000, "head-dim", methods=methods)
    assert [row["head-dim"] for row in rows if row["attention_kind"] == "el"] == [64]
    assert [row["head-dim"] for row in rows if row["attention_kind"] == "mqa"] == [32, 64]


def test_a_sweep_shows_the_methods_that_were_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(parameters, "SWEEPS", {"layers": (2,)})
    words = ["params", "--arch", "lowrank_transformer_lm", "--vocab-size", "100", "--sweep", "layers", "--json"]
    for methods, shown in (
        ([], ["mha", "xsa"]),
        (["--methods", "mla", "mha"], ["mla", "mha"]),
    ):
        assert cli.main([*words, *methods, "--attention", "xsa"]) == 0
        rows = json.loads(capsys.readouterr().out)["sweep"]["rows"]
        assert [row["attention_kind"] for row in rows] == shown
    assert cli.main([*words, "--methods", "mixhed-a"]) == 2
    assert "--methods mixhed-a: there is no such method" in (error := capsys.readouterr().err) and "mixhead-a" in error
    assert cli.main([*words[:5], "--methods", "mha"]) == 2
    assert "works only with --sweep" in capsys.readouterr().err


def test_the_command_prints_json(capsys):
    flags = ["--arch", "lowrank_transformer_iwslt_de_en", "--vocab-size", "1000", "--attention", "mixhead-a", "--json"]
    assert cli.main(["params", *flags, "--encoder-layers", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    # h 4: 16 for each of 2 encoder, 6 decoder and 6 cross layers
    assert data["extra"] == 16 * 14
    assert data["total"] == data["attention"] + data["feed_forward"] + data["embeddings"] + data["other"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--arch", "lowrank_transformer_lm_wiki104"], "Did you mean lowrank_transformer_lm_wiki103"),
        (["--arch", TRANSLATION, "--encoder-layer-count", "3"], "unrecognized arguments: --encoder-layer-count"),
        (["--arch", TRANSLATION, "--attention", "mhb"], "invalid choice: 'mhb'"),
        (["--arch", TRANSLATION, "--attention", "fixedhead"], "needs a head size"),
        (["--arch", TRANSLATION, "--encoder-attention-heads", "7"], "not divisible"),
        (["--arch", "transformer", "--encoder-attention-heads", "7"], "fairseq refuses"),
        (
            ["--arch", "s2t_transformer_s"],
            "--arch s2t_transformer_s: fairseq cannot build it from flags and a dictionary",
        ),
        (
            ["--arch", "transformer_lm_megatron"],
            "Use a text architecture that needs no more, such as transformer or transformer_lm",
        ),
        (["--arch", "hubert"], "--arch hubert: fairseq cannot build it"),
        (["--arch", "wav2vec_ctc"], "--arch wav2vec_ctc: fairseq cannot build it"),
        (["--arch", "lstm", "--attention", "mha"], "--attention: lstm"),
        (["--arch", TRANSLATION, "--task", "nonsense"], "--task nonsense: unknown. Use one of"),
    ],
)
def test_bad_input_gets_one_line(capsys, flags, message):
    assert cli.main(["params", "--vocab-size", "100", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fairseq-lowrank params: error: ") and message in error and error.count("\n") == 1


def test_a_vocabulary_smaller_than_the_special_symbols_is_refused(capsys):
    assert cli.main(["params", "--arch", TRANSLATION, "--vocab-size", "3"]) == 2
    assert "--vocab-size 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stock", "mhe", "mixhead-b"])
def test_a_checkpoint_has_as_many_parameters_as_its_tensors(name, trained, capsys):
    path = trained(name)
    assert cli.main(["params", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = checkpoints.load_model(path)[0]
    assert found["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["attention_kind"] == {"stock": "mha", "mhe": "mhe-mul"}.get(name, name)


def test_a_model_with_two_vocabularies_is_counted_with_both(old_checkpoint):
    state = checkpoints.load_state(old_checkpoint("mha-translation"))
    args = checkpoints.model_arguments(state)
    args.share_all_embeddings = args.share_decoder_input_output_embed = False
    model = build_model(args, 10, 14)
    (source, target) = (model.encoder.embed_tokens.weight.shape, model.decoder.output_projection.weight.shape)
    assert (source[0], target[0]) == (10, 14)
