"""The triton backend: on a GPU (--device cuda), or interpreted on the CPU (TRITON_INTERPRET=1, see test_triton_here.py)."""

import warnings

import numpy
import pytest
import torch
from attention_problems import attend, call_of, leaves, mixing_of
from rounded_attention import heads_and_gradients
from triton import OutOfResources

from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.cli import env, main
from fairseq_lowrank.cli._kernels import common_calls, describe_choice
from fairseq_lowrank.ops import AttentionCall, AttentionMask, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention import attention as operation
from fairseq_lowrank.ops.attention import auto, launch, selfcheck, triton
from fairseq_lowrank.ops.attention.tree import TensorTree

HEADS, LENGTH = 3, 20


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """No self-check before each composition, but for the tests of it."""
    monkeypatch.setattr(selfcheck, "_results", {})
    monkeypatch.setattr(selfcheck, "_warned", set())
    monkeypatch.setattr(selfcheck, "self_check", lambda *call, **options: selfcheck.SelfCheckResult(None))


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(selfcheck, "self_check", TRIAL)


TRIAL = selfcheck.self_check


def problem(
    device,
    *,
    prob_mixing="none",
    score_mixing="none",
    batch=1,
    heads=HEADS,
    groups=(None, None),
    queries=LENGTH,
    keys=LENGTH,
    dims=(10, 12),
    mask=None,
    **options,
):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    built = {
        "q": normal(batch, heads, queries, dims[0]),
        "k": normal(batch, groups[0] or heads, keys, dims[0]),
        "v": normal(batch, groups[1] or heads, keys, dims[1]),
        "mask": mask or AttentionMask(True),
    }
    scores = (batch, heads, queries, keys)
    return (
        built
        | {
            "score_mixing": mixing_of(score_mixing, normal, scores),
            "prob_mixing": mixing_of(prob_mixing, normal, scores),
        }
        | options
    )


def narrowed(part, dtype):
    if torch.is_tensor(part):
        return part.detach().to(dtype).requires_grad_(part.requires_grad) if part.is_floating_point() else part
    return part.map_tensors(lambda tensor: narrowed(tensor, dtype)) if isinstance(part, TensorTree) else part


def values_and_gradients(built, backend, **options):
    heads, _ = attend(**built, **options, backend=backend)
    cotangent = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(heads)
    parts = leaves(built)
    gradients = torch.autograd.grad(heads, list(parts.values()), cotangent)
    return {"heads": heads.detach(), **dict(zip(parts, gradients, strict=True))}


def assert_near_reference(built):
    """‖x − reference‖ / ‖reference‖ of the heads and all gradients in float32, the reference in float64 of these numbers."""
    narrow = {name: narrowed(part, torch.float32) for name, part in built.items()}
    expected = values_and_gradients({name: narrowed(part, torch.float64) for name, part in narrow.items()}, "reference")
    actual = values_and_gradients(narrow, "triton")
    assert actual["heads"].dtype == torch.float32
    for name, value in expected.items():
        distance = (actual[name].double() - value).norm() / value.norm().clamp(min=1e-2)
        assert distance < 1e-5, f"{name}: {distance:.1e}"
    return actual


def random_mask(batch, *, additive=None, queries=LENGTH, keys=LENGTH, **options):
    """Padding that leaves every query a key, and an additive mask of this dtype."""
    generator = torch.Generator().manual_seed(3)
    padding = torch.rand(batch, keys, generator=generator) < 0.3
    padding[:, 0] = False
    if additive is not None:
        drawn = torch.randn(HEADS, queries, keys, generator=generator)
        hidden = drawn < -1
        additive = hidden if additive == torch.bool else drawn.masked_fill(hidden, float("-inf")).to(additive)
    return AttentionMask(key_padding=padding, additive=additive, **options)


