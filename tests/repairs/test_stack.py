"""What mends fairseq costs nothing where it mends nothing, and says nothing."""

import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from fairseq.nan_detector import NanDetector
from tiny_transformer import SIZES, build, make_task, sentences
from torch.utils.data import DataLoader

from fairseq_lowrank.repairs import stack

ARCHITECTURES = ["transformer_iwslt_de_en", "lowrank_transformer_iwslt_de_en"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_detector_names_the_module_whose_gradient_is_not_finite(arch, caplog):
    task = make_task()
    source = sentences(task.source_dictionary, 5, 2, 4, left_pad=True)
    model = build(arch, *SIZES, task=task).train()
    with caplog.at_level("WARNING"), NanDetector(model):
        (model(source, None, source)[0].sum() * math.nan).backward()
    shape = [*source.shape, len(task.target_dictionary)]
    assert caplog.messages == [
        f"NaN detected in output of decoder.output_projection, shape: torch.Size({shape}), backward"
    ]


def test_loaders_say_nothing_of_pinned_memory():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.quieten_warnings()
        assert len(list(DataLoader([1, 2], pin_memory=True))) == 2


def test_a_process_that_ends_before_its_data_has_not_failed():
    command = """
import torch, fairseq_lowrank.plugin
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 10**6
    def __iter__(self):
        while True:
            yield torch.randn(256, 256).sort(0)

readers = [BufferedIterator(size, Batches()) for size in (1, 10**6)]  # one waits for room, one never does
for reader in readers:
    next(reader)
"""
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("batches", "sharded", "base_layers", "trained"),
    [
        (["a", {}], False, 0, ["a"]),
        ([{}, {}], False, 0, [{}]),
        (["a", {}], True, 0, ["a", {}]),
        (["a", {}], False, 1, ["a", {}]),
    ],
)
def test_worker_trains_on_its_own_batches_of_the_last_update(batches, sharded, base_layers, trained):
    trainer = SimpleNamespace(is_fsdp=sharded, cfg=SimpleNamespace(model=SimpleNamespace(base_layers=base_layers)))
    assert stack.count_every_batch(lambda trainer, samples, raise_oom: samples)(trainer, batches) == trained
