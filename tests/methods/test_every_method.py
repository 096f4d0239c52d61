"""Every registered method: its formula, gradients, masks, decoding, precision, states, copies, numbers and class."""

import copy
import pickle
from random import Random

import pytest
import torch
from formula import load
from tiny_layers import BATCH, HEADS, SIZE, WITHOUT_CROSS, build, causal, hidden_keys, normal

from experiments.pages import PAGES
from experiments.variants import build_layer, count, sizes_of
from fairseq_lowrank.attention import CAUSAL, METHODS, PRESETS, PackedDocuments, build_attention
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import AXES, CLASSES, evaluate
from fairseq_lowrank.parts import parts_of as children_on_axes

CASES = [(name, number) for name, method in METHODS.items() for number in range(len(method.examples))]
CROSS = [
    case for case in CASES if case[0] not in WITHOUT_CROSS and "rotary_dim" not in METHODS[case[0]].examples[case[1]]
]


def cases(found=CASES):
    return pytest.mark.parametrize(("name", "example"), found, ids=lambda value: str(value))


def test_every_file_of_formulas_is_a_method():
    from formula import FOLDER

    assert {file.stem for file in FOLDER.glob("*.py")} == METHODS.keys()


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("masked", ["open", "causal", "padding", "causal-padding", "row"])
@cases()
def test_self_attention_equals_the_formula(name, example, masked, backend):
    layer, x = build(name, example, backend=backend), normal(4, BATCH, SIZE, seed=7)
    options, hidden = {}, torch.zeros(BATCH, 4, 4, dtype=torch.bool)
    if "causal" in masked:
        options["attn_mask"], hidden = CAUSAL, hidden | causal(4)
    if "padding" in masked:
        options["key_padding_mask"], hidden = hidden_keys(4), hidden | hidden_keys(4)[:, None]
    if masked == "row":  # the second query sees no key
        options["attn_mask"] = torch.zeros(4, 4, dtype=torch.bool)
        options["attn_mask"][1] = True
        hidden = hidden | options["attn_mask"]
    output, _ = layer(x, x, x, need_weights=False, **options)
    expected = load(name)(layer)(x, x, hidden)
    if masked == "causal-padding":  # outputs at padding mean nothing
        real = ~hidden_keys(4).T
        output, expected = output[real], expected[real]
    torch.testing.assert_close(output, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@cases([case for case in CASES if not case[0].startswith("synthesizer")])
def test_packed_documents_equal_documents_one_by_one(name, example, backend):
    layer, x = build(name, example, backend=backend), normal(6, BATCH, SIZE, seed=7).requires_grad_()
    leaves = [x, *layer.parameters()]

    def outputs_and_gradients(*calls):
        output = torch.cat([layer(y, y, y, attn_mask=mask, need_weights=False)[0] for y, mask in calls])
        weighted = (output * normal(*output.shape, seed=8)).sum()
        return output, *torch.autograd.grad(weighted, leaves, allow_unused=True, materialize_grads=True)

    packed = outputs_and_gradients((x, PackedDocuments(cu_seqlens=[0, 3, 4, 6])))
    apart = outputs_and_gradients(*((document, CAUSAL) for document in x.split([3, 1, 2])))
    for found, expected in zip(packed, apart, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


@torch.no_grad()
@cases()
def test_hooks_bring_the_weights_of_an_offloaded_layer(name, example):
    accelerate = pytest.importorskip("accelerate")
    layer, x = build(name, example).eval(), normal(4, BATCH, SIZE, seed=7)
    expected, _ = layer(x, x, x, attn_mask=CAUSAL)
    offloaded = accelerate.cpu_offload(copy.deepcopy(layer), execution_device=torch.device("cpu"))
    found, _ = offloaded(x, x, x, attn_mask=CAUSAL)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2), (1, 4)])
@cases(CROSS)
def test_cross_attention_equals_the_formula(name, example, queries, keys):
    layer = build(name, example, self_attention=False, encoder_decoder_attention=True)
    x, y = normal(queries, BATCH, SIZE, seed=7), normal(keys, BATCH, SIZE, seed=8)
    output, _ = layer(x, y, y, hidden_keys(keys), need_weights=False)
    hidden = hidden_keys(keys)[:, None].expand(-1, queries, -1)
    torch.testing.assert_close(output, load(name)(layer)(x, y, hidden), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@cases()
def test_gradients_equal_finite_differences(name, example, backend):
    layer, x = build(name, example, backend=backend), normal(4, BATCH, SIZE, seed=7).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x, *values):
        call = {"attn_mask": CAUSAL, "key_padding_mask": hidden_keys(4), "need_weights": False}
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, x, x), call)[0]

    assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True, atol=1e-6)


