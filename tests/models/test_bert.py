"""BERT: the papers' sizes, token types, heads, and fairseq's own pre-training and classification tasks with it."""

import gzip
import re

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, options
from refused import words_of_refusal
from tiny_transformer import make_task, preset_flags, shake

from fairseq_lowrank.attention import MultiheadAttention
from fairseq_lowrank.tasks.span_head import add_span_head
from fairseq_lowrank.tools.fairseq import architecture

SIZES = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "4", "--max-positions", "48"),
]


def build(*flags, arch="lowrank_bert_base", task="sentence_prediction"):
    args = options.parse_args_and_arch(
        options.get_training_parser(task), ["data", "--task", task, "--arch", arch, *SIZES, *map(str, flags)]
    )
    torch.manual_seed(1)
    return architecture.ARCH_MODEL_REGISTRY[arch].build_model(args, make_task()).eval()


@pytest.mark.parametrize(
    "arch, flags, millions",
    [
        ("lowrank_bert_large", (), 336.2),
        ("lowrank_bert_fixed", (), 167.7),
        ("lowrank_bert_fixed", ("--encoder-attention-heads", "12"), 192.9),
        ("lowrank_bert_fixed", ("--encoder-attention-heads", "16"), 218.1),
        ("lowrank_bert_fixed", ("--encoder-attention-heads", "32"), 318.9),
        ("lowrank_bert_fixed", ("--head-dim", "32"), 129.9),
        ("lowrank_bert_fixed", ("--head-dim", "64"), 142.5),
        ("lowrank_bert_fixed", ("--head-dim", "256"), 218.1),
        ("roberta_large", ("--attention", "mha", "--tokens-per-sample", "512"), 335.2),
        (
            "roberta_large",
            (
                *("--attention", "fixedhead", "--head-dim", "128", "--tokens-per-sample", "512"),
                *("--encoder-embed-dim", "512", "--encoder-attention-heads", "8"),
            ),
            167.4,
        ),
    ],
)
def test_architectures_have_the_papers_sizes(arch, flags, millions):
    model = architecture.build_model(architecture.parse_architecture(arch, flags), 30_522)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_base_is_the_published_model_and_two_rows_of_positions():
    """110,106,428 is transformers' count of BertForPreTraining; fairseq's positions begin behind the number of the padding."""
    model = architecture.build_model(architecture.parse_architecture("lowrank_bert_base"), 30_522)
    assert sum(parameter.numel() for parameter in model.parameters()) == 110_106_428 + 2 * 768


@pytest.mark.parametrize("attention, extra", [("mixhead-a", 12 * 144), ("mixhead-b", 12 * (144 + 64 * 12))])
def test_mixhead_adds_its_matrices_to_bert_base(attention, extra):
    plain, mixed = (
        sum(
            p.numel()
            for p in architecture.build_model(
                architecture.parse_architecture("lowrank_bert_base", flags), 100
            ).parameters()
        )
        for flags in ((), ("--attention", attention))
    )
    assert mixed - plain == extra


PAIR = torch.tensor([[0, 5, 6, 2, 7, 8, 2], [0, 5, 2, 7, 2, 1, 1], [0, 5, 6, 7, 8, 9, 2]])
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("flags, types", [((), TYPES), (("--segments", "one"), 0 * TYPES)])
def test_token_types_that_no_task_gives_are_those_of_a_pair_or_of_one_segment(flags, types):
    model = shake(build(*flags))
    expected = model(PAIR, segment_labels=types)[0]
    assert model(PAIR)[0].equal(expected)
    assert not model(PAIR, segment_labels=1 - types)[0].isclose(expected).all(dim=2).any()


def test_a_model_of_one_token_type_takes_pairs():
    assert build("--num-segment", 1)(PAIR)[0].isfinite().all()


def test_pooled_output_and_sentence_logits_are_read_off_the_first_token():
    model = shake(build())
    encoder = model.encoder
    logits, extra = model(PAIR)
    features, _ = model(PAIR, features_only=True)
    assert logits.shape == (3, 7, len(encoder.dictionary)) and features.shape == (3, 7, 16)
    pooled = torch.tanh(features[:, 0] @ encoder.pooler.weight.T + encoder.pooler.bias)
    torch.testing.assert_close(extra["pooled_output"], pooled)
    expected = pooled @ encoder.next_sentence.weight.T + encoder.next_sentence.bias
    torch.testing.assert_close(extra["sentence_logits"], expected)
    masked = torch.zeros_like(PAIR, dtype=torch.bool)
    masked[0, 2] = masked[2, 4] = True
    torch.testing.assert_close(model(PAIR, masked_tokens=masked)[0], logits[masked])


def test_embeddings_of_tokens_may_be_given_as_to_roberta():
    encoder = shake(build()).encoder
    given = encoder.sentence_encoder.embed_tokens(PAIR)
    plain, same, other = (
        encoder.extract_features(PAIR, token_embeddings=one)[0]
        for one in (None, given, given + torch.ones(16).cumsum(0))
    )
    assert same.equal(plain) and not other.isclose(plain).all(dim=2).any()


@pytest.mark.parametrize("arch", ["lowrank_bert_base", "roberta_base"])
def test_a_model_of_questions_goes_on_with_another_task(arch, caplog):
    asked = add_span_head(shake(build(arch=arch)), 16)
    other = build(arch=arch)
    other.load_state_dict(dict(asked.state_dict()), strict=True)
    assert "the checkpoint's head for questions is not loaded" in caplog.text
    for name, tensor in other.state_dict().items():
        assert tensor.equal(asked.state_dict()[name]), name
    again = add_span_head(build(arch=arch), 16)
    again.load_state_dict(dict(asked.state_dict()), strict=True)
    assert again.span_head.out_proj.weight.equal(asked.span_head.out_proj.weight)


