"""A part may fill any step of a layer's forward pass, and the layer names no axis."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from tiny_layers import BATCH, SIZE, build, normal

import fairseq_lowrank.attention
from fairseq_lowrank.attention import CAUSAL, METHODS, PRESETS, build_attention
from fairseq_lowrank.parts import MODULE_AXES, SLOTS, Context, HeadMap, HeadOutput, LayerPart, Mixing, parts_of
from fairseq_lowrank.parts.projection import merge_heads, split_heads
from fairseq_lowrank.parts.stages import STEPS


class EveryStep(HeadOutput):
    name = "every-step"
    reads_own_value = True

    def queries(self, queries, context):
        return queries + context.inputs[:, None, :, :4]

    def states(self, states, context):
        return {"key": states["key"] + context.inputs[:, None, :, :4], "value": 3 * states["value"]}

    def call(self, call, context):
        return call.adding(score_bias=context.queries.sum(dim=-1, keepdim=True) * context.inputs[:, None, :, :5])

    def heads(self, heads, context):
        return heads + context.own_values * context.inputs[:, None, :, :1]

    def weights(self, weights, context):
        return weights / 2


WAYS = {
    "set": lambda layer, part: setattr(layer, "mixing", part),
    "written": lambda layer, part: layer._modules.update(mixing=part),  # as quantisation of torch replaces modules
    "wrapped": lambda layer, part: setattr(layer, "mixing", Wrapper(part)),
}


@pytest.mark.parametrize("way", WAYS)
def test_next_call_runs_the_part_that_replaced_another(way):
    layer, plain = (build_attention("mha", 8, 2, self_attention=True) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 8)
    layer(x, x, x)
    WAYS[way](layer, EveryStep(layer.config))
    plain.head_output = EveryStep(plain.config)
    torch.testing.assert_close(layer(x, x, x)[0], plain(x, x, x)[0])
    del layer.mixing, plain.head_output
    assert torch.equal(layer(x, x, x)[0], plain(x, x, x)[0])


@pytest.mark.parametrize("axis", MODULE_AXES)
def test_part_fills_every_step_on_any_axis(axis):
    layer = build_attention("mha", 8, 2, self_attention=True).double()
    part = EveryStep(layer.config)
    setattr(layer, axis, part)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    q, k, v = (split_heads(getattr(layer, name)(x), 4) for name in ("q_proj", "k_proj", "v_proj"))
    inputs = x.transpose(0, 1)
    q, k, v = q + inputs[:, None, :, :4], k + inputs[:, None, :, :4], 3 * v
    bias = q.sum(dim=-1, keepdim=True) * inputs[:, None, :, :5]
    weights = torch.softmax(q @ k.mT / 2 + bias, dim=-1)
    output, returned = layer(x, x, x, need_head_weights=True)
    torch.testing.assert_close(output, layer.out_proj(merge_heads(weights @ v + v * inputs[:, None, :, :1])))
    torch.testing.assert_close(returned.transpose(0, 1), weights / 2)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x, x, x)[0], output)
    wrapped = copy.deepcopy(layer)
    setattr(wrapped, axis, Wrapper(part))
    assert torch.equal(wrapped(x, x, x)[0], output)
    plain = build_attention("mha", 8, 2, self_attention=True).double()
    plain.load_state_dict(layer.state_dict())
    setattr(layer, axis, None)
    assert torch.equal(layer(x, x, x)[0], plain(x, x, x)[0])
    delattr(again, axis)
    assert torch.equal(again(x, x, x)[0], plain(x, x, x)[0])


class Wrapper(torch.nn.Module):
    """A module around a part, as adapters have it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args):
        return self.part(*args)


@pytest.mark.parametrize("name", [name for name in PRESETS if METHODS[name].parts.keys() & set(MODULE_AXES)])
def test_hooks_of_a_part_see_every_step(name):
    """Sharding, offloading and adapters bring the weights of a module when it is called."""
    layer, x = build(name, noise=0.1), normal(4, BATCH, SIZE, seed=7)
    expected, weights = layer(x, x, x)
    for part in parts_of(layer).values():
        kept = {key: tensor.data for key, tensor in part.named_parameters()}

        def bring(part, args, kept=kept):
            for key, tensor in part.named_parameters():
                tensor.data = kept[key]

        def take(part, args, output):
            for tensor in part.parameters():
                tensor.data = torch.full_like(tensor, torch.nan)

        part.register_forward_pre_hook(bring)
        part.register_forward_hook(take)
        take(part, (), None)
    output, found = layer(x, x, x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, weights)


def test_hypotheses_of_a_beam_begin_at_the_same_position():
    context = Context(queries=torch.zeros(2, 3, 4, 5), first=7, repeats=2)
    assert context.query_positions().tolist() == [7, 8, 7, 8]
    context = Context(queries=torch.zeros(2, 3, 2, 5), first=torch.tensor([7, 3]))
    assert context.query_positions().tolist() == [[7, 8], [3, 4]]


def test_every_step_is_the_identity_by_default():
    part, tensor, context = LayerPart(), torch.randn(2), Context()
    for step in STEPS:
        assert part(step, tensor, context) is tensor
    assert not any(base.filled for base in (HeadMap, HeadOutput)) and Mixing.filled == {"call"}
    assert EveryStep.filled == set(STEPS)


def test_two_parts_cannot_set_one_field_of_the_call():
    layer, x = build_attention("mixhead-a", 8, 2), torch.randn(3, 2, 8)
    layer.score_mixing = copy.deepcopy(layer.mixing)
    with pytest.raises(ValueError, match="prob_mixing of this attention is set already"):
        layer(x, x, x)


class Bias(HeadOutput):
    """A bias of each head by the distance of positions, and by a number of the key that is cached."""

    reads_positions = True

    def __init__(self, config):
        super().__init__(config)
        self.state_sizes = {"mark": 1}

    def states(self, states, context):
        return {**states, "mark": context.inputs[:, None, :, :1].expand(-1, 2, -1, -1)}

    def call(self, call, context):
        mark = context.states["mark"]
        distances = context.query_positions()[:, None] - torch.arange(mark.size(2))
        return call.adding(score_bias=mark.mT - 0.3 * distances)


def test_a_bias_of_positions_and_of_cached_numbers_decodes_what_it_trained():
    layer, x = build_attention("mha", 8, 2, self_attention=True).double().eval(), normal(5, 3, 8)
    layer.head_output = Bias(layer.config)
    full, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    plain, _ = build("mha")(x, x, x, attn_mask=CAUSAL, need_weights=False)
    assert (full - plain).abs().max() > 1e-3
    state = {}
    steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x[:3].split(1)]
    order = torch.tensor([2, 0, 1])
    layer.reorder_incremental_state(state, order)
    last, _ = layer(x[3:], x[3:], x[3:], attn_mask=CAUSAL, incremental_state=state, need_weights=False)
    torch.testing.assert_close(torch.cat(steps), full[:3])
    moved = torch.cat([x[:3, order], x[3:]])
    torch.testing.assert_close(last, layer(moved, moved, moved, attn_mask=CAUSAL, need_weights=False)[0][3:])


@pytest.mark.parametrize("file", ["layer.py", "states.py"])
def test_the_layer_names_no_axis_of_its_parts(file):
    tree = ast.parse((Path(fairseq_lowrank.attention.__file__).parent / file).read_text(encoding="utf-8"))
    # a layer is made of a projection and scores; it holds them, and names no value of any axis
    axes = SLOTS.keys() - {"projection", "score"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & axes
