"""fairseq models for the benchmarks, built as fairseq's own commands build them; ours want ``fairseq_lowrank.plugin`` imported."""

from __future__ import annotations

import argparse
import logging

import torch

STOCK = "stock"

logging.disable(logging.INFO)  # what fairseq says about itself while models are built


def configuration(arguments: list[str]):
    """The configuration that ``fairseq-train ARGUMENTS`` would have."""
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = fairseq_options.get_training_parser(default_task=arguments[arguments.index("--task") + 1])
    return convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))


def architecture(row: str, stock: str, ours: str) -> list[str]:
    """Flags of a row: ``stock``, or PRESET[+sigsoftmax][@BACKEND] of our architecture."""
    if row == STOCK:
        return ["--arch", stock]
    preset, activation, backend = attention_of(row)
    flags = ["--arch", ours, "--attention", preset, "--attention-backend", backend]
    return flags + (["--attention-activation", activation] if activation else [])


def attention_of(row: str) -> tuple[str, str | None, str]:
    """The preset, the activation and the backend of a row."""
    preset, _, backend = row.partition("@")
    preset, _, activation = preset.partition("+")
    return preset, activation or None, backend or "auto"


def add_model_arguments(parser: argparse.ArgumentParser, rows: list[str]) -> None:
    parser.add_argument(
        "--rows", nargs="+", default=rows, metavar="ROW", help=f"default: {' '.join(rows)}; ratios are to the first"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1, help="of the starting weights of every row (default: 1)")


def build(task, cfg, device: str, seed: int):
    torch.manual_seed(seed)
    return task.build_model(cfg.model).to(device)
