"""Training speed of a small language model: lowrank_transformer_lm and fairseq's transformer_lm of the same size.

    python benchmarks/training.py                                    stock, mha, mixhead-a, mixhead-b at n 512
    python benchmarks/training.py --length 2048 --rows stock mha --output benchmarks/results/training-2048.json
    python benchmarks/training.py --plain                            layers of this package in a plain PyTorch model, without fairseq

One measurement is one update on random tokens: forward, loss, backward, gradient clipping, Adam. The rows take turns in
every round; the ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse

import measure
import models
import torch
import torch.nn.functional as F
from attention import with_kernels
from torch import Tensor, nn

from fairseq_lowrank.attention import CAUSAL, build_attention


def dictionary(size: int):
    from fairseq.data import Dictionary

    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    return words


class Block(nn.Module):
    """A pre-norm layer of a Transformer."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        super().__init__()
        preset, activation, backend = models.attention_of(row)
        dim, rates = options.embed_dim, {"dropout": options.attention_dropout}
        self.attention = build_attention(
            preset, dim, options.heads, self_attention=True, activation=activation, backend=backend, **rates
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.up, self.down, self.dropout = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, y, attn_mask=CAUSAL, need_weights=False)[0])
        return x + self.dropout(self.down(self.up(self.norms[1](x)).relu()))


class PlainModel(nn.Module):
    """A language model of the same sizes in plain PyTorch; its output has the weights of its embedding."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.vocabulary, options.embed_dim)
        self.positions = nn.Embedding(options.length, options.embed_dim)
        self.blocks = nn.Sequential(*(Block(row, options) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.embed_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``[T, B, V]`` of tokens ``[B, T]``."""
        x = self.embedding(tokens.mT) + self.positions.weight[:, None]
        return self.norm(self.blocks(x)) @ self.embedding.weight.mT


class PlainTraining:
    """One row: a plain model and its optimiser."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.model = PlainModel(row, options).to(options.device, getattr(torch, options.dtype))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def loss(self, sample: dict) -> Tensor:
        logits = self.model(sample["net_input"]["src_tokens"])
        return F.cross_entropy(logits.flatten(0, 1).float(), sample["target"].mT.flatten())

    def update(self, sample: dict) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(sample)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if loss.is_cuda:
            torch.cuda.synchronize()


class Training(PlainTraining):
    """One row: a model of fairseq, its criterion and its optimiser."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        from fairseq.tasks.language_modeling import LanguageModelingTask

        import fairseq_lowrank.plugin  # noqa: F401  (registers the models)

        cfg = models.configuration(
            [
                *("unused", "--task", "language_modeling", "--criterion", "cross_entropy"),
                *models.architecture(row, "transformer_lm", "lowrank_transformer_lm"),
                *("--decoder-layers", str(options.layers), "--decoder-attention-heads", str(options.heads)),
                *("--decoder-embed-dim", str(options.embed_dim), "--decoder-ffn-embed-dim", str(4 * options.embed_dim)),
                *("--decoder-input-dim", str(options.embed_dim), "--decoder-output-dim", str(options.embed_dim)),
                *("--share-decoder-input-output-embed", "--dropout", str(options.dropout)),
                *("--attention-dropout", str(options.attention_dropout), "--tokens-per-sample", str(options.length)),
                *("--optimizer", "adam", "--lr", "1e-4", "--clip-norm", "1.0"),
            ]
        )
        words = dictionary(options.vocabulary)
        task = LanguageModelingTask(cfg.task, words, words)
        self.model = models.build(task, cfg, options.device, options.seed).to(getattr(torch, options.dtype)).train()
        self.criterion = task.build_criterion(cfg.criterion)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def loss(self, sample: dict) -> Tensor:
        loss, size, _ = self.criterion(self.model, sample)
        return loss / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_model_arguments(parser, [models.STOCK, "mha", "mixhead-a", "mixhead-b"])
    parser.add_argument("--plain", action="store_true", help="a plain PyTorch model; there is no row stock")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of an update, at least one sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=10000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the whole model")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    measure.add_common_arguments(parser, rounds=15)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    batch = max(1, options.tokens // options.length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, options.vocabulary, (batch, options.length + 1), generator=generator)
    tokens = tokens.to(options.device)
    sample = {
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((batch,), options.length)},
        "target": tokens[:, 1:].contiguous(),
        "ntokens": batch * options.length,
    }
    options.rows = with_kernels(options.rows)
    if options.plain and models.STOCK in options.rows:
        parser.error("--plain has no row stock: choose other --rows")
    rows = {row: (PlainTraining if options.plain else Training)(row, options) for row in options.rows}
    times = measure.alternate(
        {row: lambda t=t: t.update(sample) for row, t in rows.items()}, options.rounds, clock=options.clock
    )

    base, results = options.rows[0], []
    for row, taken in times.items():
        speeds = [sample["ntokens"] / seconds for seconds in taken]
        q1, median, q3 = measure.quartiles(speeds)
        ratio = measure.quartiles(measure.ratios(times[base], taken))[1]
        results.append(
            {
                "row": row,
                "tokens_per_second": round(median, 1),
                "quartiles": [round(q1, 1), round(q3, 1)],
                "ratio": round(ratio, 3),
            }
        )
    print(f"{options.layers} layers, d {options.embed_dim}, n {options.length}, batch {batch}")
    print(
        measure.table(
            ((r["row"], r["tokens_per_second"], "{} to {}".format(*r["quartiles"]), r["ratio"]) for r in results),
            ("row", "tokens/s", "quartiles", f"× {base}"),
        )
    )
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "threads", "rows")}
    measure.write(
        options.output, {"machine": measure.machine(options.device), "settings": settings, "results": results}
    )


if __name__ == "__main__":
    main()
