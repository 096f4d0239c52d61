"""Translation speed on Multi30k with beam search, and the bytes that decoding caches: ours beside stock fairseq.

    DATA=$(scripts/prepare.sh multi30k)
    python benchmarks/generation.py $DATA                         untrained models: every row writes 15 tokens a sentence
    python benchmarks/generation.py $DATA --checkpoint stock=runs/stock/checkpoint_best.pt mha=runs/mha/checkpoint_best.pt

One measurement is the translation of --sentences sentences of the test set. The rows take turns in every round; the
ratio is the median of the ratios within a round. Trained checkpoints stop where they like; untrained models are made
to write sentences of the same length.
"""

from __future__ import annotations

import argparse
import warnings

import measure
import models
import torch
from fairseq import checkpoint_utils, utils
from fairseq.tasks.translation import TranslationTask

CACHED_STEPS = 4

warnings.filterwarnings("ignore", message=".*pin_memory.*")


def configuration(row: str, options: argparse.Namespace):
    return models.configuration(
        [
            *(options.data, "--task", "translation", "--source-lang", "de", "--target-lang", "en"),
            *models.architecture(row, "transformer_iwslt_de_en", "lowrank_transformer_iwslt_de_en"),
            *("--share-all-embeddings", "--max-tokens", "4096"),
            *("--encoder-layers", str(options.layers), "--decoder-layers", str(options.layers)),
            *("--encoder-embed-dim", str(options.embed_dim), "--decoder-embed-dim", str(options.embed_dim)),
            *("--encoder-ffn-embed-dim", str(2 * options.embed_dim)),
            *("--decoder-ffn-embed-dim", str(2 * options.embed_dim)),
            *("--encoder-attention-heads", str(options.heads), "--decoder-attention-heads", str(options.heads)),
        ]
    )


class Generation:
    """One row: a model and its beam search."""

    def __init__(self, row: str, options: argparse.Namespace, checkpoint: str | None) -> None:
        cfg = configuration(row, options)
        self.task = TranslationTask.setup_task(cfg.task)
        if checkpoint:
            (self.model,), _ = checkpoint_utils.load_model_ensemble([checkpoint], task=self.task)
        else:
            self.model = models.build(self.task, cfg, options.device, options.seed)
        self.model.to(options.device).eval()
        cfg.common_eval.path = checkpoint or "untrained"  # so that it is what fairseq-generate does
        cfg.generation.beam = options.beam
        if not options.checkpoint:
            cfg.generation.update(max_len_a=0, max_len_b=options.length, min_len=options.length)
        self.model.prepare_for_inference_(cfg)
        self.search = self.task.build_generator([self.model], cfg.generation)

    def translate(self, batches: list[dict]) -> None:
        for batch in batches:
            self.task.inference_step(self.search, [self.model], batch)

    def cached_bytes(self, batch: dict) -> int:
        """Bytes that the decoder's self-attention keeps for each token of each hypothesis, all layers together."""
        inputs = batch["net_input"]
        state: dict = {}
        with torch.no_grad():
            encoded = self.model.encoder(inputs["src_tokens"], inputs["src_lengths"])
            tokens = inputs["prev_output_tokens"][:, :1].repeat(1, CACHED_STEPS)
            for step in range(CACHED_STEPS):
                self.model.decoder(tokens[:, : step + 1], encoder_out=encoded, incremental_state=state)
        cached = 0
        for layer in self.model.decoder.layers:
            saved = layer.self_attn._get_input_buffer(state)
            tensors = [saved[name] for name in ("prev_key", "prev_value") if saved.get(name) is not None]
            cached += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return cached // (CACHED_STEPS * tokens.size(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the binarised corpus: what scripts/prepare.sh multi30k prints")
    models.add_model_arguments(parser, [models.STOCK, "mha", "mqa", "mhe-mul", "mhe-add", "mixhead-a"])
    parser.add_argument("--checkpoint", nargs="+", default=[], metavar="ROW=FILE", help="trained models, for every row")
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="sentences of a batch (default: 64)")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--length", type=int, default=15, help="tokens that untrained models write (default: 15)")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--embed-dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    measure.add_common_arguments(parser, rounds=5)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    checkpoints = dict(pair.partition("=")[::2] for pair in options.checkpoint)
    if checkpoints and set(checkpoints) != set(options.rows):
        parser.error(f"--checkpoint names {', '.join(checkpoints)}, --rows {', '.join(options.rows)}: give all or none")

    rows = {row: Generation(row, options, checkpoints.get(row)) for row in options.rows}
    task = rows[options.rows[0]].task
    task.load_dataset("test")
    iterator = task.get_batch_iterator(task.dataset("test"), max_sentences=options.batch).next_epoch_itr(shuffle=False)
    batches, sentences = [], 0
    for batch in iterator:
        if sentences >= options.sentences:
            break
        batches.append(utils.move_to_cuda(batch) if options.device.startswith("cuda") else batch)
        sentences += batch["nsentences"]
    runs = {row: lambda row=row: rows[row].translate(batches) for row in options.rows}
    times = measure.alternate(runs, options.rounds, clock=options.clock)

    base, results = options.rows[0], []
    for row, taken in times.items():
        q1, median, q3 = measure.quartiles([sentences / seconds for seconds in taken])
        results.append(
            {
                "row": row,
                "sentences_per_second": round(median, 2),
                "quartiles": [round(q1, 2), round(q3, 2)],
                "ratio": round(measure.quartiles(measure.ratios(times[base], taken))[1], 3),
                "cached_bytes_per_token": rows[row].cached_bytes(batches[0]),
            }
        )
    print(f"{sentences} sentences, batches of {options.batch}, beam {options.beam}")
    header = ("row", "sentences/s", "quartiles", f"× {base}", "cached bytes a token")
    print(
        measure.table(
            (
                (
                    r["row"],
                    r["sentences_per_second"],
                    "{} to {}".format(*r["quartiles"]),
                    r["ratio"],
                    r["cached_bytes_per_token"],
                )
                for r in results
            ),
            header,
        )
    )
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "threads", "rows", "data")}
    measure.write(
        options.output, {"machine": measure.machine(options.device), "settings": settings, "results": results}
    )


if __name__ == "__main__":
    main()
