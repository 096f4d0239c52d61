"""What is added to a model of transformers is in float32 and where the layer computes; nothing of a call is kept."""

import copy
import gc
import io
import weakref

import pytest
import torch
from needed_axes import needed_axes
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers_families import build

from fairseq_lowrank.attention import METHODS, PRESETS, build_attention
from fairseq_lowrank.huggingface import apply_attention, attention_modules, mixing_state, spec_of
from fairseq_lowrank.messages import UserError

TOKENS = torch.arange(2, 12)[None]
STORED = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    **{name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2")},
}


@pytest.fixture(scope="module")
def small_heap():
    """Leave what other tests made to no later collection, because each collection would visit all of it."""
    gc.collect()
    gc.freeze()


def usable() -> list[str]:
    """The presets that a model of transformers takes."""
    names = []
    for preset in PRESETS:
        try:
            spec_of(preset)
        except ValueError:
            continue
        names.append(preset)
    return names


class Quantised(nn.Module):
    """A linear layer whose weight is a buffer of another dtype, as libraries for quantisation have them."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, parameter: bool) -> None:
        super().__init__()
        self.scale, self.bias = linear.weight.abs().amax().item() / 100, None
        offset = 100 if dtype == torch.uint8 else 0
        stored = (linear.weight.detach() / self.scale + offset).to(dtype)
        if parameter:
            self.weight = nn.Parameter(stored, requires_grad=False)
        else:
            self.register_buffer("weight", stored)
        self.offset = offset

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ ((self.weight.to(inputs.dtype) - self.offset) * self.scale).T


def quantised(model: nn.Module, dtype: torch.dtype, parameter: bool) -> nn.Module:
    for module, _, _ in attention_modules(model):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Quantised(child, dtype, parameter))
    return model


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=TOKENS).logits.float().square().mean().backward()
        optimizer.step()


def learning() -> list[str]:
    """The presets that add something trained to a model of transformers."""
    return [preset for preset in usable() if any(getattr(part, "learns", 0) for part in METHODS[preset].parts.values())]


@pytest.mark.parametrize("preset", learning())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixing_learns_in_a_half_precision_model(dtype, preset):
    model = apply_attention(build("llama").to(dtype), preset, train="mixing")
    before = {name: tensor.clone() for name, tensor in mixing_state(model).items()}
    assert before and all(tensor.dtype == torch.float32 for tensor in before.values())
    train(model, 4)  # the gradient of a factor is 0 until the other factor has learned
    assert not [name for name, tensor in mixing_state(model).items() if torch.equal(tensor, before[name])]
    assert model(input_ids=TOKENS).logits.dtype == dtype


@pytest.mark.parametrize("parameter", [True, False], ids=["parameters", "buffers"])
@pytest.mark.parametrize("dtype", STORED.values(), ids=STORED)
def test_mixing_is_float32_in_a_quantised_model(dtype, parameter):
    model = apply_attention(quantised(build("llama"), dtype, parameter), "mixhead-b", train="mixing")
    assert all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in mixing_state(model).values())
    train(model, 1)
    for module, _, _ in attention_modules(model):
        assert not torch.equal(module.mixing.weight.detach(), torch.eye(4))


def test_mixing_stays_float32_when_the_model_is_made_half_precision():
    model = apply_attention(build("bert"), "talking-heads")
    for halved in (model.half(), model.bfloat16(), model.to(torch.float16), copy.deepcopy(model).half()):
        assert all(tensor.dtype == torch.float32 for tensor in mixing_state(halved).values())
    assert all(tensor.dtype == torch.float64 for tensor in mixing_state(model.double()).values())


def test_mixing_is_where_a_layer_computes_and_not_where_its_weights_rest():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build("llama")
    for module, _, _ in attention_modules(model):
        for linear in module.children():
            weights = {name: tensor.detach().clone() for name, tensor in linear.state_dict().items()}
            add_hook_to_module(linear, AlignDevicesHook("cpu", offload=True, weights_map=weights))
        assert next(module.parameters()).is_meta
    expected = model(input_ids=TOKENS).logits
    apply_attention(model, "mixhead-b")
    assert all(tensor.device.type == "cpu" for tensor in mixing_state(model).values())
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_hooks_bring_mixing_that_was_offloaded():
    from accelerate import cpu_offload

    for preset in usable():
        model = apply_attention(build("llama"), preset)
        expected = model(input_ids=TOKENS).logits
        offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(offloaded(input_ids=TOKENS).logits, expected, msg=preset)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("preset", usable())
def test_a_model_keeps_nothing_of_a_call(preset):
    model = apply_attention(build("llama"), preset)
    sizes = []
    for length in (4, 40):
        tokens = torch.randint(2, 100, (1, length), generator=torch.Generator().manual_seed(1))
        hidden = []
        watched = attention_modules(model)[1][0].register_forward_pre_hook(
            lambda module, args, kwargs, seen=hidden: seen.append(weakref.ref(kwargs["hidden_states"])),
            with_kwargs=True,
        )
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
        watched.remove()
        gc.collect()
        assert [kept() for kept in hidden] == [None]
        for parameter in model.parameters():
            parameter.grad = None
        copied = copy.deepcopy(model)
        AveragedModel(model).update_parameters(model)
        file = io.BytesIO()
        torch.save(model, file)
        sizes.append(file.tell())
        torch.testing.assert_close(copied(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert sizes[0] == sizes[1]


def test_a_model_keeps_nothing_of_a_call_that_failed():
    model = apply_attention(build("llama"), "gated")
    module, kept = attention_modules(model)[1][0], []
    module.register_forward_pre_hook(
        lambda module, args, kwargs: kept.extend(
            map(weakref.ref, (kwargs["hidden_states"], kwargs["past_key_values"]))
        ),
        with_kwargs=True,
    )
    module.o_proj = nn.Linear(1, 1)
    with pytest.raises(RuntimeError):
        model(input_ids=TOKENS, use_cache=True)
    assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_layer_keeps_nothing_of_a_call(preset):
    layer = build_attention(preset, 32, 4, self_attention=True, batch_first=True, **needed_axes(preset))
    sizes = []
    for length in (4, 40):
        x = torch.randn(2, length, 32, requires_grad=True)
        output, _ = layer(x, x, x, need_weights=False)
        kept = weakref.ref(x)
        output.sum().backward()
        del x, output
        gc.collect()
        assert kept() is None
        layer.zero_grad()
        copy.deepcopy(layer)
        file = io.BytesIO()
        torch.save(layer, file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]


def test_mixing_that_reads_inputs_of_another_size_is_refused():
    model = apply_attention(build("llama"), "gated")
    module = attention_modules(model)[0][0]
    with pytest.raises(UserError, match="inputs of size 16"):
        module(hidden_states=torch.randn(1, 3, 16), position_embeddings=None, attention_mask=None)
