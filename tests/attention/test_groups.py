"""Groups of parameters for torch's optimizers: found by modules, without decay of what starts at the identity."""

import pytest
import torch
from tiny_layers import SIZE, build

from fairseq_lowrank.attention import METHODS, PRESETS, muon_split, parameter_groups, replace_attention
from fairseq_lowrank.parts import MODULE_AXES

LEARNING = [name for name in PRESETS if METHODS[name].parts.keys() & set(MODULE_AXES)]


@pytest.mark.parametrize("preset", LEARNING)
def test_decay_leaves_every_part_where_it_is(preset):
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), build(preset, noise=0.0))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    groups = parameter_groups(model, learning_rate=0.1, mixing_learning_rate=0.3, weight_decay=0.5)
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert {"0.weight", "1.q_proj.weight"} <= moved
    assert not any(name.split(".")[1] in MODULE_AXES for name in moved)
    assert all(tensor.dim() > 1 for name, tensor in model.named_parameters() if name in moved)
    parts = {name for name in before if name.split(".")[1] in MODULE_AXES}
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert {name for name, tensor in model.named_parameters() if rates[id(tensor)] == 0.3} == parts
    assert len(rates) == len(before)


def test_head_embeddings_and_replaced_layers_have_no_decay():
    groups = parameter_groups(build("mhe-mul", noise=0.0), learning_rate=0.1, weight_decay=0.5)
    assert [len(group["params"]) for group in groups] == [4, 4 + 3]
    layer = torch.nn.TransformerEncoderLayer(SIZE, 4, 16)
    model = replace_attention(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "mixhead-a")
    (of_mixing,) = [group for group in parameter_groups(model, learning_rate=0.1, weight_decay=0.5)][2:]
    assert of_mixing["params"] == [model.layers[0].self_attn.mixing.weight] and of_mixing["weight_decay"] == 0


@pytest.mark.parametrize("preset", LEARNING)
def test_muon_gets_weights_of_linear_maps_outside_of_parts(preset):
    embedding, head = torch.nn.Embedding(40, SIZE), torch.nn.Linear(SIZE, 40, bias=False)
    tied = torch.nn.Linear(SIZE, 40, bias=False)
    tied.weight = embedding.weight
    names = {"embedding": embedding, "tied": tied, "vocabulary": torch.nn.Linear(SIZE, 9 * SIZE), "classes": head}
    model = torch.nn.ModuleDict(names | {"wide": torch.nn.Linear(SIZE, 8 * SIZE), "attention": build(preset)})
    model["classes"].weight.requires_grad_(False)
    model["two"] = torch.nn.Linear(SIZE, 2)
    for_muon, others = muon_split(model)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {name_of[id(parameter)] for parameter in for_muon}
    assert "wide.weight" in chosen
    assert not any(name.startswith(("embedding", "tied", "vocabulary", "two", "classes")) for name in chosen)
    assert not any(name.split(".")[1] in MODULE_AXES or name.endswith("bias") for name in chosen)
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for parameter in (*for_muon, *others)} == trainable
    assert len(for_muon) + len(others) == len(trainable)
