"""Layers under whatever looks at operations without running them: compilers, exports, the meta device, TorchScript."""

import subprocess
import sys

import pytest
import torch
from attention_problems import attend
from needed_axes import PRESETS, needed_axes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fairseq_lowrank.attention import CAUSAL, build_attention, masks
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.tree import encode, flatten

LENGTH, BATCH, SIZE = 70, 2, 8


class Causal(nn.Module):
    """A causal self-attention layer with padding."""

    def __init__(self, preset, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = build_attention(
            preset, SIZE, 2, self_attention=True, **needed_axes(preset) | {"head_dim": 4} | options
        )
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x, padding):
        return self.layer(x, x, x, attn_mask=CAUSAL, key_padding_mask=padding, need_weights=False)[0]


def inputs(length=LENGTH):
    x = torch.randn(length, BATCH, SIZE, generator=torch.Generator().manual_seed(length), requires_grad=True)
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[0, :3] = True
    return x, padding


def of_any_length(x, padding):
    """Inputs for a graph of any length. Sizes that are all dynamic take three times as long to compile."""
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(padding, 1)
    return x, padding


def gradients(output, x, model):
    leaves = [x, *model.parameters()]
    return torch.autograd.grad(output.pow(2).sum(), leaves, allow_unused=True, materialize_grads=True)


def compiled(function):
    torch.compiler.reset()
    # AOT autograd without code generation: what is tested is what our operators tell it
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def first(*presets, of=()):
    """Parameters: these presets. The grid adds those in ``of``, whose parts all occur in these."""
    return [*presets, *(pytest.param(preset, marks=pytest.mark.grid) for preset in of if preset not in presets)]


COMPILED = ("mha", "gqa", "skv", "el", "mhe-add", "mhe-mul", "mixhead-b", "mixhead-random", "talking-heads", "gain")


@pytest.mark.parametrize("preset", first(*COMPILED, of=PRESETS))
def test_a_layer_compiles_as_one_graph(preset):
    model, lengths = Causal(preset), [LENGTH, 141] if preset == "mixhead-b" else [LENGTH]
    run = compiled(model)
    for length in lengths:
        x, padding = inputs(length)
        if len(lengths) > 1:
            of_any_length(x, padding)
        expected, found = model(x, padding), run(x, padding)
        torch.testing.assert_close(found, expected)
        for one, other in zip(gradients(found, x, model), gradients(expected, x, model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class ThreeViews(Causal):
    """The same with three views of one input, as a joint projection of a model makes them."""

    def forward(self, x, padding):
        query, key, value = x.expand(3, *x.shape).unbind()
        return self.layer(query, key, value, attn_mask=CAUSAL, key_padding_mask=padding, need_weights=False)[0]


@pytest.mark.parametrize("preset", ["mla", "skv"])
def test_a_layer_of_one_input_is_exported_with_three_views(preset):
    model, (x, padding) = ThreeViews(preset), inputs()
    program = torch.export.export(model, (x.detach(), padding))
    torch.testing.assert_close(program.module()(x, padding), Causal.forward(model, x, padding))


@pytest.mark.parametrize("preset", first("mixhead-b", "talking-heads", of=["mha", "mixhead-a"]))
def test_a_layer_compiles_as_one_graph_under_autocast(preset):
    model = Causal(preset)
    run, (x, padding) = compiled(model), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x, padding), run(x, padding)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    for one, other in zip(gradients(found, x, model), gradients(expected, x, model), strict=True):
        torch.testing.assert_close(one, other, atol=0.02 * other.abs().max().item() + 1e-3, rtol=0.05)


def test_dropout_compiles_and_differs_from_call_to_call():
    model = Causal("mixhead-b", dropout=0.5).train()
    run, (x, padding) = compiled(model), inputs()
    first, second = run(x, padding), run(x, padding)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    one = run(x, padding)
    torch.manual_seed(3)
    assert torch.equal(one, run(x, padding))
    # the backward pass draws what the forward pass drew: of the values the output is a linear function
    gradient = torch.autograd.grad(one.sum(), [model.layer.v_proj.bias])[0]
    model.layer.v_proj.bias.data += 1
    torch.manual_seed(3)
    torch.testing.assert_close((run(x, padding) - one).sum(), gradient.sum(), rtol=1e-3, atol=1e-3)


def test_biases_and_masks_compile():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 4, generator=generator).requires_grad_() for _ in range(3))
    bias, mask = (torch.randn(LENGTH, LENGTH, generator=generator).requires_grad_() for _ in range(2))
    weight, hidden = torch.randn(2, 2, generator=generator).requires_grad_(), torch.rand(LENGTH, LENGTH) < 0.2

    def run(q, k, v, weight, bias, additive):
        mixing = StaticMixing(weight)
        options = {
            "prob_mixing": mixing,
            "score_mixing": mixing,
            "score_bias": bias,
            "activation": "sigsoftmax",
            "backend": "blocked",
        }
        return attend(q, k, v, mask=AttentionMask(True, None, additive), **options)[0]

    traced = compiled(run)
    for additive in (mask, hidden):
        leaves = [tensor for tensor in (q, k, v, weight, bias, additive) if tensor.requires_grad]
        found, expected = (function(q, k, v, weight, bias, additive) for function in (traced, run))
        torch.testing.assert_close(found, expected)
        pairs = (torch.autograd.grad(heads.pow(2).sum(), leaves) for heads in (found, expected))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("preset", [*PRESETS, "alibi", "t5-bias", "sinks"])