@cases()
def test_no_output_depends_on_a_later_position(name, example):
    layer, x = build(name, example), normal(4, BATCH, SIZE, seed=7)
    changed = torch.cat([x[:2], normal(2, BATCH, SIZE, seed=8)])
    before, after = (layer(each, each, each, attn_mask=CAUSAL, need_weights=False)[0] for each in (x, changed))
    torch.testing.assert_close(before[:2], after[:2], atol=1e-12, rtol=1e-12)
    assert (before[2:] - after[2:]).abs().max() > 1e-6


@cases()
def test_steps_of_decoding_equal_the_full_pass_and_follow_the_beam(name, example):
    layer, x = build(name, example), normal(5, BATCH, SIZE, seed=7)
    full, state = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0], {}
    steps = [layer(step, step, step, incremental_state=state, need_weights=False)[0] for step in x[:4].split(1)]
    torch.testing.assert_close(torch.cat(steps), full[:4], atol=1e-12, rtol=1e-12)
    order = torch.tensor([1, 1])
    layer.reorder_incremental_state(state, order)
    last, _ = layer(x[4:], x[4:], x[4:], incremental_state=state, need_weights=False)
    moved = torch.cat([x[:4, order], x[4:]])
    full, _ = layer(moved, moved, moved, attn_mask=CAUSAL, need_weights=False)
    torch.testing.assert_close(last, full[4:], atol=1e-12, rtol=1e-12)


@cases(CROSS)
def test_hypotheses_share_the_keys_of_a_sentence(name, example):
    layer = build(name, example, self_attention=False, encoder_decoder_attention=True)
    x, y = normal(1, 3 * BATCH, SIZE, seed=7), normal(5, BATCH, SIZE, seed=8)
    repeated = y.repeat_interleave(3, dim=1)
    apart, _ = layer(x, repeated, repeated, need_weights=False)
    layer.beam_size = 3
    torch.testing.assert_close(layer(x, y, y, need_weights=False)[0], apart, atol=1e-12, rtol=1e-12)


@cases()
def test_bfloat16_is_near_float64(name, example):
    layer, x = build(name, example, noise=0.1), normal(5, BATCH, SIZE, seed=7)
    expected, _ = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)
    half = x.bfloat16()
    output, _ = layer.bfloat16()(half, half, half, attn_mask=CAUSAL, need_weights=False)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, atol=0.06, rtol=0.1)


@cases()
def test_a_state_has_the_layer_s_outputs(name, example):
    layer, other, x = build(name, example), build(name, example, noise=0.0), normal(4, BATCH, SIZE, seed=7)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, x, x)[0], layer(x, x, x)[0], atol=0, rtol=0)


@cases()
def test_a_stock_state_is_refused_or_continues_with_the_same_outputs(name, example):
    stock, layer = build("mha"), build(name, example, noise=0.0)
    if any(not part.learns for axis, part in METHODS[name].parts.items() if axis in ("mixing", "score_mixing")):
        return  # fixed mixing changes outputs and says so by its name
    try:
        layer.load_state_dict(stock.state_dict())
    except (RuntimeError, UserError):
        return
    if METHODS[name].parts.keys() & {"activation"} and name not in PRESETS:
        return  # an activation has no parameters
    x = normal(5, BATCH, SIZE, seed=7)
    torch.testing.assert_close(layer(x, x, x)[0], stock(x, x, x)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
@cases()
def test_a_copy_after_a_training_step_computes_the_same(name, example, how):
    layer, x = build(name, example).train(), normal(4, BATCH, SIZE, seed=7)
    layer(x, x, x, attn_mask=CAUSAL)[0].square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1e-3).step()
    other = how(layer)
    torch.testing.assert_close(other(x, x, x)[0], layer(x, x, x)[0], atol=0, rtol=0)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in layer.parameters()}


@pytest.mark.parametrize("name", METHODS)
def test_declared_numbers_are_those_of_built_layers(name):
    method, random = METHODS[name], Random(name)
    sizes = {axis for example in method.examples for axis in example if AXES[axis].type is int}
    for embed_dim, heads in ((512, 8), (48, 4), (60, 6)):
        layer = build_layer(method, embed_dim, heads)
        assert evaluate(method.parameters, sizes_of(layer)) == count(layer)
        assert evaluate(method.cached, sizes_of(layer)) == layer.cached_numbers == cached(layer)
    for _ in range(4):
        heads = random.randint(1, 9)
        chosen = {axis: random.randint(1, 40) for axis in sorted(sizes)}
        try:
            layer = build_layer(method, heads * random.randint(4, 20), heads, **chosen)
        except ValueError:  # a number that has to divide another one
            continue
        assert evaluate(method.parameters, sizes_of(layer)) == count(layer)
        assert evaluate(method.cached, sizes_of(layer)) == layer.cached_numbers == cached(layer)


