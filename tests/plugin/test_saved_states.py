"""What a state says of its layers reaches the model on every way from a file."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, utils
from families import FAMILIES
from tiny_transformer import SIZES, arguments, build, make_task

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.cli.average import average
from fairseq_lowrank.messages import StateDictMismatch

ARCH = "lowrank_transformer_iwslt_de_en"


@pytest.fixture(scope="module")
def task():
    return make_task()


def state_without(lost, task):
    """The state of a Mixhead B model, without the tensors whose names contain ``lost``."""
    state = build(ARCH, *SIZES, "--attention", "mixhead-b", task=task).state_dict()
    for name in [name for name in state if lost in name]:
        del state[name]
    return state


def checkpoint(path, model):
    state = {"args": None, "cfg": {"model": {"arch": ARCH}}, "model": model, "extra_state": {"ema": model}}
    state["extra_state"]["train_iterator"] = {"epoch": 1}
    state["optimizer_history"] = [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}]
    torch.save(utils.move_to_cpu(state), path)
    return str(path)


WAYS = {
    "saved": lambda path: checkpoint_utils.load_checkpoint_to_cpu(path)["model"],
    "averaged": lambda path: average([path, path])["model"],
    "average of the weights": lambda path: checkpoint_utils.load_ema_from_checkpoint(path)["model"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lost", [".mixing.", "encoder.layers.1.self_attn.mixing.", "mixing.query_weight"])
def test_load_refuses_a_state_that_lost_its_mixing(way, lost, task, tmp_path):
    state = WAYS[way](checkpoint(tmp_path / "checkpoint.pt", state_without(lost, task)))
    with pytest.raises(StateDictMismatch) as error:
        build(ARCH, *SIZES, "--attention", "mixhead-b", task=task).load_state_dict(state, strict=True)
    assert lost in error.value.name
    assert error.value.saved is None
    assert error.value.current is not None


@pytest.mark.parametrize("flags", [[], ["--attention", "mixhead-b"]])
def test_load_names_the_first_tensor_that_differs(task, flags):
    model = build(ARCH.removeprefix("" if flags else "lowrank_"), *SIZES, *flags, task=task)
    state = dict(model.state_dict())
    shape = tuple(state.pop("decoder.layers.0.fc1.weight").shape)
    for kind in (RuntimeError, ValueError):  # torch's, and a user's
        with pytest.raises(kind) as error:
            model.load_state_dict(state)
        assert (error.value.name, error.value.saved, error.value.current) == (
            "decoder.layers.0.fc1.weight",
            None,
            shape,
        )


@pytest.mark.parametrize(
    ("lost", "kept"), [("encoder.layers.1.self_attn.mixing", True), ("encoder.layers.0.self_attn.mixing", False)]
)
def test_load_checks_the_layers_that_are_kept(task, lost, kept):
    args = arguments(ARCH, *SIZES, "--attention", "mixhead-b")
    args.encoder_layers_to_keep, args.decoder_layers_to_keep = (
        "1",
        "0",
    )  # fairseq's parser makes lists, which no model takes
    model, state = task.build_model(args), state_without(lost, task)
    if not kept:
        model.load_state_dict(state, strict=True, model_cfg=args)
        return
    with pytest.raises(StateDictMismatch) as error:
        model.load_state_dict(state, strict=True, model_cfg=args)
    assert error.value.name.startswith("encoder.layers.0.self_attn.mixing")  # under its new number
    assert error.value.saved is None


def test_load_checks_the_attention_of_layers_that_are_kept(task):
    args = arguments(ARCH, *SIZES, "--attention", "mhe-mul")
    args.encoder_layers_to_keep, args.decoder_layers_to_keep = "1", "0"
    state = build(ARCH, *SIZES, "--attention", "mhe-add", task=task).state_dict()
    with pytest.raises(StateDictMismatch) as error:
        task.build_model(args).load_state_dict(state, strict=True, model_cfg=args)
    assert error.value.saved == {"projection": "head-embedding-add"}
    assert error.value.current == {"projection": "head-embedding-mul"}


def test_prune_leaves_a_state_with_all_its_layers(task):
    state = state_without("no tensor", task)
    assert checkpoint_utils.prune_state_dict(state, arguments(ARCH, *SIZES)) is state


def family(arch):
    [found] = [family for family in FAMILIES if family.arch == arch]
    return found


REFUSED = [
    ("--attention-activation sigsoftmax", "--attention mha", {"activation": "sigsoftmax"}, {"activation": "softmax"}),
    ("--attention-activation sigsoftmax", "", {"activation": "sigsoftmax"}, {"activation": "softmax"}),
    (
        "--attention mhe-add",
        "--attention mhe-mul",
        {"projection": "head-embedding-add"},
        {"projection": "head-embedding-mul"},
    ),
]


@pytest.mark.parametrize(("flags", "other_flags", "saved", "current"), REFUSED)
def test_load_of_a_multilingual_model_refuses_other_attention(flags, other_flags, saved, current):
    one, other = (family("multilingual_transformer").build(*each.split()) for each in (flags, other_flags))
    with pytest.raises(StateDictMismatch) as error:
        other.load_state_dict(one.state_dict())
    assert (error.value.saved, error.value.current) == (saved, current)
    one.load_state_dict(family("multilingual_transformer").build(*flags.split()).state_dict())


@pytest.mark.parametrize(("flags", "other_flags", "saved", "current"), REFUSED)
@pytest.mark.parametrize("component", ["encoder", "decoder"])
def test_load_of_a_component_refuses_other_attention(flags, other_flags, saved, current, component, tmp_path):
    """``--load-pretrained-encoder-from``, for speech."""
    one, same, other = (family("s2t_transformer_s").build(*each.split()) for each in (flags, flags, other_flags))
    path = checkpoint(tmp_path / "checkpoint.pt", one.state_dict())
    load = checkpoint_utils.load_pretrained_component_from_model
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.zero_()
    load(getattr(same, component), path)
    found, expected = (getattr(model, component).state_dict() for model in (same, one))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    with pytest.raises(StateDictMismatch) as error:
        load(getattr(other, component), path)
    assert (error.value.saved, error.value.current) == (saved, current)
    with pytest.raises(OSError, match="not found"):
        load(getattr(other, component), str(tmp_path / "none.pt"))
