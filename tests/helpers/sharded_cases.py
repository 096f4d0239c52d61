"""Cases for two workers, each a function of the worker's rank. Usage: sharded_cases.py STORE."""

import functools
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fairseq_lowrank.attention import (
    METHODS,
    DecodingCache,
    build_attention,
    build_core,
    parameter_groups,
    shard_parts,
    whole_state_dict,
)
from fairseq_lowrank.huggingface import apply_attention, load_attention, mixing_state, save_attention
from fairseq_lowrank.parts import MODULE_AXES

SIZE, HEADS = 16, 4
EXACT, ROUNDED = {"atol": 1e-5, "rtol": 1e-4}, {"atol": 2e-2, "rtol": 2e-2}
CASES = {}


def case(name, *args):
    def registered(function):
        CASES[name] = functools.partial(function, *args)
        return function

    return registered


def layer(preset, **axes):
    options = {"self_attention": True, "max_positions": 8} | METHODS[preset].examples[0] | axes
    return build_attention(preset, SIZE, HEADS, **options)


class Layers(nn.Module):
    """Two layers of attention and a linear map of ``[T, B, SIZE]``."""

    def __init__(self, preset, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(layer(preset) for _ in range(2))
        self.out = nn.Linear(SIZE, 3)
        self.to(dtype)

    def forward(self, x, **options):
        for attention in self.layers:
            x = x + attention(x, x, x, need_weights=False, **options)[0]
        return self.out(x)


def llama(preset, dtype, train="all"):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, intermediate_size=32, **sizes)).to(dtype)
    return model if preset is None else apply_attention(model, preset, train=train)


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    shard_parts(model)
    for block in getattr(model, "model", model).layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def losses_of(model, batches):
    rates = {"learning_rate": 0.05, "mixing_learning_rate": 0.5, "weight_decay": 0.1}
    optimizer, losses = torch.optim.SGD(parameter_groups(model, **rates), lr=0.05), []
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        losses.append(getattr(output, "logits", output).float().square().mean())
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach()


def check_training(build, batches, dim, rank, close, **options):
    """Losses and weights are those of training with one worker, which can load the sharded model's state."""
    one, sharded = build(), shard(build(), **options)
    mean = losses_of(sharded, [batch.chunk(2, dim)[rank] for batch in batches])
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, losses_of(one, batches), **close)
    state, start = whole_state_dict(sharded), build().state_dict()
    assert state._metadata == one.state_dict()._metadata
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(state[name], tensor, **close, msg=lambda text, name=name: f"{name}: {text}")
    assert any(not torch.equal(state[name], tensor) for name, tensor in start.items())
    one.load_state_dict(state)
    return sharded


def vectors(dtype):
    return list(torch.randn(2, 5, 4, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype))


@case("layers mixhead-b", "mixhead-b", torch.float32)
@case("layers dcmha", "dcmha", torch.float32)
@case("layers mea", "mea", torch.float32)
@case("layers mhe-add", "mhe-add", torch.float32)
@case("layers mixhead-b bfloat16", "mixhead-b", torch.bfloat16)
@case("layers gated bfloat16", "gated", torch.bfloat16)
@case("layers t5-bias", "t5-bias", torch.float32)
@case("layers sinks bfloat16", "sinks", torch.bfloat16)
def layers_train(preset, dtype, rank):
    close = EXACT if dtype == torch.float32 else ROUNDED
    sharded = check_training(lambda: Layers(preset, dtype), vectors(dtype), 1, rank, close)
    for name, parameter in sharded.named_parameters():
        part = not {*name.split(".")}.isdisjoint(MODULE_AXES)
        assert parameter.dtype == (torch.float32 if part else dtype), name


