"""Language modelling on segments that follow each other: batches, fairseq's commands, resuming."""

import itertools
import re

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.tasks.segment_lm import StreamBatcher


@pytest.mark.parametrize(
    ("blocks", "rows", "workers", "expected"),
    [
        (6, 2, 1, [[0, 3], [1, 4], [2, 5]]),
        (10, 4, 1, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        (5, 1, 1, [[0], [1], [2], [3], [4]]),
        (2, 4, 1, [[0, 1]]),
        (8, 2, 2, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        (5, 2, 2, [[0, 2], [4], [1, 3], []]),
    ],
)
def test_a_batch_holds_the_next_block_of_each_stream(blocks, rows, workers, expected):
    batches = StreamBatcher(blocks, rows, workers).batches()
    assert batches == expected
    assert sorted(block for batch in batches for block in batch) == list(range(blocks))
    for worker in range(workers):
        own = batches[worker::workers]
        for earlier, later in itertools.pairwise(own):
            assert later == [block + 1 for block in earlier][: len(later)]


# fmt: off
TRAIN = [
    "--cpu", "--task", "segment_lm", "--arch", "lowrank_transformer_xl", "--decoder-layers", 2, "--decoder-embed-dim", 16,
    "--decoder-input-dim", 16, "--decoder-output-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 4,
    "--tokens-per-sample", 12, "--memory-length", 12, "--batch-size", 4, "--batch-size-valid", 3, "--optimizer", "adam", "--lr", 0.01,
    "--dropout", 0.2, "--attention-dropout", 0.1, "--seed", 3, "--num-workers", 0, "--no-progress-bar", "--clip-norm", 1,
]
# fmt: on
EPOCH = 36  # updates


@pytest.fixture
def train(fairseq_command, language_model_data, tmp_path):
    """``train(folder, *flags)``: train, and return the last checkpoint."""

    def run(folder, *flags):
        save = ["--save-dir", tmp_path / folder, "--no-epoch-checkpoints"]
        fairseq_command("train", language_model_data, *TRAIN, *save, *flags)
        return checkpoint_utils.load_checkpoint_to_cpu(tmp_path / folder / "checkpoint_last.pt")

    return run


def assert_same(state, expected):
    for part in ("model", "last_optimizer_state"):
        torch.testing.assert_close(state[part], expected[part], atol=0, rtol=0)


@pytest.mark.parametrize("flags", [[], ["--attention", "mixhead-b", "--update-freq", 2]], ids=["mha", "mixhead-b"])
def test_a_training_stopped_at_any_point_equals_the_unbroken_one(train, flags):
    updates = [EPOCH // 2 - 3, EPOCH, EPOCH + 7]
    unbroken = train("unbroken", *flags, "--max-update", updates[-1])
    for update in updates:
        stopped = train("stopped", *flags, "--max-update", update)
    assert_same(stopped, unbroken)


def test_a_training_killed_between_saves_equals_the_unbroken_one(train, monkeypatch):
    flags = ["--save-interval-updates", 5, "--max-update", 20]
    unbroken = train("unbroken", *flags)
    step = Trainer.train_step

    def killed(self, samples):
        if self.get_num_updates() == 13:
            raise KeyboardInterrupt
        return step(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train("killed", *flags)
    assert_same(train("killed", *flags), unbroken)


def test_memory_is_saved_within_an_epoch_alone(train):
    name = "SegmentLanguageModelingTask"
    within = train("run", "--max-update", 5)["extra_state"][name]
    assert within["segment"] == 5 and [tuple(part.shape) for part in within["hidden"]] == [(12, 4, 16)] * 2
    end = train("run", "--max-epoch", 1)
    assert end["extra_state"]["train_iterator"]["iterations_in_epoch"] == 0 and end["extra_state"][name] == {}


def test_memory_matters_to_what_is_resumed(train):
    unbroken = train("unbroken", "--max-update", 9)
    train("stopped", "--max-update", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fairseq_lowrank.tasks.segment_lm.SegmentLanguageModelingTask.set_checkpoint_dict", lambda *_: None
        )
        forgetful = train("stopped", "--max-update", 9)
    with pytest.raises(AssertionError):
        assert_same(forgetful, unbroken)


def perplexity(log):
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", log).group(1)), re.search(
        r"Evaluated ([\d,]+) tokens", log
    ).group(1)


def test_perplexity_with_memory_is_that_of_one_long_pass(train, fairseq_command, language_model_data, tmp_path):
    state = train("run", "--max-update", 3)
    for name, tensor in state["model"].items():
        if "self_attn" in name:
            tensor.mul_(10)  # what was seen before has to matter
    torch.save(state, tmp_path / "run" / "checkpoint_last.pt")
    # fmt: off
    evaluate = ["eval-lm", language_model_data, "--cpu", "--task", "segment_lm", "--gen-subset", "test", "--path",
                tmp_path / "run" / "checkpoint_last.pt"]
    # fmt: on
    everything = ["--model-overrides", "{'memory_length': 500, 'max_target_positions': 500}"]
    long = perplexity(fairseq_command(*evaluate, *everything, "--tokens-per-sample", 500))
    for segment in (7, 12):
        log = fairseq_command(*evaluate, *everything, "--tokens-per-sample", segment)
        assert perplexity(log) == long and "one stream of segments" in log
    short = perplexity(
        fairseq_command(*evaluate, "--tokens-per-sample", 12, "--model-overrides", "{'memory_length': 0}")
    )
    streams = perplexity(fairseq_command(*evaluate, "--tokens-per-sample", 12, "--batch-size", 3))
    assert short[1] == streams[1] == long[1]
    assert short[0] != long[0] != streams[0]


def test_it_generates(train, fairseq_command, language_model_data, tmp_path):
    train("run", "--max-update", 10, "--attention", "mixhead-b")
    # fmt: off
    log = fairseq_command(
        "generate", language_model_data, "--cpu", "--task", "segment_lm", "--path", tmp_path / "run" / "checkpoint_last.pt",
        "--gen-subset", "test", "--beam", 2, "--max-len-b", 5, "--prefix-size", 2, "--batch-size", 1,
    )
    # fmt: on
    assert re.search(r"^H-\d+\t", log, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--task", "language_modeling"],
            "--memory-length 12 needs consecutive segments. Add --task segment_lm",
        ),
        (["--sample-break-mode", "eos"], "--sample-break-mode eos: segments must be consecutive"),
    ],
)
def test_segments_that_do_not_follow_each_other_are_refused(flags, message, refusal, language_model_data, tmp_path):
    assert message in refusal("train", language_model_data, *TRAIN, *flags, "--save-dir", tmp_path, "--max-update", 1)


def test_a_context_window_is_refused_beside_memory(train, refusal, language_model_data, tmp_path):
    train("run", "--max-update", 1)
    evaluate = [language_model_data, "--cpu", "--task", "segment_lm", "--path", tmp_path / "run" / "checkpoint_last.pt"]
    line = refusal("eval-lm", *evaluate, "--tokens-per-sample", 12, "--context-window", 4)
    assert "--context-window 4: with --task segment_lm the memory is the context" in line
