"""The protocol of a measurement: sequences of the basis, worth, rank 0, own bases, single heads, the interval, progress."""

import math
import types

import pytest
import torch
import torch.nn.functional as F

from fairseq_lowrank import progress
from fairseq_lowrank.attention import CAUSAL, build_attention
from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, attention
from fairseq_lowrank.tools.measuring import measurement
from fairseq_lowrank.tools.measuring.curve import Curve
from fairseq_lowrank.tools.measuring.directions import best_cut, last_quarter
from fairseq_lowrank.tools.measuring.layers import ClassifierSubject, LayerSubject
from fairseq_lowrank.tools.measuring.measurement import Trial, measure
from fairseq_lowrank.tools.measuring.probe import Probe, cut_call
from fairseq_lowrank.tools.measuring.subject import (
    BITS,
    LABELS,
    Metric,
    decision_bits,
    frequency_bits,
    mean_decision_bits,
)

HEADS, SIZE, WIDTH = 2, 4, 8


def layer():
    torch.manual_seed(5)
    return build_attention("mha", WIDTH, HEADS, self_attention=True).double().eval()


def subject(samples, module=None):
    """A layer whose loss is 1 plus the squared distance from its own outputs, and sequences ``[T, 1, WIDTH]``."""
    module = module or layer()

    def output(x):
        return module(x, x, x, attn_mask=CAUSAL, need_weights=False)[0].detach()

    wanted = {id(x): output(x) for x in samples}

    def loss(x):
        return (output(x) - wanted[id(x)]).square().sum().item() + x.abs().sum().item(), float(len(x))

    return LayerSubject("layer", [("layer", "decoder", 0, module)], samples, loss, BITS, 24.0)


