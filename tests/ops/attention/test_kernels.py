"""The kernels of the triton backend, compiled for chips that are not here: they fit, and no register is spilled."""

import json
import os
import sys
from pathlib import Path

import pytest

from fairseq_lowrank.ops import PositionwiseMixing, StaticMixing

pytest.importorskip(
    "triton", "3.6", reason="Triton has no wheel here, or is older than its compiler's interface that is used"
)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets and compiles nothing", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import kernels
import triton
from kernels import Configuration

from fairseq_lowrank.ops.attention import gpu_times, selfcheck
from fairseq_lowrank.ops.attention.tiled_launch import tile_of

# The widest of each pass; benchmarks/kernels.py compiles all.
CASES = [
    (80, "A", "softmax", ("query_gradients",)),
    (90, "A", "softmax", ("attend", "key_gradients")),
    (90, "B", "softmax", ("row_sums",)),
    (100, "none", "sigsoftmax", ("attend",)),
]


@pytest.mark.parametrize(("chip", "mixing", "activation", "names"), CASES)
def test_kernels_fit_a_chip_without_spilling(chip, mixing, activation, names):
    one = Configuration(mixing, activation, 16, 64, chip)
    found = {kernel.kernel: kernel for kernel in kernels.compiled(one, names)}
    assert list(found) == list(names)
    for kernel in found.values():
        assert kernel.fits, kernel
        assert kernel.blocks >= 1
    # as in the file: else something was changed, and benchmarks/kernels.py --triton has to compile again
    recorded = {kernel.kernel: kernel for kernel in kernels.read().get(one, ())}
    assert triton.__version__ in {known.triton for known in kernels.read()}
    assert found == {name: recorded[name] for name in names}


@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_all_seeds_of_dropout_share_one_compiled_kernel(backend):
    """Triton compiles 0, 1, multiples of 16 and 64-bit numbers apart: a training would compile again after some updates."""
    call = kernels.call_of(Configuration("A", "softmax", 2, 16, 90, dropout=True, backend=backend))
    drawn = (0, 1, 48, 2**60, 2**61 - 1, 2**62 - 2)
    seeds = [selfcheck.LAUNCHES[backend](call, seed).dropout.seed for seed in drawn]
    assert len({*seeds}) == len(seeds)
    assert all(seed % 2 == 1 and 2**32 < seed < 2**63 for seed in seeds)


def test_a_spill_is_seen(monkeypatch):
    """Twice the columns that registers hold."""
    from fairseq_lowrank.ops.attention import launch

    monkeypatch.setattr(launch, "tile_of", lambda *sizes: launch.Tile(32, 32, 64, 8, 1))
    (one,) = kernels.compiled(Configuration("A", "softmax", 16, 64, 90), ("query_gradients",))
    assert one.stack > 0 and not one.fits


def test_the_file_has_the_kernels_of_triton_and_they_spill_nothing():
    """For every chip, by each version of Triton in the file."""
    recorded = {one: found for one, found in kernels.read().items() if one.backend == "triton"}
    versions = {one.triton for one in recorded}
    assert set(recorded) == {one._replace(triton=version) for one in kernels.of_triton() for version in versions}
    for one, found in recorded.items():
        assert found and all(kernel.fits for kernel in found), one


def test_tiled_kernels_are_those_of_the_file():
    """One is compiled here. The widest of 16 heads of 64 keeps its registers in the loop."""
    plain = Configuration("A", "softmax", 16, 64, 90, padding=False, backend="tiled")
    recorded = {one: found for one, found in kernels.read().items() if one.backend == "tiled"}
    assert plain in recorded and set(recorded) <= set(kernels.of_tiled())  # the others wait to be compiled
    (found,) = kernels.compiled(plain, ("attend",))
    assert found in recorded[plain] and found.stores == found.reloads == 0
    averages = recorded[plain][0]
    assert averages.kernel == "averages" and averages.issue <= 0.1  # row statistics, with the averages of keys
    for one, some in recorded.items():
        low, high = (sum(ends) for ends in zip(*(kernels.predicted(kernel, one) for kernel in some), strict=True))
        assert 2 < low <= high < 60, one


def test_tiles_are_those_that_were_timed_and_their_sum_is_the_measured_time():
    timed = json.loads(kernels.RESULTS.with_name("gpu-tiles.json").read_text())["results"]
    rules = {
        "mixhead-a": (None, StaticMixing, "softmax"),
        "mixhead-b": (None, PositionwiseMixing, "softmax"),
        "talking-heads": (StaticMixing, StaticMixing, "softmax"),
        "sigsoftmax": (None, None, "sigsoftmax"),
    }
    passes = ("averages", "attend", "query_gradients", "key_gradients", "value_gradients")
    for name, heads in [*((name, 16) for name in rules), ("mixhead-a", 8)]:
        own = passes if name != "talking-heads" else ("statistics", "row_sums", *passes[1:])
        own = ("averages", "query_gradients", "key_gradients") if name == "sigsoftmax" else own
        total = 0.0
        for kernel in own:
            together = 1 if name == "sigsoftmax" or kernel == "averages" else heads
            tile = tile_of(kernel, together, 64, False, name == "mixhead-b" and together > 1)
            # the pass of averages is one kernel for mixhead-a and mixhead-b
            of = "mixhead-a" if kernel == "averages" and name == "mixhead-b" else name
            (found,) = (row[8] for row in timed if row[:8] == [of, heads, 8192, kernel, *tile])
            total += found
        cell = gpu_times.Cell(*rules[name], heads, 64)
        assert gpu_times.MEASURED[cell]["tiled"] == pytest.approx(total, abs=0.06)
