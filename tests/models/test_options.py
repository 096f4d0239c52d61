"""The attention flags: shown by --help, refused in one line, and built into every attention layer."""

import argparse
import re

import pytest
from omegaconf import OmegaConf

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from refused import words_of_refusal
from tiny_transformer import SIZES, arguments, build, make_task

from fairseq_lowrank.attention import AttentionSpec
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.plugin.flags import FLAGS, SITES, AttentionOptions, as_namespace

ARCH, LM = "lowrank_transformer_iwslt_de_en", "lowrank_transformer_lm"


def specs(model):
    """The specs of all layers at each site."""
    layers = model.decoder.layers
    return {
        "encoder": {layer.self_attn.spec for layer in model.encoder.layers},
        "decoder": {layer.self_attn.spec for layer in layers},
        "cross": {layer.encoder_attn.spec for layer in layers},
    }


def test_help_shows_every_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        arguments(ARCH, "--help")
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for name in FLAGS:
        assert f"--{name.replace('_', '-')}" in text
    for choice in ("mixhead-b", "head-embedding-mul", "sigsoftmax", "positionwise", "reference"):
        assert choice in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--attention mixhead", "argument --attention: invalid choice: 'mixhead' (choose from"),
        ("--head-mixing a", "argument --head-mixing: invalid choice: 'a' (choose from"),
        ("--attention fixedhead", "'fixedhead' needs a head size"),
        ("--encoder-attention-heads 3", "encoder attention: embed_dim=512 is not divisible by num_heads=3"),
        ("--decoder-attention-heads 3", "decoder attention: embed_dim=512 is not divisible by num_heads=3"),
        ("--head-dim 0", "head_dim=0: expected a positive integer"),
        ("--head-dim 10000000", "head_dim=10000000, value_dim=10000000, kdim=512, vdim=512: a projection would hold"),
        ("--value-dim 10000000", "value_dim=10000000, kdim=512, vdim=512: a projection would hold"),
        ("--attention el --encoder-embed-dim 256", "projection 'el' uses the hidden states as keys"),
        ("--attention el --head-dim 64", "projection 'el' cuts the hidden states into heads"),
        (
            "--attention skv --value-dim 7",
            "projection 'shared-kv' uses the keys as values. Set value_dim",
        ),
        ("--attention gqa", "'gqa' needs a number of key and value heads"),
        (
            "--attention gqa --key-value-heads 3",
            "encoder attention: key_value_heads=3: expected a divisor of num_heads=4",
        ),
        ("--attention-sites encoder,deocder", "--attention-sites 'encoder,deocder': expected a comma-separated list"),
        ("--attention-sites ,", "--attention-sites ',': expected a comma-separated list"),
        ("--mixing-lr-scale -1", "--mixing-lr-scale -1: expected a number >= 0"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_before_data_is_read(capsys, flags, message):
    assert message in words_of_refusal(capsys, arguments, ARCH, *flags.split())


def test_attention_is_plain_mha_without_flags():
    model = build(ARCH, *SIZES)
    assert specs(model) == {site: {AttentionSpec()} for site in SITES}


def test_sizes_of_values_and_queries_are_flags():
    layers = build(ARCH, *SIZES, "--value-dim", 6, "--head-dim", 3).decoder.layers
    for layer in (layers[0].self_attn, layers[0].encoder_attn):
        assert layer.v_proj.out_features == layer.out_proj.in_features == 4 * 6
        assert layer.k_proj.out_features == layer.q_proj.out_features == 4 * 3


def test_flags_apply_at_the_chosen_sites_only():
    model = build(ARCH, *SIZES, "--attention", "mixhead-b", "--head-dim", 6, "--attention-sites", "encoder, cross")
    chosen = AttentionSpec(head_dim=6, mixing="positionwise")
    assert specs(model) == {"encoder": {chosen}, "decoder": {AttentionSpec()}, "cross": {chosen}}


def test_sizes_are_checked_at_the_chosen_sites_only():
    arguments(ARCH, "--attention", "el", "--encoder-embed-dim", 256, "--attention-sites", "encoder,decoder")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [LM, "--attention-sites", "encoder"],
            "--attention-sites encoder: this model has no such attention. Choose from dec",
        ),
        ([LM, "--attention-sites", "decoder,cross"], "--attention-sites cross: this model has no such attention"),
        ([ARCH, "--no-cross-attention", "--attention-sites", "cross"], "Choose from encoder, decoder"),
    ],
)
def test_what_the_model_would_ignore_is_refused(flags, message, capsys):
    assert message in words_of_refusal(capsys, arguments, *flags, "--attention", "mixhead-a")


