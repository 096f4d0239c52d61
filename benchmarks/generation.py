"""Translation speed on Multi30k with beam search, and the bytes that decoding caches: ours and stock fairseq.

    DATA=$(scripts/prepare.sh multi30k)
    python benchmarks/generation.py $DATA                         untrained models: every row writes 15 tokens a sentence
    python benchmarks/generation.py $DATA --checkpoint stock=runs/stock/checkpoint_best.pt mha=runs/mha/checkpoint_best.pt

One measurement is the translation of --sentences sentences of the test set. The rows take turns in every round; the
ratio is the median of the ratios within a round. Trained checkpoints stop where they like; untrained models are made
to write sentences of the same length. The row "stock" runs in a process of its own that never imports this package.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import measure
import models
import torch
from fairseq import utils
from fairseq.tasks.translation import TranslationTask

CACHED_STEPS = 4

warnings.filterwarnings("ignore", message=".*pin_memory.*")
warnings.filterwarnings("ignore", category=UserWarning, module="hydra")  # of fairseq's own configuration
warnings.filterwarnings("ignore", message="\n?'config' is validated against ConfigStore")


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
    """One row: a model and its beam search.

    Args:
        trained: a file with the ``model`` of a checkpoint and the options that it was ``built`` with.
    """

    def __init__(self, row: str, options: argparse.Namespace, trained: Path | None) -> None:
        cfg = configuration(row, options)
        state = torch.load(trained, weights_only=True) if trained else None
        if state:
            cfg.model = argparse.Namespace(**state["built"])
        self.task = TranslationTask.setup_task(cfg.task)
        self.model = models.build(self.task, cfg, options.device, options.seed)
        if state:
            self.model.load_state_dict(state["model"])
        self.model.eval()
        cfg.common_eval.path = str(trained or "untrained")  # so that it is what fairseq-generate does
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


def load_batches(task: TranslationTask, options: argparse.Namespace) -> list[dict]:
    """The first ``--sentences`` of the test set, in batches."""
    task.load_dataset("test")
    iterator = task.get_batch_iterator(task.dataset("test"), max_sentences=options.batch).next_epoch_itr(shuffle=False)
    batches, sentences = [], 0
    for batch in iterator:
        if sentences >= options.sentences:
            break
        batches.append(utils.move_to_cuda(batch) if options.device.startswith("cuda") else batch)
        sentences += batch["nsentences"]
    return batches


def work(connection, rows: list[str], options: argparse.Namespace, trained: dict[str, Path]) -> None:
    """A process: it builds ``rows`` and then answers a row's name with the seconds that its translation takes."""
    if rows != [models.STOCK]:
        import fairseq_lowrank.plugin  # noqa: F401  (registers the models)
    if options.threads:
        torch.set_num_threads(options.threads)
    generations = {row: Generation(row, options, trained.get(row)) for row in rows}
    batches = load_batches(generations[rows[0]].task, options)
    if rows == [models.STOCK] and "fairseq_lowrank" in sys.modules:
        raise RuntimeError("stock fairseq cannot be measured: something has imported fairseq_lowrank")
    cached = {row: generation.cached_bytes(batches[0]) for row, generation in generations.items()}
    connection.send((sum(batch["nsentences"] for batch in batches), cached, measure.machine(options.device)))
    while (row := connection.recv()) is not None:
        connection.send(measure.seconds(partial(generations[row].translate, batches), options.clock))


def copy_checkpoint(path: str, to: Path) -> Path:
    """What :class:`Generation` reads of a checkpoint, which fairseq by itself cannot load."""
    from fairseq_lowrank.repairs.loading import load_checkpoint

    state = load_checkpoint(path)
    built = state["cfg"]["model"]
    torch.save({"model": state["model"], "built": vars(built) if isinstance(built, argparse.Namespace) else built}, to)
    return to


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
    checkpoints = dict(pair.partition("=")[::2] for pair in options.checkpoint)
    if checkpoints and set(checkpoints) != set(options.rows):
        parser.error(f"--checkpoint names {', '.join(checkpoints)}, --rows {', '.join(options.rows)}: give all or none")
    with tempfile.TemporaryDirectory() as folder:
        trained = {row: copy_checkpoint(path, Path(folder, f"{row}.pt")) for row, path in checkpoints.items()}
        report(options, *measured(options, trained))


def measured(options: argparse.Namespace, trained: dict[str, Path]) -> tuple[int, dict, dict, dict]:
    """Sentences, row → cached bytes a token, the machine, and row → seconds in each round."""
    spawn, connections, processes, cached = multiprocessing.get_context("spawn"), {}, [], {}
    for rows in ([row for row in options.rows if (row == models.STOCK) == stock] for stock in (True, False)):
        if rows:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, rows, options, trained), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is seen here
            processes.append(process)
            connections.update(dict.fromkeys(rows, ours))
    for connection in dict.fromkeys(connections.values()):
        sentences, bytes_of_rows, machine = connection.recv()
        cached.update(bytes_of_rows)

    def ask(row: str) -> float:
        connections[row].send(row)
        return connections[row].recv()

    times = measure.take_turns({row: partial(ask, row) for row in options.rows}, options.rounds)
    for connection in dict.fromkeys(connections.values()):
        connection.send(None)
    for process in processes:
        process.join()
    return sentences, cached, machine, times


def report(options: argparse.Namespace, sentences: int, cached: dict, machine: dict, times: dict) -> None:
    base, results = options.rows[0], []
    for row, taken in times.items():
        q1, median, q3 = measure.quartiles([sentences / seconds for seconds in taken])
        results.append(
            {
                "row": row,
                "sentences_per_second": round(median, 2),
                "quartiles": [round(q1, 2), round(q3, 2)],
                "ratio": round(measure.quartiles(measure.ratios(times[base], taken))[1], 3),
                "cached_bytes_per_token": cached[row],
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
    measure.write(options.output, {"machine": machine, "settings": settings, "results": results})


if __name__ == "__main__":
    main()
