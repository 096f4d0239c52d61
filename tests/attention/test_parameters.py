"""Names, starts and numbers of parameters."""

import copy

import pytest
import torch
from needed_axes import PRESETS

from fairseq_lowrank.attention import build_attention


def count(layers):
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def layers(number, *args, **options):
    with torch.device("meta"):
        return [build_attention(*args, **options) for _ in range(number)]


@pytest.mark.parametrize(
    ("preset", "number", "embed_dim", "heads", "millions"),
    [
        *(("mha", 12, 768, 12, 28.31), ("mhe-add", 12, 768, 12, 8.88), ("mhe-mul", 12, 768, 12, 8.88)),
        *(("sha", 12, 768, 12, 8.85), ("el", 12, 768, 12, 14.16), ("mqa", 12, 768, 12, 15.34)),
        ("skv", 12, 768, 12, 21.23),
        # encoder-decoders: three attention sublayers for a layer of each
        *(("mha", 18, 512, 8, 18.87), ("mhe-mul", 18, 512, 8, 6.52)),
        *(("mhe-mul", 18, 512, 16, 5.63), ("mhe-mul", 18, 512, 4, 8.29)),
        *(("mha", 12, 512, 8, 12.58), ("mhe-mul", 12, 512, 8, 4.34)),
        *(("mha", 24, 512, 8, 25.17), ("mhe-mul", 24, 512, 8, 8.69)),
        *(("mha", 18, 768, 12, 42.47), ("mhe-mul", 18, 768, 12, 13.31)),
        *(("mha", 18, 1024, 16, 75.50), ("mhe-mul", 18, 1024, 16, 22.47)),
    ],
)
def test_attention_has_the_published_number_of_parameters(preset, number, embed_dim, heads, millions):
    assert count(layers(number, preset, embed_dim, heads, bias=False)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    ("number", "heads", "head_dim", "static", "positionwise"),
    [
        (6, 8, 64, 384, 3_456),
        (16, 8, 128, 1_024, 17_408),
        (16, 8, 64, 1_024, 9_216),
        (16, 10, 41, 1_600, 8_160),
        (18, 8, 128, 1_152, 19_584),
    ],
)
def test_mixing_adds_the_published_number_of_parameters(number, heads, head_dim, static, positionwise):
    def total(preset):
        return count(layers(number, preset, heads * head_dim, heads))

    assert total("mixhead-a") - total("mha") == static
    assert total("mixhead-b") - total("mha") == positionwise
    assert total("mixhead-random") == total("avghead") == total("mha")
    assert total("gain") - total("mha") == number * heads
    assert total("talking-heads") - total("mha") == 2 * static


PROJECTIONS = {f"{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")}
OUTPUT = {"out_proj.weight", "out_proj.bias"}
HEAD_EMBEDDINGS = {f"head_embeddings.{name}" for name in ("query", "key", "value")}
EXPECTED_NAMES = {
    **dict.fromkeys(("mha", "fixedhead", "sha", "mqa", "gqa"), PROJECTIONS | OUTPUT),
    **dict.fromkeys(("mixhead-a", "mixhead-random", "avghead", "gain"), PROJECTIONS | OUTPUT | {"mixing.weight"}),
    "talking-heads": PROJECTIONS | OUTPUT | {"score_mixing.weight", "mixing.weight"},
    "mixhead-b": PROJECTIONS | OUTPUT | {"mixing.weight", "mixing.query_weight"},
    **dict.fromkeys(("mhe-add", "mhe-mul"), PROJECTIONS | OUTPUT | HEAD_EMBEDDINGS),
    "skv": PROJECTIONS - {"v_proj.weight", "v_proj.bias"} | OUTPUT,
    "el": PROJECTIONS & {"q_proj.weight", "q_proj.bias"} | OUTPUT,
}


@pytest.mark.parametrize("preset", EXPECTED_NAMES)
def test_checkpoints_hold_these_names(preset, make):
    layer = make(preset, head_dim=4)
    assert set(layer.state_dict()) == EXPECTED_NAMES[preset]
    weights = {name for name in EXPECTED_NAMES[preset] if not name.endswith("bias")}
    assert set(make(preset, head_dim=4, bias=False).state_dict()) == weights
    learned = dict(layer.named_parameters())
    assert ("mixing.weight" in learned) == (preset in ("mixhead-a", "mixhead-b", "gain", "talking-heads"))


def test_shapes_of_mixing_and_head_embeddings():
    assert build_attention("mixhead-b", 12, 3, head_dim=5).mixing.query_weight.shape == (5, 3)
    embeddings = build_attention("mhe-mul", 12, 3, head_dim=5).head_embeddings
    assert embeddings.query.shape == embeddings.key.shape == embeddings.value.shape == (3, 5)


def test_mixing_starts_at_the_identity():
    assert torch.equal(build_attention("gain", 12, 3).mixing.weight, torch.ones(3))
    assert torch.equal(build_attention("mixhead-a", 12, 3).mixing.weight, torch.eye(3))
    positionwise = build_attention("mixhead-b", 12, 3).mixing
    assert torch.equal(positionwise.weight, torch.eye(3))
    assert torch.equal(positionwise.query_weight, torch.zeros(4, 3))


