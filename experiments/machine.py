"""The machine that makes a result."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path


def machine(threads: int) -> dict:
    """Return the processor, its usable cores, the threads of a training, and the GPUs that it can use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": processor(), "cores": cores, "threads": threads}
    return found | ({"gpus": names} if (names := gpus()) else {})


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: (.+)$", text, re.M)
    return model[1].strip() if model else platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Return the names of the GPUs that CUDA shows to a training."""
    if shutil.which("nvidia-smi") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
