"""The kernels of the triton backend, compiled for chips that are not here: they fit, and no register is spilled."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets and compiles nothing", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import kernels

# The widest of each pass; benchmarks/kernels.py compiles all.
CASES = [
    (80, "A", ("query_gradients",)),
    (90, "A", ("attend", "key_gradients")),
    (90, "B", ("row_sums",)),
    (100, "sigsoftmax", ("attend",)),
]


@pytest.mark.parametrize(("chip", "mixing", "names"), CASES)
def test_kernels_fit_a_chip_without_spilling(chip, mixing, names):
    found = list(kernels.compiled(kernels.call_of(mixing, heads=16, dim=64), chip, names))
    assert [one.kernel for one in found] == list(names)
    for one in found:
        assert one.fits, one
        assert one.blocks >= 1


def test_a_spill_is_seen(monkeypatch):
    """Twice the columns that registers hold."""
    from fairseq_lowrank.ops.attention import launch

    monkeypatch.setattr(launch, "tile_of", lambda *sizes: launch.Tile(32, 32, 64, 8, 1))
    (one,) = kernels.compiled(kernels.call_of("A", heads=16, dim=64), 90, ("query_gradients",))
    assert one.stack > 0 and not one.fits
