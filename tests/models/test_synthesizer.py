"""Models of synthesizers: the paper's sizes, refusals, and fairseq's commands from training to generation."""

import re

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

import fairseq_lowrank.plugin  # noqa: F401
from fairseq_lowrank.tools.fairseq import architecture, parameters

WIKI103 = ("lowrank_synthesizer_lm_wiki103", 267_744, "--tokens-per-sample", "512")


def build(name, vocab_size, *flags):
    return architecture.build_model(architecture.parse_architecture(name, flags, task=None), vocab_size)


def count(model):
    return parameters.count(model)["total"]


DENSE = ("--attention-score", "synthesizer-dense")


def test_the_paper_s_model_has_its_size_and_what_mixhead_adds():
    assert count(build(*WIKI103)) == 247_990_272  # the paper: 248M
    for attention, more in {"mixhead-a": 1_024, "mixhead-b": 17_408}.items():
        assert count(build(*WIKI103, "--attention", attention)) - 247_990_272 == more


def test_without_the_unused_projection_of_keys_it_is_smaller():
    _, *rest = WIKI103
    flags = (*rest, *DENSE)
    kept = 16 * (1024 * 1024 + 1024)
    shared = count(build("lowrank_transformer_lm_wiki103", *flags, "--synthesizer-heads", "1"))
    assert shared == 247_990_272 - kept == 231_196_672
    # with a second layer for each head, as the Synthesizer paper has it
    assert count(build("lowrank_transformer_lm_wiki103", *flags)) == shared + 16 * 7 * (128 + 1) * 512


def test_only_the_paper_s_model_has_it_and_another_score_may_be_chosen_there():
    tiny = ("--decoder-layers", "1")
    assert build(*WIKI103, *tiny).decoder.layers[0].self_attn.k_proj is not None
    random = build(*WIKI103, *tiny, "--attention-score", "synthesizer-random").decoder.layers[0].self_attn
    assert random.k_proj is None and random.synthesizer.weight.shape == (8, 512, 512)
    assert build("lowrank_transformer_lm", 100, *tiny, *DENSE).decoder.layers[0].self_attn.k_proj is None


# fmt: off
TRAIN = [
    "--cpu", "--optimizer", "adam", "--lr", 0.01, "--seed", 3, "--num-workers", 0, "--no-progress-bar", "--max-tokens", 150,
    "--no-epoch-checkpoints", "--dropout", 0.2, "--attention-dropout", 0.2,
    "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 4,
]
TEXT = [*TRAIN, "--task", "language_modeling", "--tokens-per-sample", 12, "--save-interval-updates", 5]
PLAIN = ["--decoder-input-dim", 16, "--decoder-output-dim", 16]
PAPERS = [
    "--arch", "lowrank_synthesizer_lm_wiki103", "--adaptive-input-cutoff", "6,9", "--adaptive-softmax-cutoff", "6,9",
    "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--attention", "mixhead-b",
]
# fmt: on
LANGUAGE_MODELS = {
    "the paper's": PAPERS,
    "fairseq's own": ["--arch", "transformer_lm", *PLAIN, *DENSE, "--attention-activation", "sigsoftmax"],
    "random": [
        "--arch",
        "lowrank_transformer_lm",
        *PLAIN,
        "--attention-score",
        "synthesizer-random",
        "--attention",
        "mixhead-a",
    ],
}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_language_model_trains_resumes_evaluates_and_generates(kind, language_model_data, tmp_path, fairseq_command):
    def train(folder, *flags):
        flags = [*TEXT, *LANGUAGE_MODELS[kind], "--save-dir", tmp_path / folder, *flags]
        log = fairseq_command("train", language_model_data, *flags)
        state = checkpoint_utils.load_checkpoint_to_cpu(tmp_path / folder / "checkpoint_last.pt")
        # where fairseq keeps no number but the device
        model = {name: tensor for name, tensor in state["model"].items() if not name.endswith("_float_tensor")}
        return log, model, state["last_optimizer_state"]

    _, *unbroken = train("unbroken", "--max-update", 15)
    train("stopped", "--max-update", 10)
    log, *resumed = train("stopped", "--max-update", 15)
    assert "@ 10 updates" in log
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)

    path = ["--path", tmp_path / "unbroken" / "checkpoint_last.pt", "--gen-subset", "test", "--cpu"]
    log = fairseq_command("eval-lm", language_model_data, *path, "--context-window", 4)
    assert 1 < float(re.search(r"Perplexity: ([\d.]+)", log).group(1)) < 15
    generate = [
        "--task",
        "language_modeling",
        *path,
        "--sample-break-mode",
        "eos",
        "--prefix-size",
        2,
        "--max-len-b",
        9,
    ]
    log = fairseq_command("generate", language_model_data, *generate, "--beam", 3, "--nbest", 1)
    assert len(re.findall(r"^H-\d+\t", log, flags=re.MULTILINE)) == 12