@pytest.mark.parametrize(
    ("flags", "choice"),
    [
        (["--attention-score", "relative"], "--attention-score relative"),
        (["--attention", "alibi"], "--score-bias alibi"),
        (["--attention", "xsa"], "--head-output exclusive"),
    ],
)
def test_attention_that_reads_positions_refuses_cross_self_attention(flags, choice, capsys):
    words = [ARCH, "--cross-self-attention", "--attention-sites", "encoder,decoder", *flags]
    assert f"--cross-self-attention does not work with {choice}" in words_of_refusal(capsys, arguments, *words)
    assert build(ARCH, *SIZES, "--cross-self-attention", "--attention-sites", "encoder", *flags)


def test_a_flag_for_an_axis_wins_over_the_preset():
    flags = ["--attention", "mhe-mul", "--head-mixing", "static", "--attention-activation", "sigsoftmax"]
    spec = AttentionSpec(projection="head-embedding-mul", activation="sigsoftmax", mixing="static")
    assert specs(build(ARCH, *SIZES, *flags))["cross"] == {spec}
    assert AttentionOptions.from_args(
        arguments(ARCH, *flags, "--attention-projection", "single")
    ).spec == AttentionSpec(projection="single", activation="sigsoftmax", mixing="static")


def test_backend_bias_dropout_and_quantisation_noise_reach_every_layer():
    flags = ["--attention-backend", "reference", "--no-attention-bias", "--attention-dropout", 0.25]
    model = build(ARCH, *SIZES, *flags, "--quant-noise-pq", 0.1, "--quant-noise-pq-block-size", 4)
    layers = [layer.self_attn for layer in model.encoder.layers]
    layers += [attention for layer in model.decoder.layers for attention in (layer.self_attn, layer.encoder_attn)]
    for layer in layers:
        assert layer.backend == "reference"
        assert layer.dropout_module.p == 0.25
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            assert projection.bias is None
            # quant_noise leaves a forward pre-hook on what it wraps
            assert len(projection._forward_pre_hooks) == 1


def test_a_hydra_configuration_keeps_the_flags():
    args = arguments(ARCH, *SIZES, "--attention", "mixhead-a", "--head-dim", 6)
    config = OmegaConf.create({name: value for name, value in vars(args).items() if not callable(value)})
    options = AttentionOptions.from_args(as_namespace(config))
    assert options.spec == AttentionSpec(head_dim=6, mixing="static")


def test_a_misspelt_flag_in_a_hydra_configuration_is_refused():
    args = arguments("transformer_iwslt_de_en", *SIZES)
    config = OmegaConf.create({name: value for name, value in vars(args).items() if not callable(value)})
    with pytest.raises(ValueError, match=r"model\.atention: unknown. Did you mean model\.attention\?"):
        make_task().build_model(OmegaConf.merge(config, {"atention": "mixhead-b"}))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("no_attention_bias", "false"),
        ("attention_sites", ["decoder"]),
        ("attention_backend", ["sdpa"]),
        ("mixing_lr_scale", "fast"),
        ("unused_key_projection", "false"),
        ("attention", ["mha"]),
        ("head_dim", "8"),
        ("head_mixing", ["static"]),
    ],
)
def test_a_flag_of_another_type_is_refused(flag, value):
    """A hydra configuration, and --model-overrides, may hold values of any type."""
    config = argparse.Namespace(**{"attention": "mixhead-a", flag: value})
    with pytest.raises(UserError, match=re.escape(str(value))):
        AttentionOptions.from_args(config)


def test_overrides_reach_a_configuration_without_our_flags():
    """One that was saved without this package, or by a version without the flag."""
    config = OmegaConf.create(
        {"model": {"_name": "transformer_lm", "dropout": 0.1}, "task": {"_name": "language_modeling"}}
    )
    OmegaConf.set_struct(config, True)
    checkpoint_utils.overwrite_args_by_name(config, {"attention": "mixhead-b", "dropout": 0.2, "unknown": 1})
    assert config.model == {"_name": "transformer_lm", "dropout": 0.2, "attention": "mixhead-b"}
    assert config.task == {"_name": "language_modeling"}


def test_a_misspelt_override_is_refused():
    config = OmegaConf.create({"model": {"_name": "transformer_lm"}})
    with pytest.raises(UserError, match=r"'head-mixing': unknown. Did you mean 'head_mixing'\?"):
        checkpoint_utils.overwrite_args_by_name(config, {"head-mixing": "static"})
