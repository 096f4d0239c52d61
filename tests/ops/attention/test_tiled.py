"""The tiled backend: on a GPU (--device cuda), or interpreted on the CPU (TRITON_INTERPRET=1, see test_triton_here.py)."""

import pytest
import torch
from rounded_attention import heads_and_gradients

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention import attention, reference, selfcheck, tiled, tiled_launch
from fairseq_lowrank.ops.attention.tiled_launch import TiledLaunch, has_few_programs

LENGTH = 20


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """No self-check before each composition."""
    monkeypatch.setattr(selfcheck, "_results", {})
    monkeypatch.setattr(selfcheck, "_warned", set())
    monkeypatch.setattr(selfcheck, "self_check", lambda *call, **options: selfcheck.SelfCheckResult(None))


def padding(*hidden):
    """Two rows of keys, with these hidden ones."""
    rows = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, keys in enumerate(hidden):
        rows[row, keys] = True
    return rows


def masked(*shape):
    """A float mask that hides some keys, and all from the first of several queries."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if shape[-2] > 1:
        drawn[..., 0, :] = float("-inf")
    return drawn.masked_fill(drawn < -1, float("-inf"))


RIGHT, ANYWHERE = padding(slice(13, None)), padding([0, 17], slice(0, LENGTH))
# Rules before and after the softmax, heads, sizes of keys and values, and changes of a causal call.
PROBLEMS = {
    "one matrix, large tiles": ((None, StaticMixing), 4, (16, 16), {"few": False, "queries": 70, "keys": 70}),
    "padded heads and sizes": ((None, StaticMixing), 3, (10, 20), {"activation": "sigsoftmax"}),
    "16 heads of 128 in chunks": ((None, StaticMixing), 16, (128, 128), {}),
    "32 heads in chunks, more keys": ((None, StaticMixing), 32, (40, 64), {"queries": 16}),
    "matrices of queries, groups": ((None, PositionwiseMixing), 4, (16, 16), {"groups": (2, 1)}),
    "talking heads, window": (
        (StaticMixing, StaticMixing),
        2,
        (16, 16),
        {"queries": 56, "keys": 56, "mask": AttentionMask(True, window=36)},
    ),
    "mixed scores, more queries": ((StaticMixing, None), 4, (16, 16), {"keys": 14}),
    "right padding": ((None, StaticMixing), 2, (16, 16), {"batch": 2, "mask": AttentionMask(True, RIGHT)}),
    "padding anywhere": ((None, PositionwiseMixing), 2, (16, 16), {"batch": 2, "mask": AttentionMask(False, ANYWHERE)}),
    "beams, appended, padding": (
        (None, StaticMixing),
        2,
        (16, 16),
        {"batch": 2, "mask": AttentionMask(True, RIGHT, num_appended_keys=8, query_repeats=2)},
    ),
    "mask of queries and keys": (
        (None, StaticMixing),
        3,
        (16, 16),
        {
            "batch": 2,
            "few": False,
            "queries": 70,
            "keys": 70,
            "mask": AttentionMask(True, additive=masked(70, 70) < -1),
        },
    ),
    "float mask of each head, more keys": (
        (StaticMixing, PositionwiseMixing),
        4,
        (16, 16),
        {"queries": 18, "mask": AttentionMask(False, additive=masked(4, 18, LENGTH)), "activation": "sigsoftmax"},
    ),
    "float mask of each sequence, padding": (
        (None, StaticMixing),
        12,
        (64, 64),
        {"batch": 2, "mask": AttentionMask(True, RIGHT, masked(2, 1, 1, LENGTH).half())},
    ),
    "unmixed, float mask of each head, window": (
        (None, None),
        3,
        (16, 32),
        {"queries": 56, "keys": 56, "mask": AttentionMask(True, additive=masked(3, 56, 56), window=36)},
    ),
    "unmixed, groups, window": (
        (None, None),
        2,
        (16, 16),
        {"groups": (2, 1), "queries": 56, "keys": 56, "mask": AttentionMask(True, window=36)},
    ),
    "unmixed sigsoftmax, padding": (
        (None, None),
        2,
        (16, 48),
        {"batch": 2, "activation": "sigsoftmax", "mask": AttentionMask(True, ANYWHERE)},
    ),
}


def problem(device, rules, heads, dims, *, dtype=torch.float16, batch=1, groups=None, queries=LENGTH, keys=LENGTH, mask=None, activation="softmax", **options):  # fmt: skip
    sizes = (*(groups or (heads, heads)), queries, keys, *dims)
    generator, mask = torch.Generator().manual_seed(0), mask or AttentionMask(True)
    call = selfcheck.random_call(generator, device, dtype, batch, heads, sizes, rules, mask, activation, None)
    return call, options


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients_are_the_references(name, device, monkeypatch):
    rules, heads, dims, changes = PROBLEMS[name]
    if "window" in name:  # tiles at both edges, and between them one that is seen whole
        monkeypatch.setattr(tiled_launch, "tile_of", lambda *sizes: tiled_launch.Tile(16, 16, 4, 1))
    call, options = problem(device, rules, heads, dims, **changes)
    for part, distance in selfcheck.errors(call, backend="tiled", **options).items():
        assert distance < 2e-3, f"{part}: {distance:.1e}"


@pytest.mark.parametrize(
    "rules", [(None, StaticMixing), (None, PositionwiseMixing), (StaticMixing, StaticMixing)], ids=str
)
def test_bfloat16_is_the_formula_rounded_where_the_kernels_round(rules, device):
    call, _ = problem(device, rules, 4, (16, 16), dtype=torch.bfloat16)
    call = call.map_tensors(lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    cotangent = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
    with torch.no_grad():
        one, other = (results(call, cotangent) for _ in range(2))
    assert all(map(torch.equal, one, other))  # the same call gives the same bits
    for found, wanted in zip(one, heads_and_gradients(call, cotangent, merged=True), strict=True):
        assert (found.double() - wanted).norm() < 2e-3 * wanted.norm()


def results(call, cotangent):
    heads, kept = TiledLaunch(call, 0).forward()
    return [heads, *TiledLaunch(call, 0).backward(cotangent, *kept)]


@pytest.mark.parametrize("rules", [(None, StaticMixing), (None, None)], ids=str)
def test_dropout_draws_one_mask_in_all_passes(rules, device):
    """The unit matrix as values makes the dropped weights the output."""
    length, rate = 64, 0.25
    call, _ = problem(device, rules, 2, (16, length), queries=length, keys=length)
    call = call.map_tensors(lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    call = call.replace(dropout_p=rate)
    unit = torch.eye(length, device=device, dtype=call.v.dtype).expand_as(call.v)
    with torch.no_grad():
        drawn = [TiledLaunch(call.replace(v=unit), seed).forward()[0] != 0 for seed in (0, 1)]
        cotangent = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
        found = results(call, cotangent)
    visible = torch.ones(length, length, device=device).tril().bool()
    one, other = (kept[..., visible].double() for kept in drawn)
    both = rate**2 + (1 - rate) ** 2
    assert one.mean(-1).flatten().tolist() == pytest.approx([1 - rate] * 2, abs=0.03)
    assert (one == other).double().mean().item() == pytest.approx(both, abs=0.03)  # of another seed
    assert (one[0, 0] == one[0, 1]).double().mean().item() == pytest.approx(both, abs=0.04)  # of another head
    # neighbouring keys, which share a draw
    pairs = drawn[0][..., 32:, 0:32:2] == drawn[0][..., 32:, 1:32:2]
    assert pairs.double().mean().item() == pytest.approx(both, abs=0.04)
    exact = call.replace(dropout_p=0.0).map_tensors(lambda tensor: tensor.detach().double().requires_grad_())
    weights, _ = reference.compute(exact.replace(v=unit.double()))
    heads = weights * drawn[0] / (1 - rate) @ exact.v
    tensors = [tensor for tensor in (exact.scores.q, exact.scores.k, exact.v)]
    tensors += [exact.prob_mixing.weight] if exact.prob_mixing else []
    wanted = [heads.detach(), *torch.autograd.grad(heads, tensors, cotangent.double())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 2e-3 * other.norm()


def test_a_layer_computes_by_it_in_one_pass_less(device):
    """Through the layer: autograd, and what is kept for the backward pass."""
    x = torch.randn(18, 2, 32, generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for backend, dtype in (("tiled", torch.float16), ("reference", torch.float64)):
        torch.manual_seed(0)
        layer = build_attention("mixhead-a", embed_dim=32, num_heads=4, self_attention=True, backend=backend)
        layer = layer.to(device, torch.float16).to(dtype)
        inputs = x.to(torch.float16).to(dtype).requires_grad_()
        padded = torch.arange(18, device=device)[None] >= torch.tensor([[18], [14]], device=device)
        output, _ = layer(inputs, inputs, inputs, key_padding_mask=padded, attn_mask=CAUSAL, need_weights=False)
        gradients = torch.autograd.grad(output.float().pow(2).sum(), [inputs, *layer.parameters()])
        results.append((output, *gradients))
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= 5e-3 * expected.norm().clamp(min=1)


def test_compiled_and_exported_layers_compute_by_it(device):
    """The operator is one node for all lengths. A compiled layer has the bits of the layer itself, gradients too."""

    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = build_attention("mixhead-a", 16, 2, self_attention=True, backend="tiled").to(device).half()

        def forward(self, x):
            return self.layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]

    model = Causal()
    x = torch.randn(18, 1, 16, generator=torch.Generator().manual_seed(0)).to(device, torch.float16).requires_grad_()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x.detach(),), dynamic_shapes=({0: length},))
    assert "fairseq_lowrank.tiled_attention" in str(program.graph)
    assert torch.equal(program.module()(x[:5]), model(x[:5]))
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        output = run(x)
        results.append([output, *torch.autograd.grad(output.pow(2).sum(), [x, *model.parameters()])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("window", "instead"), [(None, "triton"), (3, "blocked")])
def test_where_it_cannot_be_used_the_older_kernels_compute(window, instead, device, monkeypatch):
    """A graph that was traced on another GPU meets this too, and gets no slower than before. Windows need blocks."""

    def fail(call, backend, **options):
        return selfcheck.SelfCheckResult("heads by 0.3" if backend == "tiled" else None)

    monkeypatch.setattr(selfcheck, "self_check", fail)
    call, _ = problem(device, (None, StaticMixing), 2, (16, 16), mask=AttentionMask(True, window=window))
    call = call.map_tensors(lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    with pytest.warns(
        RuntimeWarning, match=rf"the tiled kernels .*\(heads by 0.3\)\. From now on, '{instead}' computes"
    ):
        heads = [attention(call, backend)[0] for backend in ("tiled", instead)]
    gradients = [torch.autograd.grad(one.sum(), [call.scores.q, call.v, call.prob_mixing.weight]) for one in heads]
    assert torch.equal(*heads) and all(map(torch.equal, *gradients))


def test_its_operator_stays_in_a_graph():
    """No kernel runs while a compiler traces."""
    call, _ = problem("meta", (None, StaticMixing), 4, (16, 16))
    q = call.scores.q.detach().requires_grad_()
    heads, _ = attention(call.replace(scores=call.scores.replace(q=q)), "tiled")
    assert torch.autograd.grad(heads.sum(), q)[0].shape == q.shape


def test_what_it_cannot_compute_is_said():
    call, _ = problem("cpu", (None, StaticMixing), 4, (16, 16), mask=AttentionMask(True, window=3))
    assert tiled.unsupported_reason(call) is None
    assert "(need_weights)" in tiled.unsupported_reason(call.replace(need_weights=True))
    bias = AttentionMask(additive=torch.zeros(LENGTH, LENGTH, requires_grad=True))
    assert tiled.unsupported_reason(call.replace(mask=bias)) == "a gradient of the float mask"
    with pytest.raises(
        ValueError, match=r"cannot compute mixing of 32 heads of 128.*'auto', which takes 'triton' on a G"
    ):
        build_attention("mixhead-a", 4096, 32, backend="tiled")
    for taken, options in (("blocked", {"dropout_p": 0.5}), ("reference", {"need_weights": True})):
        many, _ = problem("cpu", (None, StaticMixing), 33, (8, 8))
        with pytest.raises(ValueError, match=f"which takes '{taken}' on a GPU, or 'reference'"):
            attention(many.replace(**options), "tiled")
    with pytest.raises(ValueError, match=r"cannot compute unmixed heads of size 53 .* which takes 'sdpa' on a GPU"):
        attention(problem("cpu", (None, None), 4, (53, 4))[0], "tiled")
    for sizes, odd in (((53, 4), 53), ((16, 24), 24)):
        unmixed, _ = problem("cpu", (None, None), 4, sizes)
        assert tiled.unsupported_reason(unmixed) == f"unmixed heads of size {odd} (of multiples of 16 alone)"
    reason = tiled.device_unsupported_reason(torch.device("cuda"), torch.float32)
    assert reason == "its kernels compute only in bfloat16 and float16"


def test_small_calls_take_small_tiles_and_are_checked_apart():
    small, _ = problem("meta", (None, StaticMixing), 16, (64, 64))
    large, _ = problem("meta", (None, StaticMixing), 16, (64, 64), batch=8, queries=2048, keys=2048)
    assert has_few_programs(small) and not has_few_programs(large)
    assert tiled_launch.tile_of("attend", 16, 64, True).rows == 16
    assert tiled_launch.tile_of("attend", 16, 64, False).rows == 32
    assert selfcheck._composition(small, "tiled") != selfcheck._composition(large, "tiled")


def test_unmixed_heads_are_read_at_aligned_addresses(device):
    """Columns of a wider tensor are copied, since Triton loads 16 bytes at a time only where strides are multiples of 16.

    Mixed heads are read where they are.
    """
    for rules, width, copied in (((None, None), 17, True), ((None, None), 24, True), ((None, StaticMixing), 17, False)):
        call, _ = problem(device, rules, 2, (16, 16))
        columns = torch.zeros(1, 2, LENGTH, width, dtype=call.v.dtype, device=device)[..., :16]
        read = TiledLaunch(call.replace(v=columns), 0).v
        assert (read.data_ptr() != columns.data_ptr()) == copied and torch.equal(read, columns)
