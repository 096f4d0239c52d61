"""Mixing parameters and head embeddings keep their own weight decay and learning rate, in every precision."""

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from fairseq import optim as fairseq_optim
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from tiny_transformer import SIZES, arguments, build

from fairseq_lowrank.parts.parameters import APPLIES_TO_ALL_OPTIMIZERS
from fairseq_lowrank.plugin.optimizers import overrides

ARCH = "lowrank_transformer_iwslt_de_en"
LR, DECAY, SCALE = 0.125, 0.5, 4
MIXHEAD = ["--attention", "mixhead-b", "--attention-projection", "head-embedding-mul"]
PRECISIONS = {"float32": [], "bf16": ["--bf16"], "memory-efficient": ["--memory-efficient-bf16"]}


def make(*flags, optimizer="adam", precision="float32"):
    """The named parameters of a model and the optimizer that fairseq's trainer builds for them."""
    options = [*MIXHEAD, "--optimizer", optimizer, "--lr", LR, *PRECISIONS[precision], *flags]
    model = build(ARCH, *SIZES, *options)
    config = convert_namespace_to_omegaconf(arguments(ARCH, *SIZES, *options))
    if precision == "float32":
        return model, fairseq_optim.build_optimizer(config.optimizer, model.parameters())
    model.bfloat16()
    half = {"bf16": fairseq_optim.FP16Optimizer, "memory-efficient": fairseq_optim.MemoryEfficientFP16Optimizer}
    return model, half[precision].build_optimizer(config, list(model.parameters()))


def is_own(name):
    return ".mixing." in name or ".head_embeddings." in name


