"""fairseq's commands train, resume, score and translate with every kind of attention, on real sentences."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.criterions import FairseqCriterion
from tiny_transformer import first_of_all, preset_flags

from fairseq_lowrank import cli
from fairseq_lowrank.attention import PRESETS
from fairseq_lowrank.models.transformer import LowrankTransformerModel

pytestmark = pytest.mark.usefixtures("quick_starts")

REPOSITORY = Path(__file__).resolve().parent.parent
SEARCHED = ("mixhead-b", pytest.param("mhe-mul", marks=pytest.mark.grid))
ARCH = ["--arch", "lowrank_transformer_iwslt_de_en"]
TRAIN = [
    *("--encoder-layers", "2", "--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32"),
    *("--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--optimizer", "adam", "--lr", "0.005"),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "20", "--max-tokens", "600", "--cpu", "--seed", "3"),
    *("--num-workers", "0", "--no-progress-bar", "--log-format", "json", "--log-interval", "1"),
]
BLEU = [
    *("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_a": 0, "max_len_b": 12}', "--eval-bleu-remove-bpe"),
    *("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"),
]
# 42 updates in two epochs, with checkpoints after 15, 21, 30 and 42
SAVE = ["--max-epoch", "2", "--save-interval-updates", "15"]
AT_THE_END = [
    "--validate-interval",
    "99",
    "--save-interval",
    "99",
]  # epochs: a run validates and saves when it ends too
SEARCH = ["--cpu", "--beam", "3", "--max-len-a", "0", "--max-len-b", "12", "--max-tokens", "300", "--num-workers", "0"]


@pytest.fixture(scope="module")
def multi30k(corpus, tmp_path_factory):
    """A fairseq data folder: 600 image captions for training, 20 for validation, 12 for testing, 120 word types."""
    from fairseq import options
    from fairseq_cli import preprocess

    folder = tmp_path_factory.mktemp("multi30k")
    for split, name, size in (("train", "train", 600), ("valid", "val", 20), ("test", "test_2016_flickr", 12)):
        for language in ("de", "en"):
            with gzip.open(corpus("multi30k") / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                lines = [" ".join(re.findall(r"\w+|[^\w\s]", next(file).lower())) for _ in range(size)]
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    splits = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    sizes = ["--nwordssrc", "120", "--nwordstgt", "120", "--destdir", str(folder / "data-bin")]
    preprocess.main(options.get_preprocessing_parser().parse_args(["-s", "de", "-t", "en", *splits, *sizes]))
    return folder / "data-bin"


def command(name, *args, stdin=""):
    """What an installed command says, run as a user with a clone runs it."""
    done = subprocess.run(
        [Path(sys.executable).parent / f"fairseq-{name}", *map(str, args), "--user-dir", "fairseq_lowrank"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def logged(output, key):
    """The values of a key in fairseq's JSON log."""
    return [float(entry[key]) for line in re.findall(r'\{"epoch".*\}', output) if key in (entry := json.loads(line))]


def texts(output):
    """The best hypotheses, by sentence."""
    return {number: text for number, (_, text) in lines(output, "H").items()}


def lines(output, kind):
    """What fairseq-generate printed on its lines of a kind (S, T, H, D, P, A), by sentence."""
    found = re.findall(rf"^{kind}-(\d+)\t(.*)", output, re.MULTILINE)
    return {int(number): text.split("\t") for number, text in found}


@pytest.fixture(scope="module")
def trained(multi30k, tmp_path_factory):
    """``trained(preset)``: the folder of a trained model and what fairseq-train said; each is trained once."""
    runs = {}

    def train(preset):
        if preset not in runs:
            folder = tmp_path_factory.mktemp(preset)
            flags = ARCH + preset_flags(preset) if preset in PRESETS else ["--arch", preset]
            output = command("train", multi30k, *flags, *TRAIN, *BLEU, *SAVE, "--save-dir", folder)
            runs[preset] = folder, output
        return runs[preset]

    return train


