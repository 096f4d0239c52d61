"""A layer that mixes loads a state without mixing; a state that lost its mixing is refused."""

import pytest
import torch

from fairseq_lowrank.attention import AXES, PRESETS, Method, RotaryPositions, build_attention, register
from fairseq_lowrank.messages import StateDictMismatch, UserError
from fairseq_lowrank.parts import HeadOutput, Option

LEARNED = {
    "mixhead-a": ["mixing.weight"],
    "gain": ["mixing.weight"],
    "talking-heads": ["score_mixing.weight", "mixing.weight"],
    "mixhead-b": ["mixing.weight", "mixing.query_weight"],
}
FIXED = {"mixhead-random": ["mixing.weight"], "avghead": ["mixing.weight"]}


def trained(preset):
    layer = build_attention(preset, 12, 3)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.state_dict()


@pytest.mark.parametrize("preset", LEARNED)
def test_a_state_saved_without_mixing_gets_the_identity(preset):
    layer, state = build_attention(preset, 12, 3), trained("mha")
    start = {name: tensor.clone() for name, tensor in layer.state_dict().items() if name not in state}
    layer.load_state_dict(state)
    loaded = layer.state_dict()
    assert not start.keys() & state.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in {**state, **start}.items())


@pytest.mark.parametrize("preset", [*LEARNED, "gated"])
def test_a_part_of_a_state_leaves_trained_parts_alone(preset):
    layer = build_attention(preset, 12, 3)
    layer.load_state_dict(trained(preset))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    some = {name: torch.zeros_like(before[name]) for name in ("q_proj.weight", "q_proj.bias")}  # such as an adapter's
    layer.load_state_dict(some, strict=False)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, some.get(name, before[name])), name


@pytest.mark.parametrize("preset", [*LEARNED, "avghead"])
@pytest.mark.parametrize("assign", [False, True])
def test_what_a_layer_held_before_does_not_enter_a_state_without_mixing(preset, assign):
    state, fresh = trained("mha"), build_attention(preset, 12, 3)
    state = state if preset in LEARNED else dict(state)  # fixed mixing continues only from states of other code
    used = build_attention(preset, 12, 3)
    empty = build_attention(preset, 12, 3, device="meta").to_empty(device="cpu")
    for layer in (used, empty):
        for name, tensor in layer.state_dict().items():
            tensor.fill_(float("nan") if "mixing" in name else 1.0)
    for layer in (fresh, used, empty):
        layer.load_state_dict(state, assign=assign)
    expected = fresh.state_dict()
    for layer in (used, empty):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
        torch.nn.init.normal_(layer.mixing.weight)  # and training does not change the start
        layer.load_state_dict(state)
        assert torch.equal(layer.mixing.weight, expected["mixing.weight"])


def test_parts_that_a_state_lacks_are_on_its_device():
    layer = build_attention("mixhead-a", 12, 3)
    layer.load_state_dict({name: tensor.to("meta") for name, tensor in trained("mha").items()}, assign=True)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


def test_a_layer_without_values_draws_no_number():
    torch.manual_seed(1)
    build_attention("mixhead-random", 12, 3, device="meta")
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


def test_a_state_with_a_key_of_zeros_is_refused_without_one():
    state = build_attention("mha", 12, 3, add_zero_attn=True).state_dict()
    with pytest.raises(StateDictMismatch) as error:
        build_attention("mha", 12, 3).load_state_dict(state)
    assert (error.value.saved, error.value.current) == ({"add_zero_attn": True}, {"add_zero_attn": False})


@pytest.mark.parametrize(
    ("preset", "lost"),
    [
        *((preset, names) for preset, names in {**LEARNED, **FIXED}.items()),
        ("mixhead-b", ["mixing.weight"]),
        ("talking-heads", ["score_mixing.weight"]),
        ("mixhead-b", ["mixing.query_weight"]),
    ],
)
def test_a_state_that_lost_its_mixing_is_refused(preset, lost):
    state = trained(preset)
    for name in lost:
        del state[name]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{lost[0]}"'):
        build_attention(preset, 12, 3).load_state_dict(state)
    missing, _ = build_attention(preset, 12, 3).load_state_dict(state, strict=False)
    assert sorted(missing) == sorted(lost)


@pytest.mark.parametrize("preset", [*LEARNED, *FIXED])
def test_a_state_of_other_code_may_lack_all_of_the_mixing(preset):
    layer = build_attention(preset, 12, 3)
    start = layer.mixing.weight.clone()
    layer.load_state_dict(dict(trained("mha")))  # a dictionary has no metadata
    assert torch.equal(layer.mixing.weight, start)


@pytest.mark.parametrize("lost", LEARNED["mixhead-b"])
def test_a_state_of_other_code_may_not_lack_some_of_the_mixing(lost):
    state = dict(trained("mixhead-b"))
    del state[lost]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{lost}"'):
        build_attention("mixhead-b", 12, 3).load_state_dict(state)


def test_a_state_of_before_scores_were_mixed_goes_on_with_the_identity():
    layer, state = build_attention("talking-heads", 12, 3), trained("mixhead-a")
    del state._metadata[""]["attention"]["score_mixing"]
    layer.load_state_dict(state)
    assert torch.equal(layer.score_mixing.weight, torch.eye(3))
    assert torch.equal(layer.mixing.weight, state["mixing.weight"])


