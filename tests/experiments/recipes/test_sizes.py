"""How large the models of a recipe are."""

import pytest

from experiments.recipes import sizes
from experiments.recipes.recipe import Run


@pytest.fixture
def run(tmp_path):
    """``run(corpus, flags)``: a run whose corpus is not prepared."""

    def make(corpus: str, flags: str) -> Run:
        return Run("row", 1, corpus, tuple(flags.split()), tmp_path / corpus, tmp_path / "runs", tmp_path)

    return make


def test_a_vocabulary_of_pieces_is_known_before_its_corpus_is_prepared(run, tmp_path):
    model = run("lm1b-all-heldout-bpe32000", "")
    assert sizes.vocab_size(model) == 32008  # 31,999 pieces, 4 special symbols, made up to a multiple of 8
    (model.data / "bin").mkdir(parents=True)
    (model.data / "bin" / "dict.txt").write_text("a 1\nb 1\n")
    assert sizes.vocab_size(model) == 6


def test_a_vocabulary_of_words_is_not(run):
    with pytest.raises(ValueError, match="size of the vocabulary is unknown"):
        sizes.vocab_size(run("lm1b", ""))


def test_a_model_is_counted_with_and_without_its_embeddings(run):
    flags = "--arch lowrank_transformer_lm --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32"
    tied = "--share-decoder-input-output-embed --lr 0.1"
    model = run(
        "lm1b-bpe101", f"{flags} --decoder-input-dim 16 --decoder-output-dim 16 --decoder-attention-heads 4 {tied}"
    )
    header, line = sizes.lines([model])
    attention, other = 4 * 16 * 16 + 4 * 16, 2 * 16 * 32 + 32 + 16 + 2 * 2 * 16  # projections; feed-forward and norms
    numbers = (104 * 16 + 2 * (attention + other), 2 * (attention + other), 2 * attention)
    assert line.split() == ["row", *(f"{number:,}" for number in numbers)]
    assert header.split() == ["parameters", "no", "embeddings", "attention"]
