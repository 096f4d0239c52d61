"""The language model: sizes of the papers' architectures, the low-rank embedding, and fairseq's commands on real text."""

import functools
import gzip
import re

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import options
from refused import words_of_refusal
from tiny_transformer import build_language_model, first_of_all, preset_flags

from fairseq_lowrank.attention import MultiheadAttention

build = functools.partial(build_language_model, "language_modeling")


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "arch, vocab_size, flags, millions",
    [
        ("wiki103", 267_744, (), 246.9),
        ("wiki103", 267_744, ("--head-dim", "256"), 314.1),
        ("wiki103", 267_744, ("--head-dim", "512"), 448.4),
        ("wiki103_vanilla", 267_744, (), 156.0),
        ("wiki2", 33_278, (), 67.5),
        ("gbw", 793_470, (), 330.8),
    ],
)
def test_architectures_have_the_papers_sizes(arch, vocab_size, flags, millions):
    assert count(build(f"lowrank_transformer_lm_{arch}", vocab_size, *flags)) / 1e6 == pytest.approx(millions, abs=0.5)


@pytest.mark.parametrize(
    "arch, flags, extra",
    [
        ("wiki103_vanilla", (), {"mixhead-a": 384, "mixhead-b": 3_456}),
        ("wiki103", (), {"mixhead-a": 1_024, "mixhead-b": 17_408}),
        ("wiki103", ("--head-dim", "64"), {"mixhead-a": 1_024, "mixhead-b": 9_216}),
    ],
)
def test_mixhead_adds_the_papers_parameters(arch, flags, extra):
    plain = count(build(f"lowrank_transformer_lm_{arch}", 70_000, *flags))
    for attention, more in extra.items():
        model = build(f"lowrank_transformer_lm_{arch}", 70_000, "--attention", attention, *flags)
        assert count(model) - plain == more


def test_the_lm1b_model_keeps_head_size_32_whatever_the_number_of_heads():
    model = build("lowrank_transformer_lm_lm1b_small", 32_000, "--decoder-attention-heads", "70")
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    assert [(layer.embed_dim, layer.num_heads, layer.head_dim) for layer in layers] == [(256, 70, 32)] * 6


def test_the_internal_width_is_free_of_the_embedding_size():
    model = build("lowrank_transformer_lm", 100, "--head-dim", "16", "--decoder-attention-heads", "3")
    layer = model.decoder.layers[0].self_attn
    assert layer.q_proj.weight.shape == (48, 512) and layer.out_proj.weight.shape == (512, 48)


def test_embed_rank_bounds_the_rank_of_the_input_embedding_and_leaves_the_output_full():
    flags = ("--decoder-embed-dim", "32", "--decoder-output-dim", "32", "--decoder-layers", "1")
    model = build("lowrank_transformer_lm", 200, "--embed-rank", "5", *flags, device="cpu")
    table, projection = model.decoder.embed_tokens.weight, model.decoder.project_in_dim.weight
    assert table.shape == (200, 5) and projection.shape == (32, 5)
    assert torch.linalg.matrix_rank(table @ projection.T) == 5
    assert model.decoder.output_projection.weight.shape == (200, 32)
    assert torch.linalg.matrix_rank(model.decoder.output_projection.weight) == 32
    full = build("lowrank_transformer_lm", 200, "--decoder-input-dim", "32", *flags)
    assert count(full) - count(model) == 200 * 32 - (200 * 5 + 5 * 32)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--embed-rank", "600"), "--embed-rank 600: expected 1 to 512"),
        (("--embed-rank", "0"), "--embed-rank 0: expected 1 to 512"),
        (
            ("--embed-rank", "8", "--share-decoder-input-output-embed"),
            "does not work with --share-decoder-input-output",
        ),
        (("--embed-rank", "8", "--adaptive-input"), "does not work with --adaptive-input"),
        (("--embed-rank", "8", "--adaptive-softmax-cutoff", "9,30"), "does not work with --adaptive-softmax-cutoff"),
        (("--attention", "fixedhead"), "needs a head size"),
        (("--decoder-attention-heads", "7"), "embed_dim=512 is not divisible by num_heads=7"),
        (("--attention", "talking-heads", "--attention-backend", "sdpa"), "cannot compute head mixing of scores"),
        (("--attention", "el", "--head-dim", "8"), "head_dim = embed_dim / num_heads = 64"),
        (("--attention-sites", "decoder,middle"), "--attention-sites 'decoder,middle'"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, message, capsys):
    assert message in words_of_refusal(capsys, build, "lowrank_transformer_lm", 100, *flags)


