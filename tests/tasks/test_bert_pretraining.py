"""BERT's pre-training by fairseq's commands: masked words and next sentences of the Brown corpus."""

import gzip
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from tiny_transformer import first_of_all, preset_flags

import fairseq_lowrank.plugin
from fairseq_lowrank.tasks.bert_pretraining import BertPretrainingConfig, BertPretrainingTask
from fairseq_lowrank.tools.fairseq import subject as fairseq_subject
from fairseq_lowrank.tools.measuring.measurement import measure


@pytest.fixture(scope="module")
def brown(tmp_path_factory, corpus):
    """Some of the Brown corpus, cut into documents of 20 lines, binarised."""
    folder = corpus("brown")
    out = tmp_path_factory.mktemp("brown")
    for split, lines in {"train": 300, "valid": 60}.items():
        with gzip.open(folder / f"{split}.txt.gz", "rt") as text:
            kept = [line for line, _ in zip((line for line in text if line.strip()), range(lines), strict=False)]
        (out / split).write_text("".join(line + "\n" * (number % 20 == 19) for number, line in enumerate(kept)))
    from fairseq_cli import preprocess

    prefixes = [f"--{split}pref={out / split}" for split in ("train", "valid")]
    arguments = ["--only-source", "--nwordssrc", "600", "--destdir", str(out / "bin"), *prefixes]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return out / "bin"


# fmt: off
TINY = [
    "--task", "bert_pretraining", "--criterion", "bert_pretraining", "--arch", "lowrank_bert_base",
    "--encoder-layers", 2, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 4,
    "--max-positions", 48, "--tokens-per-sample", 48, "--max-tokens", 384, "--optimizer", "adam", "--lr", 0.005,
    "--num-workers", 0, "--no-progress-bar", "--cpu", "--log-interval", 1, "--no-epoch-checkpoints",
]
# fmt: on


@pytest.fixture
def task(brown):
    made = BertPretrainingTask.setup_task(BertPretrainingConfig(data=str(brown), tokens_per_sample=48, seed=3))
    made.load_dataset("train")
    return made


def batch(task, epoch=1, size=16):
    dataset = task.dataset("train")
    dataset.set_epoch(epoch)
    return dataset.collater([dataset[index] for index in range(size)])


def test_a_batch_is_what_bert_reads(task):
    sample, dictionary = batch(task), task.dictionary
    tokens, labels, target = sample["net_input"]["src_tokens"], sample["net_input"]["segment_labels"], sample["target"]
    ends, pads = tokens.eq(dictionary.eos()), tokens.eq(dictionary.pad())
    assert tokens[:, 0].eq(dictionary.bos()).all() and ends.sum(1).eq(2).all() and tokens.size(1) <= 48
    behind_first = (ends.cumsum(1) - ends.long()).eq(1)
    assert labels.eq((behind_first & ~pads).long()).all()
    hidden = target.ne(dictionary.pad())
    assert not hidden[ends | pads].any() and not hidden[:, 0].any()  # special symbols are not to be predicted
    share = hidden.sum() / (tokens.numel() - 3 * len(tokens) - pads.sum())
    assert 0.1 < share < 0.2
    masked = tokens.eq(task.mask_index)
    assert not (masked & ~hidden).any() and 0.6 < masked.sum() / hidden.sum() < 0.95
    assert set(sample["sentence_target"].tolist()) == {0, 1}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_masks_are_new_in_every_epoch_with_any_number_of_workers(task, workers):
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=16, num_workers=workers)
    seen = []
    for _ in range(2):
        epoch = batches.next_epoch_itr(shuffle=False)
        seen.append([sample["target"] for sample in epoch])
    assert len(seen[0]) == len(seen[1]) > 1
    assert not any(torch.equal(*pair) for pair in zip(*seen, strict=True))


def test_masks_are_new_in_every_epoch_and_pairs_are_not(task):
    first, again, second = batch(task), batch(task), batch(task, epoch=2)
    assert first["target"].equal(again["target"]) and not first["target"].equal(second["target"])

    def text(sample):
        return torch.where(
            sample["target"].ne(task.dictionary.pad()), sample["target"], sample["net_input"]["src_tokens"]
        )

    assert text(first).equal(text(second))
    assert first["sentence_target"].equal(second["sentence_target"])


