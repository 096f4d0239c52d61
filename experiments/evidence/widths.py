"""The grid of widths on one GPU: what heads of h·d_k = ρ·d cost or gain at equal weights, for heads of 8, 32 and 128.

A model has 4 pre-norm layers (RMSNorm, no biases, ReLU² in the feed-forward layer), a context of 512 and 3.1M weights outside the
embeddings. For each ρ and d_k the width d and the feed-forward size follow from them. The six trainings of a row, three seeds at
two rates, are one model whose weights have a first axis of six. Text: the Brown corpus and prose in 4,096 pieces.

First the throughput is rehearsed; below 1.2M tokens a second the rows of ρ = ½ are left out. The last row has half of the weights
and gives the exchange rate: bits for each doubling of weights. Everything takes less than 9 minutes on an H100 or H200.

    python -m experiments.evidence.widths prepare widths.pt                       where sentencepiece and the corpora are
    python -m experiments.evidence.widths train widths.pt --output widths.json    where the GPU is
    … train widths.pt --device cpu --share 0.01 --output trial.json               a trial
    python -m experiments.evidence.widths show widths.json
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, CONTEXT, PIECES, CORE = 4, 512, 4096, 3_100_000
RATIOS, SIZES = (0.5, 1.0, 2.0, 4.0), (8, 32, 128)
RATES, SEEDS = (2e-3, 4e-3), (1, 2, 3)
TOKENS, BATCH = 8_000_000, 16
ENOUGH, REHEARSAL = 1.2e6, 60
"""Tokens a second of all six trainings below which ρ = ½ is left out, and the most seconds of the rehearsal."""


class Shape(NamedTuple):
    """The sizes of a model: width, heads, head size and feed-forward size."""

    width: int
    heads: int
    head_dim: int
    ffn: int

    @property
    def core(self) -> int:
        """Return the weights outside embeddings and norms."""
        return LAYERS * (4 * self.width * self.heads * self.head_dim + 2 * self.width * self.ffn)


def shape(ratio: float, head_dim: int, core: int = CORE) -> Shape:
    """Return the shape with h·d_k = ρ·d and so many weights, whose feed-forward size is nearest to 4·d."""
    wanted = math.sqrt(core / (LAYERS * (4 * ratio + 8)))
    heads = max(1, round(ratio * wanted / head_dim))
    width = round(heads * head_dim / ratio)
    return Shape(width, heads, head_dim, round((core / LAYERS - 4 * width * heads * head_dim) / (2 * width)))


def weights(shape: Shape, device: str) -> dict[str, Tensor]:
    """Return the weights of the six trainings, those of a seed the same at both rates."""

    def of_seed(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inner = shape.heads * shape.head_dim

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * gain * rows**-0.5

        found = {"embedding": torch.randn(PIECES, shape.width, generator=generator) * 0.02}
        found |= {"positions": torch.randn(CONTEXT, shape.width, generator=generator) * 0.02}
        for layer in range(LAYERS):
            found |= {
                f"{layer}.qkv": matrix(shape.width, 3 * inner),
                f"{layer}.out": matrix(inner, shape.width, (2 * LAYERS) ** -0.5),
                f"{layer}.fc1": matrix(shape.width, shape.ffn),
                f"{layer}.fc2": matrix(shape.ffn, shape.width, (2 * LAYERS) ** -0.5),
                f"{layer}.norms": torch.ones(2, shape.width),
            }
        return found | {"norm": torch.ones(1, shape.width), "output": matrix(shape.width, PIECES)}

    every = [of_seed(seed) for seed in SEEDS] * len(RATES)
    return {name: torch.stack([one[name] for one in every]).to(device).requires_grad_() for name in every[0]}


def losses(w: dict[str, Tensor], tokens: Tensor, shape: Shape) -> Tensor:
    """Return the loss of each training in bits a piece, for tokens ``[R, B, T + 1]``."""
    count, batch, length = tokens[..., 1:].shape
    runs = torch.arange(count, device=tokens.device)[:, None, None]
    x = w["embedding"][runs, tokens[..., :-1]] + w["positions"][:, None, :length]  # [R, B, T, d]
    x = x.flatten(1, 2)

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * scale.unsqueeze(1)

    for layer in range(LAYERS):
        qkv = torch.bmm(norm(x, w[f"{layer}.norms"][:, 0]), w[f"{layer}.qkv"])
        q, k, v = qkv.view(count * batch, length, 3, shape.heads, shape.head_dim).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [R·B, h, T, d_k]
        heads = heads.transpose(1, 2).reshape(count, batch * length, -1)
        x = x + torch.bmm(heads, w[f"{layer}.out"])
        hidden = torch.bmm(norm(x, w[f"{layer}.norms"][:, 1]), w[f"{layer}.fc1"]).relu().square()
        x = x + torch.bmm(hidden, w[f"{layer}.fc2"])
    logits = torch.bmm(norm(x, w["norm"][:, 0]), w["output"]).float()
    found = F.cross_entropy(logits.flatten(0, 1), tokens[..., 1:].flatten(), reduction="none")
    return found.view(count, -1).mean(1) / math.log(2)


class Adam:
    """Adam with one learning rate for each training, and gradients of each clipped to the norm 1."""

    def __init__(self, w: dict[str, Tensor]) -> None:
        self.weights = list(w.values())
        self.means = [torch.zeros_like(one) for one in self.weights]
        self.squares = [torch.zeros_like(one) for one in self.weights]
        self.rates = torch.tensor(RATES, device=self.weights[0].device).repeat_interleave(len(SEEDS))
        self.steps = 0

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Make an update with a share of each rate."""
        self.steps += 1
        gradients = [one.grad for one in self.weights if one.grad is not None]
        norms = torch.stack([one.flatten(1).square().sum(1) for one in gradients]).sum(0).sqrt()
        scale = (1 / norms).clamp(max=1)
        for one, gradient, mean, square in zip(self.weights, gradients, self.means, self.squares, strict=True):
            gradient = gradient * scale.view(-1, 1, 1)
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square(), 0.02)
            change = (mean / (1 - 0.9**self.steps)) / ((square / (1 - 0.98**self.steps)).sqrt() + 1e-8)
            one -= (share * self.rates).view(-1, 1, 1) * change
            one.grad = None


