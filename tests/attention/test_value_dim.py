"""Values of a size of their own."""

import brute_force
import layer_checks
import pytest
import torch
from needed_axes import AXES

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.messages import StateDictMismatch

PROJECTIONS = sorted(set(AXES["projection"]) - {"shared-kv", "el"})


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("activation", AXES["activation"])
@pytest.mark.parametrize("mixing", ["none", "positionwise", "diagonal"])
@pytest.mark.parametrize("value_dim", [2, 7])
def test_every_composition_computes_its_formula(projection, activation, mixing, value_dim, make, inputs, device):
    padding = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool, device=device)
    x = inputs(4, 2, 12)
    for appended in (False, True):
        layer = make(
            projection=projection,
            activation=activation,
            mixing=mixing,
            value_dim=value_dim,
            add_bias_kv=appended,
            add_zero_attn=appended,
            self_attention=True,
        )
        layer_checks.equals_the_formula(layer, x, padding)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("recording", [True, False])
def test_decoding_equals_the_full_pass_when_beams_are_reordered(projection, recording, make, inputs, device):
    layer = make(projection=projection, value_dim=7, self_attention=True)
    state = layer_checks.follows_beams(layer, inputs(5, 3, 12), recording)
    assert {tensor.size(3) for tensor in layer.cache.get(state).tensors.values()} == {4, 7}


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
def test_every_backend(backend, make, inputs):
    layer, x = make(value_dim=7, backend=backend), inputs(5, 2, 12)
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0].cpu(), brute_force.layer(layer, x, x, x)[0])


def test_shapes():
    layer = build_attention("mha", 12, 3, head_dim=5, value_dim=2)
    assert layer.v_proj.weight.shape == (6, 12) and layer.out_proj.weight.shape == (12, 6)
    assert layer.q_proj.weight.shape == layer.k_proj.weight.shape == (15, 12)
    embeddings = build_attention("mhe-add", 12, 3, value_dim=2).head_embeddings
    assert embeddings.key.shape == (3, 4) and embeddings.value.shape == (3, 2)


def test_none_is_the_head_size():
    torch.manual_seed(0)
    plain = build_attention("mixhead-b", 12, 3, head_dim=5)
    torch.manual_seed(0)
    layer = build_attention("mixhead-b", 12, 3, head_dim=5, value_dim=5)
    assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), plain.parameters(), strict=True))
    layer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_dim": 0}, "value_dim=0: expected a positive integer"),
        ({"value_dim": 2.0}, "value_dim=2.0: expected a positive integer"),
        ({"value_dim": 10**11}, "value_dim=100000000000.*expected sizes that make at most"),
        (
            {"preset": "skv", "value_dim": 5},
            "value_dim=5: projection 'shared-kv' uses the keys as values. Set value_dim = head_dim = 4",
        ),
        (
            {"preset": "el", "value_dim": 5},
            "value_dim=5: projection 'el' uses the keys as values. Set value_dim = head_dim",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(**{"preset": "mha", "embed_dim": 12, "num_heads": 3} | options)
    build_attention("skv", 12, 3, value_dim=4)


def test_a_state_says_its_value_size(make):
    layer = make(value_dim=7)
    assert layer.state_dict()._metadata[""]["attention"]["value_dim"] == 7
    with pytest.raises(StateDictMismatch) as error:
        make().load_state_dict(layer.state_dict())
    assert (error.value.saved, error.value.current) == ({"value_dim": 7}, {"value_dim": 4})
    # states from before there was a choice
    state = make().state_dict()
    del state._metadata[""]["attention"]["value_dim"]
    make().load_state_dict(state)
