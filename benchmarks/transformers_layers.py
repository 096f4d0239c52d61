"""Time of one attention layer of models of transformers, and of a step of generation, as a ratio to transformers' sdpa.

    python benchmarks/transformers_layers.py --output benchmarks/results/transformers-cpu.json       3 minutes on 2 cores
    python benchmarks/transformers_layers.py --models llama --presets mixhead-b gated --lengths 1024 --threads 1

The models are built here from their configurations, with random weights: bert attends in both directions, llama is causal and
has half as many heads of keys. A layer is the module that attends, with its projections, called as its model calls it.
Generation is one token of the whole model after a cache of n tokens. All candidates take turns in every round; ratios are
medians of the ratios within a round. "sdpa" is transformers' own; "mha" is this package's function without mixing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import measure
import torch
import transformers
from torch import Tensor

from fairseq_lowrank.huggingface import apply_attention, attention_modules

BASELINE = "sdpa"
MODELS = {"bert": "BertModel", "llama": "LlamaModel"}
STEPS_OF_GENERATION = 8
VOCABULARY = 1000


def build(name: str, row: str, options: argparse.Namespace) -> transformers.PreTrainedModel:
    """The model of this name with a row's attention, in evaluation mode; every row has the same weights."""
    sizes = {"hidden_size": options.embed_dim, "num_attention_heads": options.heads, "vocab_size": VOCABULARY}
    sizes |= {"intermediate_size": 4 * options.embed_dim, "num_hidden_layers": options.layers}
    longest = max(options.lengths) + STEPS_OF_GENERATION
    groups = {"num_key_value_heads": max(1, options.heads // 2)} if name == "llama" else {}
    kind = getattr(transformers, MODELS[name])
    transformers.set_seed(0)
    model = kind(kind.config_class(**sizes, **groups, max_position_embeddings=longest, attn_implementation=BASELINE))
    if row != BASELINE:
        apply_attention(model, row)
    return model.eval()


def layer_step(model: transformers.PreTrainedModel, tokens: Tensor, training: bool) -> Callable[[], None]:
    """A step of the first attention module: forward, and in training backward to its input and parameters."""
    module, _, _ = attention_modules(model)[0]
    calls = []
    handle = module.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    handle.remove()
    args, kwargs = calls[0]
    given = args[0] if args else kwargs["hidden_states"]
    x = given.detach().requires_grad_(training)
    args, kwargs = ((x, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": x})
    with torch.no_grad():
        cotangent = torch.randn_like(module(*args, **kwargs)[0])

    def step() -> None:
        with torch.set_grad_enabled(training):
            output = module(*args, **kwargs)[0]
            if training:
                output.backward(cotangent)
        module.zero_grad(set_to_none=True)
        x.grad = None

    return step


@torch.no_grad()
def generation_step(model: transformers.PreTrainedModel, tokens: Tensor) -> Callable[[], None]:
    """Steps of one token each, after a cache of ``tokens``, which is cut back to them."""
    cache = model(input_ids=tokens, use_cache=True).past_key_values

    def steps() -> None:
        with torch.no_grad():
            for _ in range(STEPS_OF_GENERATION):
                model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-STEPS_OF_GENERATION)

    return steps


def measured(name: str, what: str, length: int, options: argparse.Namespace) -> list[dict]:
    """Results of every row for one model, one kind of step and one length."""
    batch = 1 if what == "generation" else max(1, options.tokens // length)
    tokens = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    runs = {}
    for row in (BASELINE, *options.presets):
        model = build(name, row, options)
        runs[row] = (
            generation_step(model, tokens) if what == "generation" else layer_step(model, tokens, what == "training")
        )
    times = measure.alternate(runs, options.rounds, f"{name}, {what}, n {length}", options.clock)
    steps = STEPS_OF_GENERATION if what == "generation" else 1
    results = []
    for row, taken in times.items():
        q1, median, q3 = (1e3 * value / steps for value in measure.quartiles(taken))
        ratio = measure.quartiles(measure.ratios(taken, times[BASELINE]))[1]
        about = {"model": name, "step": what, "length": length, "batch": batch, "row": row}
        spread = [round(q1, 3), round(q3, 3)]
        results.append(about | {"milliseconds": round(median, 3), "quartiles": spread, "ratio": round(ratio, 3)})
    return results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    presets = ["mha", "mixhead-a", "mixhead-b", "talking-heads"]
    parser.add_argument("--presets", nargs="+", default=presets, metavar="PRESET", help="of apply_attention")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048], metavar="N")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch; it holds at least one sequence")
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model that generates (default: 4)")
    measure.add_common_arguments(parser, rounds=9)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def main() -> None:
    options = parse()
    results: list[dict] = []
    for name in options.models:
        # bert attends in both directions, so it generates nothing
        for what in ("forward", "training", "generation")[: 3 if name == "llama" else 2]:
            found = [measured(name, what, length, options) for length in options.lengths]
            results += [result for results_there in found for result in results_there]
            rows = zip(*found, strict=True)
            print(f"\n{name}, {what}: time as a ratio to {BASELINE}; milliseconds of {BASELINE} in the first row")
            cells = [
                [
                    row[0]["row"],
                    *(
                        f"{one['milliseconds']:.2f} ms" if one["row"] == BASELINE else f"{one['ratio']:.2f}"
                        for one in row
                    ),
                ]
                for row in rows
            ]
            print(measure.table(cells, ["row", *(f"n {length}" for length in options.lengths)]))
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    measure.write(options.output, {"machine": measure.machine("cpu"), "settings": settings, "results": results})


if __name__ == "__main__":
    main()
