"""What is added to an attention module of a foreign model: one object, and parts under the names of their axes."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from transformers_families import build

from fairseq_lowrank import huggingface
from fairseq_lowrank.attention import Method, register
from fairseq_lowrank.huggingface import apply_attention, attention_calls, attention_modules, attention_weights
from fairseq_lowrank.huggingface.added import SLOT, added_to
from fairseq_lowrank.huggingface.exchange import refuse_exchange
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import SLOTS, HeadOutput

TOKENS = torch.arange(2, 12)[None]


def of_each_module(model) -> list[tuple[set[str], list[str]]]:
    """The attributes and the children of each attention module."""
    modules = [module for module, _, _ in attention_modules(model)]
    return [(set(vars(module)), [name for name, _ in module.named_children()]) for module in modules]


@pytest.mark.parametrize("axes", [{}, {"head_output": "gate"}])
def test_one_object_and_the_parts_are_added(axes):
    model = build("bert")
    before, names = of_each_module(model), list(model.state_dict())
    apply_attention(model, "talking-heads", **axes)
    model(input_ids=TOKENS)
    # optimizers save states by the position of a parameter, so the order is a format
    added = ["mixing", "score_mixing", *axes]
    assert of_each_module(model) == [(attributes | {SLOT}, [*children, *added]) for attributes, children in before]
    apply_attention(model, "mha")
    assert of_each_module(model) == [(attributes | {SLOT}, children) for attributes, children in before]
    assert list(model.state_dict()) == names


def test_contexts_leave_the_object_as_it_was():
    model = apply_attention(build("llama"), "gated")
    before = [added_to(module) for module, _, _ in attention_modules(model)]
    seen = []
    with attention_weights(model, lambda *place: seen.append(place[1:3])), attention_calls(model, lambda _, call: call):
        model(input_ids=TOKENS)
    assert seen == [("decoder", 0), ("decoder", 1)]
    assert [added_to(module) for module, _, _ in attention_modules(model)] == before
    with pytest.raises(UserError, match="load_attention"), attention_weights(build("llama"), seen.append):
        pass


def test_a_second_choice_that_reads_no_inputs_keeps_none():
    model = apply_attention(apply_attention(build("llama"), "gated"), "mixhead-a")
    inputs = []
    for module, _, _ in attention_modules(model):
        module.o_proj.register_forward_hook(lambda *_, module=module: inputs.append(added_to(module).inputs))
    model(input_ids=TOKENS)
    assert inputs == [None, None]
    for _ in range(2):
        apply_attention(model, "gated")
    hooks = attention_modules(model)[0][0]._forward_pre_hooks.values()
    assert sum(hook is not refuse_exchange for hook in hooks) == 1


def test_replicas_have_their_own_inputs():
    module = attention_modules(apply_attention(build("llama"), "gated"))[0][0]
    replicas = [module._replicate_for_data_parallel() for _ in range(2)]  # as nn.DataParallel makes them
    inputs = [torch.randn(1, 3, 32) for _ in replicas]
    for replica, given in zip(replicas, inputs, strict=True):
        (hook,) = (hook for hook in replica._forward_pre_hooks.values() if hook is not refuse_exchange)
        hook(replica, (given,), {})
    assert [added_to(replica).inputs for replica in replicas] == inputs
    assert added_to(module).inputs is None


@pytest.mark.parametrize("preset", ["gated", "dcmha"])
def test_parts_that_read_inputs_compile_to_one_graph(preset):
    model = apply_attention(build("bert"), preset)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


class EveryStage(HeadOutput):
    """A part that fills each stage that models of transformers leave open."""

    name = "every-open-stage"
    fields = ("score_bias",)
    reads_inputs = reads_own_value = True

    def call_fields(self, query, inputs):
        return {"score_bias": query.sum(dim=-1, keepdim=True) * inputs[:, None, :, :1].sin()}

    def forward(self, heads, inputs, values):
        return heads + values * inputs[:, None, :, :1]

    def combine_weights(self, weights, inputs):
        return weights / 2


class MapsQueries(HeadOutput):
    name = "maps-queries"

    def map_query(self, q):
        return 2 * q


@pytest.fixture
def stages(methods_leave):
    for part in (EveryStage, MapsQueries):
        register(Method(part.name, "A test", "f", {"head_output": part}))


def test_a_part_fills_every_open_stage(stages):
    model = build("bert")
    attend = model.bert.encoder.layer[0].attention.self
    x = torch.randn(2, 5, 32)
    split = [getattr(attend, name)(x).view(2, 5, 4, 8).transpose(1, 2) for name in ("query", "key", "value")]
    q, k, v = split
    bias = q.sum(dim=-1, keepdim=True) * x[:, None, :, :1].sin()
    weights = torch.softmax(q @ k.mT / 8**0.5 + bias, dim=-1)
    apply_attention(model, "every-open-stage")
    output, returned = attend(x, output_attentions=True)
    torch.testing.assert_close(output, (weights @ v + v * x[:, None, :, :1]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(returned, weights / 2)
    torch.testing.assert_close(copy.deepcopy(attend)(x)[0], output)


def test_a_part_that_a_model_cannot_take_is_refused(stages):
    with pytest.raises(UserError, match="'maps-queries' sets head_output, which belong to the projections"):
        apply_attention(build("bert"), "maps-queries")
    with pytest.raises(UserError, match="'xsa' in cross attention"):
        apply_attention(build("bart"), "xsa")
    model = apply_attention(build("t5"), "every-open-stage", sites=["encoder", "decoder"])
    with pytest.raises(UserError, match="T5Attention sets score_bias of its attention"):
        model(input_ids=TOKENS, decoder_input_ids=TOKENS)


@pytest.mark.parametrize("name", ["added", "apply", "choice", "function", "saving"])
def test_no_axis_of_parts_is_named(name):
    tree = ast.parse((Path(huggingface.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & SLOTS.keys()
