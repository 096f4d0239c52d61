"""The ``mha`` preset is fairseq's own module: the same starts, outputs, weights and saved keys."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.modules import MultiheadAttention as Stock

from fairseq_lowrank.attention import CAUSAL, AttentionConfig, AttentionSpec
from fairseq_lowrank.plugin.layer import FairseqAttention

SITES = {
    "self": {"self_attention": True},
    "cross": {"encoder_decoder_attention": True},
    "cross of other sizes": {"encoder_decoder_attention": True, "kdim": 8, "vdim": 8},
    "no biases": {"bias": False},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True},
}


def both(**options):
    """fairseq's layer and ours, made with the same seed, with fairseq's numbers loaded into ours."""
    torch.manual_seed(3)
    stock = Stock(12, 3, **options)
    torch.manual_seed(3)
    ours = FairseqAttention(AttentionConfig(AttentionSpec(), 12, 3, **options))
    return stock.double().eval(), ours.double().eval()


@pytest.fixture
def x(inputs):
    return inputs(5, 2, 12).cpu()


@pytest.mark.parametrize("site", SITES)
def test_the_same_seed_gives_the_same_parameters(site):
    stock, ours = both(**SITES[site])
    assert set(ours.state_dict()) == set(stock.state_dict())
    for name, tensor in stock.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def padding():
    return torch.tensor([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("site", SITES)
def test_outputs_and_weights(site, x, inputs):
    stock, ours = both(**SITES[site])
    key = inputs(5, 2, ours.kdim, seed=4).cpu() if "cross" in site else x
    # fairseq computes in one of two ways: by torch's function, which fails without biases and ignores two options, or
    # by hand, which fails with appended keys
    either_way, by_hand = [{}, {"need_weights": False}], [{"need_head_weights": True}, {"before_softmax": True}]
    cases = [(False, options) for options in either_way if site != "no biases"]
    cases += [(True, options) for options in either_way + by_hand if site != "appended keys"]
    for key_padding_mask in (None, padding()):
        for stock.skip_embed_dim_check, options in cases:
            expected = stock(x, key, key, key_padding_mask=key_padding_mask, **options)
            found = ours(x, key, key, key_padding_mask=key_padding_mask, **options)
            torch.testing.assert_close(found[0], expected[0])
            assert (found[1] is None) == (expected[1] is None)
            if expected[1] is not None:
                torch.testing.assert_close(found[1], expected[1], check_dtype=False)


def test_the_causal_tensor_fairseq_makes_and_the_marker(x):
    stock, ours = both(self_attention=True)
    future = torch.full((5, 5), float("-inf")).triu(1)
    expected = stock(x, x, x, attn_mask=future.double(), need_weights=False)[0]
    for mask in (future, CAUSAL):
        torch.testing.assert_close(ours(x, x, x, attn_mask=mask, need_weights=False)[0], expected)


def test_gradients(x):
    stock, ours = both(self_attention=True)
    for layer in (stock, ours):
        layer.train()(x, x, x, key_padding_mask=padding(), need_weights=False)[0].square().sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, msg=name)


def test_decoding_with_reordered_beams_and_what_is_saved(x):
    stock, ours = both(self_attention=True)
    states, order = {stock: {}, ours: {}}, torch.tensor([1, 1])
    for step in x.split(1):
        expected, found = (layer(step, step, step, incremental_state=states[layer])[0] for layer in (stock, ours))
        torch.testing.assert_close(found, expected)
        saved, expected = ours._get_input_buffer(states[ours]), stock._get_input_buffer(states[stock])
        for name in ("prev_key", "prev_value"):
            torch.testing.assert_close(saved[name], expected[name])
        for layer in (stock, ours):
            layer.reorder_incremental_state(states[layer], order)


@pytest.mark.parametrize("repeated", [False, True])
def test_one_set_of_encoder_keys_for_all_beams(repeated, inputs):
    stock, ours = both(encoder_decoder_attention=True)
    query, key = inputs(1, 6, 12).cpu(), inputs(5, 2, 12, seed=4).cpu()
    key, key_padding_mask = (
        (key.repeat_interleave(3, 1), padding().repeat_interleave(3, 0)) if repeated else (key, padding())
    )
    outputs = []
    for layer in (stock, ours):
        layer.set_beam_size(3)
        state = {}
        steps = [layer(query, key, key, key_padding_mask, state, static_kv=True) for _ in range(2)]
        layer.reorder_incremental_state(state, torch.tensor([4, 3, 5]))
        steps.append(layer(query[:, 3:], None, None, None, state, static_kv=True))
        outputs.append(steps)
    for (expected, expected_weights), (found, weights) in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(weights, expected_weights, check_dtype=False)


def test_quantisation_noise_reaches_what_a_score_makes_of_its_own():
    from fairseq.modules.quant_noise import quant_noise

    torch.manual_seed(1)
    spec = AttentionSpec(score="synthesizer-dense")
    options = {"self_attention": True, "max_positions": 8}
    layer = FairseqAttention(
        AttentionConfig(spec, 12, 3, **options), wrap_projection=lambda linear: quant_noise(linear, 0.9, 4)
    )
    x = torch.randn(5, 2, 12)
    before = layer.synthesizer.weight.clone()
    layer.eval()
    exact = layer(x, x, x)[0]
    assert torch.equal(before, layer.synthesizer.weight) and torch.equal(exact, layer(x, x, x)[0])
    layer.train()
    layer(x, x, x)
    assert (layer.synthesizer.weight == 0).float().mean() > 0.5 > (before == 0).float().mean()


def test_a_fairseq_dropout_module_and_quantisation_noise_fit_in(x):
    from fairseq.modules import FairseqDropout
    from fairseq.modules.quant_noise import quant_noise

    dropout = FairseqDropout(0.5, module_name="MultiheadAttention")
    layer = FairseqAttention(
        AttentionConfig(AttentionSpec(), 12, 3),
        dropout=dropout,
        wrap_projection=lambda projection: quant_noise(projection, 0.5, 4),
    ).double()
    layer.eval()
    exact = layer(x, x, x)[0]
    assert torch.equal(layer(x, x, x)[0], exact)
    dropout.make_generation_fast_(name="", retain_dropout=True)
    assert not torch.allclose(layer(x, x, x)[0], exact)
    dropout.apply_during_inference, dropout.p = False, 0.0
    # noise sets blocks of the weights to zero for good while training
    before = layer.q_proj.weight.clone()
    layer.train()(x, x, x)
    assert 0 < (layer.q_proj.weight == 0).double().mean() < 1
    assert (before != 0).all()