def test_a_layer_is_exported_for_all_lengths(preset):
    model = Causal(preset).eval()
    x, padding = inputs()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x.detach(), padding), dynamic_shapes=({0: length}, {1: length}))
    for other in (2, 5, LENGTH, 150):
        x, padding = inputs(other)
        torch.testing.assert_close(program.module()(x, padding), model(x, padding))


LOAD = """
import sys, torch
{imports}
try:
    program = torch.export.load(sys.argv[1])
    print(program.module()(torch.ones(5, 2, 8), torch.zeros(2, 5, dtype=torch.bool)).shape)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("backend", "imports", "loads"),
    [
        ("auto", "import fairseq_lowrank.ops", True),
        ("auto", "", False),
        ("reference", "", True),
    ],
)
def test_a_saved_program_needs_the_package_only_for_its_operator(backend, imports, loads, tmp_path):
    x, padding = inputs()
    length = torch.export.Dim("length", min=2, max=4096)
    model = Causal("mixhead-b", backend=backend).eval()
    program = torch.export.export(model, (x.detach(), padding), dynamic_shapes=({0: length}, {1: length}))
    torch.export.save(program, tmp_path / "program.pt2")
    words = [sys.executable, "-W", "ignore", "-c", LOAD.format(imports=imports), tmp_path / "program.pt2"]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    assert (said == "torch.Size([5, 2, 8])\n") is loads, said
    assert loads or said.startswith("RuntimeError")


@pytest.mark.parametrize("preset", first("mixhead-b", "gated-head", of=["mha", "talking-heads"]))
def test_onnx_computes_the_layer_at_all_lengths(preset, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model, length = Causal(preset).eval(), torch.export.Dim("length", min=2, max=4096)
    x, padding = inputs()
    shapes = ({0: length}, {1: length})
    torch.onnx.export(model, (x.detach(), padding), tmp_path / "layer.onnx", dynamo=True, dynamic_shapes=shapes)
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    names = [one.name for one in session.get_inputs()]
    for other in (2, 5, LENGTH, 150):
        x, padding = inputs(other)
        given = dict(zip(names, (x.detach().numpy(), padding.numpy()), strict=True))
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, given)[0]), model(x, padding), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("backend", ["blocked", "triton", "tiled"])
def test_an_export_to_onnx_refuses_our_operator_by_its_name(backend, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    x, padding = inputs()
    program = torch.export.export(Causal("mixhead-b").eval(), (x.detach(), padding))
    assert "fairseq_lowrank" not in str(program.graph)
    with pytest.raises(
        ValueError, match=f"fairseq_lowrank::{backend}_attention, which ONNX does not have; use backend='auto'"
    ):
        torch.export.export(Causal("mixhead-b", backend=backend).eval(), (x.detach(), padding))


@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b"])
def test_mixing_by_pytorchs_own_kernels_compiles_and_is_exported(preset):
    model, length = Causal(preset, backend="sdpa"), torch.export.Dim("length", min=2, max=4096)
    x, padding = of_any_length(*inputs())
    expected, found = model(x, padding), compiled(model)(x, padding)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, x, model), gradients(expected, x, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    program = torch.export.export(model, (x.detach(), padding), dynamic_shapes=({0: length}, {1: length}))
    x, padding = inputs(150)
    torch.testing.assert_close(program.module()(x, padding), model(x, padding))


def test_an_exported_layer_refuses_second_derivatives():
    model, (x, padding) = Causal("mixhead-a").eval(), inputs()
    run = torch.export.export(model, (x.detach(), padding)).module()
    (gradient,) = torch.autograd.grad(run(x, padding).pow(2).sum(), [x], create_graph=True)
    with pytest.raises(NotImplementedError, match='choose backend="reference"'):
        torch.autograd.grad(gradient.sum() + x.sum(), [x])


@pytest.mark.parametrize("options", [{}, {"activation": "sigsoftmax"}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_come_out_on_the_meta_device(preset, options):
    model = Causal(preset, **options).to("meta").train()
    x, padding = (tensor.detach().to("meta") for tensor in inputs())
    output = model(x.requires_grad_(), padding)
    assert output.is_meta and output.shape == x.shape
    output.sum().backward()
    assert x.grad.shape == x.shape


def test_fake_tensors_pass_and_leave_nothing_for_later_calls():
    layer, mask = Causal("mixhead-b").eval().layer, nn.Transformer.generate_square_subsequent_mask(5)
    x, padding = torch.randn(5, BATCH, SIZE), torch.zeros(BATCH, 5)
    expected = layer(x, x, x, padding, attn_mask=mask)[0]
    masks._causal_tensor.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (mask, mode.from_tensor(mask)):
            fake = layer(x, x, x, padding, attn_mask=given)[0]
            assert fake.shape == x.shape and type(fake) is FakeTensor
    graph = make_fx(lambda x: layer(x, x, x, padding, attn_mask=mask)[0])(x)
    torch.testing.assert_close(graph(x), expected)
    torch.testing.assert_close(layer(x, x, x, padding, attn_mask=mask)[0], expected)


def test_the_operator_obeys_the_rules_of_torch():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :2] = True
    call = AttentionCall(
        DotProduct(normal(2, 3, 5, 4), normal(2, 1, 6, 4), 0.5),
        normal(2, 3, 6, 2),
        AttentionMask(True, padding, normal(5, 6), documents=torch.tensor([[0, 0, 0, 1, 1, 1]])),
        score_mixing=StaticMixing(normal(3, 3)),
        prob_mixing=PositionwiseMixing(normal(2, 5, 3, 3)),
        activation="sigsoftmax",
        sinks=normal(3),
        distance_bias=normal(1, 3, 10),
    )
    structure, tensors, numbers = flatten(call)
    arguments = (tensors, None, encode(structure), numbers)
    torch.library.opcheck(torch.ops.fairseq_lowrank.blocked_attention.default, arguments)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_in_a_line():
    model, example = Causal("mixhead-a").eval(), inputs()
    with pytest.raises(NotImplementedError, match="not available in TorchScript: use"):
        torch.jit.script(model)
    with pytest.raises(NotImplementedError, match="not available in TorchScript: use"):
        torch.jit.trace(model, (example[0].detach(), example[1]))
