"""Learning curves and validations, read from fairseq's own logs."""

import json
import re

import pytest

from experiments.recipes.commands import batches
from experiments.recipes.scoring import read_validation
from fairseq_lowrank.records import logs

# As fairseq 0.12 logs with --log-format json. The run was interrupted in epoch 2 and resumed from epoch 1's checkpoint.
EVENTS = [
    ("train_inner", {"epoch": 1, "update": 0.5, "loss": "9", "ppl": "512", "num_updates": "50"}),
    ("valid", {"epoch": 1, "valid_loss": "8.5", "valid_nll_loss": "8", "valid_ppl": "256", "valid_num_updates": "100"}),
    (
        "train",
        {"epoch": 1, "train_loss": "9.5", "train_wpb": "1000", "train_num_updates": "100", "train_train_wall": "100"},
    ),
    ("train_inner", {"epoch": 2, "update": 1.5, "loss": "8", "ppl": "256", "num_updates": "150"}),
    ("valid", {"epoch": 2, "valid_loss": "7", "valid_nll_loss": "6.9", "valid_ppl": "120", "valid_num_updates": "150"}),
    ("valid", {"epoch": 2, "valid_loss": "7.5", "valid_nll_loss": "7", "valid_ppl": "128", "valid_num_updates": "200"}),
    (
        "train",
        {"epoch": 2, "train_loss": "8", "train_wpb": "1100", "train_num_updates": "200", "train_train_wall": "50"},
    ),
]
# The same with fairseq's default, --log-format simple.
SIMPLE = """\
2026-01-01 00:01:00 | INFO | train_inner | epoch 001:     50 / 100 loss=9, nll_loss=9, ppl=512, wps=90, num_updates=50
2026-01-01 00:02:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.5 | nll_loss 8 | ppl 256 | wps 9e+03 | num_updates 100
2026-01-01 00:02:01 | INFO | train | epoch 001 | loss 9.5 | nll_loss 9 | ppl 512 | wps 123 | ups 2 | wpb 1000 | num_updates 100 | lr 1e-05 | train_wall 100 | wall 120
2026-01-01 00:03:30 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 7 | nll_loss 6.9 | ppl 120 | num_updates 150 | best_loss 7
2026-01-01 00:05:00 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 7.5 | nll_loss 7 | ppl 128 | num_updates 200 | best_loss 7.5
2026-01-01 00:05:01 | INFO | train | epoch 002 | loss 8 | nll_loss 7.5 | ppl 181 | wps 99 | wpb 1100 | num_updates 200 | train_wall 50 | wall 60
"""


def written(events) -> str:
    lines = [f"2026-01-01 00:00:01 | INFO | {tag} | {json.dumps(fields)}" for tag, fields in events]
    return "\n".join(["+ fairseq-train data", *lines, '2026-01-01 00:00:01 | INFO | train | {"epoch": 3, "tra'])


def of_hydra(text: str) -> str:
    """Return the text as fairseq-hydra-train logs it."""
    return re.sub(r"^(\S+ \S+) \| (\w+) \| ([\w.]+) \| ", r"[\1,123][\3][\2] - ", text, flags=re.M)


def without_heads(text: str) -> str:
    """Return the text as `--log-file` has it: without date and level, and lines several times."""
    return re.sub(r"^\S+ \S+ \| \w+ \| \w+ \| (.*)$", r"\1\n\1", text, flags=re.M)


def after_bars(text: str) -> str:
    """Return the text as a terminal gets it with --log-format tqdm."""
    bar = "epoch 001:  50%|█████     | 50/100 [00:01<00:01, 50.0it/s, loss=9, ppl=512]"
    return re.sub("^", rf"\r{bar}\r{bar}", text, flags=re.M)


LOGS = {"json": written(EVENTS), "simple": SIMPLE, "tqdm": after_bars(SIMPLE)}
LOGS |= {
    f"{name}-{change.__name__}": change(LOGS[name])
    for name in ("json", "simple")
    for change in (of_hydra, without_heads)
}


@pytest.mark.parametrize("text", LOGS.values(), ids=LOGS)
def test_a_training_log_gives_updates_speed_and_curve(tmp_path, text):
    (tmp_path / "log").write_text(text)
    run = logs.read_training_log(tmp_path / "log")
    assert run["updates"] == 200 and run["tokens_per_second"] == round((1000 * 100 + 1100 * 100) / 150)
    assert run["epochs"] == [
        {"updates": 100, "train_loss": 9.5, "valid_loss": 8.5},
        {"updates": 200, "train_loss": 8.0, "valid_loss": 7.5},
    ]
    assert run["valid_perplexity"] == 120 and run["valid_loss"] == 6.9


def test_the_updates_are_those_of_a_later_validation_too(tmp_path):
    (tmp_path / "log").write_text(written(EVENTS[:5]))
    found = logs.read_training_log(tmp_path / "log")
    assert (found["updates"], found["valid_perplexity"], len(found["epochs"])) == (150, 120, 1)
    (tmp_path / "log").write_text(written([event for event in EVENTS if event[0] == "train"]))
    found = logs.read_training_log(tmp_path / "log")
    assert (found["updates"], found["valid_perplexity"]) == (200, None)


def test_a_validation_without_a_number_hides_no_best_one(tmp_path):
    for gone, best in (("256", 120), ("120", 128)):
        (tmp_path / "log").write_text(written(EVENTS).replace(f'"valid_ppl": "{gone}"', '"valid_ppl": "nan"'))
        assert logs.read_training_log(tmp_path / "log")["valid_perplexity"] == best


