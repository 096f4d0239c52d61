import os

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN: what is read before it is written shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # then torch.utils.deterministic.fill_uninitialized_memory holds
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(deterministic)


def pytest_ignore_collect(collection_path, config):
    """The kernels are tested on a GPU, or interpreted by a process of its own, see test_triton_here.py."""
    elsewhere = os.environ.get("TRITON_INTERPRET") != "1" and config.getoption("--device") == "cpu"
    return True if elsewhere and collection_path.name in ("test_triton.py", "test_tiled.py") else None