PROBLEMS = {
    "static": {"prob_mixing": "static"},
    "positionwise": {"prob_mixing": "positionwise", "activation": "sigsoftmax"},
    "talking heads": {"score_mixing": "static", "prob_mixing": "static"},
    "mixed scores": {"score_mixing": "static", "activation": "sigsoftmax"},
    "diagonal before": {"score_mixing": "diagonal", "prob_mixing": "positionwise"},
    "diagonal": {"prob_mixing": "diagonal", "activation": "sigsoftmax"},
    "plain": {"queries": 40, "keys": 40, "heads": 2},
    "batch, padding": {"prob_mixing": "static", "batch": 2, "mask": lambda: random_mask(2)},
    "bool mask": {"prob_mixing": "static", "mask": lambda: random_mask(1, additive=torch.bool, causal=True)},
    "float mask": {"prob_mixing": "positionwise", "mask": lambda: random_mask(1, additive=torch.float64)},
    "plain float mask": {"activation": "sigsoftmax", "mask": lambda: random_mask(1, additive=torch.float64)},
    "groups": {"prob_mixing": "static", "heads": 6, "groups": (2, 3)},
    "one key and value": {"heads": 4, "groups": (1, 1), "prob_mixing": "positionwise"},
    "more keys": {"prob_mixing": "static", "queries": 17, "keys": 39},
    "more queries": {"prob_mixing": "positionwise", "queries": 39, "keys": 17},
    "one query": {"prob_mixing": "static", "score_mixing": "static", "queries": 1, "keys": 33},
    "beams, appended": {
        "prob_mixing": "static",
        "queries": 24,
        "mask": lambda: AttentionMask(True, num_appended_keys=2, query_repeats=2),
    },
    "17 heads of 1": {"prob_mixing": "static", "heads": 17, "dims": (1, 1), "queries": 16, "keys": 16},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients_are_the_references(name, device):
    options = dict(PROBLEMS[name])
    if "mask" in options:
        mask = options.pop("mask")()
        options["mask"] = mask.map_tensors(lambda tensor: tensor.to(device))
    assert_near_reference(problem(device, **options))


@pytest.mark.parametrize("mixing", ["static", "positionwise"])
def test_mixing_is_that_by_pytorchs_own_kernels(mixing, device):
    """An oracle on any device that shares no code with these kernels nor with the reference."""
    built = problem(device, prob_mixing=mixing, heads=4, groups=(4, 2), queries=24, keys=24)
    built = {name: narrowed(part, torch.float32) for name, part in built.items()}
    expected = values_and_gradients(built, "sdpa")
    for name, found in values_and_gradients(built, "triton").items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("dtype", "rules"), [(torch.float16, ("static", "static")), (torch.bfloat16, ("none", "positionwise"))], ids=str
)
def test_half_precision_is_the_formula_rounded_where_the_kernels_round(dtype, rules, device):
    built = problem(device, score_mixing=rules[0], prob_mixing=rules[1], dims=(10, 10))
    call = call_of(**{name: narrowed(part, dtype) for name, part in built.items()})
    cotangent = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
    heads, _ = operation(call, "triton")
    tensors = [call.scores.q, call.scores.k, call.v, *(m.weight for m in (call.score_mixing, call.prob_mixing) if m)]
    found = [heads.detach(), *torch.autograd.grad(heads, tensors, cotangent)]
    for one, other in zip(found, heads_and_gradients(call, cotangent, merged=False), strict=True):
        assert (one.double() - other).norm() < 2e-3 * other.norm()


def test_heads_of_128_are_computed_in_parts(device):
    """On a GPU no program has registers for all columns, and in float32 no shared memory for mixed scores too."""
    before = "static" if device == "cpu" else "none"
    assert_near_reference(problem(device, prob_mixing="static", score_mixing=before, heads=2, dims=(128, 100)))


def test_queries_without_keys_give_zeros_and_no_gradient(device):
    padding = torch.zeros(2, LENGTH, dtype=torch.bool, device=device)
    padding[0], padding[1, :3] = True, True
    for rules in ({"prob_mixing": "static"}, {"activation": "sigsoftmax"}):
        built = problem(device, batch=2, mask=AttentionMask(True, padding), **rules)
        found = assert_near_reference(built)
        assert not found["heads"][0].any() and not found["heads"][1, :, :3].any()
        assert not found["q"][0].any() and not found["q"][1, :, :3].any()
        assert not found["k"][0].any() and not found["v"][1, :, :3].any()


def test_very_low_scores_keep_their_sigsoftmax(device):
    scores = torch.tensor([-1000.0, -1000.5, -1003.0], device=device)
    q, k, v = torch.ones(1, 1, 1, 1, device=device), scores.view(1, 1, 3, 1), torch.eye(3, device=device)[None, None]
    heads, _ = attend(q, k, v, activation="sigsoftmax", scale=1.0, backend="triton")
    torch.testing.assert_close(heads.flatten(), torch.softmax(2 * scores, 0), rtol=1e-5, atol=1e-6)


