import pytest

TRAINING = (
    *("--max-update", "2", "--max-tokens", "256", "--optimizer", "adam", "--lr", "0.05", "--num-workers", "0"),
    *("--no-progress-bar", "--no-epoch-checkpoints", "--no-last-checkpoints", "--cpu", "--seed", "3"),
)
SMALL = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
]
SMALL_LM = [*SMALL[6:12], "--decoder-attention-heads", "4", "--tokens-per-sample", "12"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, translation_data, language_model_data):
    """``trained(name)``: a checkpoint after two updates of ``stock``, ``mhe`` or ``mixhead-a`` (translation),
    ``mixhead-b`` (text).
    """
    import fairseq_cli.train
    from fairseq import checkpoint_utils

    import fairseq_lowrank.plugin  # noqa: F401

    flags = {
        "stock": [translation_data, "--arch", "transformer_iwslt_de_en", *SMALL],
        "mhe": [translation_data, "--arch", "lowrank_transformer_iwslt_de_en", "--attention", "mhe-mul", *SMALL],
        "mixhead-a": [
            translation_data,
            "--arch",
            "lowrank_transformer_iwslt_de_en",
            "--attention",
            "mixhead-a",
            *SMALL,
        ],
        "mixhead-b": [
            *(language_model_data, "--task", "language_modeling", "--arch", "lowrank_transformer_lm"),
            *("--attention", "mixhead-b", *SMALL_LM),
        ],
    }
    found = {}

    def train(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            vars(checkpoint_utils.save_checkpoint).pop("best", None)
            words = ["fairseq-train", *flags[name], *TRAINING, "--save-dir", folder]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", [str(word) for word in words])
                fairseq_cli.train.cli_main()
            found[name] = folder / "checkpoint_best.pt"
        return found[name]

    return train
