"""What the compiler makes of the triton backend's kernels, without a GPU, and what that predicts of their speed.

    python benchmarks/kernels.py                          the table of common sizes, compiled for sm_90
    python benchmarks/kernels.py --chips 80 90 100 --everything
    python benchmarks/kernels.py --write docs/performance.md         puts the table between its marks there

Nothing here is measured. `registers` and `shared` are the compiler's; `blocks an SM` what fits by registers, shared memory and
threads; `operations` and `bytes` those of a tile: products of matrices, and what it reads of keys and values, or of queries
and gradients. The prediction is written below the table.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import measure
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from fairseq_lowrank.ops import AttentionCall, AttentionMask, DotProduct, PositionwiseMixing, StaticMixing
from fairseq_lowrank.ops.attention.launch import Kernel, Launch

# Shared memory of a block at most, of an SM, and threads of an SM.
CHIPS = {80: (163, 164, 2048), 90: (227, 228, 2048), 100: (227, 228, 2048)}
REGISTERS = 65536
MIXINGS = {
    "A": ("none", "static", "softmax"),
    "B": ("none", "positionwise", "softmax"),
    "talking heads": ("static", "static", "softmax"),
    "sigsoftmax": ("none", "none", "sigsoftmax"),
}
SIZES = ((16, 64), (8, 128))
MARKS = ("<!-- kernels: benchmarks/kernels.py --write -->", "<!-- /kernels -->")
# Per score and head, in products of 2·d_k operations, and in mixings of 2·H operations; the same of flash attention.
PRODUCTS = {
    "row_statistics": 1,
    "attend": 2,
    "row_sums": 2,
    "query_gradients": 3,
    "key_gradients": 3,
    "value_gradients": 2,
}
MIXED = {"attend": 1, "row_sums": 2, "query_gradients": 1, "key_gradients": 1, "value_gradients": 1}
FLASH_PRODUCTS = 7


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

    @property
    def fits(self) -> bool:
        return self.stack == 0 and self.shared <= CHIPS[self.chip][0] * 1024

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


def compiled(call: AttentionCall, chip: int, names: Container[str] = PRODUCTS) -> Iterator[Compiled]:
    """Every kernel of the forward and backward pass of ``call``, or those of ``names``."""
    launched: list[Kernel] = []
    launch = Launch(call, 1, run=launched.append)
    with torch.no_grad():
        heads, kept = launch.forward()
        launch.backward(heads, *kept)
    for kernel in launched:
        if name_of(kernel) in names:
            yield compile_kernel(kernel, chip)


def name_of(kernel: Kernel) -> str:
    """Of the function; that of keys is compiled for values too."""
    name = kernel.function.__name__
    of_values = name == "key_gradients" and not kernel.arguments[-1].value
    return "value_gradients" if of_values else name


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
    sizes = (shape.ROWS, shape.KEYS, shape.CHUNK)
    rows, keys, columns = (size.value for size in sizes)
    dims = shape.TOGETHER.value, shape.PADDED_DIM.value, shape.PADDED_VALUE_DIM.value
    return Compiled(
        name_of(kernel),
        chip,
        rows,
        keys,
        columns,
        kernel.options["num_warps"],
        registers,
        stack,
        result.metadata.shared,
        *dims,
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return int(registers), int(stack) + int(re.search(r"LOCAL:(\d+)", report)[1])


def call_of(
    mixing: str, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16, everything: bool = False
) -> AttentionCall:
    """A causal call of a composition; with ``everything``, of padding, a float mask and dropout too."""
    before, after, activation = MIXINGS[mixing]
    batch, length = 2, 64

    def projected() -> torch.Tensor:
        return torch.zeros(length, batch, heads, dim, dtype=dtype).permute(1, 2, 0, 3).requires_grad_()

    rules = {
        "none": lambda: None,
        "static": lambda: StaticMixing(torch.zeros(heads, heads, requires_grad=True)),
        "positionwise": lambda: PositionwiseMixing(torch.zeros(batch, length, heads, heads, requires_grad=True)),
    }
    mask = AttentionMask(True)
    if everything:
        padding = torch.zeros(batch, length, dtype=torch.bool)
        mask = AttentionMask(True, padding, torch.zeros(length, length, dtype=dtype))
    scores = DotProduct(projected(), projected())
    dropout = 0.1 if everything else 0.0
    return AttentionCall(scores, projected(), mask, None, rules[before](), rules[after](), activation, dropout)


def table(rows: list[tuple[str, Compiled]]) -> str:
    header = (
        "h, d_k",
        "mixing",
        "kernel",
        "tile",
        "columns",
        "warps",
        "registers",
        "spilled",
        "shared KiB",
        "blocks an SM",
    )
    header = (*header, "MFLOP a tile", "KiB a tile")
    cells = []
    for (mixing, heads, dim), one in rows:
        chip = f"sm_{one.chip}"
        cells.append(
            (
                f"{heads}, {dim} ({chip})",
                mixing,
                one.kernel,
                f"{one.rows} × {one.keys}",
                one.columns,
                one.warps,
                one.registers,
                one.stack,
                f"{one.shared / 1024:.0f}",
                one.blocks,
                f"{one.operations / 1e6:.2f}",
                f"{one.bytes / 1024:.0f}",
            )
        )
    return measure.table(cells, header)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", type=int, choices=CHIPS, default=[90], help="compute capabilities")
    parser.add_argument("--mixings", nargs="+", choices=MIXINGS, default=list(MIXINGS), metavar="MIXING")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--everything", action="store_true", help="with padding, a float mask and dropout too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    rows, wrong = [], 0
    for chip, (heads, dim), mixing in itertools.product(options.chips, SIZES, options.mixings):
        call = call_of(mixing, heads, dim, getattr(torch, options.dtype), options.everything)
        for one in compiled(call, chip):
            rows.append(((mixing, heads, dim), one))
            wrong += not one.fits
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    text = table(rows)
    print(text)
    if options.write:
        page = options.write.read_text()
        start, end = (page.index(mark) for mark in MARKS)
        options.write.write_text(f"{page[: start + len(MARKS[0])]}\n\n{text}\n\n{page[end:]}")
    if wrong:
        print(f"{wrong} kernels spill or do not fit", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
