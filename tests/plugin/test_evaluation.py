"""What changes the numbers of an evaluation says so where it does, and can be switched off."""

import pytest

pytest.importorskip("fairseq")

MODEL = [
    *("--arch", "transformer", "--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
    *("--encoder-attention-heads", 2, "--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16),
    *("--decoder-attention-heads", 2, "--optimizer", "adam", "--max-update", 2, "--no-epoch-checkpoints"),
]
QUICKLY = ["--cpu", "--num-workers", 0, "--max-tokens", 600]
LEFT_OUT = "fairseq by itself would leave out {} (--required-batch-size-multiple 8)"


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


def test_sentences_that_fairseq_would_leave_out_are_evaluated_and_named(checkpoint, generate, monkeypatch):
    assert f"All 20 sentences are evaluated; {LEFT_OUT.format(4)}" in checkpoint[1]
    hypotheses, said = generate()
    assert hypotheses == 12 and f"All 12 sentences are evaluated; {LEFT_OUT.format(4)}" in said
    hypotheses, said = generate("--required-batch-size-multiple", 1)
    assert hypotheses == 12 and "would leave out" not in said
    monkeypatch.setenv("LOWRANK_STOCK_EVALUATION", "1")
    hypotheses, said = generate()
    assert hypotheses == 8 and "would leave out" not in said


def test_bfloat16_is_named_where_it_is_computed_in(generate, monkeypatch):
    words = "the model computes in bfloat16; fairseq by itself would compute in float32"
    assert words in generate("--bf16")[1]
    assert words not in generate()[1]
    monkeypatch.setenv("LOWRANK_STOCK_EVALUATION", "1")
    assert words not in generate("--bf16")[1]
