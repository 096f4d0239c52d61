"""What is added to an attention module of a foreign model: one object, and parts under the names of their axes."""

import ast
import copy
import threading
from pathlib import Path

import pytest
import torch
from transformers_families import build

from fairseq_lowrank import huggingface
from fairseq_lowrank.attention import Method, build_attention, register
from fairseq_lowrank.huggingface import apply_attention, attention_calls, attention_modules, attention_weights
from fairseq_lowrank.huggingface.added import SLOT, added_to, inputs_of
from fairseq_lowrank.huggingface.exchange import refuse_exchange
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import SLOTS, HeadOutput, parts_of

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


def test_calls_of_another_thread_are_not_watched():
    model, tokens = apply_attention(build("llama"), "mixhead-a").requires_grad_(False), TOKENS
    expected, found, seen = model(input_ids=tokens).logits, [], []

    def without_values(index, call):
        seen.append(threading.get_ident())
        return call.replace(v=torch.zeros_like(call.v))

    def outputs():
        return found.append(model(input_ids=tokens).logits)

    with (
        attention_weights(model, lambda *_: seen.append(threading.get_ident())),
        attention_calls(model, without_values),
    ):
        outputs()
        thread = threading.Thread(target=outputs)
        thread.start()
        thread.join()
    outputs()
    own, other, after = found
    assert not torch.equal(own, expected)
    torch.testing.assert_close(other, expected)
    torch.testing.assert_close(after, expected)
    assert set(seen) == {threading.get_ident()} and len(seen) == 4


def test_contexts_within_each_other_all_see_a_call():
    model, seen = apply_attention(build("llama"), "mixhead-a").requires_grad_(False), []
    outer = attention_calls(model, lambda index, call: seen.append(("outer", index)) or call)
    inner = attention_calls(model, lambda index, call: seen.append(("inner", index)) or call)
    with outer:
        with inner:
            model(input_ids=TOKENS)
        model(input_ids=TOKENS)
    assert seen == [("outer", 0), ("inner", 0), ("outer", 1), ("inner", 1), ("outer", 0), ("outer", 1)]


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
        module.o_proj.register_forward_hook(lambda *_, module=module: inputs.append(inputs_of(module)))
    model(input_ids=TOKENS)
    assert inputs == [None, None]
    for _ in range(2):
        apply_attention(model, "gated")
    hooks = attention_modules(model)[0][0]._forward_pre_hooks.values()
    assert sum(hook is not refuse_exchange for hook in hooks) == 1


@pytest.mark.parametrize("preset", ["gated", "gated-head", "dcmha"])
def test_threads_that_call_one_model_at_once_get_their_own_outputs(preset):
    model = apply_attention(build("llama"), preset)
    with torch.no_grad():
        for module, _, _ in attention_modules(model):
            for part in parts_of(module).values():
                for parameter in part.parameters():
                    parameter.normal_()
    tokens = {name: torch.arange(start, start + 8)[None] for name, start in (("first", 2), ("second", 30))}
    expected, found = {name: model(input_ids=given).logits.detach() for name, given in tokens.items()}, {}
    inside, done = threading.Event(), threading.Event()

    def wait(module, args, output):
        """Let the second thread enter the first layer while the first thread is in it, and leave it last."""
        if threading.current_thread().name == "first":
            assert inside.wait(60)
        elif threading.current_thread().name == "second":
            inside.set()
            assert done.wait(60)

    def call(name):
        found[name] = model(input_ids=tokens[name]).logits.detach()
        done.set()

    attention_modules(model)[0][0].q_proj.register_forward_hook(wait)
    threads = [threading.Thread(target=call, name=name, args=(name,)) for name in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in tokens:
        torch.testing.assert_close(found[name], expected[name], msg=name)


@pytest.mark.parametrize("preset", ["gated", "dcmha"])
def test_parts_that_read_inputs_compile_to_one_graph(preset):
    model = apply_attention(build("bert"), preset)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_a_call_after_one_that_failed_gets_its_own_inputs():
    model, plain = apply_attention(build("llama"), "gated"), build("llama")
    first, second = (module for module, _, _ in attention_modules(model))
    handle = second.q_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=TOKENS)
    handle.remove()
    torch.testing.assert_close(model(input_ids=TOKENS + 1).logits, plain(input_ids=TOKENS + 1).logits)
    assert inputs_of(first) is inputs_of(second) is None


