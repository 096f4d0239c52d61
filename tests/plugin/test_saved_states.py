"""What a state says of its layers reaches the model on every way from a file."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, utils
from families import FAMILIES
from tiny_transformer import SIZES, arguments, build, make_task

from fairseq_lowrank import plugin  # noqa: F401 (what --user-dir brings)
from fairseq_lowrank.cli.average import average

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
def test_a_state_that_lost_its_mixing_is_refused_in_one_line(way, lost, task, tmp_path):
    state = WAYS[way](checkpoint(tmp_path / "checkpoint.pt", state_without(lost, task)))
    with pytest.raises(ValueError, match=r"^The checkpoint is damaged: it has lost \S+mixing\S+ "):
        build(ARCH, *SIZES, "--attention", "mixhead-b", task=task).load_state_dict(state, strict=True)


@pytest.mark.parametrize("flags", [[], ["--attention", "mixhead-b"]])
def test_what_does_not_fit_is_caught_as_torchs_error_and_as_a_value_that_is_refused(task, flags):
    arch = ARCH.removeprefix("" if flags else "lowrank_")
    model = build(arch, *SIZES, *flags, task=task)
    state = dict(model.state_dict())
    del state["decoder.layers.0.fc1.weight"]
    for kind in (RuntimeError, ValueError):
        with pytest.raises(
            kind, match=r"^The checkpoint is of another model: only the model has decoder\.layers\.0\.fc1"
        ):
            model.load_state_dict(state)


def test_it_is_refused_where_only_some_layers_are_kept_of_it(task):
    keep = ("--encoder-layers-to-keep", "1", "--decoder-layers-to-keep", "0", "--attention", "mixhead-b")
    for lost, refused in ("encoder.layers.1.self_attn.mixing", True), ("encoder.layers.0.self_attn.mixing", False):
        args = arguments(ARCH, *SIZES, *keep)
        model = task.build_model(args)
        state = state_without(lost, task)
        if refused:
            with pytest.raises(ValueError, match=r"damaged: it has lost encoder\.layers\.0\.self_attn\.mixing"):
                model.load_state_dict(state, strict=True, model_cfg=args)
        else:
            model.load_state_dict(state, strict=True, model_cfg=args)


def test_layers_kept_of_a_state_must_have_been_of_this_attention(task):
    keep = ("--encoder-layers-to-keep", "1", "--decoder-layers-to-keep", "0")
    args = arguments(ARCH, *SIZES, *keep, "--attention", "mhe-mul")
    state = build(ARCH, *SIZES, "--attention", "mhe-add", task=task).state_dict()
    with pytest.raises(
        ValueError, match="saved with projection=head-embedding-add and is built with head-embedding-mul"
    ):
        task.build_model(args).load_state_dict(state, strict=True, model_cfg=args)


def test_a_state_of_which_every_layer_is_kept_is_left_as_it_is(task):
    state = state_without("no tensor", task)
    assert checkpoint_utils.prune_state_dict(state, arguments(ARCH, *SIZES)) is state


def family(arch):
    [found] = [family for family in FAMILIES if family.arch == arch]
    return found


REFUSED = [
    ("--attention-activation sigsoftmax", "--attention mha", "was saved with activation=sigsoftmax"),
    ("--attention-activation sigsoftmax", "", "was saved with activation=sigsoftmax"),
    ("--attention mhe-add", "--attention mhe-mul", "was saved with projection=head-embedding-add"),
]


@pytest.mark.parametrize("saved, built, message", REFUSED)
def test_languages_of_a_multilingual_model_take_no_state_of_other_attention(saved, built, message):
    one, other = (family("multilingual_transformer").build(*flags.split()) for flags in (saved, built))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(one.state_dict())
    one.load_state_dict(family("multilingual_transformer").build(*saved.split()).state_dict())


@pytest.mark.parametrize("saved, built, message", REFUSED)
@pytest.mark.parametrize("component", ["encoder", "decoder"])
def test_a_component_of_a_model_takes_no_state_of_other_attention(saved, built, message, component, tmp_path):
    """As --load-pretrained-encoder-from has it, for speech."""
    one, same, other = (family("s2t_transformer_s").build(*flags.split()) for flags in (saved, saved, built))
    path = checkpoint(tmp_path / "checkpoint.pt", one.state_dict())
    load = checkpoint_utils.load_pretrained_component_from_model
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.zero_()
    load(getattr(same, component), path)
    found, expected = (getattr(model, component).state_dict() for model in (same, one))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    with pytest.raises(ValueError, match=message):
        load(getattr(other, component), path)
    with pytest.raises(OSError, match="not found"):
        load(getattr(other, component), str(tmp_path / "none.pt"))