def sequences(count, seed=1, length=24):
    generator = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(length, 1, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def test_basis_is_of_the_first_half_and_cuts_are_of_the_second():
    first, second, other = (sequences(4, seed) for seed in (1, 2, 3))
    seen = []

    class Recorded(LayerSubject):
        def hooked(self, hook):
            self.probe = hook
            return super().hooked(hook)

        def evaluate(self, index):
            seen.append((index, self.probe.gathering))
            return super().evaluate(index)

    recorded = subject(first + second)
    recorded.__class__ = Recorded
    result = measure(recorded, "layer", quick=True)
    assert {index for index, gathering in seen if gathering} == {0, 1, 2, 3}
    assert {index for index, gathering in seen if not gathering} == {4, 5, 6, 7}
    assert result["tokens_of_basis"] == sum(len(x) for x in first)
    changed = measure(subject(first + other), "layer", quick=True)
    assert changed["layers"] == result["layers"] and changed["value"] != result["value"]
    changed = measure(subject(other + second), "layer", quick=True)
    assert changed["layers"] != result["layers"] and changed["value"] == result["value"]


def call_of(queries=6, keys=6, causal=True):
    torch.manual_seed(2)
    q, k = torch.randn(1, HEADS, queries, SIZE), torch.randn(1, HEADS, keys, SIZE)
    values = torch.randn(1, HEADS, keys, SIZE)
    return AttentionCall(DotProduct(q.double(), k.double(), 1.0), values.double(), AttentionMask(causal=causal))


def whole_cut(call):
    queries, keys = call.scores.q[0], call.scores.k[0]
    centred = keys - keys.mean(1, keepdim=True)
    return best_cut(centred.mT @ centred, queries.mT @ queries, keys.mean(1))


@pytest.mark.parametrize("kind", ["scores", "own"])
def test_all_keys_are_alike_at_rank_0(kind):
    call = call_of()
    changed = cut_call(call, kind, whole_cut(call), 0)
    patterns = attention(AttentionCall(changed.scores, changed.v, changed.mask, need_weights=True))[1]
    uniform = torch.ones(6, 6).tril()
    torch.testing.assert_close(patterns[0, 0].float(), uniform / uniform.sum(-1, keepdim=True))


@pytest.mark.parametrize("queries, keys", [(6, 6), (3, 9), (9, 3)])
@pytest.mark.parametrize("rank", [0, 1, 3, 4])
def test_own_basis_truncates_the_centred_logits_and_keeps_row_constants(queries, keys, rank):
    call = call_of(queries, keys, causal=False)
    logits = call.scores.dense()[0]
    means = logits.mean(-1, keepdim=True)
    left, values, right = torch.linalg.svd(logits - means, full_matrices=False)
    expected = (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :] + means
    torch.testing.assert_close(cut_call(call, "own", None, rank).scores.dense()[0], expected)


def test_own_basis_of_each_sequence_loses_no_more_of_its_logits_than_one_basis():
    module = layer()
    found = subject(sequences(6), module)
    result = measure(found, "layer")
    one, own = result["cuts"]["scores"]["all"], result["cuts"]["own"]["all"]
    assert own["need"] <= one["need"] and own["ranks"][0] == one["ranks"][0]
    assert all(row["rank"] < one["need"] for row in own["ranks"][:-1])
    assert own["needs"] == [[result["tolerance"], own["need"]]]


def test_cost_is_a_share_of_what_attention_is_worth():
    result = measure(subject(sequences(8)), "layer")
    curve = result["cuts"]["scores"]["all"]
    values = {entry["rank"]: entry["value"] for entry in curve["ranks"]}
    assert curve["worth"] == pytest.approx(values[0] - values[4])
    assert curve["worth_share"] == pytest.approx((values[0] - values[4]) / values[4])
    for entry in curve["ranks"]:
        assert entry["cost"] == pytest.approx((entry["value"] - values[4]) / (values[0] - values[4]))
    assert [need for _, need in curve["needs"]] == sorted((need for _, need in curve["needs"]), reverse=True)
    assert dict(curve["needs"])[result["tolerance"]] == curve["need"]


def curve_of(found, cost):
    """A curve whose cost of a rank on some sequences is a function."""
    curve = Curve(max(found), BITS, dict.fromkeys(range(10), (1.0, 1.0)), compute=None, found=dict(found))
    curve.cost = cost
    return curve


def test_interval_has_the_middle_95_percent_of_draws():
    """Two of ten sequences are hard. Rank 1 is too dear if five or more of the ten drawn are hard: in 3.3 % of draws."""
    hard = dict.fromkeys(range(10), 0.0) | {0: 1.0, 1: 1.0}

    def cost(rank, chosen):
        return 2.0 - rank if rank != 1 else sum(hard[index] for index in chosen) / len(chosen)

    curve = curve_of({0: None, 1: None, 2: None}, cost)
    assert curve.interval(0.45, 1) == [1, 2]
    assert curve.interval(0.55, 1) == [1, 1]  # six or more: 0.6 % of draws
    assert curve.interval(0.05, 1) == [1, 2]  # one or more: 89 % of draws
    hard = dict.fromkeys(range(10), 1.0) | {0: 0.0, 1: 0.0}
    assert curve.interval(0.55, 1) == [1, 2]  # cheap if five or more are easy
    assert curve.interval(0.45, 1) == [2, 2]  # cheap if six or more are easy: 0.6 % of draws


def trial_of(size, tolerance, loss, tokens=lambda index: 1.0, quick=False, constant=None):
    """The curve of one layer whose sequences lose ``loss(rank, index)`` in all."""
    probe = types.SimpleNamespace(kind="values", ranks={}, layers=[0], size=lambda kind, layer: size)
    found = types.SimpleNamespace(metric=BITS, second=None, layers=[], samples=range(20))
    found.evaluate = lambda index: (1 + loss(probe.ranks.get(0, size), index - 10), tokens(index - 10))
    trial = Trial(found, tolerance, 1, quick)
    trial.probe, trial.progress = probe, types.SimpleNamespace(update=lambda: None)
    trial.uncut, trial.constant = trial.evaluate({}, trial.held_out), constant
    return trial._entry(trial._whole([0]))


@pytest.mark.parametrize("need", range(1, 21))
def test_bisection_ends_at_the_need(need):
    assert trial_of(20, 0.5, lambda rank, index: float(rank < need))["need"] == need


@pytest.mark.parametrize("needs", [(20, 10, 5), (19, 17, 2), (7, 6, 6), (1, 1, 1)])
def test_bisection_finds_the_need_at_each_tolerance(needs):
    shares = (0.02, 0.1, 0.5)

    def loss(rank, index):
        return sum((0.03, 0.1, 0.87)[place] * (rank < need) for place, need in enumerate(needs))

    expected = [[pytest.approx(share), need] for share, need in zip(shares, needs, strict=True)]
    for quick in (False, True):
        assert trial_of(20, 0.02, loss, quick=quick)["needs"] == expected
    assert trial_of(20, 0.1, loss)["needs"] == [expected[1], expected[2]]  # 250 % is no share


def test_interval_is_that_of_the_sequences_drawn():
    """Cuts to ranks 1 and 2 cost 1 % of what attention is worth, by one sequence of ten, which a quarter of draws has twice."""
    found = trial_of(3, 0.015, lambda rank, index: 10.0 if rank == 0 else float(index == 0 and rank < 3))
    assert found["need"] == 1 and found["interval"] == [1, 3]


@pytest.mark.parametrize("quick", [False, True])
def test_ranks_at_which_a_verdict_changes_are_tried(quick):
    """Half of 24 and seven eighths of 24, also of values: else an end of the interval would be rounded past them."""
    found = trial_of(24, 0.5, lambda rank, index: float(rank < 3), quick=quick)
    assert {12, 21} <= {entry["rank"] for entry in found["ranks"]}


def test_interval_holds_every_need_that_rounds_up_to_its_lower_end():
    """Ranks 0, 16, 24 and 32 are tried. Draws whose need is 17 are told 24, so the lower end is 17."""
    found = dict.fromkeys((0, 16, 24, 32))
    assert curve_of(found, lambda rank, chosen: float(rank < 20)).interval(0.5, 1) == [17, 24]
    assert curve_of(found, lambda rank, chosen: 0.0).interval(0.5, 1) == [0, 0]


def test_long_sequences_weigh_more():
    """The first sequence has 91 of 100 tokens, and each loses 2 in all: 0.2 a token."""
    found = trial_of(3, 0.5, lambda rank, index: 2.0 * (rank < 3), lambda index: 91.0 if index == 0 else 1.0)
    assert found["worth"] == pytest.approx(0.2)


def test_a_layer_costs_a_share_of_what_all_attention_is_worth():
    result = measure(two_layers(), "layers")
    scores = result["cuts"]["scores"]
    for one in scores["layers"]:
        row = one["ranks"][0]
        assert row["cost"] == pytest.approx(row["added"] / worth_on_few(scores["all"], result))
    alone = [one["ranks"][0]["cost"] for one in scores["layers"]]
    assert all(0 < cost < 1 for cost in alone)


def worth_on_few(curve, result):
    """All held-out sequences are few here."""
    assert result["sequences_held_out"] == 4
    return curve["worth"]


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x, **options):
        return sum(one(x, x, x, **options)[0] for one in (self.first, self.second)), None


