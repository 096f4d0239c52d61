"""What changes the numbers of an evaluation says so where it does, and can be switched off."""

import re

import pytest

pytest.importorskip("fairseq")

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.repairs.evaluation import one_after_another

MODEL = [
    *("--arch", "transformer", "--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
    *("--encoder-attention-heads", 2, "--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16),
    *("--decoder-attention-heads", 2, "--optimizer", "adam", "--max-update", 2, "--no-epoch-checkpoints"),
]
QUICKLY = ["--cpu", "--num-workers", 0, "--max-tokens", 600]
LEFT_OUT = "stock fairseq would leave out {} (--required-batch-size-multiple 8)"


@pytest.fixture
def checkpoint(translation_data, fairseq_command, tmp_path):
    """A checkpoint of a stock model, and what its training said; validation has 20 sentences."""
    said = fairseq_command("train", translation_data, *MODEL, *QUICKLY, "--save-dir", tmp_path)
    return tmp_path / "checkpoint_last.pt", said


@pytest.fixture
def generate(translation_data, fairseq_command, checkpoint):
    """``generate(…)``: hypotheses of the 12 test sentences, and all that was said."""

    def run(*flags):
        search = ["--path", checkpoint[0], *QUICKLY, "--beam", 1, "--max-len-b", 3]
        said = fairseq_command("generate", translation_data, *search, *flags)
        return sum(line.startswith("H-") for line in said.splitlines()), said

    return run


def test_validation_in_training_is_fairseqs(checkpoint):
    assert "would leave out" not in checkpoint[1] and re.search(r"valid on 'valid' subset .* bsz 16\b", checkpoint[1])


def test_whole_validation_uses_and_counts_every_sentence(translation_data, fairseq_command, tmp_path, enable):
    enable("whole-validation")
    said = fairseq_command("train", translation_data, *MODEL, *QUICKLY, "--save-dir", tmp_path)
    assert f"All 20 sentences are evaluated; {LEFT_OUT.format(4)}" in said
    assert "Validation uses" not in said


def test_training_says_once_how_many_sentences_validation_leaves_out(translation_data, fairseq_command, tmp_path):
    flags = ["--save-dir", tmp_path, "--eval-bleu", "--eval-bleu-args", '{"beam": 1}', "--valid-subset", "valid,test"]
    said = fairseq_command("train", translation_data, *MODEL, *QUICKLY, *flags, "--max-update", 4)
    lines = [line for line in said.splitlines() if line.startswith("Validation uses")]
    assert [line.partition("(")[0] for line in lines] == [
        "Validation uses 16 of the 20 samples of 'valid' ",
        "Validation uses 8 of the 12 samples of 'test' ",
    ]
    assert all("--eval-bleu" in line and "LOWRANK_ENABLE=whole-validation" in line for line in lines)


def test_generate_translates_and_counts_every_sentence(generate):
    hypotheses, said = generate()
    assert hypotheses == 12 and f"All 12 sentences are evaluated; {LEFT_OUT.format(4)}" in said
    hypotheses, said = generate("--required-batch-size-multiple", 1)
    assert hypotheses == 12 and "would leave out" not in said


def test_two_shards_make_the_whole(generate, capsys):
    def hypotheses(*flags):
        return sorted(line for line in generate(*flags)[1].splitlines() if line.startswith("H-"))

    whole, shards = (
        hypotheses("--batch-size", 2),
        [hypotheses("--batch-size", 2, "--num-shards", 2, "--shard-id", shard) for shard in (0, 1)],
    )
    assert len(whole) == 12 and [len(shard) for shard in shards] == [6, 6] and sorted(shards[0] + shards[1]) == whole


def test_bfloat16_is_named_where_it_is_computed_in(generate, enable):
    words = "the model computes in bfloat16; stock fairseq would compute in float32"
    assert words not in generate("--bf16")[1]
    enable("bf16-evaluation")
    assert words in generate("--bf16")[1]
    assert words not in generate()[1]


@pytest.fixture
def validate(translation_data, fairseq_command, checkpoint):
    def run(*flags):
        return fairseq_command(
            "validate", translation_data, "--task", "translation", "--path", checkpoint[0], *QUICKLY, *flags
        )

    return run


def test_validate_says_what_it_does_differently(validate, enable):
    enable("bf16-evaluation")
    in_bfloat16 = "the model computes in bfloat16; stock fairseq would compute in float32"
    said = validate()
    assert f"All 20 sentences are evaluated; {LEFT_OUT.format(4)}" in said and in_bfloat16 not in said
    half = validate("--bf16")
    assert in_bfloat16 in half
    losses = [float(re.search(r"valid on 'valid' subset .* loss (\S+)", text)[1]) for text in (said, half)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_interactive_translation_leaves_nothing_out_by_itself_and_nothing_is_said(
    translation_data, fairseq_command, checkpoint, tmp_path
):
    text = tmp_path / "text"
    text.write_text("a\n" * 5)
    search = ["--path", checkpoint[0], "--cpu", "--beam", 1, "--max-len-b", 3, "--buffer-size", 5, "--batch-size", 5]
    said = fairseq_command("interactive", translation_data, *search, "--input", text)
    assert sum(line.startswith("H-") for line in said.splitlines()) == 5 and "would leave out" not in said


@pytest.mark.parametrize("workers", [0, 2])
def test_a_context_window_is_the_same_with_any_number_of_workers(
    workers, language_model_data, fairseq_command, tmp_path
):
    model = [
        "--arch",
        "transformer_lm",
        "--decoder-layers",
        1,
        "--decoder-embed-dim",
        16,
        "--decoder-ffn-embed-dim",
        16,
    ]
    model += ["--decoder-attention-heads", 2, "--tokens-per-sample", 32, "--optimizer", "adam", "--max-update", 20]
    save = ["--no-epoch-checkpoints", "--disable-validation", "--lr", 0.05, "--save-dir", tmp_path]
    fairseq_command("train", language_model_data, "--task", "language_modeling", *model, *QUICKLY, *save)
    evaluate = [language_model_data, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--gen-subset", "valid"]
    evaluate += ["--tokens-per-sample", 32, "--context-window", 24, "--batch-size", 1]

    def perplexity(*flags):
        said = fairseq_command("eval-lm", *evaluate, *flags)
        return re.search(r"Loss .*", said)[0], "One process reads the data, not 2 (--num-workers)" in said

    assert "would leave out" not in fairseq_command("eval-lm", *evaluate)
    (expected, _), (found, announced) = perplexity("--num-workers", 1), perplexity("--num-workers", workers)
    assert found == expected and announced == (workers > 1)


def test_shards_of_blocks_that_need_each_other_are_refused():
    with pytest.raises(UserError, match="--context-window 24"):
        one_after_another(24, num_shards=2)