@case("layers mixed precision", "own groups")
@case("parts in the groups of their layers", "one group")
def mixed_precision(groups, rank):
    """Weights are in float32, and layers compute in bfloat16; what parts compute is near what float32 gives."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if groups == "own groups":
        check_training(
            lambda: Layers("gated", torch.float32), vectors(torch.float32), 1, rank, ROUNDED, mp_policy=policy
        )
        return
    x = vectors(torch.float32)[0]
    for preset in ("mixhead-b", "gated", "mea", "headmix", "knocking-linear", "diff"):
        sharded = fully_shard(Layers(preset, torch.float32), mp_policy=policy)
        torch.testing.assert_close(sharded(x).float(), Layers(preset, torch.float32)(x), **ROUNDED)


@case("steps with a cache")
def steps_with_a_cache(rank):
    """Policies copy dictionaries of arguments: a cache is an object, and a dictionary that comes back empty is refused."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=True)
    x = vectors(torch.float32)[0]
    for preset in ("mha", "mixhead-b", "mla", "gated"):
        sharded, cache, lost = shard(Layers(preset, torch.float32).eval(), mp_policy=policy), DecodingCache(), {}
        expected = Layers(preset, torch.float32).eval()(x, attn_mask="causal")
        with torch.no_grad():
            steps = [sharded(part, attn_mask="causal", incremental_state=cache) for part in x.split((2, 1, 1, 1))]
            torch.testing.assert_close(torch.cat(steps), expected, **EXACT)
            sharded(x[:1], incremental_state=lost)
            refused("DecodingCache", functools.partial(sharded, incremental_state=lost), x[1:2])


@case("llama mixhead-b", "mixhead-b", torch.float32, "all")
@case("llama dcmha mixing alone", "dcmha", torch.float32, "mixing")
@case("llama gated bfloat16", "gated", torch.bfloat16, "all")
@case("llama talking-heads bfloat16 mixing alone", "talking-heads", torch.bfloat16, "mixing")
def llama_trains(preset, dtype, train, rank):
    close = EXACT if dtype == torch.float32 else ROUNDED
    batches = list(torch.randint(0, 50, (2, 4, 6), generator=torch.Generator().manual_seed(3)))
    sharded = check_training(lambda: llama(preset, dtype, train), batches, 0, rank, close)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    save_attention(sharded, folders[0])
    state = whole_state_dict(sharded)
    for name, tensor in mixing_state(load_attention(llama(None, dtype), folders[0])).items():
        assert torch.equal(tensor, state[name]), name


RESET = [*(name for name, method in METHODS.items() if method.preset), "synthesizer-dense", "synthesizer-random"]


@case("reset")
def reset(rank):
    """A layer is made on the meta device, sharded, emptied and reset; then it has what a layer that is built has."""
    wrong = []
    torch.manual_seed(1)
    for name in RESET:
        build = functools.partial(layer, "mha", score=name) if name in SCORES else functools.partial(layer, name)
        with torch.device("meta"):
            sharded = build()
        from torch.distributed.fsdp import fully_shard

        fully_shard(shard_parts(sharded)).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*sharded.parameters(), *sharded.buffers()):
                tensor.fill_(7.0)
        sharded.reset_parameters()
        state, expected, again = whole_state_dict(sharded), build().state_dict(), build().state_dict()
        for key, tensor in expected.items():
            drawn = not torch.equal(tensor, again[key])
            # columns of random mixing are divided by their sums, which may be near 0, so the median tells the scale
            scale = torch.median if name == "mixhead-random" else torch.max
            near = scale(state[key].abs()) < 5 * tensor.abs().max()
            right = near if drawn else torch.equal(state[key], tensor)
            if not right or state[key].eq(7.0).any():
                wrong.append(f"{name}: {key}")
    assert not wrong, wrong


SCORES = RESET[-2:]


@case("trainer")
def trainer(rank):
    """Trainer with FSDP2 of accelerate trains as one worker with the whole batch does, and saves what loads elsewhere."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    options = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    workers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in workers.items()}):
        arguments = TrainingArguments(
            folders[0],
            use_cpu=True,
            fsdp=True,
            fsdp_config=options,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        )
        assert arguments.device.type == "cpu"
        # accelerate shards on any device but a CPU, so it is told of another kind.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        sharded = shard_parts(llama("mixhead-b", torch.float32))
        tokens = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(3))
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trains = Trainer(sharded, arguments, train_dataset=data)
        assert trains.is_fsdp_enabled
        trains.train()
    one = llama("mixhead-b", torch.float32)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        one(tokens, labels=tokens).loss.backward()
        optimizer.step()
    state = whole_state_dict(trains.model)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(state[name], tensor, **EXACT)
    assert state["model.layers.0.self_attn.mixing.query_weight"].any()
    saved = load_file(f"{folders[0]}/checkpoint-2/model.safetensors")
    assert "model.layers.0.self_attn.mixing.query_weight" in saved
    assert all(torch.equal(saved[name], state[name]) for name in saved)


@case("order")
def wrong_order(rank):
    """Parts that are in the group of a layer already are refused."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Layers("mixhead-b", torch.float32))
    refused("PositionwiseMatrix is sharded already. Call shard_parts before fully_shard", shard_parts, model)
    refused(
        "is sharded already. Call apply_attention before fully_shard",
        apply_attention,
        fully_shard(llama(None, torch.float32)),
        "mha",
    )