def two_layers():
    module, samples = TwoLayers(), sequences(8)

    def output(x):
        return module(x, attn_mask=CAUSAL, need_weights=False)[0].detach()

    wanted = {id(x): output(x) for x in samples}
    places = [(name, "decoder", i, getattr(module, name)) for i, name in enumerate(("first", "second"))]
    return LayerSubject(
        "two", places, samples, lambda x: ((output(x) - wanted[id(x)]).square().sum().item() + 1, 24.0), BITS, 24.0
    )


def test_worth_is_bounded_by_the_best_constant_prediction():
    """Rank 0 loses 8, and a constant prediction 2: a cut that loses 0.5 costs a quarter of the worth."""
    constant = dict.fromkeys(range(10, 20), (3.0, 1.0))

    def loss(rank, index):
        return 8.0 if rank == 0 else 0.5 * (rank < 3)

    found = trial_of(3, 0.2, loss, constant=constant)
    assert (found["worth"], found["worth_share"], found["need"]) == (2.0, 2.0, 3)
    row = found["ranks"][1]
    assert (row["added"], row["of_loss"], row["cost"]) == (0.5, 0.5, 0.25)
    assert trial_of(3, 0.2, loss)["need"] == 1  # without the bound the same cut costs a sixteenth
    better = dict.fromkeys(range(10, 20), (0.5, 1.0))  # a model below a constant prediction
    assert trial_of(3, 0.2, loss, constant=better)["worth"] == -0.5