@pytest.fixture(scope="module")
def brown(tmp_path_factory, corpus):
    """A few hundred sentences of the Brown corpus, binarised."""
    folder = corpus("brown")
    out = tmp_path_factory.mktemp("brown")
    for split, lines in {"train": 300, "valid": 40, "test": 40}.items():
        with gzip.open(folder / f"{split}.txt.gz", "rt") as text:
            (out / split).write_text("".join(line for line, _ in zip(text, range(lines), strict=False)))
    from fairseq_cli import preprocess

    prefixes = [f"--{split}pref={out / split}" for split in ("train", "valid", "test")]
    arguments = ["--only-source", "--nwordssrc", "600", "--destdir", str(out / "bin"), *prefixes]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return out / "bin"


# fmt: off
TINY = [
    "--task", "language_modeling", "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32,
    "--decoder-attention-heads", 4, "--tokens-per-sample", 32, "--max-tokens", 256, "--optimizer", "adam", "--lr", 0.005,
    "--num-workers", 0, "--no-progress-bar", "--log-interval", 1, "--no-epoch-checkpoints", "--disable-validation",
]
ADAPTIVE = [
    "--arch", "lowrank_transformer_lm_wiki103", "--adaptive-input-cutoff", "100,300",
    "--adaptive-softmax-cutoff", "100,300", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp",
]
# fmt: on
PLAIN = ["--arch", "lowrank_transformer_lm", "--decoder-input-dim", 16, "--decoder-output-dim", 16]


@pytest.mark.parametrize("attention", first_of_all("mixhead-b", "mhe-mul", "talking-heads", "mla"))
def test_every_preset_trains_resumes_evaluates_and_samples(attention, brown, tmp_path, fairseq_command):
    family = ADAPTIVE if attention in ("mha", "mixhead-b") else PLAIN
    flags = [*TINY, *family, *preset_flags(attention, ("decoder",)), "--save-dir", tmp_path]
    fairseq_command("train", brown, *flags, "--max-update", 3)
    log = fairseq_command("train", brown, *flags, "--max-update", 6)
    assert re.search(r"Loaded checkpoint .* \(epoch 1 @ 3 updates\)", log) and "num_updates: 6" in log
    model = tmp_path / "checkpoint_last.pt"
    evaluate = ["--path", model, "--gen-subset", "test", "--tokens-per-sample", 32, "--max-tokens", 256]
    without, within = (
        fairseq_command("eval-lm", brown, *evaluate, *window) for window in ((), ("--context-window", 16))
    )
    perplexities = [float(re.search(r"Perplexity: ([\d.]+)", log).group(1)) for log in (without, within)]
    assert all(1 < perplexity < 1000 for perplexity in perplexities)
    tokens = {re.search(r"Evaluated ([\d,]+) tokens", log).group(1) for log in (without, within)}
    assert len(tokens) == 1
    sampled = fairseq_command(
        "generate", brown, "--task", "language_modeling", "--path", model, "--gen-subset", "test", "--sample-break-mode",
        "eos", "--sampling", "--sampling-topk", 10, "--beam", 1, "--max-len-b", 5, "--prefix-size", 2, "--max-tokens", 256,
        "--skip-invalid-size-inputs-valid-test",
    )  # fmt: skip
    assert re.search(r"^H-\d+\t", sampled, flags=re.MULTILINE)


def test_blocks_longer_than_the_model_are_refused_not_left_out(brown, tmp_path, fairseq_command, refusal):
    fairseq_command("train", brown, *TINY, *PLAIN, "--save-dir", tmp_path, "--max-update", 1)
    model = ["--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "test"]
    assert "--tokens-per-sample: " in refusal("eval-lm", brown, *model, "--tokens-per-sample", 64)


def test_a_low_rank_embedding_trains_and_evaluates(brown, tmp_path, fairseq_command):
    fairseq_command(
        "train", brown, *TINY, *PLAIN, "--embed-rank", 3, "--save-dir", tmp_path, "--max-update", 2,
    )  # fmt: skip
    log = fairseq_command(
        "eval-lm", brown, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "valid", "--tokens-per-sample", 32
    )
    assert "Perplexity" in log


def test_future_tokens_change_nothing_before_them_and_no_square_mask_is_kept():
    model = build(
        "lowrank_transformer_lm", 50, "--decoder-embed-dim", "16", "--decoder-layers", "2", "--attention", "mixhead-b",
        "--decoder-attention-heads", "4", device="cpu",
    ).eval()  # fmt: skip
    tokens = torch.randint(4, 50, (2, 9))
    changed = tokens.clone()
    changed[:, 6:] = 4
    torch.testing.assert_close(model(tokens)[0][:, :6], model(changed)[0][:, :6])
    assert model.decoder._future_mask.numel() == 0