def test_the_loss_is_the_mean_of_masked_words_and_that_of_next_sentences(task):
    args = options.parse_args_and_arch(options.get_training_parser("bert_pretraining"), ["data", *map(str, TINY)])
    torch.manual_seed(1)
    model, sample = task.build_model(args).eval(), batch(task)
    assert model.args.segments == "pair"
    hidden = sample["target"].ne(task.dictionary.pad())
    words, extra = model(**sample["net_input"])
    mlm = -words.log_softmax(-1)[hidden].gather(1, sample["target"][hidden][:, None]).mean()
    nsp = -extra["sentence_logits"].log_softmax(-1).gather(1, sample["sentence_target"][:, None]).mean()
    for weight in (1.0, 0.5, 0.0):
        args.next_sentence_weight = weight
        criterion = task.build_criterion(args)
        loss, size, log = criterion(model, sample)
        torch.testing.assert_close(loss / size, mlm + weight * nsp)
        right = extra["sentence_logits"].argmax(1).eq(sample["sentence_target"]).sum()
        assert size == hidden.sum() and log["nsp_correct"] == right


@pytest.mark.parametrize("attention", first_of_all("mixhead-b", "talking-heads"))
def test_every_preset_learns_both_and_goes_on(attention, brown, tmp_path, fairseq_command):
    flags = [*TINY, *preset_flags(attention, ("encoder",)), "--save-dir", tmp_path]
    fairseq_command("train", brown, *flags, "--max-update", 3)
    log = fairseq_command("train", brown, *flags, "--max-update", 6)
    assert re.search(r"Loaded checkpoint .* \(epoch 1 @ 3 updates\)", log) and "num_updates: 6" in log
    said = re.search(r"valid on 'valid' subset \| loss ([\d.]+) \| mlm_loss ([\d.]+) \| nsp_loss ([\d.]+)", log)
    loss, mlm, nsp = map(float, said.groups())
    assert loss == pytest.approx(mlm + nsp, abs=0.2) and mlm < math.log2(700)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 6
    for part in ("next_sentence.bias", "pooler.bias", "lm_head.bias"):  # which start at 0
        assert state["model"][f"encoder.{part}"].any()


@pytest.mark.parametrize("flags", [[], ["--attention", "mixhead-b"]], ids=str)
def test_fairseqs_own_bert_learns_both_too(flags, brown, tmp_path, fairseq_command):
    words = [*TINY, "--arch", "bert_base", "--max-positions", 48, *flags, "--save-dir", tmp_path]
    log = fairseq_command("train", brown, *words, "--max-update", 2)
    assert "num_updates: 2" in log and re.search(r"valid on 'valid' subset \| loss [\d.]+ \| mlm_loss", log)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))["model"]
    assert state["encoder.sentence_projection_layer.weight"].any() and state["encoder.masked_lm_pooler.bias"].any()
    assert any("mixing" in name for name in state) == ("mixhead-b" in flags)


@pytest.mark.usefixtures("quick_starts")
def test_two_workers_train_as_one_process_with_twice_the_batches(brown, tmp_path, fairseq_command):
    none = [word for flag in ("", "attention-", "pooler-") for word in (f"--{flag}dropout", "0")]
    flags = [brown, *TINY, *none, "--attention", "mixhead-b", "--max-update", "8", "--max-tokens-valid", "384"]
    fairseq_command("train", *flags, "--save-dir", tmp_path / "one", "--update-freq", 2)
    launcher = [sys.executable, "-m", "fairseq_lowrank.cli", "launch", "--workers", "2", "--", "fairseq-train"]
    package = Path(fairseq_lowrank.__file__).parent
    words = [*launcher, *flags, "--save-dir", tmp_path / "two", "--user-dir", package]
    environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in words], check=True, env=environment)
    one, two = (
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name / "checkpoint_last.pt")) for name in ("one", "two")
    )
    torch.testing.assert_close(two["model"], one["model"], rtol=0, atol=1e-4)
    assert two["extra_state"]["val_loss"] == pytest.approx(one["extra_state"]["val_loss"], abs=2e-3)


