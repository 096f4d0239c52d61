"""The blocked backend: linear memory, narrow dtypes, compilation. Its values are compared in test_backends.py."""

import pytest
import torch
from attention_problems import LargestTensor, attend, call_of, leaves, mixing_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_lowrank.ops import AttentionMask, StaticMixing
from fairseq_lowrank.ops.attention import blocked, blocks
from fairseq_lowrank.ops.attention.mixing import _products_by_query

HEADS, DIM = 2, 4


def problem(length, device, *, prob_mixing="none", score_mixing="none", heads=HEADS, groups=None, **options):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    built = {
        "q": normal(1, heads, length, DIM),
        "k": normal(1, groups or heads, length, DIM),
        "v": normal(1, groups or heads, length, DIM),
        "mask": AttentionMask(causal=True),
    }
    rules = {"prob_mixing": prob_mixing, "score_mixing": score_mixing}
    built |= {name: mixing_of(rule, normal, (1, heads, length, length)) for name, rule in rules.items()}
    return built | options


def gradients(heads, built):
    return torch.autograd.grad(heads.float().pow(2).sum(), list(leaves(built).values()))


def parted_padding(length):
    padding = torch.zeros(1, length, dtype=torch.bool)
    padding[:, :100] = True
    return padding


@pytest.mark.parametrize(
    "options",
    [
        {"prob_mixing": "static"},
        {"prob_mixing": "positionwise"},
        {"prob_mixing": "static", "score_mixing": "static"},
        {"activation": "sigsoftmax"},
        {"dropout_p": 0.1},
        {"groups": 1, "prob_mixing": "static", "activation": "sigsoftmax", "dropout_p": 0.1},
        {"mask": AttentionMask(True, num_appended_keys=2)},
        {"mask": AttentionMask(True, query_repeats=2)},
        {"mask": AttentionMask(True, parted_padding(2048))},
        {"score_bias": torch.zeros(1, HEADS, 1, 2048)},
        {"distance_bias": torch.zeros(1, HEADS, 4095, requires_grad=True)},
        {"sinks": torch.zeros(HEADS, requires_grad=True)},
        {"mask": AttentionMask(True, documents=torch.arange(2048)[None] // 300)},
    ],
    ids=[
        "static",
        "positionwise",
        "talking",
        "sigsoftmax",
        "dropout",
        "shared-key",
        "appended",
        "repeated",
        "padding",
        "bias",
        "distances",
        "sinks",
        "documents",
    ],
)
def test_no_tensor_grows_with_the_square_of_the_length(options):
    length = 2048
    built = problem(length, "cpu", **options)
    with LargestTensor() as largest:
        heads, _ = attend(**built, backend="blocked")
        gradients(heads, built)
    # float32 scores of one block of queries; all scores are 16 times as much
    assert largest.bytes <= 4 * HEADS * blocked.MAX_BLOCK_ROWS * length == 4 * HEADS * length**2 / 16
    assert largest.bytes < length * length


@pytest.mark.parametrize(
    "options", [{}, {"prob_mixing": "static"}, {"dropout_p": 0.1}], ids=["plain", "static", "dropout"]
)
def test_a_window_bounds_the_keys_of_every_block(options):
    length, window = 4096, 100
    built = problem(length, "cpu", **options, mask=AttentionMask(True, window=window))
    with LargestTensor() as largest:
        heads, _ = attend(**built, backend="blocked")
        gradients(heads, built)
    rows = blocked.MAX_BLOCK_ROWS
    assert largest.bytes <= max(4 * HEADS * rows * (rows + window), 4 * HEADS * length * DIM)
    call = call_of(**{name: part for name, part in built.items() if part is not None})
    parts = list(blocked.BlockedAttention(call, 0).blocks())
    assert len(parts) == length // rows and all(block.num_keys < rows + window for block in parts)


def test_the_reference_does_build_all_scores():
    built = problem(512, "cpu")
    with LargestTensor() as largest:
        attend(**built, backend="reference")
    assert largest.bytes >= 4 * HEADS * 512 * 512


def test_shared_keys_are_never_expanded(device):
    """Nothing of the size of H copies of the keys is made while one query attends to many of them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 1, 64, generator=generator).to(device)
    k = torch.randn(1, 1, 4096, 64, generator=generator).to(device)
    with LargestTensor() as largest:
        heads, _ = attend(q, k, k, prob_mixing=StaticMixing(torch.eye(8, device=device)), backend="blocked")
    assert largest.bytes == k.untyped_storage().nbytes()
    expected, _ = attend(q, k, k, backend="reference")
    torch.testing.assert_close(heads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixing", ["static", "positionwise"])
def test_autocast_keeps_the_softmax_and_the_mixing_in_float32(mixing, device):
    built = problem(200, device, prob_mixing=mixing, activation="sigsoftmax")
    expected, _ = attend(**built, backend="reference")
    expected_gradients = gradients(expected, built)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        heads, _ = attend(**built, backend="blocked")
        found = gradients(heads, built)
    assert heads.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in found] == [torch.float32] * len(found)
    torch.testing.assert_close(heads.float(), expected, rtol=0.05, atol=0.05)
    for gradient, exact in zip(found, expected_gradients, strict=True):
        assert (gradient - exact).norm() <= 0.03 * exact.norm()


def test_compiled_code_around_it_gives_the_same(device):
    built = problem(70, device, prob_mixing="static")
    mixing = built.pop("prob_mixing")

    def doubled(q, weight):
        arguments = built | {"q": 2 * q, "prob_mixing": StaticMixing(weight)}
        return attend(**arguments, backend="blocked")[0] * 2

    # "eager" stands for any compiler: what is tested is that tracing goes round the blocked path
    heads = torch.compile(doubled, backend="eager")(built["q"], mixing.weight)
    expected = doubled(built["q"], mixing.weight)
    torch.testing.assert_close(heads, expected)
    (found,) = torch.autograd.grad(heads.sum(), [mixing.weight])
    (wanted,) = torch.autograd.grad(expected.sum(), [mixing.weight])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("batch", [1, 2])
def test_products_of_each_query_add_up_to_the_gradient_of_one_matrix(batch, device):
    """On a GPU they are how it is computed. On the CPU it is one product."""
    heads, grad = torch.randn(2, batch, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    found = _products_by_query(heads, grad).sum(dim=0)
    torch.testing.assert_close(found, torch.einsum("bjts,bits->ji", heads, grad))


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("mixing", ["static", "positionwise"])
def test_mixing_is_that_by_pytorchs_own_kernels(mixing, groups, device):
    """An oracle on any device that shares no code with the blocks."""
    built = problem(700, device, prob_mixing=mixing, heads=4, groups=groups)
    results = []
    for backend in ("blocked", "sdpa"):
        heads, _ = attend(**built, backend=backend)
        results.append((heads, *gradients(heads, built)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_bias_has_its_shape(device):
    for shape in [(1, HEADS, 1, 90), (90, 1), (1, 1, 1, 1), (1, HEADS, 90, 90)]:
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        built = problem(90, device, score_bias=bias, activation="sigsoftmax")
        found, wanted = (
            torch.autograd.grad(attend(**built, backend=backend)[0].pow(2).sum(), [bias])[0]
            for backend in ("blocked", "reference")
        )
        assert found.shape == bias.shape
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixing", ["none", "static", "positionwise"])
def test_blocks_before_the_first_visible_key_give_zeros(mixing, device):
    """200 queries over 50 keys: causality shows the first 150 queries no key."""
    built = problem(200, device, prob_mixing=mixing)
    built |= {name: built[name].detach()[:, :, :50].requires_grad_() for name in ("k", "v")}
    results = []
    for backend in ("blocked", "reference"):
        heads, _ = attend(**built, backend=backend)
        results.append([heads, *gradients(heads, built)])
    assert results[0][0][:, :, :150].abs().max() == 0
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_very_low_scores_keep_their_sigsoftmax(device):
    """At scores of −1000 both exp and σ vanish in float32; the row is softmax(2 s) all the same."""
    scores = torch.tensor([-1000.0, -1000.5, -1003.0], device=device)
    q, k = torch.ones(1, 1, 1, 1, device=device), scores.view(1, 1, 3, 1)
    v = torch.eye(3, device=device).view(1, 1, 3, 3)
    heads, _ = attend(q, k, v, activation="sigsoftmax", scale=1.0, backend="blocked")
    torch.testing.assert_close(heads.flatten(), torch.softmax(2 * scores, 0), rtol=1e-5, atol=1e-6)


def test_dropout_differs_between_calls_heads_and_blocks(device):
    length = 256
    v = torch.eye(length, device=device).expand(1, HEADS, length, length)
    q = torch.zeros(1, HEADS, length, DIM, device=device)
    torch.manual_seed(0)
    kept = [attend(q, q, v, dropout_p=0.5, backend="blocked")[0][0] != 0 for _ in range(2)]
    rows = blocked.MIN_BLOCK_ROWS
    for first, second in [
        (kept[0], kept[1]),
        (kept[0][0], kept[0][1]),
        (kept[0][:, :rows], kept[0][:, rows : 2 * rows]),
        (kept[0][:, :, : length // 2], kept[0][:, :, length // 2 :]),
    ]:
        assert (first == second).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_batch_entries_share_blocks_as_far_as_a_cpu_has_cache_and_a_gpu_memory():
    call = call_of(**problem(64, "cpu", prob_mixing="positionwise"))
    assert [blocked._max_block_elements(call, kind) for kind in ("cpu", "cuda")] == [1 << 16, 1 << 25]
    call = call_of(**problem(64, "cpu", prob_mixing="static"))
    assert [blocked._max_block_elements(call, kind) for kind in ("cpu", "cuda")] == [1 << 19, 1 << 25]


def test_a_gpu_gets_blocks_that_are_worth_a_launch():
    """16 heads of 512 keys: 64 queries of one entry are half a million scores, all 512 of them four million."""

    def rows(batch, length, device="meta"):
        x = torch.empty(batch, 16, length, 64, device=device)
        return blocked.BlockedAttention(call_of(x, x, mask=AttentionMask(True)), 0).rows

    assert [rows(1, 512), rows(2, 512), rows(64, 512)] == [512, 256, 64]
    assert [rows(1, 2048), rows(1, 8192)] == [128, 128]
    assert rows(1, 512, "cpu") == 64


class Waits(TorchDispatchMode):
    """Remembers operations that need numbers of a tensor, for which a GPU would be waited for."""

    READING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        chosen = [leaf for leaf in tree_leaves(args[1:]) if torch.is_tensor(leaf) and leaf.dtype == torch.bool]
        if function.overloadpacket.__name__ in self.READING or (function.overloadpacket.__name__ == "index" and chosen):
            self.found.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {"prob_mixing": "static", "score_mixing": "static", "activation": "sigsoftmax", "dropout_p": 0.1},
        {"prob_mixing": "positionwise", "mask": AttentionMask(True, parted_padding(200), torch.zeros(200, 200))},
        {"prob_mixing": "diagonal", "score_mixing": "diagonal", "score_bias": torch.zeros(200), "groups": 1},
    ],
    ids=["static", "positionwise", "diagonal"],
)
def test_no_number_is_read_that_a_gpu_would_be_waited_for(options):
    built = {
        name: part.detach().bfloat16().requires_grad_() if torch.is_tensor(part) else part
        for name, part in problem(200, "cpu", **options).items()
    }
    with Waits() as waits:
        heads, _ = attend(**built, backend="blocked")
        gradients(heads, built)
        found = len(waits.found)
        torch.ones(1).item()
    # the seed of dropout, which is drawn on the CPU, and what shows that waiting is seen
    assert found == int("dropout_p" in options) and len(waits.found) == found + 1


def test_it_says_that_it_returns_no_weights(device):
    with pytest.raises(ValueError, match="backend='blocked' cannot compute the attention weights"):
        attend(**problem(5, device), need_weights=True, backend="blocked")


@pytest.fixture(params=[True, False], ids=["narrow", "wide"])
def narrow_products(request, monkeypatch):
    """Whether the processor has instructions for half precision, whatever it is."""
    monkeypatch.setattr(blocks, "_is_fast_on_cpu", lambda dtype: request.param)
    return request.param


class Products(TorchDispatchMode):
    """Remembers the dtypes of products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("bmm", "baddbmm", "baddbmm_"):
            self.dtypes |= {arg.dtype for arg in args}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_in_float32_on_a_processor_without_its_instructions(
    dtype, narrow_products, monkeypatch
):
    """Of two batch entries in separate blocks, so that converted keys of the first are not taken for the second."""
    monkeypatch.setattr(blocked, "MAX_BLOCK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    half = {name: torch.randn(2, HEADS, 150, DIM, generator=generator).to(dtype).requires_grad_() for name in "qkv"}
    weight = torch.eye(HEADS) + 0.2
    exact = {name: part.detach().double().requires_grad_() for name, part in half.items()}
    expected, _ = attend(**exact, mask=AttentionMask(True), prob_mixing=StaticMixing(weight.double()))
    wanted = torch.autograd.grad(expected.sum(), list(exact.values()))
    with Products() as products:
        heads, _ = attend(**half, mask=AttentionMask(True), prob_mixing=StaticMixing(weight), backend="blocked")
        found = torch.autograd.grad(heads.sum(), list(half.values()))
    assert (dtype in products.dtypes) == narrow_products
    for one, other in zip((heads, *found), (expected, *wanted), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("known", "fast"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, (False, False, True)),
        ({"architecture": "x86_64", "avx512_bf16": True}, (True, False, True)),
        ({"architecture": "x86_64", "amx_bf16": True, "amx_fp16": True}, (True, True, True)),
        ({"architecture": "aarch64"}, (True, True, True)),
        ({}, (True, True, True)),
    ],
)
def test_instructions_for_half_precision_are_those_that_torch_names(known, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert tuple(map(blocks._is_fast_on_cpu.__wrapped__, dtypes)) == fast


def test_products_beyond_the_largest_float16_are_computed(device, narrow_products):
    inputs = problem(80, device, scale=1e-5)
    half = {name: (200 * inputs[name]).detach().half().requires_grad_() for name in "qkv"}
    heads, _ = attend(**inputs | half, backend="blocked")
    expected, _ = attend(**inputs | half, backend="reference")
    torch.testing.assert_close(heads, expected, atol=0.5, rtol=0.01)
    heads.float().sum().backward()
    for leaf in half.values():
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_nothing_to_attend_from_gives_nothing(device, batch, queries):
    q, k, v = (torch.randn(batch, 2, length, 4, device=device, requires_grad=True) for length in (queries, 5, 5))
    heads, _ = attend(q, k, v, backend="blocked")
    assert heads.shape == (batch, 2, queries, 4)
    heads.sum().backward()
    assert not k.grad.any()