def cached(layer):
    """The number of values that the layer holds after it has decoded one token."""
    state, token = {}, torch.empty(1, 1, layer.embed_dim, device="meta")
    layer(token, token, token, incremental_state=state, need_weights=False)
    return sum(tensor.numel() for saved in state.values() for tensor in saved.tensors.values())


@pytest.mark.parametrize("name", PRESETS)
def test_only_methods_that_add_nothing_have_a_plain_form(name):
    kind, layer, x = METHODS[name].kind, build(name), normal(4, BATCH, SIZE, seed=7)
    assert kind in CLASSES
    if METHODS[name].kind_of is not None:
        kind = METHODS[name].kind_of(layer)
    try:
        plain = plain_attention(layer)
    except UserError:
        assert kind not in ("restricted", "equal") or PAGES[name].kind_limit
        return
    torch.testing.assert_close(plain(x, x, x)[0], layer(x, x, x)[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_of_fairseq_learns_with_it(name):
    pytest.importorskip("fairseq")
    from tiny_transformer import SIZES, make_task, preset_flags, sentences
    from tiny_transformer import build as build_model

    task = make_task()
    model = build_model("transformer", *SIZES, *preset_flags(name), task=task)
    source, target = (sentences(task.source_dictionary, 3, 2, left_pad=left) for left in (True, False))
    output, _ = model(source, torch.tensor([4, 3]), target)
    output.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_of_transformers_takes_it_or_names_those_that_it_takes(name):
    pytest.importorskip("transformers")
    from transformers_families import build as build_model

    from fairseq_lowrank.huggingface import apply_attention

    model, tokens = build_model("gpt2"), torch.tensor([[5, 6, 7, 8]])
    before = model(tokens).logits
    needed = {} if METHODS[name].needs is None else METHODS[name].examples[0]
    try:
        apply_attention(model, name, **needed)
    except UserError as error:
        assert "mixhead-b" in str(error) and name not in str(error).partition("Choose from")[2].split(", ")
        assert METHODS[name].axes.keys() & {"projection", "head_map", "head_output"} or needed
        return
    after = model(tokens).logits
    assert after.isfinite().all()
    fixed = any(not part.learns for axis, part in METHODS[name].parts.items() if axis in ("mixing", "score_mixing"))
    if not fixed and all(part.keeps_stock for part in children_on_axes(build(name)).values()):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


def parts_of(name):
    return [(name, axis) for axis in METHODS[name].parts if axis != "activation"]


@pytest.mark.parametrize(("name", "axis"), [pair for name in METHODS for pair in parts_of(name)])
def test_a_wrong_factor_in_a_part_fails_the_formula(name, axis, monkeypatch):
    """A test of these tests: a copy of each part that computes something of 1 % more."""
    layer, x = build(name), normal(4, BATCH, SIZE, seed=7)
    owner = getattr(layer, axis)
    where = {
        "projection": "attention_inputs",
        "score": "attention_inputs",
        "mixing": "operation",
        "score_mixing": "operation",
        "head_map": "states",
        "head_output": "heads",
        "score_bias": "bias",
        "attention_sinks": "call",
    }[axis]
    right = getattr(owner, where)

    def wrong(*args, **kwargs):
        return off(right(*args, **kwargs))

    monkeypatch.setattr(owner, where, wrong)
    hidden = torch.zeros(BATCH, 4, 4, dtype=torch.bool)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            layer(x, x, x, need_weights=False)[0], load(name)(layer)(x, x, hidden), atol=1e-9, rtol=1e-9
        )


def off(result):
    """The result of a part with each tensor of it 1 % greater."""
    if isinstance(result, torch.Tensor):
        return result * 1.01
    if isinstance(result, dict):
        return {name: off(value) for name, value in result.items()}
    if isinstance(result, tuple):
        changed = (off(value) for value in result)
        return type(result)(*changed) if hasattr(result, "_fields") else tuple(changed)
    if hasattr(result, "map_tensors"):
        return result.map_tensors(lambda tensor: tensor * 1.01)
    fields = {name: off(value) if isinstance(value, torch.Tensor) else value for name, value in vars(result).items()}
    return type(result)(**fields)


def test_a_method_without_a_formula_fails():
    with pytest.raises(AssertionError, match=r"mine has no formula: write tests/methods/formulas/mine.py"):
        load("mine")


def test_a_layer_is_built_from_names_alone():
    assert build_attention("mha", SIZE, HEADS).spec.choices == {}