class EveryStep(HeadOutput):
    """A part that fills each step that models of transformers leave open."""

    name = "every-open-step"
    reads_own_value = True

    def call(self, call, context):
        bias = context.queries.sum(dim=-1, keepdim=True) * context.inputs[:, None, :, :1].sin()
        return call.adding(score_bias=bias)

    def heads(self, heads, context):
        return heads + context.own_values * context.inputs[:, None, :, :1]

    def weights(self, weights, context):
        return weights / 2


class Sinks(HeadOutput):
    name = "own-sinks"

    def call(self, call, context):
        return call.adding(sinks=torch.zeros(4))


class Projected(HeadOutput):
    """Heads times a map of the input, and a bias of each head, from modules of torch."""

    name = "projected"

    def __init__(self, config):
        super().__init__(config)
        self.map = torch.nn.Linear(config.embed_dim, config.num_heads)

    def heads(self, heads, context):
        return heads * self.map(context.inputs).mT[..., None]


class MapsQueries(HeadOutput):
    name = "maps-queries"

    def queries(self, queries, context):
        return 2 * queries


@pytest.fixture
def steps(methods_leave):
    for part in (EveryStep, MapsQueries, Sinks, Projected):
        register(Method(part.name, "A test", "f", {"head_output": part}))


def test_a_part_fills_every_open_step(steps):
    model = build("bert")
    attend = model.bert.encoder.layer[0].attention.self
    x = torch.randn(2, 5, 32)
    split = [getattr(attend, name)(x).view(2, 5, 4, 8).transpose(1, 2) for name in ("query", "key", "value")]
    q, k, v = split
    bias = q.sum(dim=-1, keepdim=True) * x[:, None, :, :1].sin()
    weights = torch.softmax(q @ k.mT / 8**0.5 + bias, dim=-1)
    apply_attention(model, "every-open-step")
    output, returned = attend(x, output_attentions=True)
    torch.testing.assert_close(output, (weights @ v + v * x[:, None, :, :1]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(returned, weights / 2)
    torch.testing.assert_close(copy.deepcopy(attend)(x)[0], output)


def test_a_part_that_a_model_cannot_take_is_refused(steps):
    with pytest.raises(UserError, match="'maps-queries' sets head_output, which the projections of the model fix"):
        apply_attention(build("bert"), "maps-queries")
    with pytest.raises(UserError, match="'xsa' in cross attention"):
        apply_attention(build("bart"), "xsa")


def test_a_part_and_a_model_add_biases_and_share_no_other_field(steps):
    model = apply_attention(build("t5"), "every-open-step", sites=["encoder", "decoder"])
    model(input_ids=TOKENS, decoder_input_ids=TOKENS)
    model = apply_attention(build("gpt-oss"), "own-sinks")
    with pytest.raises(UserError, match=r"GptOssAttention: sinks of this attention is set already.*layers="):
        model(input_ids=TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_modules_of_torch_in_a_part_get_inputs_of_their_dtype(steps, dtype):
    model = apply_attention(build("gpt2").to(dtype), "projected")
    assert model(input_ids=TOKENS).logits.dtype == dtype
    layer = build_attention("projected", 32, 4, self_attention=True, dtype=dtype)
    x = torch.randn(5, 2, 32, dtype=dtype)
    assert layer(x, x, x)[0].dtype == dtype


@pytest.mark.parametrize("name", ["added", "apply", "choice", "function", "saving"])
def test_no_axis_of_parts_is_named(name):
    tree = ast.parse((Path(huggingface.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & SLOTS.keys()