def test_frequencies_of_words_leave_a_share_for_unseen_ones():
    basis, held_out = [torch.tensor([[0, 0, 1]]), torch.tensor([0])], [torch.tensor([0, 1]), torch.tensor([[3]])]
    seen, kinds, words = [0, 0, 1, 0], 2, 4
    chances = [(seen.count(word) + kinds / words) / (len(seen) + kinds) for word in range(words)]
    assert sum(chances) == pytest.approx(1)
    expected = [(-math.log2(chances[0]) - math.log2(chances[1]), 2.0), (-math.log2(chances[3]), 1.0)]
    assert frequency_bits(basis, held_out, words) == [pytest.approx(one) for one in expected]


@pytest.mark.parametrize("binary", [False, True])
def test_constant_decisions_are_the_mean_of_the_uncut_ones(binary):
    generator = torch.Generator().manual_seed(1)
    basis, held_out = ([torch.randn(3, 2, generator=generator).double() for _ in range(2)] for _ in range(2))
    chances = [(part.sigmoid() if binary else part.softmax(-1)) for part in (torch.cat(basis), held_out[0])]
    mean = chances[0].mean(0)
    expected = -(chances[1] * mean.log2()).sum()
    if binary:
        expected -= ((1 - chances[1]) * (1 - mean).log2()).sum()
    total, count = mean_decision_bits(basis, held_out, binary=binary)[0]
    assert (total, count) == (pytest.approx(expected.item()), 6.0 if binary else 3.0)


def test_cut_of_one_head_leaves_the_others_as_they_are():
    call = call_of()
    whole, cut = cut_call(call, "scores", whole_cut(call), 1), cut_call(call, "scores", whole_cut(call), 1, head=1)
    torch.testing.assert_close(cut.scores.dense()[:, 0], call.scores.dense()[:, 0])
    torch.testing.assert_close(cut.scores.dense()[:, 1], whole.scores.dense()[:, 1])
    assert not torch.allclose(cut.scores.dense()[:, 1], call.scores.dense()[:, 1])


SQUARES = Metric("squared error", True)


def sharp_heads(sharp, scale=1.0, heads=4, size=8):
    """Heads that find their own code of ``size`` signs among codes with one other sign need all directions, and others one.

    Args:
        scale: of the output of the sharp heads.
    """
    generator, width = torch.Generator().manual_seed(0), heads * size
    module = build_attention("mha", width, heads, self_attention=True, batch_first=True).double().eval()
    one = torch.zeros(size, size, dtype=torch.float64)
    one[0, 0] = 6.0
    parts = [3.0 * torch.eye(size).double() if head < sharp else one for head in range(heads)]
    outputs = [(scale if head < sharp else 1.0) * torch.eye(size).double() for head in range(heads)]
    state = {f"{name}.weight": torch.block_diag(*parts) for name in ("q_proj", "k_proj")}
    state |= {"v_proj.weight": torch.eye(width).double(), "out_proj.weight": torch.block_diag(*outputs)}
    for name, parameter in module.named_parameters():
        parameter.data = state.get(name, torch.zeros_like(parameter))
    flips = torch.cat([torch.ones(1, size), 1 - 2 * torch.eye(size)]).repeat(1, heads)
    samples = []
    for _ in range(16):
        signs = torch.randint(0, 2, (4, 1, width), generator=generator).float() * 2 - 1
        rest = torch.randint(0, 2, (4, size + 1, width), generator=generator).float() * 2 - 1
        near = signs * flips
        near[..., sharp * size :] = rest[..., sharp * size :]
        samples.append(near.reshape(1, -1, width).double())
    wanted = {id(x): module(x, x, x, need_weights=False)[0].detach() for x in samples}

    def score(x):
        error = module(x, x, x, need_weights=False)[0].detach() - wanted[id(x)]
        return error.square().sum().item() + 1e-3, float(x.size(1))

    return LayerSubject("hand", [("layer", "encoder", 0, module)], samples, score, SQUARES, 36)