def test_the_same_call_gives_the_same_numbers_to_the_bit(device):
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    one, other = (values_and_gradients(built, "triton") for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_heads_and_gradients_in_any_layout_are_read(device):
    """As [T, B, H, D] and as [B, H, D, T]; the gradient of a sum has no strides at all."""
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    expected = torch.autograd.grad(attend(**built, backend="triton")[0].sum(), [built["q"]])
    built["q"] = built["q"].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    built["k"] = built["k"].detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    found = torch.autograd.grad(attend(**built, backend="triton")[0].sum(), [built["q"]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mixing", ["static", "none"])
def test_dropout_keeps_its_share_and_scales_the_rest(mixing, device):
    length, rate = 64, 0.25
    built = problem(device, prob_mixing=mixing, queries=length, keys=length)
    built = {name: narrowed(part, torch.float32) for name, part in built.items()}
    # with the unit matrix as values the output is the dropped weights
    built["v"] = torch.eye(length, device=device).expand(1, HEADS, length, length)
    weights = attend(**built, backend="triton")[0]
    torch.manual_seed(0)
    one, other = (attend(**built, dropout_p=rate, backend="triton")[0] for _ in range(2))
    visible = weights != 0
    kept = one != 0
    torch.testing.assert_close(one[kept], weights[kept] / (1 - rate))
    for head in range(HEADS):
        # the standard error of the share is below 0.01
        assert kept[0, head][visible[0, head]].double().mean().item() == pytest.approx(1 - rate, abs=0.04)
    same = (kept == (other != 0))[visible].double().mean().item()
    assert same == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.03)  # another mask at another call
    same = (kept[0, 0] == kept[0, 1])[visible[0, 0] & visible[0, 1]].double().mean().item()
    assert same == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.05)  # and in another head


@pytest.mark.parametrize("mixing", ["static", "positionwise", "none"])
def test_gradients_under_dropout_are_those_of_the_mask_that_was_drawn(mixing, device):
    length, rate = 20, 0.4
    exact = problem(device, prob_mixing=mixing, dims=(10, length))
    built = {name: narrowed(part, torch.float32) for name, part in exact.items()}
    unit = torch.eye(length, device=device).expand(1, HEADS, length, length)
    torch.manual_seed(4)
    kept = attend(**built | {"v": unit}, dropout_p=rate, backend="triton")[0] != 0
    torch.manual_seed(4)
    found = values_and_gradients(built, "triton", dropout_p=rate)
    # the formula with this mask
    weights, _ = attend(**exact | {"v": unit.double()}, backend="reference")
    heads = (weights * kept / (1 - rate)) @ exact["v"]
    cotangent = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(heads)
    parts = leaves(exact)
    torch.testing.assert_close(found["heads"].double(), heads, rtol=1e-4, atol=1e-5)
    for name, wanted in zip(parts, torch.autograd.grad(heads, list(parts.values()), cotangent), strict=True):
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-4, msg=name)


def test_second_derivatives_and_transforms_are_refused(device):
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    heads, _ = attend(**built, backend="triton")
    (gradient,) = torch.autograd.grad(heads.pow(2).sum(), [built["q"]], create_graph=True)
    with pytest.raises(NotImplementedError, match=r'the triton backend .* choose backend="reference"'):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match='choose backend="reference"'):
        torch.func.vmap(lambda v: attend(**built | {"v": v}, backend="triton")[0])(built["v"][None])