@case("tensor parallel")
def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"out_proj": RowwiseParallel()}
    for preset, heads, split in (
        ("mixhead-b", 4, "qkv"),
        ("mha", 2, "qkv"),
        ("mha", 4, "kv"),
        ("talking-heads", 4, "v"),
    ):
        chosen = {name: plan[name] for name in plan if name[0] in split}
        attention = parallelize_module(build_attention(preset, SIZE, heads, self_attention=True), mesh, chosen)
        x = torch.randn(3, 2, SIZE)
        refused("heads are split over workers", attention, x, x, x)
    for split, reason in (
        ("qkv", "mixing of 4 heads, and the model passes 2"),
        ("kv", "keys of 1 heads"),
        ("v", "values of 1"),
    ):
        plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in split}
        model = parallelize_module(llama("mixhead-b", torch.float32), mesh, plan)
        refused(reason, model, torch.arange(6)[None])


@case("without shard_parts")
def without_shard_parts(rank):
    """A half-precision model whose parts stay in the groups of its layers, or in that of the whole model."""
    from torch.distributed.fsdp import fully_shard

    tokens, x = torch.arange(6)[None], torch.randn(5, 2, SIZE).bfloat16()
    for shards_layers in (True, False):
        for model, blocks, given in (
            (llama("gated", torch.bfloat16), lambda model: model.model.layers, tokens),
            (Layers("mixhead-b", torch.bfloat16), lambda model: model.layers, x),
        ):
            for block in blocks(model) if shards_layers else ():
                fully_shard(block)
            refused("Call shard_parts(model) before fully_shard", fully_shard(model), given)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())  # a model without parts keeps torch's line
    try:
        fully_shard(other)(torch.randn(2, 4))
    except AssertionError as error:
        assert "shard_parts" not in str(error)
    else:
        raise AssertionError("not refused")


@case("context parallel")
def context_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel as split

    mesh, reason = init_device_mesh("cpu", (2,)), "context parallelism of attention is not computed"
    x, q, tokens = torch.randn(1, 8, SIZE), torch.randn(1, HEADS, 8, 4), torch.arange(8)[None]
    for preset in ("mha", "mixhead-a", "mixhead-b", "talking-heads"):
        for backend in ("auto", "sdpa", "blocked", "reference") if preset == "mha" else ("auto",):
            attention = build_attention(preset, SIZE, HEADS, self_attention=True, batch_first=True, backend=backend)
            core, model = build_core(preset, HEADS, 4), llama(preset, torch.float32)
            for function, given in (
                (lambda x, attention=attention: attention(x, x, x, is_causal=True), x.clone()),
                (lambda q, core=core: core(q, q, q, "causal"), q.clone()),
                (model, tokens.clone()),
            ):
                function(given)
                with split(mesh, buffers=[given], buffer_seq_dims=[2 if given.dim() == 4 else 1]):
                    refused(reason, function, given)
    part = DTensor.from_local(q[:, :, 4 * rank : 4 * rank + 4], mesh, [Shard(2)])
    refused(reason, build_core("mixhead-a", HEADS, 4), part, part, part, "causal")


def refused(text, function, *args):
    try:
        function(*args)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"not refused: {text}")


def main(rank, store):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="(?s).*(returned a view tensor|DTensor random operators)")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    results = {}
    for name, run in CASES.items():
        try:
            run(rank)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    Path(f"{store}.{rank}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    # Both workers are copies of this process, so that the libraries are imported once.
    torch.multiprocessing.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
