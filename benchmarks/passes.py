"""The GPU kernels of our backends alone: are they right, what does each pass take, and what limits it.

    python benchmarks/passes.py values --output values.json      values, gradients and equal bits, against float64
    python benchmarks/passes.py times --lengths 8192             each pass alone, its variants, and the same without the L2 cache
    python benchmarks/passes.py constants                        clock under load, bandwidth of the L2 cache and of the memory

A backend is asked for its kernels as it launches them, so that a new one needs no change here. Variants of a pass have other
numbers of warps and of tiles in flight. Variants of a launch have its options: "few" takes small tiles. "one row" reads the same position of keys, values, queries and gradients everywhere, so that no load leaves the SM:
what a pass takes less then is the price of the L2 cache, and the rest is its chain of instructions.

PART/PARTS computes only a part of the rows. Kernels stay in Triton's cache, so that many processes can compile them at once:
with --rounds 0 each compiles its part of them, and nothing is timed.
DEVICE=cpu needs TRITON_INTERPRET=1 and tiny sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import measure
import torch
from attention import OWN_KERNELS
from torch import Tensor
from triton.language import constexpr

from fairseq_lowrank.ops import (
    AttentionCall,
    AttentionMask,
    DotProduct,
    HeadMixing,
    PositionwiseMixing,
    StaticMixing,
    attention,
)
from fairseq_lowrank.ops.attention import auto, selfcheck
from fairseq_lowrank.ops.attention.launch import Kernel, Launch

LAUNCHES: dict[str, type[Launch]] = selfcheck.LAUNCHES
COMPOSITIONS: dict[str, tuple[type[HeadMixing] | None, type[HeadMixing] | None, str]] = {
    "mixhead-a": (None, StaticMixing, "softmax"),
    "mixhead-b": (None, PositionwiseMixing, "softmax"),
    "score-mixing": (StaticMixing, None, "softmax"),
    "talking-heads": (StaticMixing, StaticMixing, "softmax"),
    "sigsoftmax": (None, None, "sigsoftmax"),
}
"""Mixing before and after the softmax, and the activation."""
SHORT = 100
"""A length that is no multiple of a tile."""


def problem(
    composition: str, shape: tuple[int, int], length: int, options: argparse.Namespace, padded: bool = False
) -> AttentionCall:
    """A random causal call whose tensors lie in memory as a layer projects them; M is near the identity.

    As in a layer, one M has the dtype of the layer, and matrices of queries are in float32.
    """
    heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    batch = max(1, options.tokens // length)
    dtype, device = getattr(torch, options.dtype), options.device

    def projected() -> Tensor:
        drawn = torch.randn(length, batch, heads, head_dim, generator=generator)
        return drawn.to(device, dtype).permute(1, 2, 0, 3).requires_grad_()

    def mixing(rule: type[HeadMixing] | None) -> HeadMixing | None:
        if rule is None:
            return None
        by_query = rule is PositionwiseMixing
        sizes = (batch, length, heads, heads) if by_query else (heads, heads)
        weight = torch.eye(heads) + 0.3 * torch.randn(sizes, generator=generator)
        weight = weight.to(device, torch.float32 if by_query else dtype)
        return rule(weight.requires_grad_())  # type: ignore[call-arg]

    before, after, activation = COMPOSITIONS[composition]
    padding = None
    if padded:
        padding = (torch.arange(length) >= length - length // 4).expand(batch, -1).to(device)
    scores, mask = DotProduct(projected(), projected()), AttentionMask(True, padding)
    rules = mixing(before), mixing(after)
    return AttentionCall(scores, projected(), mask, None, *rules, activation, options.dropout)


def leaves(call: AttentionCall) -> dict[str, Tensor]:
    weights = {"before": call.score_mixing, "after": call.prob_mixing}
    tensors = {"dq": call.dot_product.q, "dk": call.dot_product.k, "dv": call.v}
    return tensors | {f"dM {name}": mixing.weight for name, mixing in weights.items() if mixing is not None}


def computed(call: AttentionCall, backend: str, cotangent: Tensor) -> dict[str, Tensor]:
    """Heads and gradients. Kernels that a self-check refuses raise its warning: another backend would compute then."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        heads, _ = attention(call, backend)
        gradients = torch.autograd.grad(heads, list(leaves(call).values()), cotangent.to(heads.dtype))
    return {"heads": heads.detach(), **dict(zip(leaves(call), gradients, strict=True))}


