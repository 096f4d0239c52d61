"""``--arch ANYTHING --attention …``: every family of fairseq's models is built with our attention, and is what it was.

The test command runs one small case a family; ``--all`` runs every family with every preset, in float32 and bfloat16.
"""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.modules import MultiheadAttention as StockAttention
from families import FAMILIES, Family
from tiny_transformer import needs_self_attention, preset_flags, shake

from fairseq_lowrank.attention import CAUSAL, PRESETS, AttentionSpec, MultiheadAttention

NAMES = [family.arch for family in FAMILIES]
CASES = [
    pytest.param(family, preset, id=f"{family.arch}-{preset}", marks=[] if preset == "mixhead-b" else pytest.mark.grid)
    for family in FAMILIES
    for preset in PRESETS
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=NAMES)


def ours(model) -> list[MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiheadAttention)]


def spec(preset: str, site: str) -> AttentionSpec:
    if site == "cross" and needs_self_attention(preset):
        return AttentionSpec()
    words = preset_flags(preset, ())[2:]
    flags = zip((word.strip("-").replace("-", "_") for word in words[::2]), map(int, words[1::2]), strict=True)
    return AttentionSpec.from_preset(preset, **dict(flags))


def stock(model) -> list[StockAttention]:
    return [module for module in model.modules() if isinstance(module, StockAttention)]


def same_hypotheses(some, others) -> None:
    for hypotheses, expected in zip(some, others, strict=True):
        assert [h["tokens"].tolist() for h in hypotheses] == [h["tokens"].tolist() for h in expected]
        for hypothesis, other in zip(hypotheses, expected, strict=True):
            torch.testing.assert_close(hypothesis["positional_scores"], other["positional_scores"], atol=3e-5, rtol=0)


@every_family
def test_stock_models_are_stock_and_a_state_of_theirs_gives_the_same(family: Family):
    """In plain mha and in Mixhead B, whose mixing starts at the identity: outputs and hypotheses."""
    theirs = shake(family.build())
    assert stock(theirs) and not ours(theirs)
    expected = family.output(theirs)
    for preset in ("mha", "mixhead-b"):
        model = family.build("--attention", preset)
        assert ours(model) and not stock(model)
        assert {layer.site for layer in ours(model)} == set(family.sites)
        model.load_state_dict(theirs.state_dict(), strict=True)
        torch.testing.assert_close(family.output(model), expected, atol=3e-5, rtol=1e-4)
        if family.decode is not None:
            same_hypotheses(family.decode(model), family.decode(theirs))


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_three_updates_move_every_parameter(family: Family, preset: str):
    model = family.build(*preset_flags(preset, family.sites)).train()
    assert all(layer.spec == spec(preset, layer.site) for layer in ours(model)) and ours(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = -family.output(model).float().log_softmax(-1)[..., 5].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    layers = {name for name, module in model.named_modules() if isinstance(module, MultiheadAttention)}
    still = [
        name
        for name, old in before.items()
        if old.equal(model.get_parameter(name)) and any(name.startswith(f"{layer}.") for layer in layers)
    ]
    # softmax cancels what is added to every key of a row
    assert not [name for name in still if not name.endswith(("k_proj.bias", "head_embeddings.key"))]


@pytest.mark.parametrize(("family", "preset"), CASES)
def test_bfloat16_is_near_float32(family: Family, preset: str):
    model = family.build(*preset_flags(preset, family.sites))
    expected = family.output(model).detach()
    output = family.output(model.bfloat16())
    assert output.dtype == torch.bfloat16 and output.isfinite().all()
    assert (output.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize(("family", "preset"), [case for case in CASES if case.values[0].one_word_after_another])
def test_decoding_step_by_step_scores_as_in_one_pass(family: Family, preset: str):
    model = shake(family.build(*preset_flags(preset, family.sites)))
    hypotheses = family.decode(model)
    best = [sentence[0]["tokens"] for sentence in hypotheses]
    longest = max(map(len, best))
    tokens = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=1) for row in best])
    inputs = torch.cat((torch.full((3, 1), 2), tokens[:, :-1]), dim=1)
    log_probs = family.output(model, inputs).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    for row, sentence in zip(log_probs, hypotheses, strict=True):
        scores = sentence[0]["positional_scores"]
        torch.testing.assert_close(row[: len(scores)], scores, atol=5e-5, rtol=0)


@every_family
def test_no_mask_of_all_pairs_is_made(family: Family):
    """Decoders say "causal"; everything else that may hide a key is padding, a number a key."""
    model, masks = family.build("--attention", "mixhead-b").train(), []
    for layer in ours(model):
        layer.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs.get("attn_mask")), with_kwargs=True)
    family.output(model)
    assert len(masks) >= len(ours(model))
    assert set(masks) <= {None, CAUSAL}
    assert (CAUSAL in masks) == family.one_word_after_another or family.arch == "multilingual_transformer"
    for module in model.modules():
        if isinstance(kept := getattr(module, "_future_mask", None), torch.Tensor):
            assert kept.numel() == 0
