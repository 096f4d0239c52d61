"""Models of every family are pickled and copied with this package's attention."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("fairseq")

from families import FAMILIES, Family
from tiny_transformer import shake

from fairseq_lowrank.attention import MultiheadAttention

COPIES = {"pickled": lambda model: pickle.loads(pickle.dumps(model)), "copied": copy.deepcopy}


def overrides(model) -> dict[str, dict]:
    return {name: getattr(parameter, "optim_overrides", None) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("family", FAMILIES, ids=[family.arch for family in FAMILIES])
def test_a_copy_of_a_model_computes_the_same(family: Family, how):
    if how == "pickled":
        try:
            pickle.dumps(family.build())
        except pickle.PicklingError as error:
            pytest.skip(f"fairseq's own model cannot be pickled: {error}")
    model = shake(family.build("--attention", "mixhead-b", "--mixing-lr-scale", "3"))
    made, expected = COPIES[how](model), family.output(model)
    torch.testing.assert_close(family.output(made), expected)
    assert overrides(made) == overrides(model)
    for name, parameter in made.named_parameters():
        if "mixing" in name:
            assert parameter.optim_overrides["optimizer"] == {"weight_decay": 0.0, "lr_scale": 3.0}
    # a copy has its own parameters, and decoders that are bound to it
    for parameter in model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(family.output(made), expected)
    layers = [module for module in made.modules() if isinstance(module, MultiheadAttention)]
    assert layers and not {id(layer) for layer in layers} & {id(module) for module in model.modules()}