def test_a_log_without_its_start_counts_epochs_with_a_known_start(tmp_path):
    text = "".join(line for line in SIMPLE.splitlines(keepends=True) if "001" not in line)
    third = text.replace("002", "003").replace("150", "250").replace("200", "300")
    (tmp_path / "log").write_text(text)
    assert logs.read_training_log(tmp_path / "log")["tokens_per_second"] is None
    (tmp_path / "log").write_text(text + third)
    assert logs.read_training_log(tmp_path / "log")["tokens_per_second"] == round(1100 * 100 / 50)
    # fairseq rounds to whole seconds
    (tmp_path / "log").write_text(
        SIMPLE.replace("train_wall 100", "train_wall 0").replace("train_wall 50", "train_wall 0")
    )
    assert logs.read_training_log(tmp_path / "log")["tokens_per_second"] is None
    continued = "x | INFO | fairseq.trainer | Loaded checkpoint a/b.pt (epoch 9 @ 60 updates)\n"
    (tmp_path / "log").write_text(continued + SIMPLE)
    assert logs.read_training_log(tmp_path / "log")["tokens_per_second"] == round(1100 * 100 / 50)


def test_a_fine_tuning_hides_an_earlier_training_of_its_log(tmp_path):
    started = "x | INFO | fairseq.trainer | Loaded checkpoint a/b.pt (epoch 9 @ 0 updates)\n"
    alone = "".join(SIMPLE.splitlines(keepends=True)[:3]).replace("num_updates 100", "num_updates 300")
    (tmp_path / "log").write_text(alone)
    expected = logs.read_training_log(tmp_path / "log")
    (tmp_path / "log").write_text(SIMPLE + started + alone)
    assert logs.read_training_log(tmp_path / "log") == expected and expected["updates"] == 300


@pytest.mark.parametrize("length", [70, 95, 110, 160])
@pytest.mark.parametrize("glued", [False, True])
def test_a_cut_line_of_a_log_is_left_out(tmp_path, length, glued):
    *first, valid, train = SIMPLE.splitlines(keepends=True)
    for cut, rest in ((valid, [valid, train]), (train, [train])):
        before = [*first, valid][: len(first) + (cut is train)]
        (tmp_path / "log").write_text("".join([*before, cut[:length], *("\n" * (not glued)), *rest]))
        found = logs.read_training_log(tmp_path / "log")
        assert found["updates"] == 200
        assert found["epochs"][0] == {"updates": 100, "train_loss": 9.5, "valid_loss": 8.5}


def test_the_curve_has_only_losses_at_the_end_of_an_epoch(tmp_path):
    within = [event for event in EVENTS if event[1].get("valid_num_updates") != "200"]
    nan = json.loads(json.dumps(EVENTS).replace('"valid_loss": "7.5"', '"valid_loss": "nan"'))
    for events in (within, nan):
        (tmp_path / "log").write_text(written(events))
        found = logs.read_training_log(tmp_path / "log")
        assert [point["valid_loss"] for point in found["epochs"]] == [8.5, None]
        assert found["valid_perplexity"] == 120


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_losses_that_are_no_finite_numbers_are_none(tmp_path, value):
    text = re.sub(r"(?<=loss\": \")[\d.]+|(?<=ppl\": \")[\d.]+", value, written(EVENTS[:3]))
    (tmp_path / "log").write_text(text)
    found = logs.read_training_log(tmp_path / "log")
    assert found["epochs"] == [{"updates": 100, "train_loss": None, "valid_loss": None}]
    assert found["valid_perplexity"] is found["valid_loss"] is None


def test_a_log_with_paths_in_another_encoding_is_read(tmp_path):
    (tmp_path / "log").write_bytes("Namespace(data='/home/ü')\n".encode("latin-1") + SIMPLE.encode())
    assert logs.read_training_log(tmp_path / "log")["updates"] == 200


def test_a_log_without_a_finished_epoch_is_refused(tmp_path):
    (tmp_path / "log").write_text(written(EVENTS[:2]))
    with pytest.raises(ValueError, match="no finished epoch"):
        logs.read_training_log(tmp_path / "log")


def test_a_validation_is_that_of_the_test_set(tmp_path):
    file, fields = tmp_path / "log", {"test_loss": "11.596", "test_ppl": "1563.79", "test_num_updates": "10"}
    file.write_text(written([("test", fields | {"test_nsp_accuracy": "60.2"})]))
    found = {"metric": "perplexity", "value": 1563.79, "next_sentence_accuracy": 60.2}
    assert read_validation(file) == found
    file.write_text(written([("test", fields)]))
    assert read_validation(file) == {"metric": "perplexity", "value": 1563.79}
    file.write_text(
        "2026-01-01 00:00:01 | INFO | test | valid on 'test' subset | loss 11.596 | ppl 1563.79 | wps 9e+03\n"
    )
    assert read_validation(file) == {"metric": "perplexity", "value": 1563.79}
    file.write_text(written([("valid", {"valid_ppl": "3"})]))
    with pytest.raises(ValueError, match=r"no perplexity\. Give the log of fairseq-validate"):
        read_validation(file)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("2026-01-01 00:00:01 | INFO | fairseq.logging.progress_bar | :      3 / 1200 wps=98", (3, 1200)),
        ("INFO:fairseq.logging.progress_bar::      2 / 3 wps=153", (2, 3)),
        ("predicting valid1: 1,003 of 1,200 batches in 10 s, about 2 s left", (1003, 1200)),
        ("2026-01-01 00:00:01 | INFO | train_inner | epoch 001:     50 / 100 loss=9, nll_loss=9", None),
        ("H-3\t-0.5\twhat : 3 / 4 is more : 1 of 2 times", None),
        ("2026-01-01 00:00:01 | INFO | fairseq_cli.generate | NOTE: 3 / 4", None),
    ],
)
def test_batches_of_fairseqs_lines_and_ours(line, found):
    assert batches(line) == found
