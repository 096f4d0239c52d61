"""What a state says of its layers reaches the model on every way from a file."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, utils
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
