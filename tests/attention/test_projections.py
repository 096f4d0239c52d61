"""A projection is a class: one made here, with one tensor for keys *and* values, needs nothing from the package."""

import brute_force
import layer_checks
import pytest
import torch
from torch import nn

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.messages import StateDictMismatch
from fairseq_lowrank.parts import PARTS
from fairseq_lowrank.parts.projection import AttentionInputs, Projection, split_heads

RANK, HEADS = 5, 3


class Latent(Projection):
    """c = y W_c of RANK numbers is all that is cached; k_i = c W^k_i and v_i = c W^v_i are never made.

    Both are absorbed: q_i is multiplied by W^k_i, and W^v_i is applied to the average of c.
    """

    name = "own-latent"

    def __init__(self, config):
        super().__init__(config)
        self.state_heads, self.state_sizes = 1, {"latent": RANK}

    def build_projections(self, linear):
        config = self.config
        return {
            "k_proj": linear(config.kdim, RANK),
            "v_proj": None,
            "q_proj": linear(config.embed_dim, config.num_heads * config.head_dim),
        }

    def build_extra_parameters(self):
        return {
            "key_up": nn.Parameter(torch.randn(self.config.num_heads, RANK, self.config.head_dim)),
            "value_up": nn.Parameter(torch.randn(self.config.num_heads, RANK, self.config.value_dim)),
        }

    def project_key_value(self, layer, key, value):
        return {"latent": split_heads(layer.k_proj(key), RANK)}

    def attention_inputs(self, layer, q, states, **needs):
        absorbed = torch.einsum("bhtd,hrd->bhtr", q, layer.key_up)
        return AttentionInputs(absorbed, states["latent"], states["latent"])

    def finalize_heads(self, layer, heads, call):
        return torch.einsum("bhtr,hrd->bhtd", heads, layer.value_up)

    def expand_values(self, layer, states):
        return torch.einsum("bgsr,hrd->bhsd", states["latent"], layer.value_up)


@pytest.fixture
def latent(make, monkeypatch):
    monkeypatch.setitem(PARTS["projection"], "own-latent", Latent)
    return lambda **options: make(projection="own-latent", **options)


def expected(layer, x, hidden):
    """Keys and values of every head, made in full."""
    q = split_heads(layer.q_proj(x), layer.head_dim)
    c = x.transpose(0, 1) @ layer.k_proj.weight.t() + layer.k_proj.bias
    if layer.bias_k is not None:
        c = torch.cat((c, layer.bias_k.expand(c.size(0), 1, -1), torch.zeros_like(c[:, :1])), dim=1)
        hidden = nn.functional.pad(hidden, (0, 2))
    k, v = (torch.einsum("bsr,hrd->bhsd", c, up) for up in (layer.key_up, layer.value_up))
    mixing = layer.state_dict().get("mixing.weight")
    if "mixing.query_weight" in layer.state_dict():
        mixing = brute_force.mixing_matrix(q, layer.mixing.query_weight, mixing)
    heads, weights, scores = brute_force.attend(
        *(tensor.detach() for tensor in (q, k, v)),
        scale=layer.head_dim**-0.5,
        activation=layer.spec.activation,
        hidden=hidden.expand(x.size(1), HEADS, x.size(0), -1),
        mixing=mixing,
    )
    return layer.out_proj(heads.permute(2, 0, 1, 3).flatten(2)), weights, scores, v


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("mixing", ["none", "static", "positionwise", "diagonal"])
@pytest.mark.parametrize("value_dim", [None, 2])
def test_one_shared_key_and_value_of_another_size(activation, mixing, value_dim, latent, inputs):
    x = inputs(4, 2, 12).cpu()
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for appended in (False, True):
        options = {"add_bias_kv": appended, "add_zero_attn": appended}
        layer = latent(activation=activation, mixing=mixing, value_dim=value_dim, **options).cpu()
        output, weights, *before = expected(layer, x, future)
        found = layer(x, x, x, attn_mask=CAUSAL, need_head_weights=True)
        torch.testing.assert_close(found, (output, weights.transpose(0, 1)))
        torch.testing.assert_close(layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0], output)
        found = layer(x, x, x, attn_mask=CAUSAL, before_softmax=True)
        torch.testing.assert_close(found, tuple(tensor.flatten(0, 1) for tensor in before))


@pytest.mark.parametrize("recording", [True, False])
def test_decoding_keeps_one_named_tensor(recording, latent, inputs, device):
    layer = latent(mixing="positionwise", self_attention=True)
    state = layer_checks.follows_beams(layer, inputs(5, 3, 12), recording)
    assert {name: tensor.shape for name, tensor in layer.cache.get(state).tensors.items()} == {
        "latent": (3, 1, 5, RANK)
    }


def test_it_learns_and_its_state_says_what_it_is(latent, inputs):
    layer, x = latent(), inputs(4, 2, 12)
    layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in layer.named_parameters() if name != "k_proj.bias")
    latent().load_state_dict(layer.state_dict())
    with pytest.raises(StateDictMismatch) as error:
        build_attention("mha", 12, HEADS, dtype=torch.float64).load_state_dict(layer.state_dict())
    assert (error.value.saved["projection"], error.value.current["projection"]) == ("own-latent", "independent")


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_a_structured_map_can_be_the_identity_for_every_number_of_blocks(blocks):
    layer = build_attention("structured", 16, 2, blocks=blocks, bias=False)
    first, second = layer.query_first, layer.query_second
    rows = torch.eye(16 // blocks).repeat(1, 2)
    with torch.no_grad():
        first.copy_(rows.expand_as(first))
        second.copy_(torch.eye(blocks).expand_as(second))
    x = torch.randn(3, 2, 16)
    query = layer.projection.project_query(layer, x)
    expected = torch.nn.functional.rms_norm(x, (16,)) * (layer.head_dim / 16) ** 0.5
    torch.testing.assert_close(query, expected.transpose(0, 1).unsqueeze(1).expand_as(query))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["mha", "sha", "mqa", "mixhead-a"])
def test_layers_with_quantised_projections_compute(preset, make, inputs):
    layer, x = make(preset, self_attention=True).cpu().float(), inputs(5, 2, 12).cpu().float()
    expected, _ = layer(x, x, x, need_weights=False)
    quantised = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)
    error = quantised(x, x, x, need_weights=False)[0] - expected
    assert 0 < error.norm() < 0.05 * expected.norm()  # weights and inputs have 8 bits


@pytest.mark.parametrize(
    "axes", [{"mixing": "static"}, {"attention_sinks": "learned"}], ids=lambda axes: next(iter(axes))
)
def test_added_embeddings_of_values_count_rows_that_do_not_sum_to_one(axes):
    torch.manual_seed(0)
    layer = build_attention("mhe-add", embed_dim=8, num_heads=4, self_attention=True, **axes).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        x = torch.randn(5, 2, 8, dtype=torch.float64)
        output, weights = layer(x, x, x, average_attn_weights=False)
        values = layer.v_proj(x).transpose(0, 1)[:, None] + layer.head_embeddings.value[:, None, :]
        heads = weights @ values
        expected = layer.out_proj(heads.permute(2, 0, 1, 3).flatten(2))
    assert (weights.sum(-1) - 1).abs().max() > 0.1
    torch.testing.assert_close(output, expected)