def test_padding_changes_nothing():
    model = shake(build())
    alone = model(PAIR[1:2, :5])
    torch.testing.assert_close(model(PAIR)[0][1, :5], alone[0][0])
    torch.testing.assert_close(model(PAIR)[1]["pooled_output"][1], alone[1]["pooled_output"][0])


def test_a_classification_head_has_the_pooler_of_the_checkpoint_it_begins_from():
    pretrained, tuned = shake(build()), build()
    tuned.register_classification_head("polarity", num_classes=3)
    tuned.eval().load_state_dict(dict(pretrained.state_dict()), strict=True)
    head = tuned.classification_heads["polarity"]
    assert head.dense is tuned.encoder.pooler and head.dense.weight.equal(pretrained.encoder.pooler.weight)
    pooled = pretrained(PAIR)[1]["pooled_output"]
    expected = pooled @ head.out_proj.weight.T + head.out_proj.bias
    torch.testing.assert_close(tuned(PAIR, classification_head_name="polarity")[0], expected)
    again = build("--load-checkpoint-heads")
    again.load_state_dict(dict(shake(tuned).state_dict()), strict=True)
    outputs = (model(PAIR, classification_head_name="polarity")[0] for model in (again.eval(), tuned))
    torch.testing.assert_close(*outputs)


def test_a_classification_head_has_quantisation_noise_too():
    model = build("--quant-noise-pq", "0.5", "--quant-noise-pq-block-size", "4")
    model.register_classification_head("polarity", num_classes=4)
    project = model.train().classification_heads["polarity"].out_proj
    weight = project.weight.detach().clone()
    project(torch.ones(1, 16))
    assert project.weight.ne(weight).any() and project.weight.eq(0).any()


def test_a_head_of_another_inner_size_is_refused():
    with pytest.raises(ValueError, match="classification head polarity: its inner size is 8"):
        build().register_classification_head("polarity", num_classes=2, inner_dim=8)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="49 tokens: expected at most 48"):
        build()(torch.full((1, 49), 5))


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--num-segment", "0"), "--num-segment 0: expected a number >= 1"),
        (("--max-positions", "0"), "--max-positions 0: expected a number >= 1"),
        (("--pooler-dropout", "1"), "--pooler-dropout 1: expected a number from 0 to below 1"),
        (("--layer-norm-eps", "0"), "--layer-norm-eps 0: expected a number above 0"),
        (("--layer-norm-eps", "nan"), "--layer-norm-eps nan: expected a number above 0"),
        (("--spectral-norm-classification-head",), "fairseq cannot load such a head again"),
        (("--segments", "three"), "--segments: invalid choice: 'three'"),
        (("--encoder-attention-heads", "5"), "not divisible by num_heads=5"),
        (("--attention-sites", "decoder"), "this model has no such attention. Choose from encoder"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, message, capsys):
    assert message in words_of_refusal(capsys, build, *flags)


def test_layer_norms_have_the_published_epsilon():
    norms = [module for module in build().modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 6 and {norm.eps for norm in norms} == {1e-12}
    assert {m.eps for m in build("--layer-norm-eps", "1e-5").modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-5}


@pytest.fixture(scope="module")
def brown(tmp_path_factory, corpus):
    """A few hundred sentences of the Brown corpus, binarised."""
    folder = corpus("brown")
    out = tmp_path_factory.mktemp("brown")
    for split, lines in {"train": 300, "valid": 60}.items():
        with gzip.open(folder / f"{split}.txt.gz", "rt") as text:
            (out / split).write_text("".join(line for line, _ in zip(text, range(lines), strict=False)))
    from fairseq_cli import preprocess

    prefixes = [f"--{split}pref={out / split}" for split in ("train", "valid")]
    arguments = ["--only-source", "--nwordssrc", "600", "--destdir", str(out / "bin"), *prefixes]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return out / "bin"


# fmt: off
TINY = [
    *SIZES, "--max-tokens", 384, "--optimizer", "adam", "--lr", 0.005, "--num-workers", 0, "--no-progress-bar", "--cpu",
    "--log-interval", 1, "--no-epoch-checkpoints", "--tokens-per-sample", 48,
]
# fmt: on


# Every preset is pre-trained in tests/tasks/test_bert_pretraining.py.
@pytest.mark.parametrize("attention", ["mha", "mixhead-b"])
def test_masked_words_alone_are_learned_by_the_task_of_fairseq(attention, brown, tmp_path, fairseq_command):
    flags = [
        "--arch",
        "lowrank_bert_base",
        *TINY,
        *preset_flags(attention),
        "--task",
        "masked_lm",
        "--criterion",
        "masked_lm",
    ]
    flags += ["--save-dir", tmp_path]
    fairseq_command("train", brown, *flags, "--max-update", 3)
    log = fairseq_command("train", brown, *flags, "--max-update", 6)
    assert re.search(r"Loaded checkpoint .* \(epoch 1 @ 3 updates\)", log) and "num_updates: 6" in log
    assert re.search(r"valid on 'valid' subset \| loss [\d.]+", log)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_best.pt")])
    assert model.args.segments == "one"
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    assert len(layers) == 2
