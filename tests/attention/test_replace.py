"""Attention of this package in models that were built with ``torch.nn.MultiheadAttention``."""

import copy

import pytest
import torch
from tiny_layers import BATCH, build, hidden_keys, normal
from torch import nn

from fairseq_lowrank.attention import METHODS, MultiheadAttention, replace_attention, to_stock
from fairseq_lowrank.messages import UserError

SIZE, HEADS = 8, 2


class Own(nn.Module):
    """A module with attention from other sizes, used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(
            SIZE, HEADS, kdim=6, vdim=7, bias=False, add_bias_kv=True, add_zero_attn=True
        )
        self.again = self.first
        self.rest = nn.ModuleDict({"a": nn.Linear(SIZE, SIZE)})

    def forward(self, x):
        return self.rest["a"](self.again(self.first(x, x[..., :6], x[..., :7])[0], x[..., :6], x[..., :7])[0])


def models():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(SIZE, HEADS, 16, batch_first=True)
    return {
        "encoder": (nn.TransformerEncoder(encoder, 2), 1),
        "transformer": (nn.Transformer(SIZE, HEADS, 1, 1, 16, batch_first=True), 2),
        "own": (Own(), 1),
        "attention": (nn.MultiheadAttention(SIZE, HEADS), 1),
    }


def outputs(name, model):
    x = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(1))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        if name == "encoder":
            return model(x, src_key_padding_mask=padding)[~padding]
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        return {"transformer": lambda: model(x, x, tgt_mask=causal), "attention": lambda: model(x, x, x)[0]}.get(
            name, lambda: model(x)
        )()


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("preset", ["mha", "mixhead-a", "mixhead-b", "gain", "talking-heads"])
@pytest.mark.parametrize("name", models())
def test_replaced_attention_keeps_the_outputs(name, preset):
    model = models()[name][0].eval()
    expected = outputs(name, model)
    replaced = replace_attention(copy.deepcopy(model), preset)
    assert not any(type(part) is nn.MultiheadAttention for part in replaced.modules())
    torch.testing.assert_close(outputs(name, replaced), expected, atol=1e-6, rtol=1e-5)
    assert not replaced.training


def test_a_shared_layer_stays_one_layer():
    model = replace_attention(Own(), "mixhead-a")
    assert model.first is model.again and isinstance(model.first, MultiheadAttention)


def test_frozen_weights_stay_frozen_and_mixing_learns():
    model = nn.TransformerEncoderLayer(SIZE, HEADS, 16)
    model.requires_grad_(False)
    replace_attention(model, "mixhead-b")
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {"self_attn.mixing.weight", "self_attn.mixing.query_weight"}


@pytest.mark.parametrize(
    ("preset", "axes"),
    [("mhe-mul", {}), ("mqa", {}), ("mha", {"head_dim": 8}), ("el", {}), ("sinks", {}), ("collaborative", {})],
)
def test_a_size_that_cannot_be_kept_is_refused_by_name(preset, axes):
    model = nn.Transformer(SIZE, HEADS, 1, 1, 16, batch_first=True)
    before = dict(model.named_modules())
    with pytest.raises(UserError, match=r"encoder\.layers\.0\.self_attn"):
        replace_attention(model, preset, **axes)
    assert dict(model.named_modules()) == before


def test_a_module_without_attention_is_refused():
    with pytest.raises(UserError, match="Linear"):
        replace_attention(nn.Linear(2, 2), "mixhead-a")


HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook")]


@pytest.mark.parametrize("register", HOOKS)
def test_a_layer_with_any_hook_is_refused(register):
    model = Own()
    getattr(model.first.out_proj, register)(lambda *_: None)
    with pytest.raises(ValueError, match=r"first its out_proj has hooks, which its replacement would lose\. Remove it"):
        replace_attention(model, "mixhead-a")


STOCK = [name for name, method in METHODS.items() if method.preset and method.kind in ("restricted", "equal")]


@pytest.mark.parametrize("name", [name for name in STOCK if name != "mla"])
def test_plain_attention_in_other_words_becomes_torchs_module(name):
    layer, x = build(name), normal(4, BATCH, SIZE)
    stock = to_stock(layer)
    assert type(stock) is torch.nn.MultiheadAttention
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for options in ({}, {"attn_mask": hidden}, {"key_padding_mask": hidden_keys(4)}):
        torch.testing.assert_close(stock(x, x, x, **options)[0], layer(x, x, x, **options)[0])


def test_torchs_module_comes_back_with_its_sizes():
    theirs = (
        torch.nn.MultiheadAttention(8, 2, dropout=0.1, bias=False, kdim=6, vdim=4, batch_first=True).double().eval()
    )
    query, key, value = normal(2, 3, 8), normal(2, 5, 6), normal(2, 5, 4)
    stock = to_stock(replace_attention(theirs, "gain"))
    assert repr(stock) == repr(theirs) and (stock.dropout, stock.batch_first, stock.training) == (0.1, True, False)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in stock.state_dict().items())
    torch.testing.assert_close(stock(query, key, value)[0], theirs(query, key, value)[0])


@pytest.mark.parametrize(
    ("name", "axes", "reason"),
    [
        ("mixhead-a", {}, "no plain attention computes this"),
        ("mixhead-b", {}, "no plain attention computes this"),
        ("talking-heads", {}, "no plain attention computes this"),
        ("gated", {}, "no plain attention computes this"),
        ("mla", {}, "no plain attention computes this"),
        ("fixedhead", {}, "torch.nn.MultiheadAttention has heads of size 4"),
        ("mha", {"value_dim": 3}, "torch.nn.MultiheadAttention has heads of size 4"),
        ("mha", {"add_bias_kv": True}, "appended keys"),
    ],
)
def test_a_layer_that_computes_more_does_not_become_torchs_module(name, axes, reason):
    with pytest.raises(ValueError, match=reason):
        to_stock(build(name, **axes))