@pytest.mark.parametrize("preset", SEARCHED)
def test_commands_train_with_bleu_and_generate(preset, trained, multi30k, fairseq_command):
    folder, output = trained(preset)
    assert logged(output, "valid_num_updates") == [15, 21, 30, 42]
    assert len(logged(output, "valid_bleu")) == 4
    losses = logged(output, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    generate = command if preset == "mixhead-b" else fairseq_command
    output = generate("generate", multi30k, "--path", folder / "checkpoint_best.pt", *SEARCH, "--scoring", "sacrebleu")
    assert re.search(r"Generate test with beam=3: BLEU\S* = \d", output)
    assert len(lines(output, "H")) == 12


@pytest.mark.parametrize("preset", ["mixhead-b"])
def test_every_way_of_generating(preset, trained, multi30k, fairseq_command, tmp_path):
    folder, _ = trained(preset)
    path = folder / "checkpoint_last.pt"

    def generate(*flags, model=path):
        return fairseq_command("generate", multi30k, "--path", model, *SEARCH, *flags)

    beam = texts(generate())
    assert len(beam) == 12
    assert any(beam.values())

    sampling = [texts(generate("--sampling", "--beam", 1, "--seed", seed)) for seed in (1, 1, 2)]
    assert sampling[0] == sampling[1] != sampling[2]

    # a model and itself agree; a model and an earlier one are something else
    assert texts(generate(model=f"{path}:{path}")) == beam
    assert texts(generate(model=f"{path}:{folder / 'checkpoint_1_15.pt'}")) != beam

    average = tmp_path / "average.pt"
    assert not cli.main(["average", str(folder / "checkpoint1.pt"), str(path), "--output", str(average)])
    assert len(lines(generate(model=average), "H")) == 12

    aligned = generate("--print-alignment")
    assert texts(aligned) == beam
    for number, (pairs,) in lines(aligned, "A").items():
        words = [len(lines(aligned, kind)[number][-1].split()) for kind in "SH"]
        pairs = [[int(word) for word in pair.split("-")] for pair in pairs.split()]
        assert [target for _, target in pairs] == list(range(words[1]))
        assert all(0 <= source < words[0] for source, _ in pairs)

    # scoring the references gives each word's log probability, which make up the model's loss
    scored = generate("--score-reference")
    total = sum(float(score) for scores in lines(scored, "P").values() for score in scores[0].split())
    output = fairseq_command(
        "validate",
        multi30k,
        "--task",
        "translation",
        "--path",
        path,
        "--valid-subset",
        "test",
        "--cpu",
        "--max-tokens",
        600,
    )
    words = sum(len(scores[0].split()) for scores in lines(scored, "P").values())
    loss = float(re.search(r"test.* loss (\S+)", output)[1])
    # both in bits, the loss printed with three decimals
    assert -total / words == pytest.approx(loss, abs=2e-3)


@pytest.mark.parametrize("preset", SEARCHED)
def test_interactive_and_from_pretrained_translate_like_generate(preset, trained, multi30k, fairseq_command, tmp_path):
    folder, _ = trained(preset)
    output = fairseq_command("generate", multi30k, "--path", folder / "checkpoint_last.pt", *SEARCH)
    # an unknown word is printed as <unk>, and whatever is not in the dictionary reads back as one
    sources = {number: text.replace("<unk>", f"x{number}") for number, (text,) in lines(output, "S").items()}
    expected = texts(output)
    (tmp_path / "input").write_text("".join(f"{sources[number]}\n" for number in range(12)))

    search = [multi30k, "--path", folder / "checkpoint_last.pt", *SEARCH]
    from_file = ["--input", tmp_path / "input"]
    if preset == "mixhead-b":
        output = command("interactive", *search, "--print-alignment", stdin=(tmp_path / "input").read_text())
    else:
        output = fairseq_command("interactive", *search, "--print-alignment", *from_file)
    assert texts(output) == expected
    assert all(re.fullmatch(r"(\d+-\d+ ?)*", pairs) for (pairs,) in lines(output, "A").values())
    hub = LowrankTransformerModel.from_pretrained(str(folder), "checkpoint_last.pt", str(multi30k))
    hypotheses = hub.translate([sources[number] for number in range(12)], beam=3, max_len_a=0, max_len_b=12)
    assert hypotheses == [expected[number] for number in range(12)]


@pytest.mark.parametrize("preset", SEARCHED)
def test_training_aids_of_fairseq_work_together(preset, multi30k, fairseq_command, tmp_path):
    flags = ["--checkpoint-activations", "--encoder-layerdrop", 0.3, "--decoder-layerdrop", 0.3]
    flags += ["--quant-noise-pq", 0.2, "--quant-noise-pq-block-size", 4]
    flags += ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1]
    flags += ["--max-update", 20, "--no-epoch-checkpoints", "--save-dir", tmp_path]
    output = fairseq_command("train", multi30k, *ARCH, *preset_flags(preset), *TRAIN, *flags)
    losses = logged(output, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    path = tmp_path / "checkpoint_last.pt"
    fewer = "{'encoder_layers_to_keep': '1', 'decoder_layers_to_keep': '0'}"
    output = fairseq_command("generate", multi30k, "--path", path, *SEARCH, "--model-overrides", fewer)
    assert len(lines(output, "H")) == 12


@pytest.fixture
def losses():
    """The unrounded loss of each batch that a criterion sees, as it sees it."""
    seen = []

    def note(module, args, output):
        if isinstance(module, FairseqCriterion) and module.training:
            seen.append(output[0].item() / output[1])

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    yield seen
    hook.remove()


def test_mha_follows_the_loss_of_stock_fairseq_for_forty_updates(multi30k, fairseq_command, tmp_path, losses):
    flags = [*TRAIN, "--lr", 0.001, "--dropout", 0, "--max-update", 40, "--no-save", "--disable-validation"]
    fairseq_command("train", multi30k, "--arch", "transformer_iwslt_de_en", *flags)
    stock = losses[:]
    losses.clear()
    fairseq_command("train", multi30k, *ARCH, *flags)
    assert len(stock) == len(losses) == 40
    assert stock[-1] < 0.8 * stock[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(stock), atol=1e-4, rtol=0)


@pytest.mark.parametrize("preset", [pytest.param("mha", marks=pytest.mark.grid), "mixhead-b"])
def test_a_model_trained_by_stock_fairseq_translates_the_same(preset, trained, multi30k, fairseq_command, tmp_path):
    folder, _ = trained("transformer_iwslt_de_en")
    expected = fairseq_command("generate", multi30k, "--path", folder / "checkpoint_last.pt", *SEARCH)
    flags = [*ARCH, *preset_flags(preset), *TRAIN, "--finetune-from-model", folder / "checkpoint_last.pt"]
    # an update at a learning rate of 0, for a checkpoint of the model as it was loaded
    flags += ["--lr", 0, "--lr-scheduler", "fixed", "--warmup-updates", 0, "--max-update", 1, "--disable-validation"]
    fairseq_command("train", multi30k, *flags, "--save-dir", tmp_path)
    output = fairseq_command("generate", multi30k, "--path", tmp_path / "checkpoint_last.pt", *SEARCH)
    assert texts(output) == texts(expected)
    ours, stock = ([float(score) for score, _ in lines(found, "H").values()] for found in (output, expected))
    assert ours == pytest.approx(stock, abs=1e-4)


def test_a_checkpoint_of_another_kind_of_attention_is_refused_in_one_line(trained, multi30k, tmp_path, refusal):
    path = trained("mixhead-b")[0] / "checkpoint_last.pt"
    flags = [*ARCH, *preset_flags("mha"), *TRAIN, "--finetune-from-model", path, "--save-dir", tmp_path]
    error = refusal("train", multi30k, *flags)
    assert error.startswith(f"fairseq-train: error: {path} does not fit the model: encoder.layers.0.self_attn")
    assert error.endswith("Train with --attention mixhead-b.")


@pytest.mark.parametrize("preset", first_of_all("mla", "dcmha", leave_out=("mixhead-b", "mhe-mul")))
def test_every_other_preset_trains_with_bleu_resumes_and_generates(
    preset, translation_data, fairseq_command, tmp_path, losses
):
    flags = [*ARCH, *preset_flags(preset), *TRAIN, *BLEU, *AT_THE_END, "--dropout", 0, "--no-epoch-checkpoints"]
    flags += ["--checkpoint-activations", "--save-dir", tmp_path]
    fairseq_command("train", translation_data, *flags, "--max-update", 20)
    output = fairseq_command("train", translation_data, *flags, "--max-update", 30)
    assert "@ 20 updates" in output
    assert len(losses) == 30
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert logged(output, "valid_bleu")
    path = tmp_path / "checkpoint_best.pt"
    output = fairseq_command("generate", translation_data, "--path", path, *SEARCH)
    assert len(lines(output, "H")) == 12


@pytest.mark.parametrize("preset", SEARCHED)
def test_bf16_trains_and_generates(preset, translation_data, fairseq_command, tmp_path, losses):
    flags = [*ARCH, *preset_flags(preset), *TRAIN, *AT_THE_END, "--bf16", "--dropout", 0, "--no-epoch-checkpoints"]
    fairseq_command("train", translation_data, *flags, "--max-update", 30, "--save-dir", tmp_path)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    path = tmp_path / "checkpoint_last.pt"
    output = fairseq_command("generate", translation_data, "--path", path, *SEARCH, "--bf16")
    assert len(lines(output, "H")) == 12
