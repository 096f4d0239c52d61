"""Parameters that an optimizer treats in a way of their own."""

from torch import Tensor, nn

OURS = "under_any_optimizer"
"""What marks this package's ``optim_overrides``: fairseq's own models have some that its composite optimizer alone reads."""


def undecayed(weight: Tensor) -> nn.Parameter:
    """A parameter exempt from weight decay, which would pull it towards 0."""
    parameter = nn.Parameter(weight)
    parameter.optim_overrides = {"optimizer": {"weight_decay": 0.0}, OURS: True}
    return parameter
