import functools
import os
from types import SimpleNamespace

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


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Patch Triton's language once for each function, which its interpreter does at each call of the function."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patched = functools.cache(interpreter._patch_lang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: patched(fn) and SimpleNamespace(restore=lambda: None))
        yield


def pytest_ignore_collect(collection_path, config):
    """The kernels are tested on a GPU, or interpreted by a process of its own, see test_triton_here.py."""
    elsewhere = os.environ.get("TRITON_INTERPRET") != "1" and config.getoption("--device") == "cpu"
    return True if elsewhere and collection_path.name in ("test_triton.py", "test_tiled.py") else None
