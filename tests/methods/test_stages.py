"""A part may fill any stage of a layer's forward pass, and the layer names no axis."""

import ast
import copy
from pathlib import Path

import pytest
import torch

import fairseq_lowrank.attention
from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.parts import MODULE_AXES, SLOTS, HeadMap, HeadOutput, LayerPart, Mixing, Stages
from fairseq_lowrank.parts.projection import merge_heads, split_heads
from fairseq_lowrank.parts.stages import STAGES


class EveryStage(HeadOutput):
    name = "every-stage"
    fields = ("score_bias",)
    reads_inputs = reads_own_value = True

    def map_query(self, q):
        return 2 * q

    def map_states(self, states):
        return {"key": states["key"] + 1, "value": 3 * states["value"]}

    def call_fields(self, query, inputs):
        return {"score_bias": query.sum(dim=-1, keepdim=True) * inputs[:, None, :, :5]}

    def forward(self, heads, inputs, values):
        return heads + values * inputs[:, None, :, :1]

    def combine_weights(self, weights, inputs):
        return weights / 2


@pytest.mark.parametrize("axis", MODULE_AXES)
def test_part_fills_every_stage_on_any_axis(axis):
    layer = build_attention("mha", 8, 2, self_attention=True).double()
    part = EveryStage(layer.projection.dims)
    setattr(layer, axis, part)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    q, k, v = (split_heads(getattr(layer, name)(x), 4) for name in ("q_proj", "k_proj", "v_proj"))
    q, k, v, inputs = 2 * q, k + 1, 3 * v, x.transpose(0, 1)
    bias = q.sum(dim=-1, keepdim=True) * inputs[:, None, :, :5]
    weights = torch.softmax(q @ k.mT / 2 + bias, dim=-1)
    output, returned = layer(x, x, x, need_head_weights=True)
    torch.testing.assert_close(output, layer.out_proj(merge_heads(weights @ v + v * inputs[:, None, :, :1])))
    torch.testing.assert_close(returned.transpose(0, 1), weights / 2)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x, x, x)[0], output)
    setattr(layer, axis, None)
    plain = build_attention("mha", 8, 2, self_attention=True).double()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, x, x)[0], plain(x, x, x)[0])


def test_every_stage_is_the_identity_by_default():
    part, tensor = LayerPart(), torch.randn(2)
    assert part.map_query(tensor) is tensor
    assert part.map_states(states := {"key": tensor}) is states
    assert part.call_fields(tensor, tensor) == {}
    assert part(tensor, tensor, None) is tensor
    assert part.combine_weights(tensor, tensor) is tensor
    assert Stages.of({"part": part}) == Stages.of({}) == Stages()
    assert not any(base.filled for base in (HeadMap, HeadOutput)) and Mixing.filled == {"call_fields"}
    assert EveryStage.filled == set(STAGES)


def test_two_parts_cannot_set_one_field_of_the_call():
    layer = build_attention("mixhead-a", 8, 2)
    with pytest.raises(ValueError, match="score_mixing, mixing set prob_mixing of the call together"):
        layer.score_mixing = copy.deepcopy(layer.mixing)


@pytest.mark.parametrize("file", ["layer.py", "states.py"])
def test_the_layer_names_no_axis_of_its_parts(file):
    tree = ast.parse((Path(fairseq_lowrank.attention.__file__).parent / file).read_text(encoding="utf-8"))
    # a layer is made of a projection and scores; it holds them, and names no value of any axis
    axes = SLOTS.keys() - {"projection", "score"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & axes