def values(options: argparse.Namespace) -> list[dict]:
    """Relative errors of each backend against the formula in float64, and whether a second run gives the same bits."""
    rows = []
    cases = [*((length, False) for length in options.lengths), (SHORT, True)]
    cases = list(dict.fromkeys((min(length, options.longest or length), padded) for length, padded in cases))
    every = list(itertools.product(options.compositions, cases, options.shapes))
    for composition, (length, padded), shape in every[options.part[0] :: options.part[1]]:
        call = problem(composition, shape, length, options, padded)
        exact = call.map_tensors(
            lambda tensor: tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor
        )
        cotangent = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
        wanted = computed(exact, "reference", cotangent)
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()  # scores in float64, which other workers need room for
        for backend in options.backends:
            row = {"backend": backend, "composition": composition, **named(shape), "length": length, "padded": padded}
            if (refused := auto.BACKENDS[backend].unsupported_reason(call)) is not None:
                rows.append(row | {"refused": refused})
                continue
            try:
                found, again = (computed(call, backend, cotangent) for _ in range(2))
            except (RuntimeError, ValueError, RuntimeWarning) as error:
                rows.append(row | {"failed": reason(error)})
                continue
            errors = {
                name: float((found[name].double() - exact_value).norm() / exact_value.norm())
                for name, exact_value in wanted.items()
            }
            bits = all(torch.equal(found[name], again[name]) for name in found)
            right = max(errors.values()) <= selfcheck.TOLERANCE[call.v.dtype]
            rows.append(row | {"errors": errors, "same_bits": bits, "right": right})
        save(options, rows)
    header = ("backend", "composition", "heads", "size", "n", "padded", "largest error", "of", "same bits")
    cells = []
    for row in rows:
        largest = max(row.get("errors", {"": float("nan")}).items(), key=lambda item: item[1])
        name = row.get("failed", row.get("refused", largest[0]))
        place = (row["backend"], row["composition"], row["heads"], row["head_dim"], row["length"], row["padded"])
        cells.append((*place, f"{largest[1]:.4f}", name, row.get("same_bits")))
    print(measure.table(cells, header))
    return rows


def named(shape: tuple[int, int]) -> dict[str, int]:
    return {"heads": shape[0], "head_dim": shape[1]}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def one_row(call: AttentionCall) -> AttentionCall:
    """The same call of tensors in which every position is the first, and lies where it lies."""

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.detach()[:, :, :1].expand(tensor.shape).requires_grad_()

    scores = call.dot_product
    return call.replace(scores=DotProduct(repeated(scores.q), repeated(scores.k)), v=repeated(call.v))


def launched(call: AttentionCall, launch: Callable[..., Launch], same_row: bool, computes: bool) -> list[Kernel]:
    """The kernels of a forward and a backward pass, in their order. They run if the pass ``computes``."""
    kernels: list[Kernel] = []

    def run(kernel: Kernel) -> object:
        kernels.append(kernel)
        return kernel.run() if computes else None

    with torch.no_grad():
        passes = launch(call, 0, run)
        heads, kept = passes.forward()
        passes.backward(heads[:, :, :1].expand(heads.shape) if same_row else heads, *kept)
    return kernels


def launch_variants(backend: str) -> Iterator[tuple[str, Callable[..., Launch]]]:
    """A backend's launch as it is, and with each of its options on and off."""
    launch = LAUNCHES[backend]
    yield "", launch
    for name in list(inspect.signature(launch).parameters)[3:]:
        for value in (True, False):
            yield f"{name}={value}", partial(launch, **{name: value})


