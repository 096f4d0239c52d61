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
