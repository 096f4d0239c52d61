"""One architecture of each model class of fairseq that a toy corpus can train takes one update, with its defaults."""

import pytest

pytest.importorskip("fairseq")

from fairseq import options
from fairseq_cli import preprocess

QUICKLY = ["--cpu", "--optimizer", "adam", "--max-update", 1, "--batch-size", 8, "--num-workers", 0, "--no-save"]
LAYERS = {
    "encoder": ["--encoder-layers", 1],
    "decoder": ["--decoder-layers", 1],
    "both": ["--encoder-layers", 1, "--decoder-layers", 1],
}
CONVOLUTIONS = {side: [f"--{side}-layers", "[(16, 3)]"] for side in ("encoder", "decoder")}
LEVENSHTEIN = ["--task", "translation_lev", "--criterion", "nat_loss", *LAYERS["both"]]
MASKED = [*LEVENSHTEIN, "--noise", "full_mask"]
TRANSLATION = {
    "transformer": LAYERS["both"],
    "transformer_align": LAYERS["both"],
    "lstm": [],
    "fconv": [*CONVOLUTIONS["encoder"], *CONVOLUTIONS["decoder"]],
    "fconv_self_att": [],
    "lightconv": [*LAYERS["both"], "--encoder-kernel-size-list", "[3]", "--decoder-kernel-size-list", "[3]"],
    "bart_base": LAYERS["both"],
    "multilingual_transformer": ["--task", "multilingual_translation", "--lang-pairs", "de-en", *LAYERS["both"]],
    "nonautoregressive_transformer": MASKED,
    "nacrf_transformer": [*MASKED, "--crf-beam-approx", 8],
    "iterative_nonautoregressive_transformer": MASKED,
    "cmlm_transformer": MASKED,
    "levenshtein_transformer": LEVENSHTEIN,
    "insertion_transformer": LEVENSHTEIN,
}
LANGUAGE_MODELS = {
    "transformer_lm": LAYERS["decoder"],
    "lstm_lm": [],
    "fconv_lm": CONVOLUTIONS["decoder"],
    "lightconv_lm": [*LAYERS["decoder"], "--decoder-kernel-size-list", "[3]"],
    "roberta_base": ["--task", "masked_lm", "--criterion", "masked_lm", *LAYERS["encoder"]],
}


@pytest.fixture(scope="module")
def joined_data(translation_data, tmp_path_factory):
    """A data folder (de-en) with one dictionary, which some classes demand."""
    folder = tmp_path_factory.mktemp("joined") / "data-bin"
    splits = ["--trainpref", translation_data.parent / "train", "--joined-dictionary", "--destdir", folder]
    words = ["-s", "de", "-t", "en", *splits]
    preprocess.main(options.get_preprocessing_parser().parse_args([str(word) for word in words]))
    return folder


@pytest.mark.parametrize("arch", [*TRANSLATION, *LANGUAGE_MODELS])
def test_a_class_of_models_trains(arch, joined_data, language_model_data, fairseq_command, tmp_path):
    data = joined_data if arch in TRANSLATION else language_model_data
    task = [] if arch in TRANSLATION else ["--task", "language_modeling", "--tokens-per-sample", 32]
    flags = (TRANSLATION | LANGUAGE_MODELS)[arch]
    said = fairseq_command(
        "train", data, "--arch", arch, *task, *flags, *QUICKLY, "--disable-validation", "--save-dir", tmp_path
    )
    assert "num_updates: 1" in said and "done training" in said