def step(model, optimizer, gradient):
    """One update with the same gradient everywhere; how far each parameter moved."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.backward(torch.zeros((), requires_grad=True))
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}, before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_adam_update_of_mixing_is_scaled(precision):
    model, optimizer = make("--mixing-lr-scale", SCALE, precision=precision)
    optimizer.set_lr(LR)
    assert optimizer.get_lr() == LR
    moves, before = step(model, optimizer, 1.0)
    # Adam's first update is the learning rate, whatever the size of the gradient
    seen = set()
    for name, move in moves.items():
        scale = SCALE if ".mixing." in name else 1
        atol = 1e-5 if precision == "float32" else 0.01 * (before[name].abs().max().item() + scale * LR)
        torch.testing.assert_close(move, torch.full_like(move, -scale * LR), atol=atol, rtol=0)
        seen.add(scale)
    assert seen == {1, SCALE}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_decay_spares_mixing_and_head_embeddings(precision):
    model, optimizer = make("--weight-decay", DECAY, precision=precision)
    moves, before = step(model, optimizer, 0.0)
    for name, move in moves.items():
        expected = torch.zeros_like(move) if is_own(name) else -LR * DECAY * before[name]
        torch.testing.assert_close(move, expected, atol=1e-6 if precision == "float32" else 0.01, rtol=0)
    assert moves["encoder.layers.0.self_attn.q_proj.weight"].abs().max() > 0.01
    assert any(is_own(name) for name in moves)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_overrides_of_a_resumed_training_spare_what_has_settings_of_its_own(precision):
    model, optimizer = make("--weight-decay", 0.01, "--mixing-lr-scale", SCALE, precision=precision)
    step(model, optimizer, 0.0)
    optimizer.load_state_dict(optimizer.state_dict(), {"weight_decay": DECAY, "lr": LR / 2})
    found = {(group["weight_decay"], group["lr"]) for group in optimizer.param_groups}
    assert found == {(DECAY, LR / 2), (0.0, LR / 2), (0.0, LR / 2 * SCALE)}
    moves, before = step(model, optimizer, 0.0)
    for name, move in moves.items():
        expected = torch.zeros_like(move) if is_own(name) else -LR / 2 * DECAY * before[name]
        torch.testing.assert_close(move, expected, atol=1e-6 if precision == "float32" else 0.01, rtol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adagrad", "adamax", "adafactor", "adadelta"])
def test_other_optimizers_follow_too(optimizer):
    model, built = make("--mixing-lr-scale", SCALE, "--weight-decay", DECAY, optimizer=optimizer)
    built.set_lr(LR)
    rates = {id(parameter): group["lr"] for group in built.param_groups for parameter in group["params"]}
    decays = {id(parameter): group["weight_decay"] for group in built.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == LR * (SCALE if ".mixing." in name else 1)
        assert decays[id(parameter)] == (0 if is_own(name) else DECAY)
    moves, _ = step(model, built, 0.0)
    assert not any(move.any() for name, move in moves.items() if is_own(name))


def test_every_parameter_is_optimised_once():
    model, optimizer = make("--mixing-lr-scale", SCALE)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    assert len(optimizer.param_groups) == 3


def test_a_model_without_parameters_of_their_own_has_one_group():
    model = build(ARCH, *SIZES)
    assert not any(overrides(parameter) for parameter in model.parameters())
    config = convert_namespace_to_omegaconf(arguments(ARCH, *SIZES, "--optimizer", "adam"))
    assert len(fairseq_optim.build_optimizer(config.optimizer, model.parameters()).param_groups) == 1


TRAIN = [
    *("--arch", ARCH, *SIZES, *MIXHEAD, "--optimizer", "adam", "--lr", LR, "--weight-decay", DECAY, "--dropout", 0),
    *("--cpu", "--max-tokens", 500, "--seed", 1, "--no-progress-bar", "--num-workers", 0, "--no-epoch-checkpoints"),
    *("--disable-validation", "--lr-scheduler", "fixed", "--warmup-updates", 0),
]


def trained(fairseq_command, data, folder, updates, *flags):
    fairseq_command("train", data, *TRAIN, "--save-dir", folder, "--max-update", updates, *flags)
    return checkpoint_utils.load_checkpoint_to_cpu(folder / "checkpoint_last.pt")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_scales_the_first_update_of_mixing_and_resuming_keeps_the_groups(
    precision, fairseq_command, translation_data, tmp_path
):
    flags = PRECISIONS[precision]
    first = trained(fairseq_command, translation_data, tmp_path, 1, *flags, "--mixing-lr-scale", 0.5)
    weights = {name: tensor for name, tensor in first["model"].items() if name.endswith("mixing.weight")}
    moves = torch.stack([(weight - torch.eye(4)).abs() for weight in weights.values()])
    # Adam moves what has a gradient by the learning rate; decay would take a further 1/32 of the diagonal
    tolerance = 0.001 if precision == "float32" else 0.005
    assert len(weights) == 6
    assert torch.allclose(moves[moves > 0.03], torch.tensor(LR / 2), atol=tolerance, rtol=0)
    assert (moves > 0.03).float().mean() > 0.9

    # a resumed run follows the flag that it is given, not the one before
    second = trained(fairseq_command, translation_data, tmp_path, 2, *flags, "--mixing-lr-scale", 0)
    assert second["optimizer_history"][-1]["num_updates"] == 2
    groups = [state["last_optimizer_state"]["param_groups"] for state in (first, second)]
    assert [len(group["params"]) for group in groups[0]] == [len(group["params"]) for group in groups[1]]
    for before, after in zip(*groups, strict=True):
        assert before["weight_decay"] == after["weight_decay"]
    assert sorted(group["weight_decay"] for group in groups[1]) == [0, 0, DECAY]
    assert all(torch.equal(second["model"][name], weight) for name, weight in weights.items())
    projection = "encoder.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first["model"][projection], second["model"][projection])


def test_the_composite_optimizer_is_refused():
    adam = {"_name": "adam", "lr": [LR], "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-8, "weight_decay": DECAY}
    adam |= {"use_old_adam": True, "fp16_adam_stats": False, "tpu": False}
    schedule = {"_name": "fixed", "lr": [LR], "lr_shrink": 0.1, "warmup_updates": 0, "force_anneal": None}
    group = {"lr_float": None, "optimizer": adam, "lr_scheduler": schedule}
    config = OmegaConf.create({"_name": "composite", "dynamic_groups": False, "groups": {"default": group}})
    assert fairseq_optim.build_optimizer(config, list(build(ARCH, *SIZES).parameters())).param_groups
    parameters = list(build(ARCH, *SIZES, *MIXHEAD).parameters())
    first = [parameter for parameter in parameters if overrides(parameter)]
    for order in (parameters, [*first, *parameters]):
        with pytest.raises(ValueError, match="--optimizer composite"):
            fairseq_optim.build_optimizer(config, order)
    config.groups = {}
    with pytest.raises(ValueError, match="--optimizer composite"):
        fairseq_optim.build_optimizer(config, parameters)


def test_settings_that_fairseqs_models_have_for_its_composite_optimizer_are_left_to_it():
    def first_updates(own):
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        weights[1].optim_overrides = own
        config = convert_namespace_to_omegaconf(arguments(ARCH, *SIZES, "--optimizer", "adam", "--lr", LR))
        optimizer = fairseq_optim.build_optimizer(config.optimizer, weights)
        optimizer.set_lr(LR)
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
        return [1 - weight[0].item() for weight in weights], len(optimizer.param_groups)

    scaled = {"optimizer": {"lr_scale": 0.5}}
    moves, groups = first_updates(scaled)
    assert moves == pytest.approx([LR, LR], rel=1e-4) and groups == 1
    moves, groups = first_updates(scaled | {APPLIES_TO_ALL_OPTIMIZERS: True})
    assert moves == pytest.approx([LR, LR / 2], rel=1e-4) and groups == 2


def test_mixing_of_scores_is_scaled_and_spared_too():
    model = build(ARCH, *SIZES, "--attention", "talking-heads", "--mixing-lr-scale", SCALE)
    found = [overrides(parameter) for name, parameter in model.named_parameters() if ".score_mixing." in name]
    assert found and found == [{"weight_decay": 0.0, "lr_scale": SCALE}] * len(found)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_small_steps_of_mixing_are_kept(precision):
    model, optimizer = make(precision=precision)
    optimizer.set_lr(1e-3)
    moves, _ = step(model, optimizer, 1.0)
    mixing = {name: move for name, move in moves.items() if name.endswith(".mixing.weight")}
    assert mixing
    for name, move in mixing.items():
        torch.testing.assert_close(move, torch.full_like(move, -1e-3), atol=1e-5, rtol=0, msg=name)


def test_workers_add_up_the_gradients_of_parts_in_float32(monkeypatch):
    monkeypatch.setattr(distributed_utils, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed_utils, "all_reduce", lambda tensor, group: tensor.mul_(2))
    model = build(ARCH, *SIZES, *MIXHEAD).half()
    workers = LegacyDistributedDataParallel(model, None)
    wide, most = 100_000.1, torch.finfo(torch.half).max
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, wide if parameter.dtype == torch.float32 else most)
        workers.all_reduce_grads()
        for name, parameter in model.named_parameters():
            assert (parameter.dtype == torch.float32) == (".mixing." in name), name
            expected = torch.full_like(parameter, wide if ".mixing." in name else most)
            torch.testing.assert_close(parameter.grad, expected, atol=0, rtol=0)