def test_compiled_code_around_it_gives_the_same(device):
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    mixing = built.pop("prob_mixing")

    def doubled(q, weight):
        return attend(**built | {"q": 2 * q, "prob_mixing": StaticMixing(weight)}, backend="triton")[0] * 2

    # "eager" stands for any compiler: what is tested is that tracing goes round the kernels
    heads = torch.compile(doubled, backend="eager")(built["q"], mixing.weight)
    expected = doubled(built["q"], mixing.weight)
    torch.testing.assert_close(heads, expected)
    found, wanted = (torch.autograd.grad(result.sum(), [built["q"], mixing.weight]) for result in (heads, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("preset", ["mixhead-b", "talking-heads"])
def test_a_layer_computes_by_it(preset, device):
    layers = []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        layers.append(
            build_attention(preset, embed_dim=32, num_heads=4, self_attention=True, backend=backend).to(device)
        )
    x = torch.randn(18, 2, 32, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    padding = torch.zeros(2, 18, dtype=torch.bool, device=device)
    padding[1, -4:] = True
    results = []
    for layer in layers:
        output, _ = layer(x, x, x, key_padding_mask=padding, attn_mask=CAUSAL, need_weights=False)
        gradients = torch.autograd.grad(output.pow(2).sum(), [x, *layer.parameters()])
        results.append((output, *gradients))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_wrong_kernels_are_noticed_and_blocks_compute_instead(device, checked, monkeypatch):
    right = launch._matrix

    def unmixed(mixing):
        """M's first column is that of the second head."""
        matrix = right(mixing)
        return matrix if mixing is None else matrix._replace(column=0)

    monkeypatch.setattr(launch, "_matrix", unmixed)
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    with pytest.warns(
        RuntimeWarning, match=r"the triton kernels cannot be used on this GPU \(heads by .*'blocked' computes"
    ):
        found = values_and_gradients(built, "triton")
    expected = values_and_gradients(built, "blocked")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values_and_gradients(built, "triton")  # said once


def test_kernels_that_do_not_run_are_noticed(device, checked, monkeypatch):
    def broken(kernel):
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(launch.Kernel, "run", broken)
    monkeypatch.setattr(launch.Launch.__init__, "__defaults__", (broken,))
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    with pytest.warns(RuntimeWarning, match=r"\(RuntimeError: out of resources: shared memory\)"):
        found = values_and_gradients(built, "triton")
    expected = values_and_gradients(built, "blocked")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def kernels_of(device, monkeypatch):
    """Heads of a call that "auto" leaves to these kernels, and the kernels that a backend launched."""
    monkeypatch.setattr(auto, "_kind", lambda call: "cuda")
    monkeypatch.setattr(auto.tiled, "unsupported_reason", lambda call: "what is tested here")
    built = problem(device, prob_mixing="static", heads=8, dims=(32, 32))
    built = {name: narrowed(part, torch.bfloat16) for name, part in built.items()}
    run, launched = launch.Kernel.run, []

    def launched_as(kernel):
        launched.append(kernel.name)
        return run(kernel)

    monkeypatch.setattr(launch.Kernel, "run", launched_as)
    monkeypatch.setattr(launch.Launch.__init__, "__defaults__", (launched_as,))

    def computed(backend):
        launched.clear()
        heads, _ = attend(**built, backend=backend)
        return heads, list(launched)

    return computed


def test_auto_takes_the_kernels_after_a_check(kernels_of, checked):
    assert "row_sums" in kernels_of("auto")[1]  # when it was tried
    heads, launched = kernels_of("auto")
    assert launched == ["row_statistics", "attend"]
    assert torch.equal(heads, kernels_of("triton")[0])


def test_auto_leaves_to_blocks_what_lacks_shared_memory_here_and_says_nothing(kernels_of, checked, monkeypatch):
    def larger_than_the_chip(kernel):
        raise OutOfResources(147456, 101376, "shared memory")

    monkeypatch.setattr(launch.Kernel, "run", larger_than_the_chip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads, _ = kernels_of("auto")
    assert torch.equal(heads, kernels_of("blocked")[0])
    with pytest.warns(RuntimeWarning, match="out of resource: shared memory, Required: 147456"):
        assert torch.equal(heads, kernels_of("triton")[0])


def test_a_recorded_graph_has_what_its_warm_up_found(kernels_of, monkeypatch):
    monkeypatch.setattr(selfcheck, "_is_recorded", lambda call: True)
    monkeypatch.setattr(
        selfcheck, "self_check", lambda *call: pytest.fail("nothing is compared while a graph is recorded")
    )
    assert kernels_of("auto")[1] == ["row_statistics", "attend"]  # nothing is known
    monkeypatch.setattr(selfcheck, "_is_recorded", lambda call: False)
    monkeypatch.setattr(selfcheck, "self_check", lambda *call: selfcheck.SelfCheckResult("OutOfResources", fits=False))
    assert kernels_of("auto")[1] == []
    monkeypatch.setattr(selfcheck, "_is_recorded", lambda call: True)
    assert kernels_of("auto")[1] == []


@pytest.mark.parametrize(("length", "alike"), [(1, 1), (33, 20), (64, 48)])
def test_the_check_compiles_what_is_used(length, alike, device, checked, monkeypatch):
    """Triton compiles another kernel for a length of 1, of a multiple of 16, and for weights in half precision."""
    tried = []
    monkeypatch.setattr(selfcheck, "self_check", lambda call, backend: tried.append(call) or TRIAL(call))
    built = problem(device, prob_mixing="static", heads=2, queries=length, keys=length)
    attend(**{name: narrowed(part, torch.bfloat16) for name, part in built.items()}, backend="triton")
    (call,) = tried
    assert call.scores.shape == (1, 2, alike, alike) and call.prob_mixing.weight.dtype == torch.bfloat16


def test_right_kernels_pass_their_check_once_for_each_composition(device, checked, monkeypatch):
    tried = []
    monkeypatch.setattr(selfcheck, "self_check", lambda call, backend: tried.append(call) or TRIAL(call))
    built = {name: narrowed(part, torch.float32) for name, part in problem(device, prob_mixing="static").items()}
    for length in (5, 7, 5):
        attend(**built | {name: built[name][:, :, :length] for name in "qkv"}, backend="triton")
    assert len(tried) == 1
    attend(**built | {"activation": "sigsoftmax"}, backend="triton")
    assert len(tried) == 2


@pytest.fixture
def random_cases_alone(device):
    """``env --kernels`` with these arguments, without common layers. Returns its exit status."""
    return lambda *arguments: main(["env", "--kernels", "--random-only", "--device", device, *arguments])


def test_kernels_that_do_not_fit_are_not_wrong(random_cases_alone, capsys, monkeypatch):
    larger = selfcheck.SelfCheckResult("OutOfResources: 268288", fits=False)
    results = iter([larger, selfcheck.SelfCheckResult(None), larger])
    monkeypatch.setattr(selfcheck, "self_check", lambda *call: next(results))
    assert random_cases_alone("--cases", "3", "--dtype", "float32") == 0
    assert capsys.readouterr().out == (
        "2 of 3 random cases need more shared memory than this GPU has, and were not computed\n1 random cases: all right\n"
    )


def test_the_command_checks_random_cases(random_cases_alone, checked, capsys, monkeypatch):
    # in float32 these cases need more shared memory than an H100 has
    status = random_cases_alone("--cases", "2", "--dtype", "float16", "--seed", "8")
    assert (status, capsys.readouterr().out) == (0, "2 random cases: all right\n")
    monkeypatch.setattr(selfcheck, "self_check", lambda *call: selfcheck.SelfCheckResult("k by 0.3"))
    assert random_cases_alone("--cases", "2", "--dtype", "float32") == 1
    *cases, last = capsys.readouterr().out.splitlines()
    assert last == "2 of 2 random cases are wrong" and all(case.endswith(": k by 0.3") for case in cases)
    lengths = []
    monkeypatch.setattr(
        selfcheck,
        "self_check",
        lambda call, backend: lengths.append(max(call.scores.shape[2:])) or selfcheck.SelfCheckResult(None),
    )
    assert random_cases_alone("--cases", "40", "--longest", "3") == 0
    assert max(lengths) == 3


@pytest.mark.parametrize(
    ("dtype", "rules", "sizes"),
    [
        (torch.float32, (StaticMixing, None), (1, 12, 23, 7, 50, 58)),
        (torch.bfloat16, (None, PositionwiseMixing), (1, 2, 9, 1, 43, 120)),
    ],
    ids=str,
)
def test_the_rounding_of_a_gradient_that_is_zero_is_no_mistake(dtype, rules, sizes, device):
    """Of one visible key a softmax is 1 whatever its score."""
    keys, heads = sizes[3], sizes[1]
    mask = AttentionMask(key_padding=torch.arange(keys, device=device)[None] != keys // 2)
    generator = torch.Generator().manual_seed(0)
    call = selfcheck.random_call(generator, device, dtype, 1, heads, sizes, rules, mask, "softmax", None)
    assert TRIAL(call).error is None


def test_what_it_cannot_compute_is_said(device):
    plain = problem(device)
    assert triton.unsupported_reason(call_of(**plain)) is None
    for options, reason in [
        ({"need_weights": True}, "the attention weights"),
        ({"score_bias": torch.zeros(1)}, "a score_bias"),
        ({"distance_bias": torch.zeros(1, 1, 2 * LENGTH - 1)}, "a distance_bias"),
        ({"mask": AttentionMask(additive=torch.zeros(1, requires_grad=True))}, "a gradient of the float mask"),
        ({"mask": AttentionMask(True, window=2)}, "a sliding window"),
        ({"mask": AttentionMask(True, documents=torch.zeros(1, LENGTH).long())}, "a mask of documents"),
        ({"score_mixing": mixing_of("positionwise", torch.randn, (1, HEADS, LENGTH, LENGTH))}, "before the softmax"),
    ]:
        assert reason in triton.unsupported_reason(call_of(**plain | options))
    many = torch.zeros(1, 33, 2, 4)
    assert triton.unsupported_reason(call_of(many, many)) is None
    assert "33 heads (of 2 to 32 alone)" in triton.unsupported_reason(
        call_of(many, many, prob_mixing=StaticMixing(torch.eye(33)))
    )
    wide = torch.zeros(1, 2, 2, 129)
    assert "of size 129 (of up to 128 alone)" in triton.unsupported_reason(call_of(wide, wide))

    assert "scores other than dot products" in triton.unsupported_reason(AttentionCall(object(), wide, AttentionMask()))


@pytest.fixture
def pretended(device, monkeypatch):
    """The rows of ``env`` where these self-checks of the backends have these results, and "auto" prefers their kernels."""
    monkeypatch.setattr(auto, "_kind", lambda call: "cuda")

    def rows(**results):
        monkeypatch.setattr(selfcheck, "_results", {})
        monkeypatch.setattr(
            selfcheck, "self_check", lambda call, backend, **options: selfcheck.SelfCheckResult(*results[backend])
        )
        return dict(env.kernels())

    return rows


A = "kernels{}, static mixing"
WHY = "(measured, picoseconds a score: tiled 12.0, triton 25.7, sdpa 76.9, blocked 407.8)"


def test_env_checks_and_explains_what_auto_takes(device, pretended):
    name = A.format("" if device == "cpu" else " 0")
    rows = pretended(tiled=(None,), triton=(None,))
    assert rows[name] == f"tiled {WHY}; tiled equals the reference"
    assert {row.partition(" ")[0] for row in rows.values()} == {"tiled"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = pretended(tiled=("q by 0.3",), triton=(None,))
    assert rows[name] == f"triton {WHY}; tiled is wrong (q by 0.3); triton equals the reference"
    rows = pretended(tiled=("OutOfResources: 268288", False), triton=(None,))
    assert rows[name] == (f"triton {WHY}; tiled does not fit (OutOfResources: 268288); triton equals the reference")


def test_kernels_are_wrong_if_a_common_layer_is_wrong(device, pretended):
    pretended(tiled=("q by 0.3",), triton=(None,))
    calls = common_calls(torch.device(device), torch.bfloat16)
    said, right = describe_choice(calls["static mixing of 8 heads"])
    assert "tiled is wrong (q by 0.3); triton equals the reference" in said and not right
    assert describe_choice(common_calls(torch.device(device), torch.float32)["static mixing"]) == (
        "blocked; triton equals the reference",
        True,
    )


def test_common_layers_pass_the_check(device):
    call = common_calls(torch.device(device))["mixing by query"]
    assert TRIAL(call) == selfcheck.SelfCheckResult(None)


def test_addresses_of_a_mask_have_64_bits(device):
    if device != "cpu":
        pytest.skip("its memory is empty pages of the operating system")
    # 3 GiB, but only two pages are touched
    memory = torch.from_numpy(numpy.zeros(3 * 2**30 + 1, dtype=bool))
    memory[-1] = True
    hidden = memory.as_strided((1, 4), (0, 2**30))
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    found, expected = (
        attend(q, k, k, mask=AttentionMask(additive=mask), prob_mixing=StaticMixing(torch.eye(2)), backend=backend)[0]
        for mask, backend in ((hidden, "triton"), (hidden.contiguous(), "reference"))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_addresses_of_heads_have_64_bits(device):
    if device != "cpu":
        pytest.skip("its memory is empty pages of the operating system")
    # heads 2 GiB apart, but only three pages are touched
    memory = torch.from_numpy(numpy.zeros(2 * 2**30 + 32, dtype=numpy.float16))
    k = memory.as_strided((1, 3, 4, 8), (0, 2**30, 8, 1))
    q, values = torch.randn(1, 3, 5, 8).half(), torch.randn(1, 3, 4, 8).half()
    k.copy_(torch.randn(1, 3, 4, 8))
    found, expected = (
        attend(q, keys, values, prob_mixing=StaticMixing(torch.eye(3)), backend=backend)[0].float()
        for keys, backend in ((k, "triton"), (k.contiguous(), "reference"))
    )
    torch.testing.assert_close(found, expected, atol=3e-3, rtol=3e-3)