def train(shape: Shape, data: dict[str, Tensor], device: str, tokens: float, seconds: float = math.inf) -> dict:
    """Train the six models of a row on so many tokens each; return bits by rate and seed, and tokens a second."""
    batch = BATCH if device == "cuda" else 1
    updates = max(6, round(tokens / (batch * CONTEXT)))
    w = weights(shape, device)
    optimizer = Adam(w)
    generators = [torch.Generator().manual_seed(1000 + seed) for seed in SEEDS] * len(RATES)
    text = data["train"].to(device)
    compute = torch.compile(losses) if device == "cuda" else losses
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    start = warm = time.perf_counter()
    warm_updates = done = 0
    for done in range(1, updates + 1):
        places = torch.stack(
            [torch.randint(len(text) - CONTEXT - 1, (batch,), generator=one) for one in generators[:3]]
        )
        places = places.repeat(len(RATES), 1).to(device)
        pieces = text[places.unsqueeze(-1) + torch.arange(CONTEXT + 1, device=device)].long()
        with autocast:
            found = compute(w, pieces, shape)
        found.sum().backward()
        optimizer.step(min(1, 10 * done / updates) * (1 - done / (updates + 1)))
        if done == 5:  # compiled
            found.sum().item()
            warm, warm_updates = time.perf_counter(), done
        if time.perf_counter() - start > seconds:
            break
    found.sum().item()  # waits for the device
    made = (done - warm_updates) * batch * CONTEXT * len(generators)
    result = {"speed": made / max(1e-9, time.perf_counter() - warm), "updates": done}
    for split in ("valid", "test"):
        blocks = (
            data[split][: len(data[split]) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).to(device).long()
        )
        blocks = blocks if device == "cuda" else blocks[:4]
        with torch.no_grad(), autocast:
            parts = [losses(w, part.expand(len(generators), -1, -1), shape) * len(part) for part in blocks.split(batch)]
        bits = (sum(parts) / len(blocks)).view(len(RATES), len(SEEDS))
        result[split] = [[round(value, 4) for value in row] for row in bits.tolist()]
    return result