def test_a_checkpoint_is_validated(brown, tmp_path, fairseq_command):
    fairseq_command("train", brown, *TINY, "--save-dir", tmp_path, "--max-update", 1)
    path = tmp_path / "checkpoint_best.pt"
    said = fairseq_command(
        "validate", brown, "--task", "bert_pretraining", "--path", path, "--valid-subset", "valid", "--max-tokens", 384, "--cpu"
    )  # fmt: skip
    found = re.search(r"valid on 'valid' subset \| loss [\d.]+ .* \| nsp_accuracy [\d.]+ \| nsp_random ([\d.]+)", said)
    task = BertPretrainingTask.setup_task(BertPretrainingConfig(data=str(brown), tokens_per_sample=48, seed=1))
    task.load_dataset("valid")
    pairs = task.dataset("valid")
    random = [pairs[index]["sentence_target"] for index in range(len(pairs))]
    assert float(found[1]) == pytest.approx(100 * sum(random) / len(random), abs=0.06)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mask-prob", 0], "--mask-prob 0: expected a number between 0 and 1"),
        (["--short-pair-prob", 2], "--short-pair-prob 2: expected a number from 0 to 1"),
        (["--leave-unmasked-prob", 0.6, "--random-token-prob", 0.6], "add up to 1.2: expected at most 1"),
        (["--tokens-per-sample", 4], "--tokens-per-sample 4: expected at least 5"),
        (["--tokens-per-sample", 60], "--tokens-per-sample 60: expected at most 48, the model's --max-positions"),
        (["--max-positions", 0], "--max-positions 0: expected a number >= 1"),
        (["--num-segment", 1], "--num-segment 1: a pair has two segments"),
        (["--layer-norm-eps", "nan"], "--layer-norm-eps nan: expected a number above 0"),
        (["--pooler-dropout", 1], "--pooler-dropout 1: expected a number from 0 to below 1"),
        (["--next-sentence-weight", -1], "--next-sentence-weight -1: expected a number >= 0"),
        (["--arch", "roberta_base"], "has no next-sentence head. Use --arch lowrank_bert_base"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_one_line(flags, message, brown, tmp_path, refusal):
    assert message in refusal("train", brown, *TINY, *flags, "--save-dir", tmp_path, "--max-update", 1)


def test_text_without_documents_is_refused(brown, tmp_path, refusal):
    from fairseq_cli import preprocess

    (tmp_path / "text").write_text("one document\nof two lines\n")
    arguments = ["--only-source", f"--trainpref={tmp_path / 'text'}", "--destdir", str(tmp_path / "bin")]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    message = refusal(
        "train", tmp_path / "bin", *TINY, "--disable-validation", "--save-dir", tmp_path, "--max-update", 1
    )
    assert "has 1 document: expected several" in message


def test_the_dictionary_ends_with_the_mask(task):
    assert task.dictionary[len(task.dictionary) - 1] == "<mask>" and isinstance(task.dictionary, Dictionary)


def test_measurement_reads_the_loss_of_masked_words(task):
    words = [str(word) for word in ["data", *TINY, "--attention", "mixhead-b"]]
    args = options.parse_args_and_arch(options.get_training_parser("bert_pretraining"), words)
    model = task.build_model(convert_namespace_to_omegaconf(args).model).eval()
    dataset = task.dataset("train")
    samples = [dataset.collater([dataset[index]]) for index in range(8)]
    subject = fairseq_subject.subject_of(model, samples, task)
    masked = samples[0]["target"].ne(task.dictionary.pad())
    with torch.no_grad():
        logits = model(**samples[0]["net_input"], masked_tokens=masked)[0]
    nats = torch.nn.functional.cross_entropy(logits, samples[0]["target"][masked], reduction="sum").item()
    assert subject.evaluate(0) == (pytest.approx(nats / math.log(2), rel=1e-5), masked.sum())
    result = measure(subject, "bert")
    assert result["metric"] == "bits per token" and set(result["cuts"]["scores"]["sites"]) == {"encoder"}
