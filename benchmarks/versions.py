"""Time of a layer in this package against the same layer in another copy, and against PyTorch's fused attention.

    git worktree add /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before --presets mixhead-a --lengths 512 2048 --output versions.json

Each copy runs in a separate process. The processes take turns in every round, and a ratio is the median of the ratios within
a round. The layer is self-attention of d 512 with 8 heads, in float32. Times are processor
seconds of one thread, or elapsed seconds of several.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import measure

ROOT = Path(__file__).resolve().parents[1]
EMBED_DIM, HEADS = 512, 8
CASES = {"plain": {}, "padding": {"padding": True}, "dropout": {"dropout": 0.1}}
SDPA, SERVE = "sdpa", "--serve"
RATIOS = {
    "after_to_before": ("after", "before"),
    "before_to_sdpa": ("before", SDPA),
    "after_to_sdpa": ("after", SDPA),
}


def clock(threads: int) -> str:
    """Return which clock of :mod:`measure` times a process with these threads."""
    return "processor" if threads == 1 else "elapsed"


class Worker:
    """A process that runs layers of one copy of the package."""

    def __init__(self, copy: Path, threads: int, tokens: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, SERVE, str(threads), str(tokens)]
        self.process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, cell: dict) -> float:
        """Return the seconds of one pass of a layer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(cell), file=self.process.stdin, flush=True)
        if not (answer := self.process.stdout.readline()):
            raise SystemExit(f"the process ended with code {self.process.wait()}; its error is above")
        return float(answer)


def serve(threads: int, tokens: int) -> None:
    """Answer each cell on standard input with the seconds of one pass."""
    import torch
    from attention import FusedAttention

    import fairseq_lowrank
    from fairseq_lowrank.attention import CAUSAL, build_attention

    here = Path.cwd()
    if here not in Path(fairseq_lowrank.__file__).parents:
        raise SystemExit(f"{here}: Python finds another copy, {fairseq_lowrank.__file__}")

    class Fused(FusedAttention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    torch.set_num_threads(threads)
    layers: dict[tuple, torch.nn.Module] = {}
    for line in sys.stdin:
        cell = json.loads(line)
        preset, length, dropout = cell["preset"], cell["length"], cell.get("dropout", 0.0)
        if (preset, dropout) not in layers:
            torch.manual_seed(0)
            layers[preset, dropout] = (
                Fused(EMBED_DIM, HEADS, 0.0)
                if preset == SDPA
                else build_attention(preset, EMBED_DIM, HEADS, self_attention=True, dropout=dropout)
            ).train()
        layer, training = layers[preset, dropout], cell["direction"] == "training"
        batch = max(1, tokens // length)
        x, cotangent = (torch.randn(length, batch, EMBED_DIM) for _ in "xg")
        x.requires_grad_(training)
        padding = None
        if cell.get("padding"):
            padding = torch.zeros(batch, length, dtype=torch.bool)
            padding[:, -length // 8 :] = True

        def run(layer=layer, x=x, cotangent=cotangent, padding=padding, cell=cell, training=training) -> None:
            with torch.set_grad_enabled(training):
                if isinstance(layer, Fused):
                    layer.causal = cell["causal"]
                    output = layer(x)
                else:
                    mask = CAUSAL if cell["causal"] else None
                    output, _ = layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
                if training:
                    output.backward(cotangent)

        print(measure.seconds(run, clock(threads)), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Compare the two copies in every cell, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="FOLDER", help="the root of the other copy")
    parser.add_argument("--presets", nargs="+", default=["mixhead-a", "mha"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch (default: 2048)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["plain"])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")
    parser.add_argument("--output", type=measure.new_file(".json"), help="write the results to this JSON file")
    args = parser.parse_args(argv)
    if not (args.before / "fairseq_lowrank" / "attention").is_dir():
        parser.error(f"{args.before}: it has no fairseq_lowrank/attention. Give the root of a clone or a worktree.")
    folders = {"before": args.before.resolve(), "after": ROOT}
    copies = {name: Worker(folder, args.threads, args.tokens) for name, folder in folders.items()}
    results, rows = [], []
    cells = itertools.product(args.presets, args.cases, args.lengths, (True, False), ("forward", "training"))
    for preset, case, length, causal, direction in cells:
        cell = {"preset": preset, "length": length, "causal": causal, "direction": direction, **CASES[case]}
        runs = {name: partial(worker.seconds, cell) for name, worker in copies.items()}
        if case == "plain":
            runs[SDPA] = partial(copies["after"].seconds, cell | {"preset": SDPA})
        found = measure.take_turns(runs, args.rounds, f"{preset}, n {length}")
        result = {name: value for name, value in cell.items() if name not in ("padding", "dropout")} | {"case": case}
        for name, (one, base) in RATIOS.items():
            if base in found:
                result[name] = round(measure.quartiles(measure.ratios(found[one], found[base]))[1], 3)
        results.append(result)
        shape = f"{length} {'causal' if causal else 'full'}"
        rows.append((preset, case, shape, direction, *(result.get(name, "") for name in RATIOS)))
    header = ("preset", "case", "n", "direction", *(name.replace("_", " ") for name in RATIOS))
    print(measure.table(rows, header))
    settings = {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "clock": clock(args.threads),
    }
    described = measure.machine("cpu") | {"threads": args.threads}
    measure.write(args.output, {"machine": described, "settings": settings, "results": results})


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(*map(int, sys.argv[2:]))
    else:
        main()
