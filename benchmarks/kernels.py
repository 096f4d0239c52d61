"""What the compiler makes of the kernels of the backends triton and tiled, without a GPU, and what that predicts of their speed.

    python benchmarks/kernels.py                                     a table of common sizes, compiled for sm_90
    python benchmarks/kernels.py --chips 80 90 100 --everything
    python benchmarks/kernels.py --triton benchmarks/results/kernels.json  compiles the kernels of the triton backend, for an hour
    python benchmarks/kernels.py --tiled benchmarks/results/kernels.json   adds those of the tiled backend, for half an hour
    python benchmarks/kernels.py --recorded                          the tables of benchmarks/results/kernels.json

Nothing here is measured. `registers` and `shared` are the compiler's; `blocks an SM` what fits by registers, shared memory and
threads; `operations` and `bytes` those of a tile: products of matrices, and what it reads of keys and values, or of queries
and gradients. The prediction is written below the table. Of the tiled kernels, the instructions of the inner loop and a
prediction of picoseconds a score are shown; both ends come from two readings of what was measured of the older kernels
(:func:`predicted`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import measure
import torch
import triton
from machine_code import inner_loop, tool
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, HeadMixing, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.activation import ACTIVATIONS
from fairseq_lowrank.ops.attention.launch import Kernel, Launch
from fairseq_lowrank.ops.attention.tiled import MOST_COLUMNS
from fairseq_lowrank.ops.attention.tiled_launch import TiledLaunch

# Shared memory of a block at most, of an SM, and threads of an SM.
CHIPS = {80: (163, 164, 2048), 90: (227, 228, 2048), 100: (227, 228, 2048)}
REGISTERS = 65536
MIXINGS = {
    "none": (None, None),
    "A": (None, StaticMixing),
    "B": (None, PositionwiseMixing),
    "talking heads": (StaticMixing, StaticMixing),
}
COMPILED_SIZES = ((8, 32), (16, 32), (8, 64), (12, 64), (16, 64))
"""Numbers of heads and their sizes, of the kernels of ``triton``."""
RULES = MIXINGS | {"mixed scores": (StaticMixing, None)}
SIZES = ((16, 64), (8, 128))
RESULTS = Path(__file__).with_name("results") / "kernels.json"
# Per score and head, in products of 2·d_k operations, and in mixings of 2·H operations.
PRODUCTS = {
    "row_statistics": 1,
    "attend": 2,
    "row_sums": 2,
    "query_gradients": 3,
    "key_gradients": 3,
    "value_gradients": 2,
}
MIXED = {"attend": 1, "row_sums": 2, "query_gradients": 1, "key_gradients": 1, "value_gradients": 1}


class Compiled(NamedTuple):
    """A kernel as the compiler left it for a chip."""

    kernel: str
    chip: int
    rows: int
    keys: int
    columns: int
    warps: int
    registers: int
    stack: int
    """Bytes of local memory a thread, spilled registers among them."""
    shared: int
    heads: int
    dim: int
    value_dim: int
    instructions: int | None = None
    """Of a warp in the inner loop (tiled kernels)."""
    reloads: int | None = None
    """Among them, loads of registers that were spilled."""
    stores: int | None = None
    """Among them, stores of registers that are spilled: what a loop must not have."""

    @property
    def fits(self) -> bool:
        """Tiled kernels may spill what stays the same in the inner loop."""
        spilled = self.stack if self.stores is None else self.stores
        return spilled == 0 and self.shared <= CHIPS[self.chip][0] * 1024

    @property
    def scores(self) -> int:
        """Of a tile."""
        return self.heads * self.rows * self.keys

    @property
    def issue(self) -> float:
        """Clocks a score in which a scheduler of an SM issues an instruction."""
        return (self.instructions or 0) * self.warps / 4 / self.scores

    @property
    def blocks(self) -> int:
        """Programs that an SM holds at once."""
        _, shared, threads = CHIPS[self.chip]
        per_warp = -(-self.registers * 32 // 256) * 256
        limits = [threads // (32 * self.warps), REGISTERS // (per_warp * self.warps), 32]
        return min([*limits, shared * 1024 // (self.shared + 1024)])

    @property
    def operations(self) -> int:
        """Of a tile, with the products that a program of a part of the columns does again."""
        scores = self.heads * self.rows * self.keys
        width = self.value_dim if self.kernel in ("attend", "value_gradients") else self.dim
        whole = {"row_statistics": 1, "attend": 1, "row_sums": 2, "value_gradients": 1}.get(self.kernel, 2)
        into = 0 if self.kernel in ("row_statistics", "row_sums") else self.columns
        parts = -(-width // self.columns) if into else 1
        mixing = 2 * self.heads * MIXED.get(self.kernel, 0) if self.heads > 1 else 0
        return parts * scores * (2 * self.dim * whole + 2 * into + mixing)

    @property
    def bytes(self) -> int:
        """Read by a tile from beyond the SM, in 16 bits a number."""
        moving = self.rows if self.kernel in ("key_gradients", "value_gradients") else self.keys
        width = self.dim + (0 if self.kernel == "row_statistics" else self.value_dim)
        if self.kernel == "attend":
            width = self.dim + self.columns
        parts = -(-(self.dim if self.kernel == "query_gradients" else self.value_dim) // self.columns)
        parts = 1 if self.kernel in ("row_statistics", "row_sums") else parts
        return 2 * self.heads * moving * width * parts


class Configuration(NamedTuple):
    """What the compiler sees of a call and a chip. Lengths that are no multiples of 16 leave it the least to know."""

    mixing: str
    """One of :data:`MIXINGS`."""
    activation: str
    heads: int
    dim: int
    chip: int
    causal: bool = True
    padding: bool = True
    dtype: str = "bfloat16"
    weights: str = "float32"
    """The dtype of the matrices of mixing."""
    length: int = 70
    everything: bool = False
    """A mask of floats and dropout too."""
    triton: str = triton.__version__
    backend: str = "triton"
    dropout: bool = False
    few: bool = False
    """Tiles for few programs."""
    masked: bool = False
    """A mask of floats."""


def of_triton() -> list[Configuration]:
    """Kernels of the triton backend that spill nothing: compositions, sizes and chips, under causality and padding in bfloat16.

    Of the widest, both kinds of mixing, also other masks, dtypes and lengths on one chip.
    """
    every = itertools.product(COMPILED_SIZES[::-1], CHIPS, ACTIVATIONS, MIXINGS)
    # Sigsoftmax with mixing is left out: it spills a few registers.
    grid = [
        Configuration(mixing, activation, *size, chip)
        for size, chip, activation, mixing in every
        if activation == "softmax" or mixing == "none"
    ]
    changes: list[dict] = [
        {"causal": False, "padding": False},
        {"causal": False},
        {"padding": False},
        {"dtype": "float16"},
        {"weights": "bfloat16"},
        {"length": 64},
        {"length": 1},
    ]
    widest = [Configuration(mixing, "softmax", 16, 64, 90) for mixing in ("A", "B")]
    grid += [one._replace(**change) for one in widest for change in changes]
    return [one for one in grid if not (one.mixing == "B" and one.weights == "bfloat16")]


def of_tiled() -> list[Configuration]:
    """Kernels of the tiled backend on an H100: all sizes of Mixhead A, and each other kind with 16 heads of 64."""
    plain = Configuration("A", "softmax", 16, 64, 90, padding=False, backend="tiled")
    changes: list[dict] = [
        {},
        {"mixing": "none"},
        {"mixing": "none", "activation": "sigsoftmax"},
        {"mixing": "B"},
        {"dropout": True},
        {"masked": True},
        {"mixing": "talking heads"},
        {"mixing": "mixed scores"},
    ]
    sizes = itertools.product((4, 8, 12, 16, 32), (32, 64, 128))
    changes += [{"heads": heads, "dim": dim} for heads, dim in sizes if heads * dim <= MOST_COLUMNS]
    return list(dict.fromkeys(plain._replace(**change) for change in changes))


def compiled(one: Configuration, names: Container[str] | None = None) -> Iterator[Compiled]:
    """Every kernel of the forward and backward pass of a configuration, or those of ``names``."""
    launched: list[Kernel] = []
    if one.backend == "tiled":
        launch: Launch = TiledLaunch(call_of(one), 1, launched.append, few=one.few)
    else:
        launch = Launch(call_of(one), 1, run=launched.append)
    with torch.no_grad():
        heads, kept = launch.forward()
        launch.backward(heads, *kept)
    for kernel in launched:
        if names is None or kernel.name in names:
            yield compile_kernel(kernel, one.chip)


def compile_kernel(kernel: Kernel, chip: int) -> Compiled:
    """Compile a launch for a chip as if it were there."""
    function, target = kernel.function, GPUTarget("cuda", chip, 32)
    backend = make_backend(target)
    options = {**kernel.options, "debug": False}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, unparsed = bind(*kernel.arguments, **options)
    parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, unparsed)
    source = ASTSource(function, signature, constants, attributes)
    result = triton.compile(source, target=target, options=parsed.__dict__)
    shape = bound["shape"]
    registers, stack = resources(result.asm["cubin"])
    tiled = hasattr(shape, "COPIES")
    loop = inner_loop(result.asm["cubin"]) if tiled else None
    columns = shape.BLOCK_D if tiled else shape.BLOCK_OUT
    sizes = (size.value for size in (shape.BLOCK_M, shape.BLOCK_N, columns))
    dims = (size.value for size in (shape.BLOCK_H, shape.BLOCK_D, shape.BLOCK_DV))
    figures = (loop.total(), loop["LDL"], loop["STL"]) if loop is not None else ()
    warps, shared = kernel.options["num_warps"], result.metadata.shared
    return Compiled(kernel.name, chip, *sizes, warps, registers, stack, shared, *dims, *figures)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread."""
    report = tool("cuobjdump", cubin, "-res-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(stack) + int(re.search(r"LOCAL:(\d+)", report)[1])


def call_of(one: Configuration) -> AttentionCall:
    batch, dtype = 2, getattr(torch, one.dtype)
    heads, length = one.heads, one.length

    def projected() -> torch.Tensor:
        return torch.zeros(length, batch, heads, one.dim, dtype=dtype).permute(1, 2, 0, 3).requires_grad_()

    def mixing(rule: type | None) -> HeadMixing | None:
        shape = (batch, length, heads, heads) if rule is PositionwiseMixing else (heads, heads)
        return rule and rule(torch.zeros(shape, dtype=getattr(torch, one.weights), requires_grad=True))

    padding = torch.zeros(batch, length, dtype=torch.bool) if one.padding else None
    additive = torch.zeros(length, length, dtype=dtype) if one.everything or one.masked else None
    mask = AttentionMask(one.causal, padding, additive)
    before, after = map(mixing, RULES[one.mixing])
    scores, dropout = DotProduct(projected(), projected()), 0.1 if one.everything or one.dropout else 0.0
    return AttentionCall(scores, projected(), mask, None, before, after, one.activation, dropout)


def compile_all(path: Path, grid: list[Configuration]) -> dict[Configuration, list[Compiled]]:
    """Of one backend, by this version of Triton, together with what others made; written after each, so that an interrupted run
    resumes.
    """
    found = {
        one: kernels
        for one, kernels in (read(path) if path.exists() else {}).items()
        if one.triton != triton.__version__ or one.backend != grid[0].backend or one in grid
    }
    for one in tqdm(grid, disable=None):
        if one not in found:
            found[one] = list(compiled(one))
            write(path, found)
    return found


def write(path: Path, found: dict[Configuration, list[Compiled]]) -> None:
    """A line a configuration."""
    later = {name: Configuration._field_defaults[name] for name in ("backend", "dropout", "few", "masked")}
    lines = []
    for one, kernels in found.items():
        fields = {name: value for name, value in one._asdict().items() if value != later.get(name)}
        numbers = {kernel.kernel: [number for number in kernel[2:] if number is not None] for kernel in kernels}
        lines.append(json.dumps(fields | {"kernels": numbers}))
    names = json.dumps(Compiled._fields[2:])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{"fields": {names},\n"results": [\n' + ",\n".join(lines) + "\n]}\n")
    partial.replace(path)


def read(path: Path = RESULTS) -> dict[Configuration, list[Compiled]]:
    """What :func:`write` wrote."""
    found = {}
    for entry in json.loads(path.read_text())["results"]:
        kernels = entry.pop("kernels")
        one = Configuration(**entry)
        found[one] = [Compiled(name, one.chip, *numbers) for name, numbers in kernels.items()]
    return found


def called(one: Configuration) -> str:
    """Its mixing and activation."""
    return one.mixing if one.activation == "softmax" else f"{one.mixing}, {one.activation}"


def detailed(found: dict[Configuration, list[Compiled]]) -> str:
    """A table of every kernel."""
    header = ("h, d_k", "mixing", "kernel", "tile", "columns", "warps", "registers", "spilled", "shared KiB")
    header = (*header, "blocks an SM", "MFLOP a tile", "KiB a tile")
    cells = []
    for one, kernels in found.items():
        for kernel in kernels:
            cells.append(
                (
                    f"{one.heads}, {one.dim} (sm_{one.chip})",
                    called(one),
                    kernel.kernel,
                    f"{kernel.rows} × {kernel.keys}",
                    kernel.columns,
                    kernel.warps,
                    kernel.registers,
                    kernel.stack,
                    f"{kernel.shared / 1024:.0f}",
                    kernel.blocks,
                    f"{kernel.operations / 1e6:.2f}",
                    f"{kernel.bytes / 1024:.0f}",
                )
            )
    return measure.table(cells, header)


def predicted(kernel: Compiled, one: Configuration) -> tuple[float, float]:
    """Predict picoseconds a score on an H100: two readings of the times of today's kernels, which differ in what a tile's
    latencies cost. Nobody has measured it.

    A tile takes its bytes from the L2 cache at 24.5 bytes a clock and SM, and a chain of dependent steps: its instructions and
    2,100 clocks, or its instructions at 28 % of the slots. Where all loads are in flight the larger counts, else the sum. Unmixed
    heads have several programs an SM, whose instructions take 60 % of the slots.
    """
    by_keys = kernel.kernel in ("key_gradients", "value_gradients")
    width = kernel.dim if kernel.kernel in ("statistics",) else kernel.dim + kernel.value_dim
    width = kernel.dim if kernel.kernel == "averages" and one.mixing != "none" else width
    numbers = 2 * width / (kernel.keys if by_keys else kernel.rows)
    if by_keys and one.mixing == "B":
        numbers += 4 * kernel.heads / kernel.keys  # a matrix a query, in float32
    cache = numbers / 24.5
    if kernel.heads == 1:
        clocks = [max(cache, kernel.issue / 0.6)] * 2
    else:
        chains = (kernel.issue + 2100 / kernel.scores, kernel.issue / 0.28)
        flying = kernel.kernel in ("attend", "value_gradients", "statistics")
        clocks = [max(cache, chain) if flying else cache + chain for chain in chains]
    picoseconds = 1e12 / (132 * 1.7e9)
    low, high = sorted(clock * picoseconds for clock in clocks)
    return low, high


def tiled_table(found: dict[Configuration, list[Compiled]]) -> str:
    """A table of the tiled kernels: compiled figures, and what the cost model predicts."""
    header = (
        "h, d_k",
        "mixing",
        "kernel",
        "tile",
        "registers",
        "spilled bytes",
        "reloads, stores in the loop",
        "shared KiB",
    )
    header = (*header, "issued clocks a score", "predicted ps a score")
    cells = []
    for one, kernels in found.items():
        if one.backend != "tiled":
            continue
        extra = [name for name in ("dropout", "few", "masked", "padding") if getattr(one, name)]
        totals = [sum(ends) for ends in zip(*(predicted(kernel, one) for kernel in kernels), strict=True)]
        for kernel in kernels:
            low, high = predicted(kernel, one)
            cells.append(
                (
                    f"{one.heads}, {one.dim}",
                    ", ".join([called(one), *extra]),
                    kernel.kernel,
                    f"{kernel.rows} × {kernel.keys}",
                    kernel.registers,
                    kernel.stack,
                    f"{kernel.reloads}, {kernel.stores}",
                    f"{kernel.shared / 1024:.0f}",
                    f"{kernel.issue:.3f}",
                    f"{low:.1f} to {high:.1f}",
                )
            )
        total = f"{totals[0]:.1f} to {totals[1]:.1f}"
        cells.append((f"{one.heads}, {one.dim}", ", ".join([called(one), *extra]), "all", *[""] * 6, total))
    return measure.table(cells, header)


def worst(found: dict[Configuration, list[Compiled]]) -> str:
    """A table of the most registers and shared memory of any size and kernel, by composition and chip."""
    rows = []
    for name in dict.fromkeys(map(called, found)):
        cells = []
        for chip in CHIPS:
            kernels = [
                kernel for one, some in found.items() if called(one) == name and one.chip == chip for kernel in some
            ]
            registers, spilled = (max(getattr(kernel, field) for kernel in kernels) for field in ("registers", "stack"))
            shared = max(kernel.shared for kernel in kernels) / 1024
            cells.append(f"{registers}, {spilled}, {shared:.0f} KiB")
        configurations = sum(called(one) == name for one in found)
        rows.append((name, configurations, *cells))
    return measure.table(rows, ("mixing", "compiled", *(f"sm_{chip} (of {CHIPS[chip][0]} KiB)" for chip in CHIPS)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", type=int, choices=CHIPS, default=[90], help="compute capabilities")
    parser.add_argument("--mixings", nargs="+", choices=MIXINGS, default=["A", "B"], metavar="MIXING")
    parser.add_argument("--activation", default="softmax", choices=ACTIVATIONS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--everything", action="store_true", help="with a float mask and dropout too")
    parser.add_argument(
        "--triton", type=measure.new_file(".json"), metavar="FILE", help="the kernels of the triton backend, into FILE"
    )
    parser.add_argument(
        "--tiled", type=measure.new_file(".json"), metavar="FILE", help="the kernels of the tiled backend, into FILE"
    )
    parser.add_argument("--recorded", action="store_true", help=f"compile nothing; print the tables of {RESULTS.name}")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.recorded:
        found = {one: kernels for one, kernels in read().items() if one.backend == "triton"}
        print(
            worst(found),
            detailed({one: found[one] for one in found if (one.heads, one.dim, one.chip) == (16, 64, 90)}),
            sep="\n\n",
        )
        return 0
    if options.tiled:
        print(tiled_table(compile_all(options.tiled, of_tiled())))
        return 0
    if options.triton:
        found = compile_all(options.triton, of_triton())
        print(worst({one: kernels for one, kernels in found.items() if one.backend == "triton"}))
    else:
        axes = itertools.product(options.chips, SIZES, options.mixings)
        grid = [Configuration(mixing, options.activation, *size, chip) for chip, size, mixing in axes]
        grid = [one._replace(dtype=options.dtype, everything=options.everything) for one in grid]
        found = {one: list(compiled(one)) for one in tqdm(grid, disable=None)}
        print(detailed(found))
    wrong = [(one, kernel.kernel) for one, kernels in found.items() for kernel in kernels if not kernel.fits]
    for one, kernel in wrong:
        print(f"spills or does not fit: {kernel} of {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