def test_a_state_that_mixes_scores_is_no_mixhead():
    with pytest.raises(StateDictMismatch) as error:
        build_attention("mixhead-a", 12, 3).load_state_dict(trained("talking-heads"))
    assert (error.value.saved, error.value.current) == ({"score_mixing": "static"}, {"score_mixing": "none"})


MARKED = {
    "activation_sigsoftmax": {"activation": "sigsoftmax"},
    "rotary_true": {"rotary": RotaryPositions(4), "self_attention": True},
}


def shapes(layer):
    return {name: tensor.shape for name, tensor in layer.state_dict().items()}


@pytest.mark.parametrize("num_heads", [2, 4])
def test_other_function_has_other_tensors_than_plain_attention(num_heads):
    """Code that does not read the configuration, such as fairseq's own layer, knows a state only by its tensors."""
    plain = build_attention("mha", 16, num_heads)
    same = [
        (preset, axis, choice)
        for preset in PRESETS
        for axis in AXES
        for choice in AXES[axis].choices or (1, 2, 4, 8, 16)
        if (layer := built(preset, 16, num_heads, **{axis: choice})) is not None
        and layer.state_config.config != plain.state_config.config
        and shapes(layer) == shapes(plain)
    ]
    assert not same


def built(*args, **options):
    try:
        return build_attention(*args, self_attention=True, **options)
    except ValueError:
        return None  # choices that do not go together


@pytest.mark.parametrize("marker", MARKED)
@pytest.mark.parametrize("preset", ["mha", "mixhead-a"])
def test_marker_of_a_setting_is_refused_elsewhere_and_optional_here(marker, preset):
    layer, plain = build_attention(preset, 16, 4, **MARKED[marker]), build_attention(preset, 16, 4)
    state = layer.state_dict()
    assert set(state) - set(plain.state_dict()) == {marker}
    with pytest.raises(RuntimeError, match=marker):
        plain.load_state_dict(dict(state))  # without metadata, as other code keeps it
    old = layer.state_dict()
    del old[marker]
    for saved in (old, dict(old)):
        layer.load_state_dict(saved)


class Switched(HeadOutput):
    name = "switched"
    options = (Option("switch", "a choice without tensors", default="off", choices=("off", "on")),)

    def __init__(self, config, switch="off"):
        super().__init__(config)
        self.switch = switch

    def heads(self, heads, context):
        return heads * 2 if self.switch == "on" else heads


@pytest.fixture
def switched(methods_leave):
    register(Method("switched", "A test", "f", {"head_output": Switched}))


def test_a_state_has_no_option_of_a_method_that_it_does_not_use(switched):
    state = build_attention("mixhead-b", 12, 3).state_dict()
    assert not state._metadata[""]["attention"].keys() & {"switch", "gate_start"}
    state = build_attention("switched", 12, 3, switch="on").state_dict()
    assert state._metadata[""]["attention"]["switch"] == "on"
    with pytest.raises(StateDictMismatch) as error:
        build_attention("switched", 12, 3).load_state_dict(state)
    assert (error.value.saved, error.value.current) == ({"switch": "on"}, {"switch": "off"})


def test_an_unknown_option_is_ignored_only_where_it_is_at_its_default():
    layer = build_attention("mixhead-b", 12, 3)
    of_a_later_version, of_0_2_0 = layer.state_dict(), layer.state_dict()
    of_a_later_version._metadata[""]["attention"] |= {"switch": "on"}
    with pytest.raises(UserError, match="switch='on', an option that is unknown here"):
        layer.load_state_dict(of_a_later_version)
    of_0_2_0._metadata[""]["attention"] |= {"gate_start": "identity", "switch": "off"}  # lists every option
    layer.load_state_dict(of_0_2_0)


class Powered(HeadOutput):
    name = "powered"
    options = (Option("power", "a number without tensors", default=1),)

    def __init__(self, config, power=1):
        super().__init__(config)
        self.power = power

    def heads(self, heads, context):
        return heads**self.power


@pytest.mark.parametrize(("saved", "current"), [(1, 2), (2, 1)])
def test_a_number_without_tensors_is_saved(saved, current, methods_leave):
    register(Method("powered", "A test", "f", {"head_output": Powered}))
    state = build_attention("powered", 12, 3, power=saved).state_dict()
    build_attention("powered", 12, 3, power=saved).load_state_dict(state)
    with pytest.raises(StateDictMismatch) as error:
        build_attention("powered", 12, 3, power=current).load_state_dict(state)
    assert (error.value.saved, error.value.current) == ({"power": saved}, {"power": current})
    del state._metadata[""]["attention"]["power"]  # as earlier versions wrote
    build_attention("powered", 12, 3, power=current).load_state_dict(state)


def test_a_number_that_a_part_computes_is_saved_as_it_is_used():
    given, computed = build_attention("dcmha", 12, 3, factor_rank=2), build_attention("dcmha", 12, 3)
    given.load_state_dict(computed.state_dict())
    computed.load_state_dict(given.state_dict())
    with pytest.raises(StateDictMismatch, match="factor_rank"):
        build_attention("dcmha", 12, 3, factor_rank=3).load_state_dict(given.state_dict())


def test_the_base_of_rotary_positions_is_saved():
    first, second = (
        build_attention("mha", 12, 3, self_attention=True, rotary=RotaryPositions(base)) for base in (1e4, 5e5)
    )
    with pytest.raises(StateDictMismatch, match="rotary_base"):
        second.load_state_dict(first.state_dict())
