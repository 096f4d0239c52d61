"""Training speed of a small language model: lowrank_transformer_lm and fairseq's transformer_lm of the same size.

    python benchmarks/training.py                                    stock, mha, mixhead-a, mixhead-b at n 512
    python benchmarks/training.py --length 2048 --rows stock mha --output benchmarks/results/training-2048.json

One measurement is one update on random tokens: forward, loss, backward, gradient clipping, Adam. The rows take turns in
every round; the ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse

import measure
import models
import torch
from attention import with_kernels
from fairseq.data import Dictionary
from fairseq.tasks.language_modeling import LanguageModelingTask

import fairseq_lowrank.plugin  # noqa: F401  (registers the models)


def dictionary(size: int) -> Dictionary:
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    return words


class Training:
    """One row: a model, its criterion and its optimiser."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
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

    def update(self, sample: dict) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, size, _ = self.criterion(self.model, sample)
        (loss / size).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if loss.is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_model_arguments(parser, [models.STOCK, "mha", "mixhead-a", "mixhead-b"])
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
    rows = {row: Training(row, options) for row in options.rows}
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
