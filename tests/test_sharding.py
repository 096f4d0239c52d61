"""Models whose parameters are split over two workers, against the same training with one."""

import json
import subprocess
from pathlib import Path

import pytest
import sharded_cases


@pytest.fixture(scope="module")
def results(tmp_path_factory, warm_python):
    """What both workers say of each case. They run all cases once, because they need seconds to start."""
    store = tmp_path_factory.mktemp("sharded") / "store"
    subprocess.run([warm_python / "python", sharded_cases.__file__, store], check=True, timeout=600)
    return [json.loads(Path(f"{store}.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.parametrize("case", sharded_cases.CASES)
def test_two_workers(results, case):
    for result in results:
        assert not result[case], result[case]