@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b", "gain", "talking-heads"])
def test_at_its_start_a_mixhead_layer_computes_what_the_standard_layer_computes(preset, activation, inputs, device):
    x = inputs(5, 2, 12, dtype=torch.float32)
    options = {"activation": activation, "self_attention": True}
    standard = build_attention("mha", 12, 3, **options, backend="reference").to(device)
    mixhead = build_attention(preset, 12, 3, **options, backend="reference").to(device)
    missing, unexpected = mixhead.load_state_dict(standard.state_dict(), strict=False)
    assert not unexpected and all("mixing." in name for name in missing)
    expected, expected_weights = standard(x, x, x, attn_mask="causal")
    output, weights = mixhead(x, x, x, attn_mask="causal")
    assert torch.equal(output, expected) and torch.equal(weights, expected_weights)
    mixhead.backend = "auto"
    torch.testing.assert_close(mixhead(x, x, x, attn_mask="causal", need_weights=False)[0], expected)


@pytest.mark.parametrize(
    ("preset", "options", "names", "deviation"),
    [
        ("lrkv", {"factor_rank": 16}, ("key_factors", "value_factors"), (16 + 64) ** -0.5),
        ("mha", {"score": "relative", "self_attention": True}, ("pos_bias_u", "pos_bias_v"), 0.02),
        (
            "mha",
            {"score": "synthesizer-random", "self_attention": True, "max_positions": 64},
            ("synthesizer.weight",),
            64**-0.5,
        ),
    ],
    ids=["lrkv", "relative", "synthesizer-random"],
)
def test_parameters_start_with_the_published_deviation(preset, options, names, deviation):
    parameters = dict(build_attention(preset, 512, 8, **options).named_parameters())
    found = torch.cat([parameters[name].detach().flatten() for name in names])
    assert found.std().item() == pytest.approx(deviation, rel=0.1)


def test_heads_of_collaborative_attention_start_with_features_of_their_own():
    features = build_attention("collaborative", 12, 3).head_features
    assert torch.equal(features, torch.eye(3).repeat_interleave(4, dim=1))


def test_average_mixing_is_the_mean_of_heads(make, inputs):
    layer, x = make("avghead"), inputs(4, 2, 12)
    torch.testing.assert_close(layer.mixing.weight, torch.full_like(layer.mixing.weight, 1 / 3))
    weights = layer(x, x, x, need_head_weights=True)[1]
    layer.mixing = None
    unmixed = layer(x, x, x, need_head_weights=True)[1]
    torch.testing.assert_close(weights, unmixed.mean(dim=0).expand_as(unmixed), rtol=1e-6, atol=0)


def test_random_mixing_has_columns_of_sum_1_and_follows_the_seed():
    def weight(seed):
        torch.manual_seed(seed)
        return build_attention("mixhead-random", 64, 16).mixing.weight

    torch.testing.assert_close(weight(1).sum(dim=0), torch.ones(16), rtol=0, atol=1e-4)
    torch.manual_seed(1)
    drawn = torch.randn(16, 16)
    assert all(torch.equal(weight(seed), weight(seed)) for seed in (1, 2)) and not torch.equal(weight(1), weight(2))
    ratios = weight(1)[1:] / weight(1)[:1]
    assert (weight(1) < 0).any() and drawn.shape == weight(1).shape and ratios.std() > 0.1


def test_random_mixing_travels_with_a_checkpoint():
    first, second = build_attention("mixhead-random", 12, 3), build_attention("mixhead-random", 12, 3)
    assert not torch.equal(first.mixing.weight, second.mixing.weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.mixing.weight, second.mixing.weight)


@pytest.mark.parametrize("preset", ["mhe-add", "mhe-mul"])
def test_head_embeddings_start_small_and_normal(preset):
    torch.manual_seed(0)
    for embedding in build_attention(preset, 512, 32, head_dim=64).head_embeddings.parameters():
        assert abs(embedding.mean()) < 0.002
        assert embedding.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("activation", ["softmax", "sigsoftmax"])
def test_every_parameter_gets_a_gradient(preset, activation, make, inputs):
    # distributed training waits for each
    for appended in (False, True):
        layer = make(
            preset,
            head_dim=4,
            activation=activation,
            add_bias_kv=appended,
            add_zero_attn=appended,
            self_attention=True,
            dropout=0.1,
        ).train()
        x = inputs(4, 2, 12)
        for options in ({"need_weights": False}, {"need_weights": True, "attn_mask": "causal"}):
            layer.zero_grad()
            layer(x, x, x, **options)[0].square().sum().backward()
            assert [name for name, parameter in layer.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("preset", ["mixhead-a", "mixhead-b", "mhe-add", "mhe-mul", "gain", "talking-heads"])
def test_mixing_and_head_embeddings_are_exempt_from_weight_decay(preset, make):
    for name, parameter in make(preset).named_parameters():
        extra = name.startswith(("mixing.", "score_mixing.", "head_embeddings."))
        assert hasattr(parameter, "optim_overrides") == extra, name
        if extra:
            assert parameter.optim_overrides["optimizer"]["weight_decay"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_copy_is_independent(preset, make, inputs):
    layer, x = make(preset, head_dim=4), inputs(4, 2, 12)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert not torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])


def test_every_projection_is_wrapped(make, inputs):
    wrapped = []

    def double(projection):
        wrapped.append(projection)
        projection.register_forward_hook(lambda module, args, output: 2 * output)
        return projection

    for preset in PRESETS:
        wrapped.clear()
        plain, layer = make(preset, head_dim=4), make(preset, head_dim=4, wrap_projection=double)
        assert set(wrapped) == {module for module in layer.modules() if isinstance(module, torch.nn.Linear)}
        x = inputs(4, 2, 12)
        assert not torch.allclose(layer(x, x, x)[0], plain(x, x, x)[0])
