"""Time and peak memory of one causal self-attention layer as a whole, ours and its peers.

    python benchmarks/attention.py                               the presets and peers at n 512 to 4096, on the CPU
    python benchmarks/attention.py --layers fairseq mixhead-a mixhead-a@reference --lengths 2048 --dropout 0.1
    python benchmarks/attention.py --layers mqa gqa:key_value_heads=4 fixedhead:head_dim=128 mha:value_dim=32+sigsoftmax
    python benchmarks/attention.py --operation --device cuda --dtype bfloat16 --baseline sdpa-flash sdpa-cudnn \\
        --layers sdpa mixhead-a@kernels                          attention alone, on a GPU
    python benchmarks/attention.py --operation --baseline sdpa --layers mha@blocked --threads 1 \\
        --shapes 8x32 8x64 8x128 --lengths 256 384 512 768 1024  what FASTER_IN_BLOCKS of ops/attention/auto.py should say
    python benchmarks/attention.py --operation --baseline sdpa --layers {mha,mixhead-a}@blocked{,-128,-onednn,-onednn-128} \\
        --shapes 8x64 --lengths 512 1024 2048 4096 --threads 1   what larger blocks and other products bring, on a CPU

A layer is PRESET[:AXIS=VALUE,…][+sigsoftmax][@BACKEND], such as gqa:key_value_heads=2. AXIS is a keyword of build_attention, and
@kernels stands for each backend of our own GPU kernels. @blocked-128 has blocks of at least 128 queries, and @blocked-onednn and
@blocked-onednn-128 multiply float32 by oneDNN. Or it is a peer:

    fairseq          its MultiheadAttention with its float causal mask
    sdpa             PyTorch's fused attention between four projections, by the kernel that PyTorch chooses
    sdpa-flash, sdpa-cudnn    the same by this kernel
    flex-sigsoftmax  the same with FlexAttention, compiled on a GPU; on the CPU only --direction forward
    x-transformers   its attention with post-softmax talking heads; it needs requirements/bench.txt

All layers take turns in every round; ratios are medians of the ratios within a round. Of several baselines ratios are to the
fastest. On a GPU times are those between events on the GPU, and the work is queued before it begins. "Late" counts rounds where
the GPU had to wait for Python all the same. Peak memory counts what a step allocates and the T×T mask that fairseq keeps for it.
--operation times attention alone: its queries, keys and values are leaves that lie in memory as a layer projects them.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_lowrank.attention import AXES, CAUSAL, PRESETS, AttentionSpec, MultiheadAttention, build_attention
from fairseq_lowrank.ops import BACKENDS, AttentionCall, AttentionMask, DotProduct, attention
from fairseq_lowrank.ops.attention import blocked
from fairseq_lowrank.ops.attention.blocks import Block, KeyGradient, Workspace

FLEX = "flex-sigsoftmax"
SDPA = {"sdpa": None, "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
"""Names of PyTorch's fused attention, and the kernel that each takes."""
PEERS = {"fairseq": "fairseq", **dict.fromkeys(SDPA, "torch"), FLEX: "torch", "x-transformers": "x_transformers"}
OWN_KERNELS = [name for name in BACKENDS if name not in ("auto", "reference", "sdpa", "blocked")]
"""Backends of our own GPU kernels."""
BLOCKS = {"blocked-128": (128, False), "blocked-onednn": (None, True), "blocked-onednn-128": (128, True)}
"""Trials of blocks: the least queries of a block, and whether oneDNN multiplies."""
LABELS = {"x-transformers": "x-transformers' talking heads", "talking-heads": "talking-heads (this package)"}
"""Labels of layers in tables and pictures that are not their names."""


class FusedAttention(nn.Module):
    """Four projections around ``scaled_dot_product_attention``: the least that a layer can do."""

    def __init__(self, embed_dim: int, heads: int, dropout: float, backend: SDPBackend | None = None) -> None:
        super().__init__()
        self.heads, self.dropout, self.backend = heads, dropout, backend
        self.joint, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
        self.kernel = ""
        """Name of the kernel that PyTorch took in the first call."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 1, 3, 0, 4)
        return self.out(self.attend(q, k, v).permute(2, 0, 1, 3).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            if not self.kernel:
                with torch.enable_grad():
                    tried = F.scaled_dot_product_attention(
                        q.detach().requires_grad_(), k, v, dropout_p=self.dropout, is_causal=True
                    )
                name = tried.grad_fn.name().removesuffix("Backward0")
                self.kernel = name if name.startswith("ScaledDotProduct") else "unfused"
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)


class Operation(nn.Module):
    """A layer's attention alone, of queries, keys and values ``[B, H, T, D]``."""

    def __init__(self, layer: FusedAttention | MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, FusedAttention):
            return layer.attend(q, k, v)
        mixings = {"score_mixing": layer.score_mixing, "prob_mixing": layer.mixing}
        parts = {name: module and module.operation(q) for name, module in mixings.items()}
        dropout = layer.dropout_module.p if self.training else 0.0
        call = AttentionCall(
            DotProduct(q, k), v, AttentionMask(True), activation=layer.spec.activation, dropout_p=dropout, **parts
        )
        return attention(call, layer.backend)[0]