def test_blocks_longer_than_the_training_s_are_refused(language_model_data, tmp_path, fairseq_command, refusal):
    flags = [*TEXT, *LANGUAGE_MODELS["random"], "--save-dir", tmp_path, "--max-update", 1]
    fairseq_command("train", language_model_data, *flags)
    path = ["--path", tmp_path / "checkpoint_last.pt", "--cpu", "--tokens-per-sample", 20]
    assert "--tokens-per-sample: " in refusal("eval-lm", language_model_data, *path)
    longer = [*path, "--model-overrides", "{'max_target_positions': 20}"]
    assert "was saved with max_positions=12 and is built with max_positions=20" in refusal(
        "eval-lm", language_model_data, *longer
    )


ENCODER = [
    "--encoder-layers",
    1,
    "--encoder-embed-dim",
    16,
    "--encoder-ffn-embed-dim",
    16,
    "--encoder-attention-heads",
    4,
]
POSITIONS = ["--max-source-positions", 20, "--max-target-positions", 20]


@pytest.mark.parametrize("score", ["synthesizer-dense", "synthesizer-random"])
def test_encoder_and_decoder_of_translation_have_synthesizers(score, translation_data, tmp_path, fairseq_command):
    flags = [
        *TRAIN,
        *ENCODER,
        *POSITIONS,
        "--arch",
        "transformer",
        "--attention-score",
        score,
        "--attention-sites",
        "encoder,decoder",
    ]
    fairseq_command("train", translation_data, *flags, "--max-update", 20, "--save-dir", tmp_path)
    generate = ["--path", tmp_path / "checkpoint_last.pt", "--cpu", "--beam", 3, "--max-len-b", 10]
    by_batch = [
        dict(
            re.findall(
                r"^H-(\d+)\t(.*)$", fairseq_command("generate", translation_data, *generate, *size), re.MULTILINE
            )
        )
        for size in (["--batch-size", 1], ["--batch-size", 12])
    ]
    # padding, which one sentence at a time has none of, changes no translation
    words = [{number: line.split("\t")[1] for number, line in translations.items()} for translations in by_batch]
    assert words[0] == words[1] and len(words[0]) == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*DENSE], "cross attention: score 'synthesizer-dense'"),
        (
            [*DENSE, "--attention-sites", "encoder", "--attention", "mhe-mul"],
            "projection 'head-embedding-mul' needs keys",
        ),
        (
            ["--attention-score", "synthesizer-random", "--attention", "mixhead-b"],
            "mixing 'positionwise' is computed from the queries",
        ),
        (
            ["--unused-key-projection", "--attention", "mha"],
            "unused_key_projection=True has no effect with score 'dot-product'",
        ),
        (["--synthesizer-heads", "2"], "synthesizer_heads=2 has no effect with score 'dot-product'"),
        ([*DENSE, "--attention-sites", "decoder", "--cross-self-attention"], "--cross-self-attention"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_in_one_line(flags, message, translation_data, refusal):
    assert message in refusal("train", translation_data, *TRAIN, *ENCODER, "--arch", "transformer", *flags)
