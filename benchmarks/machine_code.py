"""What a compiled kernel does in its inner loop, read from the machine code by the disassembler that Triton brings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path


def tool(name: str, cubin: bytes, *flags: str) -> str:
    """Return what a tool of Triton prints about a binary.

    Raises:
        OSError, subprocess.SubprocessError: the tool is missing, or it fails.
    """
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=True).stdout


def inner_loop(cubin: bytes) -> Counter[str]:
    """Count the instructions of the inner loop of a kernel by name, such as ``STL``, a store of a register that was spilled.

    Of several innermost loops with products of matrices it is the shortest: the others also apply a mask.
    """
    text = tool("cuobjdump", cubin, "-sass")
    code = [(int(address, 16), line) for address, line in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)]
    spans = []
    for address, line in code:
        target = re.search(r"BRA.*?0x([0-9a-f]+)", line)
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    innermost = [
        (first, last) for first, last in spans if not any(first <= a and b <= last for a, b in spans if (a, b) != (first, last))
    ]  # fmt: skip
    loops = [Counter(_name(line) for address, line in code if first <= address <= last) for first, last in innermost]
    return min((loop for loop in loops if loop["HMMA"] or loop["HGMMA"]), key=Counter.total, default=Counter())


def _name(line: str) -> str:
    """Return the instruction of a line without its condition and its variant."""
    return re.sub(r"^@!?U?P\w+ ", "", line.strip()).split()[0].split(".")[0]