@contextmanager
def other_blocks(rows: int | None, onednn: bool) -> Iterator[None]:
    """Let the backend ``blocked`` compute by a trial of :data:`BLOCKS`, in float32 on a CPU."""

    def dense(matrix: Tensor) -> Tensor:  # oneDNN takes a hundred times as long for a part of a wider tensor
        return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()

    def product(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        out = left.new_empty(left.size(0), left.size(1), right.size(2)) if out is None else out
        for one, other, result in zip(left, right, out, strict=True):
            result.copy_(torch.ops.mkldnn._linear_pointwise(dense(one), dense(other.mT), None, "none", [], ""))
        return out if scale == 1 else out.mul_(scale)

    def add(self: KeyGradient, block: Block, rows: Tensor, weights: Tensor, scale: float = 1.0) -> None:
        groups = self.keys.size(1)
        part = self.total[block.batch.start * groups : block.batch.stop * groups, :, block.keys]
        part += product(rows.mT, weights, scale)

    with ExitStack() as stack:
        if rows is not None:
            stack.enter_context(mock.patch.object(blocked, "MIN_BLOCK_ROWS", rows))
        if onednn:
            stack.enter_context(mock.patch.object(Workspace, "_product", staticmethod(product)))
            stack.enter_context(mock.patch.object(KeyGradient, "add", add))
        yield


class FlexSigsoftmax(FusedAttention):
    """The same around PyTorch's FlexAttention with sigsoftmax: exp(s) σ(s) is the exponential of s + log σ(s)."""

    def __init__(self, embed_dim: int, heads: int, length: int, device: str) -> None:
        super().__init__(embed_dim, heads, dropout=0.0)
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device)
        self.flex = torch.compile(flex_attention) if device.startswith("cuda") else flex_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.flex(q, k, v, score_mod=lambda score, *_: score + F.logsigmoid(score), block_mask=self.mask)