def compiler_variants(kernel: Kernel, options: argparse.Namespace) -> Iterator[tuple[str, Kernel]]:
    """A kernel with other numbers of warps and tiles in flight than its own."""
    own = kernel.options["num_warps"], kernel.options["num_stages"]
    for warps, stages in itertools.product(options.warps, options.stages):
        if (warps, stages) == own:
            continue
        changed = kernel.options | {"num_warps": warps, "num_stages": stages}
        if "maxnreg" in changed:
            changed["maxnreg"] = min(255, 65536 // (32 * warps))
        yield (
            f"{warps} warps, {stages} stages",
            kernel._replace(
                options=changed, arguments=tuple(_with_stages(argument, stages) for argument in kernel.arguments)
            ),
        )


def _with_stages(argument: object, stages: int) -> object:
    """A kernel that plans its own loop is told of the stages by its shape."""
    fields = getattr(argument, "_fields", ())
    return argument._replace(STAGES=constexpr(stages)) if "STAGES" in fields else argument  # type: ignore[attr-defined]


def times(options: argparse.Namespace) -> list[dict]:
    """Milliseconds, and picoseconds and clocks a score, of each pass and each variant of it."""
    results: list[dict] = []
    known = 0
    for backend, composition, shape, length in itertools.product(
        options.backends, options.compositions, options.shapes, options.lengths
    ):
        call = problem(composition, shape, length, options)
        batch = call.v.size(0)
        place = {"backend": backend, "composition": composition, **named(shape), "length": length, "batch": batch}
        some: dict[tuple[str, str], Kernel] = {}
        for (variant, launch), same_row in itertools.product(launch_variants(backend), (False, True)):
            if (same_row and variant) or ((same_row or variant) and not options.variants):
                continue
            name = "one row" if same_row else variant
            try:
                kernels = launched(one_row(call) if same_row else call, launch, same_row, options.rounds > 0)
            except (RuntimeError, ValueError) as error:
                results.append(place | {"kernel": "", "variant": name, "failed": reason(error)})
                continue
            some |= {(kernel.name, name): kernel for kernel in kernels}
            if not name and options.variants:
                for kernel in kernels:
                    some |= {(kernel.name, other): changed for other, changed in compiler_variants(kernel, options)}
        part, parts = options.part
        chosen = dict(list(some.items())[(part - known) % parts :: parts])
        known += len(some)
        runs = {}
        for key, kernel in chosen.items():
            try:
                compiled = kernel.run()
            except Exception as error:  # the compiler's own errors have no common class
                results.append(place | {"kernel": key[0], "variant": key[1], "failed": reason(error)})
                continue
            runs[key] = partial(_timed, kernel, options)
            some[key] = compiled  # type: ignore[assignment]
        found = measure.take_turns(runs, options.rounds) if options.rounds else {}
        scores = batch * shape[0] * length * (length + 1) // 2
        for key, rounds in found.items():
            seconds = measure.quartiles([laps[0] for laps, _ in rounds])
            results.append(
                place
                | {
                    "kernel": key[0],
                    "variant": key[1],
                    "milliseconds": [round(one * 1e3, 4) for one in seconds],
                    "picoseconds_per_score": round(seconds[1] * 1e12 / scores, 3),
                    "spills": getattr(some[key], "n_spills", None),
                    "registers": getattr(some[key], "n_regs", None),
                }
            )
    cells = []
    for row in results:
        median = f"{row['milliseconds'][1]:.3f}" if "milliseconds" in row else row["failed"]
        place = (row["backend"], row["composition"], row["heads"], row["head_dim"], row["length"])
        place = (*place, row["kernel"], row["variant"])
        cells.append((*place, median, row.get("picoseconds_per_score"), row.get("registers"), row.get("spills")))
    header = (
        "backend",
        "composition",
        "heads",
        "size",
        "n",
        "pass",
        "variant",
        "ms",
        "ps a score",
        "registers",
        "spills",
    )
    print(measure.table(cells, header))
    return results


def _timed(kernel: Kernel, options: argparse.Namespace) -> tuple[list[float], bool]:
    watch = measure.Stopwatch(options.device)
    watch.mark()
    kernel.run()
    watch.mark()
    return watch.laps()


def constants(options: argparse.Namespace) -> list[dict]:
    """What the cost model assumes of a GPU."""
    results = []
    for name, size in (("L2 cache", 10 << 20), ("memory", (1 << 30) if options.device.startswith("cuda") else 1 << 20)):
        source = torch.empty(size, dtype=torch.uint8, device=options.device)
        target = torch.empty_like(source)
        found = []
        for _ in range(options.rounds):
            watch = measure.Stopwatch(options.device)
            target.copy_(source)
            watch.mark()
            for _ in range(10):
                target.copy_(source)
            watch.mark()
            found.append(watch.laps()[0][0])
        rate = 20 * size / measure.quartiles(found)[1] / 1e12
        results.append({"name": f"copies within the {name}, TB/s, read and written", "value": round(rate, 3)})
    if options.device.startswith("cuda"):
        left = torch.randn(8192, 8192, device=options.device, dtype=torch.bfloat16)
        for _ in range(400):  # about a second of work
            left @ left
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        clock, power = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
        )
        torch.cuda.synchronize()
        properties = torch.cuda.get_device_properties(options.device)
        results += [
            {"name": "clock under load, MHz", "value": float(clock)},
            {"name": "power under load, W", "value": float(power)},
            {"name": "multiprocessors", "value": properties.multi_processor_count},
        ]
    print(measure.table(((row["name"], row["value"]) for row in results), ("constant", "measured")))
    return results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("values", "times", "constants"))
    parser.add_argument(
        "--backends", nargs="+", choices=LAUNCHES, default=[one for one in OWN_KERNELS if one in LAUNCHES]
    )
    parser.add_argument("--compositions", nargs="+", choices=COMPOSITIONS, default=list(COMPOSITIONS))
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=measure.shape,
        default=[(16, 64), (8, 64)],
        metavar="HxD",
        help="heads and their size",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048], metavar="N")
    parser.add_argument("--longest", type=int, help="cut every length of values to this, for a trial")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens in a batch; it holds at least one sequence")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dropout", type=float, default=0.0, help="attention dropout; values take none")
    parser.add_argument(
        "--variants", action=argparse.BooleanOptionalAction, default=True, help="times of variants too (default: yes)"
    )
    parser.add_argument("--warps", nargs="+", type=int, default=[8, 16], help="of variants")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], help="tiles in flight, of variants")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="PART/PARTS", help="rows to compute, from 0/PARTS on"
    )
    measure.add_common_arguments(parser, rounds=7)
    return parser.parse_args(arguments)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: expected PART/PARTS, such as 0/4")
    return int(part), int(parts)


def save(options: argparse.Namespace, rows: list[dict]) -> None:
    """Write what there is: a step that runs out of its time leaves the rows before."""
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    measure.write(options.output, {"machine": measure.machine(options.device), "settings": settings, "results": rows})


def main() -> int:
    options = parse()
    rows = {"values": values, "times": times, "constants": constants}[options.what](options)
    save(options, rows)
    checked = [row for row in rows if "refused" not in row]
    return 1 if options.what == "values" and not all(row.get("right") and row["same_bits"] for row in checked) else 0


if __name__ == "__main__":
    sys.exit(main())