def grid(data: dict[str, Tensor], device: str, share: float, output: Path) -> None:
    """Train all rows, and write the file after each."""
    rehearsal = train(shape(1, 32), data, device, share * TOKENS, seconds=REHEARSAL * min(1.0, share * 10))
    rows = [(ratio, size, CORE) for size in SIZES for ratio in RATIOS if ratio >= 1 or rehearsal["speed"] >= ENOUGH]
    lines = []
    for ratio, size, core in [*rows, (1.0, 32, CORE // 2)]:
        sizes = shape(ratio, size, core)
        line = {"ratio": ratio, **sizes._asdict(), "core": sizes.core} | train(sizes, data, device, share * TOKENS)
        lines.append(line)
        print(json.dumps(line), flush=True)
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
        output.write_text(json.dumps({"rehearsal": rehearsal["speed"], **versions, "rows": lines}, indent=1))


def tested(line: dict) -> list[float]:
    """Return the test losses by seed at the rate that is best on validation."""
    best = min(range(len(RATES)), key=lambda rate: sum(line["valid"][rate]))
    return line["test"][best]


def table(lines: list[dict]) -> str:
    """Return for each row its mean test loss, how often resampled seeds call it the best of its head size, and its worth in weights."""
    import numpy as np

    *rows, half = lines
    (whole,) = (row for row in rows if (row["ratio"], row["head_dim"]) == (1.0, 32))
    doubling = np.mean(tested(half)) - np.mean(tested(whole))
    rng = np.random.default_rng(1)
    found = ["| d_k | ρ | d | bits | best in | weights for the loss of ρ = 1 |", "| --- " * 6 + "|"]
    for size in SIZES:
        own = [row for row in rows if row["head_dim"] == size]
        bits = np.array([tested(row) for row in own])
        drawn = rng.integers(0, bits.shape[1], (10_000, bits.shape[1]))
        best = np.bincount(bits[:, drawn].mean(-1).argmin(0), minlength=len(own)) / len(drawn)
        one = bits[[row["ratio"] for row in own].index(1.0)].mean()
        for row, mean, share in zip(own, bits.mean(1), best, strict=True):
            worth = 2 ** ((one - mean) / doubling)
            found.append(f"| {size} | {row['ratio']:g} | {row['width']} | {mean:.4f} | {share:.0%} | {worth:.2f} |")
    return "\n".join([*found, "", f"A doubling of the weights is worth {doubling:.4f} bits."])


def prepare(output: Path) -> None:
    """Cut the corpora into pieces learned on the training text, and write the three splits."""
    import os

    import numpy as np
    import sentencepiece

    folder = Path(os.environ.get("LOWRANK_DATA", Path(__file__).parents[3] / "shared" / "data"))

    def read(*names: str) -> list[str]:
        return [
            text
            for name in names
            for text in gzip.decompress((folder / name).read_bytes()).decode().splitlines()
            if text.strip()
        ]

    texts = {"train": read("brown/train.txt.gz", "prose/prose.txt.gz"), "valid": read("brown/valid.txt.gz")}
    texts["test"] = read("brown/test.txt.gz")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts["train"]), model_writer=model, vocab_size=PIECES, model_type="bpe", minloglevel=2
    )
    cutter = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    splits = {}
    for name, lines in texts.items():
        pieces = np.array([piece for one in cutter.encode(lines) for piece in (*one, cutter.eos_id())], np.int16)
        splits[name] = torch.from_numpy(pieces)
        print(f"{name}: {len(pieces):,} pieces")
    torch.save(splits, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "train", "show"))
    parser.add_argument("file", type=Path, help="the pieces, or with show the results")
    parser.add_argument("--output", type=Path, default=Path("widths.json"), help="the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--share", type=float, default=1.0, help="share of the tokens of a training (default: 1)")
    args = parser.parse_args()
    if args.what == "prepare":
        prepare(args.file)
    elif args.what == "show":
        print(table(json.loads(args.file.read_text(encoding="utf-8"))["rows"]))
    else:
        torch.set_num_threads(torch.get_num_threads() if args.device == "cuda" else 1)
        grid(torch.load(args.file, weights_only=True), args.device, args.share, args.output)


if __name__ == "__main__":
    main()