def build(name: str, options: argparse.Namespace, length: int) -> Layer:
    """The layer of this name, with random weights."""
    held, rest, backend = 0, *name.rpartition("@")[::2]
    name, trial = (f"{rest}@blocked", BLOCKS[backend]) if backend in BLOCKS else (name, None)
    width, heads, dropout = options.embed_dim, options.heads, options.dropout
    if name == "fairseq":
        from fairseq.modules import MultiheadAttention

        module = MultiheadAttention(width, heads, dropout=dropout, self_attention=True)
        mask = torch.full((length, length), float("-inf")).triu(1).to(options.device, options.torch_dtype)
        held = mask.numel() * mask.element_size()
        call = lambda module, x: module(x, x, x, attn_mask=mask, need_weights=False)[0]  # noqa: E731
    elif name in SDPA:
        module = FusedAttention(width, heads, dropout, SDPA[name])
        call = lambda module, x: module(x)  # noqa: E731
    elif name == FLEX:
        module = FlexSigsoftmax(width, heads, length, options.device)
        call = lambda module, x: module(x)  # noqa: E731
    elif name == "x-transformers":
        from x_transformers.x_transformers import Attention

        size = options.head_dim or width // heads
        module = Attention(width, size, heads=heads, causal=True, dropout=dropout, post_talking_heads=True)
        call = lambda module, x: module(x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
    else:
        module = ours(name, options)
        call = lambda module, x: module(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]  # noqa: E731
    if options.operation:
        module = Operation(module)
        call = Operation.__call__
    module.to(options.device, options.torch_dtype).train(options.direction == "training")
    return Layer(module, call, held, trial)


def ours(name: str, options: argparse.Namespace, device: str | None = None) -> MultiheadAttention:
    """The layer of this package that is called ``PRESET[:AXIS=VALUE,…][+ACTIVATION][@BACKEND]``.

    Raises:
        ValueError: there is none of this name, or of these sizes.
    """
    rest, _, backend = name.partition("@")
    backend = "blocked" if backend in BLOCKS else backend
    rest, _, activation = rest.partition("+")
    preset, _, given = rest.partition(":")
    axes = {"head_dim": options.head_dim, "activation": activation or None}
    for axis, _, value in (word.partition("=") for word in given.split(",") if word):
        number = axis in AXES and AXES[axis].type is int and value.isdecimal()
        axes[axis] = int(value) if number else value
    return build_attention(
        preset,
        options.embed_dim,
        options.heads,
        self_attention=True,
        dropout=options.dropout,
        max_positions=max(options.lengths),
        backend=backend or "auto",
        device=device,
        **axes,
    )


SIZES = {
    "collaborative": "shared_dim=256",
    "fixedhead": "head_dim=128",
    "gqa": "key_value_heads=2",
    "mfa": "head_dim=128,latent_dim=256",
}
"""Sizes of methods that differ from those of plain attention, with d 512 and 8 heads as on their pages."""


def default_layers(options: argparse.Namespace) -> list[str]:
    """Every preset that can have these sizes, with the number that it needs, sigsoftmax with two of them, and on a GPU
    what the kernels of the triton backend compute."""
    names = [f"{preset}:{SIZES[preset]}" if preset in SIZES else preset for preset in PRESETS]
    names += ["mha+sigsoftmax", "mixhead-a+sigsoftmax"]
    if options.device.startswith("cuda"):
        names += with_kernels(
            ["mixhead-a@kernels", "mixhead-b@kernels", "talking-heads@kernels", "mha+sigsoftmax@kernels"]
        )
    return [name for name in names if not refusal(name, options)]


def with_kernels(names: list[str]) -> list[str]:
    """``names``, each that ends in @kernels once for each of :data:`OWN_KERNELS`."""
    parts = [name.partition("@") for name in names]
    return [
        f"{layer}{mark}{backend}"
        for layer, mark, given in parts
        for backend in (OWN_KERNELS if given == "kernels" else [given])
    ]


def refusal(name: str, options: argparse.Namespace) -> str:
    """Why there is no layer of this package of this name and these sizes; empty where there is."""
    try:
        ours(name, options, device="meta")
    except ValueError as error:
        return str(error)
    return ""


def has_operation(name: str, options: argparse.Namespace) -> bool:
    """Whether its attention reads queries, keys and values of embed_dim each, as :class:`Operation` gives them."""
    if name in PEERS:
        return name in (*SDPA, FLEX)
    layer = ours(name, options, device="meta")
    others = layer.spec.replace(activation="softmax", mixing="none", score_mixing="none", head_dim=None)
    return others == AttentionSpec() and layer.head_dim * layer.num_heads == layer.embed_dim


class Layer:
    """One timed step: forward, and backward to the inputs and all parameters where the direction asks for it."""

    def __init__(
        self, module: nn.Module, call: Callable[..., Tensor], held: int, trial: tuple[int | None, bool] | None = None
    ) -> None:
        self.module, self.call, self.held, self.trial = module, call, held, trial

    @property
    def kernel(self) -> str:
        """The name of PyTorch's kernel, where the layer is one of :data:`SDPA`."""
        layer = self.module.layer if isinstance(self.module, Operation) else self.module
        return getattr(layer, "kernel", "")

    def step(self, inputs: list[Tensor], cotangent: Tensor, options: argparse.Namespace) -> tuple[list[float], bool]:
        """Seconds of the forward pass, and of the backward pass, and whether a GPU waited for the host."""
        training = options.direction == "training"
        leaves = [*inputs, *self.module.parameters()]
        with nullcontext() if self.trial is None else other_blocks(*self.trial):
            watch = measure.Stopwatch(options.device, options.clock)
            watch.mark()
            with torch.set_grad_enabled(training):
                output = self.call(self.module, *inputs)
            watch.mark()
            if training:
                gradients = torch.autograd.grad(output, leaves, cotangent, allow_unused=True)  # noqa: F841 (held, as a training does)
                watch.mark()
            return watch.laps()


def tried(layers: dict[str, Layer], step: Callable[[Layer], object], failed: dict[str, str]) -> dict[str, Layer]:
    """The layers that run; why the others do not is put into ``failed``.

    Kernels that are wrong on a GPU warn once and leave the call to another backend, whose time is not theirs.
    """
    for name, layer in layers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                step(layer)
            except (RuntimeError, ValueError, RuntimeWarning) as error:
                failed[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return {name: layer for name, layer in layers.items() if name not in failed}


def at_length(options: argparse.Namespace, length: int, failed: dict[str, str] | None = None) -> list[dict]:
    """Results of every layer at one sequence length. Layers in ``failed`` are left out, and those that do not run are added."""
    failed = {} if failed is None else failed
    batch = max(1, options.tokens // length)
    generator = torch.Generator().manual_seed(0)
    training = options.direction == "training"

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(options.device, options.torch_dtype)

    if options.operation:
        shape = length, batch, options.heads, options.embed_dim // options.heads
        *inputs, cotangent = (drawn(*shape).permute(1, 2, 0, 3) for _ in range(4))
    else:
        inputs = [drawn(length, batch, options.embed_dim)]
        cotangent = drawn(length, batch, options.embed_dim)
    for tensor in inputs:
        tensor.requires_grad_(training)
    failed |= {name: reason for name in options.layers if name not in PEERS and (reason := refusal(name, options))}
    layers = {name: build(name, options, length) for name in options.layers if name not in failed}
    layers = tried(layers, lambda layer: layer.step(inputs, cotangent, options), failed)
    runs = {name: lambda layer=layer: layer.step(inputs, cotangent, options) for name, layer in layers.items()}
    found = measure.take_turns(runs, options.rounds, f"n {length}") if runs else {}
    times = {name: [sum(laps) for laps, _ in rounds] for name, rounds in found.items()}
    memory = {name: measure.peak_bytes(run, options.device) + layers[name].held for name, run in runs.items()}
    bases = [name for name in options.baseline if name in times]
    base = min(bases, key=lambda name: measure.quartiles(times[name])[1], default=None)
    scores = batch * options.heads * length * (length + 1) // 2
    results = []
    for name in layers:
        q1, median, q3 = measure.quartiles(times[name])
        passes = {
            f"{direction}_milliseconds": round(measure.quartiles([laps[place] for laps, _ in found[name]])[1] * 1e3, 3)
            for place, direction in enumerate(("forward", "backward")[: 2 if training else 1])
        }
        ratio = base and round(measure.quartiles(measure.ratios(times[name], times[base]))[1], 3)
        results.append(
            {
                "layer": name,
                "kernel": layers[name].kernel,
                "heads": options.heads,
                "head_dim": options.head_dim or options.embed_dim // options.heads,
                "length": length,
                "batch": batch,
                "milliseconds": round(median * 1e3, 3),
                "quartiles": [round(q1 * 1e3, 3), round(q3 * 1e3, 3)],
                **passes,
                "picoseconds_per_score": round(median * 1e12 / scores, 3),
                "late": sum(late for _, late in found[name]),
                "baseline": base,
                "ratio": ratio,
                "mask_mebibytes": round(layers[name].held / 2**20, 4),
                "peak_mebibytes": round(memory[name] / 2**20, 4),
                "memory_ratio": base and round(memory[name] / memory[base], 3),
            }
        )
    return results


def picture(results: list[dict], path: Path, settings: dict) -> None:
    """Time and peak memory against n, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    from fairseq_lowrank.tools import pictures

    heads = settings["heads"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lengths = sorted({result["length"] for result in results})
    for axis, key, label in zip(
        axes,
        ("milliseconds", "peak_mebibytes"),
        ("milliseconds a sequence", "peak memory of a batch, MiB"),
        strict=True,
    ):
        names = list(dict.fromkeys(result["layer"] for result in results))
        for name, style in zip(names, pictures.styles(names), strict=True):
            points = [
                (r["length"], r[key] / (r["batch"] if key == "milliseconds" else 1))
                for r in results
                if r["layer"] == name and r[key]
            ]
            style = {"marker": pictures.marker(style), **style}
            style = {"color": "black", "linestyle": ":"} if name in settings["baseline"] else style
            axis.plot(*zip(*points, strict=True), **style, markersize=4, label=LABELS.get(name, name))
        axis.set(xscale="log", yscale="log", xlabel="sequence length n", ylabel=f"{label} (less is better)")
        axis.set_xticks(lengths, labels=map(str, lengths), minor=False)
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    head_dim = settings["head_dim"] or settings["embed_dim"] // heads
    what = "The attention of one layer" if settings["operation"] else "One self-attention layer"
    figure.suptitle(
        f"{what}, h = {heads}, d_k = {head_dim}, {settings['direction']}, {settings['dtype']}, {settings['device']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"wrote {path}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", metavar="LAYER", help="default: every peer installed and every preset")
    parser.add_argument(
        "--baseline",
        nargs="+",
        default=["fairseq"],
        metavar="LAYER",
        help="ratios are to the fastest of these (default: fairseq)",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096], metavar="N")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch; it holds at least one sequence")
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, help="head size of our layers (default: embed-dim / heads)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=measure.shape,
        metavar="HxD",
        help="heads and their size in place of --heads, --embed-dim; a layer that has no such shape is left out there",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--operation", action="store_true", help="without projections, of sdpa and layers of plain ones"
    )
    parser.add_argument("--direction", default="training", choices=("training", "forward"))
    parser.add_argument("--dropout", type=float, default=0.0, help="attention dropout of every layer")
    measure.add_common_arguments(parser, rounds=15)
    drawing = measure.new_file(".svg", ".png", ".pdf")
    parser.add_argument("--picture", type=drawing, help="draw time and memory against n into this file (.svg, .png)")
    options = parser.parse_args(arguments)
    options.torch_dtype = getattr(torch, options.dtype)
    if options.threads:
        torch.set_num_threads(options.threads)
    flexible = not options.dropout and (options.device.startswith("cuda") or options.direction == "forward")
    installed = {name for name, module in PEERS.items() if importlib.util.find_spec(module)}
    possible = installed if flexible else installed - {FLEX}
    possible -= set() if options.device.startswith("cuda") else {"sdpa-flash", "sdpa-cudnn"}
    options.layers = options.layers or [name for name in PEERS if name in possible] + default_layers(options)
    options.layers = list(dict.fromkeys(with_kernels([*options.baseline, *options.layers])))
    if options.shapes:
        options.heads, size = min(options.shapes, key=math.prod)
        options.embed_dim = options.heads * size
    for name in options.layers:
        if name in PEERS and name not in installed:
            parser.error(
                f"{name} is not installed: pip install -r requirements/bench.txt, or choose --layers, --baseline"
            )
        if name == FLEX and not flexible:
            parser.error(f"{FLEX} has no dropout, and on the CPU no backward pass: --dropout 0 --direction forward")
        if name not in PEERS and (reason := refusal(name, options)):
            parser.error(f"layer {name!r}: {reason} (or a peer: {', '.join(PEERS)})")
        if options.operation and not has_operation(name, options):
            parser.error(f"--operation knows {', '.join(SDPA)}, {FLEX} and layers of plain projections, not {name!r}")
    return options


def table(results: list[dict]) -> str:
    rows = [
        (
            " ".join(filter(None, (LABELS.get(r["layer"], r["layer"]), r["kernel"]))),
            f"{r['milliseconds']:.2f}",
            "{:.2f} to {:.2f}".format(*r["quartiles"]),
            f"{r['forward_milliseconds']:.2f}",
            f"{r['picoseconds_per_score']:.1f}",
            r["ratio"],
            f"{r['peak_mebibytes']:.1f}",
            r["memory_ratio"],
            r["late"],
        )
        for r in results
    ]
    base = results[0]["baseline"] if results else None
    header = ("layer", "ms", "quartiles", "forward", "ps a score", f"× {base}", "peak MiB", f"memory × {base}", "late")
    return measure.table(rows, header)


def main() -> int:
    options = parse()
    logging.disable(logging.INFO)  # fairseq switches every library's messages on
    names = "embed_dim heads head_dim dtype device operation direction dropout rounds clock baseline"
    settings = {name: getattr(options, name) for name in names.split()}
    results: list[dict] = []
    failed: dict[str, str] = {}
    for heads, size in options.shapes or [(options.heads, options.embed_dim // options.heads)]:
        options.heads, options.embed_dim = heads, heads * size
        refused: dict[str, str] = {}
        for length in options.lengths:
            found = at_length(options, length, refused)
            results += found
            batch = max(1, options.tokens // length)
            print(
                f"\n{heads} heads of {size}, n {length}, batch {batch}, {options.direction}, dropout {options.dropout:g}"
            )
            print(table(found), flush=True)
        failed |= {f"{name}, {heads} heads of {size}": reason for name, reason in refused.items()}
        measure.write(
            options.output,
            {"machine": measure.machine(options.device), "settings": settings, "results": results, "failed": failed},
        )
    for name, reason in failed.items():
        print(f"{name}: does not run: {reason}")
    if options.picture and results:
        picture(results, options.picture, settings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