@pytest.mark.parametrize("sharp, scale", [(1, 1.0), (1, 0.3), (1, 0.1), (4, 1.0), (0, 1.0)])
def test_need_of_each_head_does_not_depend_on_its_scale(sharp, scale):
    heads = measure(sharp_heads(sharp, scale), "hand", quick=True, heads=True)["cuts"]["scores"]["heads"]
    assert [head["need"] for head in heads] == [8] * sharp + [1] * (4 - sharp)


def test_head_that_changes_nothing_has_no_need():
    heads = measure(sharp_heads(1, 0.0), "hand", quick=True, heads=True)["cuts"]["scores"]["heads"]
    assert [head["need"] for head in heads] == [0, 1, 1, 1]


def test_last_quarter_has_the_share_of_the_last_directions():
    energies = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.0, 3.0])
    assert last_quarter(energies, 8).item() == pytest.approx(1 / 20)


def test_decisions_are_judged_by_the_cross_entropy_with_the_uncut_model():
    uncut, cut = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    assert decision_bits(uncut, uncut) == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)
    assert decision_bits(cut, uncut) == pytest.approx(1.0)
    assert decision_bits(uncut, cut) == pytest.approx(0.5 * math.log2(4 / 3) + 0.5 * 2)
    assert decision_bits(uncut, uncut, binary=True) == pytest.approx(decision_bits(uncut, uncut) + 1)


def test_classifier_has_bits_per_decision_and_per_label():
    module, samples = layer(), sequences(8)
    labels = [torch.tensor([index % 3]) for index in range(8)]

    def decide(sample):
        x, label = sample
        return module(x, x, x, need_weights=False)[0].mean(0)[:, :3], label

    places = [("layer", "encoder", 0, module)]
    found = ClassifierSubject("classifier", places, list(zip(samples, labels, strict=True)), decide, 24.0)
    result = measure(found, "classifier", quick=True)
    assert result["second_metric"] == LABELS.name
    with torch.no_grad():
        outputs = [decide(sample) for sample in found.samples[4:]]
    entropies = [-(F.softmax(one, -1) * F.log_softmax(one, -1)).sum().item() / math.log(2) for one, _ in outputs]
    assert result["value"] == pytest.approx(sum(entropies) / 4)
    losses = [F.cross_entropy(one, label).item() / math.log(2) for one, label in outputs]
    assert result["second_value"] == pytest.approx(sum(losses) / 4)
    assert all(entry["cost"] >= 0 for entry in result["cuts"]["scores"]["all"]["ranks"])


FLAGS = [{}, {"layers": False}, {"quick": True}, {"quick": True, "heads": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=["whole", "no layers", "quick", "heads"])
def test_passes_are_said_before_they_are_made(flags, capsys, monkeypatch):
    made = []

    class Counted(progress.Progress):
        def update(self, count=1):
            made.extend([super().update(count)] * count)

    monkeypatch.setattr(measurement, "Progress", Counted)
    result = measure(subject(sequences(16)), "layer", **flags)
    said = int(capsys.readouterr().err.split("about ")[1].split()[0].replace(",", ""))
    assert 0.75 * said <= len(made) <= 1.25 * said
    assert ("layers" in result["cuts"]["scores"]) == (flags == {})
    assert ("values" in result["cuts"]) == ("quick" not in flags)
    assert result["cuts"]["own"]["all"]["need"] <= result["cuts"]["scores"]["all"]["need"]


def test_rank_of_own_bases_is_the_limit_of_the_layer():
    probe = Probe([7])
    assert probe.size("own", 0) == probe.size("scores", 0) == 7
