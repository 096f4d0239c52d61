"""Show versions and devices. --patches lists the functions of fairseq that this package replaces.

LOWRANK_ENABLE=NAME,… switches patches of the group optional on, LOWRANK_DISABLE=NAME,… switches patches of the group fix off.

--kernels compares kernels with the reference instead, on random problems, and ends with 1 if a case is wrong:

  fairseq-lowrank env --kernels                            1,000 cases on the GPU, in bfloat16
  fairseq-lowrank env --kernels --backend tiled            those of --attention-backend tiled
  fairseq-lowrank env --kernels --dtype float32 --cases 100
  TRITON_INTERPRET=1 fairseq-lowrank env --kernels --device cpu --cases 5     without a GPU, interpreted

Kernels are compiled for 24 compositions, which takes a few minutes. Cases that need more shared memory than the GPU has are counted.
"""

import importlib.metadata
import importlib.util
import platform

from fairseq_lowrank.cli import _kernels, _output
from fairseq_lowrank.messages import UserError

NAME = "env"
HELP = "show versions and devices, the changes of fairseq, or check the GPU kernels"

PACKAGES = (
    *("torch", "triton", "numpy", "fairseq", "transformers", "peft", "accelerate"),
    *("sacrebleu", "sentencepiece", "sacremoses", "matplotlib"),
)


def add_arguments(parser) -> None:
    parser.add_argument("--patches", action="store_true", help="list each change of fairseq, its reason and its end")
    _output.add_json_argument(parser)
    parser.add_argument("--kernels", action="store_true", help="compare kernels with the reference on random problems")
    _kernels.add_arguments(parser.add_argument_group("with --kernels"))


def run(args) -> int:
    if args.kernels:
        return _kernels.run(args)
    if args.patches:
        table = patch_rows()
        _output.show(args, table, "\n\n".join(map(describe, table)))
        return 0
    import fairseq_lowrank
    from fairseq_lowrank import versions

    rows = [("fairseq_lowrank", fairseq_lowrank.__version__), ("commit", versions.commit())]
    rows.append(("python", platform.python_version()))
    rows += [(package, installed_version(package)) for package in PACKAGES]
    if (risk := versions.loading_risk()) is not None:
        rows.append(("checkpoints", risk))
    rows += devices() + kernels()
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    _output.show(args, dict(rows), text)
    return 0


def patch_rows() -> list[dict]:
    """Return the patches by name, each with its group, reason, end and targets, and True if it is on.

    Raises:
        UserError: fairseq is not installed.
    """
    if importlib.util.find_spec("fairseq") is None:
        raise UserError(
            "--patches: fairseq is not installed, so nothing of it is changed. Run pip install 'fairseq-lowrank[fairseq]' first."
        )
    from fairseq_lowrank.plugin.patches import ALL
    from fairseq_lowrank.repairs.patch import selected

    on, rows = selected(ALL), dict[str, dict]()
    for patch in ALL:
        fields = {name: getattr(patch, name) for name in ("name", "group", "reason", "remove_when")}
        rows.setdefault(patch.name, fields | {"on": patch in on, "targets": []})["targets"].append(patch.target)
    return list(rows.values())


def describe(row: dict) -> str:
    """Return the lines of a patch."""
    head = f"{row['name']} ({row['group']}, {'on' if row['on'] else 'off'})"
    return "\n  ".join((head, row["reason"], f"until {row['remove_when']}", *row["targets"]))


def installed_version(package: str) -> str:
    """Return the version of an importable package, with its distribution if that has another name, or "not installed"."""
    from fairseq_lowrank import versions

    distribution = importlib.metadata.packages_distributions().get(package, [package])[0]
    version = versions.installed_version(package, distribution) or "not installed"
    return version if distribution.lower() == package else f"{version} ({distribution})"


def devices() -> list[tuple[str, str]]:
    """Return rows for the CPU's threads and for every GPU, with its memory and compute capability."""
    import torch

    rows = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        return [*rows, ("gpu", "none")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        rows.append((f"gpu {index}", f"{gpu.name}, {memory}, sm_{gpu.major}{gpu.minor}"))
    return rows


def kernels() -> list[tuple[str, str]]:
    """Return a row for each GPU and each common layer: what ``auto`` takes there and why, and if it equals the reference.

    Where no kernels of this package run, a row says why.
    """
    import torch

    from fairseq_lowrank.ops.attention import triton

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rows = []
    for device in gpus or [torch.device("cpu")]:
        name = "kernels" if device.index is None else f"kernels {device.index}"
        if (reason := triton.device_unsupported_reason(device, torch.bfloat16)) is not None:
            rows.append((name, reason))
            continue
        for kind, call in _kernels.common_calls(device).items():
            rows.append((f"{name}, {kind}", _kernels.describe_choice(call)[0]))
    return rows
