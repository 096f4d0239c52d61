"""fairseq's commands train, translate and score with other architectures than ``transformer``, on real sentences."""

import gzip
import re

import pytest

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

from fairseq_lowrank.attention import MultiheadAttention

TRAIN = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--optimizer", "adam", "--lr", "0.005"),
    *("--max-tokens", "400", "--max-update", "12", "--cpu", "--seed", "3", "--num-workers", "0", "--no-progress-bar"),
    *("--log-interval", "1", "--no-epoch-checkpoints", "--label-smoothing", "0.1", "--dropout", "0"),
]
GENERATE = ["--cpu", "--beam", "3", "--max-tokens", "300", "--num-workers", "0", "--scoring", "sacrebleu"]
KINDS = {
    "nonautoregressive_transformer": (
        ["--task", "translation_lev", "--criterion", "nat_loss", "--noise", "full_mask", "--pred-length-offset"],
        ["--task", "translation_lev", "--iter-decode-max-iter", "2", "--iter-decode-eos-penalty", "0"],
    ),
    "bart_base": (["--criterion", "label_smoothed_cross_entropy"], ["--max-len-a", "0", "--max-len-b", "12"]),
    "transformer_align": (
        [
            *("--criterion", "label_smoothed_cross_entropy_with_alignment", "--load-alignments"),
            *("--alignment-layer", "1", "--alignment-heads", "1", "--attention-sites", "encoder,decoder"),
        ],
        ["--print-alignment", "--max-len-a", "0", "--max-len-b", "12"],
    ),
}


@pytest.fixture(scope="module")
def aligned(corpus, tmp_path_factory):
    """A fairseq data folder: 120 image captions for training, 12 for validation and for testing, aligned word by word."""
    from fairseq import options
    from fairseq_cli import preprocess

    folder = tmp_path_factory.mktemp("aligned")
    for split, name, size in (("train", "train", 120), ("valid", "val", 12), ("test", "test_2016_flickr", 12)):
        sentences = {}
        for language in ("de", "en"):
            with gzip.open(corpus("multi30k") / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                sentences[language] = [re.findall(r"\w+|[^\w\s]", next(file).lower())[:12] for _ in range(size)]
            text = "".join(" ".join(words) + "\n" for words in sentences[language])
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
        pairs = zip(*sentences.values(), strict=True)
        text = "".join(" ".join(f"{i}-{i}" for i in range(min(map(len, pair)))) + "\n" for pair in pairs)
        (folder / f"{split}.align").write_text(text)
    splits = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    more = [
        "--joined-dictionary",
        "--nwordssrc",
        "120",
        "--align-suffix",
        "align",
        "--destdir",
        str(folder / "data-bin"),
    ]
    preprocess.main(options.get_preprocessing_parser().parse_args(["-s", "de", "-t", "en", *splits, *more]))
    return folder / "data-bin"


@pytest.mark.parametrize("arch", KINDS)
def test_an_architecture_trains_translates_and_scores(arch, aligned, tmp_path, fairseq_command):
    train, generate = KINDS[arch]
    log = fairseq_command(
        "train", aligned, "--arch", arch, "--attention", "mixhead-b", *TRAIN, *train, "--save-dir", tmp_path
    )
    assert "num_updates: 12" in log
    path = tmp_path / "checkpoint_last.pt"
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)])
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    mixing = [layer for layer in layers if layer.spec.mixing == "positionwise"]
    assert (len(layers), len(mixing)) == (6, 4 if "--attention-sites" in train else 6)
    assert all(layer.mixing.query_weight.any() for layer in mixing)  # it learned: its start is 0
    output = fairseq_command("generate", aligned, "--path", path, *GENERATE, *generate)
    assert len(re.findall(r"^H-\d+\t", output, re.MULTILINE)) == 12
    assert re.search(r"BLEU\S* = \d", output)
    if "--load-alignments" in train:
        losses = [float(loss) for loss in re.findall(r"alignment_loss (\S+)", log)]
        assert losses and min(losses) >= 0
    if "--print-alignment" in generate:
        assert len(re.findall(r"^A-\d+\t\d+-\d+", output, re.MULTILINE)) == 12
