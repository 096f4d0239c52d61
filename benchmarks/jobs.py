"""Whole jobs on this machine's CPUs, each next to the plainest alternative: a table for docs/performance.md.

    python benchmarks/jobs.py --output benchmarks/results/jobs.json        more than 12 minutes on two quiet cores
    python benchmarks/jobs.py --tiny                                       a minute: does it run?
    python benchmarks/jobs.py --table benchmarks/results/jobs.json --page docs/performance.md        put the table into the page

Every row is a process. The rows of a job take turns in every round. Seconds are those of a processor (user and system) for the
steps of the job, without start-up and the first step; the ratio is the median of the ratios within a round.
Memory is the largest resident set. One more run of a row under PyTorch's profiler says where the time goes. The row `fairseq` has fairseq's own attention; Llama's `sdpa` has that of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "fairseq"
JOBS = {
    "translation training": [PLAIN, "mha", "mixhead-a", "mixhead-b", "mixhead-a, oneDNN"],
    "generate": [PLAIN, "mha", "mixhead-a"],
    "language model training": [PLAIN, "mha", "mixhead-a", "mixhead-a, oneDNN"],
    "eval-lm": [PLAIN, "mha", "mixhead-a"],
    "Llama training": ["sdpa", "mixhead-a"],
    "Llama generation": ["sdpa", "mixhead-a"],
}
STEPS = {
    "train": ("fairseq.trainer", "Trainer", "train_step"),
    "generate": ("fairseq.tasks.fairseq_task", "FairseqTask", "inference_step"),
    "eval_lm": ("fairseq.sequence_scorer", "SequenceScorer", "generate"),
}
"""The function of each command whose calls after the first are timed."""
KINDS = {
    "linear layers": r"addmm|::mm$|mkldnn|linear",
    "attention": r"bmm|softmax$|_softmax_backward|scaled_dot_product|flash",
    "loss": r"log_softmax|nll|gather|logsumexp",
    "optimizer": r"adam|foreach|addcdiv|addcmul|lerp",
}


def corpus(folder: Path, size: int) -> None:
    """Make binarised data: pairs of 15 words and a text of 512 words a line, drawn from a vocabulary of 8,000 by Zipf's law."""
    draw = random.Random(1)
    words, weights = [f"w{number}" for number in range(8000)], [1 / (1 + number) for number in range(8000)]
    for split, lines in (("train", 40 * size), ("valid", 4), ("test", 4 * size)):
        for ending, length in (("de", 15), ("en", 15), ("txt", 512)):
            text = (
                " ".join(draw.choices(words, weights, k=length))
                for _ in range(lines if length == 15 else lines // 40 + 4 if split == "train" else 6)
            )
            (folder / f"{split}.{ending}").write_text(
                "\n".join([*text, *(" ".join(words[i : i + 15]) for i in range(0, 8000, 15) if split == "train")])
                + "\n"
            )
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", split)]
    pairs = [*prefixes, "--source-lang", "de", "--target-lang", "en", "--joined-dictionary", "--destdir", "pairs"]
    text = [word + ".txt" if word in ("train", "valid", "test") else word for word in prefixes]
    for flags in (pairs, ["--only-source", *text, "--destdir", "text"]):
        run(["preprocess", *flags], folder)


def command(job: str, row: str, options: argparse.Namespace) -> list[str]:
    """Return a command of fairseq without its first word, or that of a Llama, for a row of a job."""
    preset, updates = row.partition(",")[0], str(options.updates)
    if job.startswith("Llama"):
        return ["llama", preset, job.split()[1], str(options.updates)]
    plugin = ["--user-dir", str(ROOT / "fairseq_lowrank")]
    attention = [] if preset == PLAIN else ["--attention", preset]
    save = [
        "--save-dir",
        f"{job[:4]}-{preset}{row[len(preset) :][-6:]}",
        "--no-epoch-checkpoints",
        "--disable-validation",
    ]
    train = [
        "--optimizer",
        "adam",
        "--lr",
        "1e-4",
        "--max-update",
        updates,
        "--log-format",
        "json",
        "--seed",
        "1",
        "--cpu",
    ]
    train += [*attention, *plugin, *save, "--log-interval", "1000", "--num-workers", "0"]
    if job == "translation training":
        sizes = (
            "--arch transformer_iwslt_de_en --encoder-layers 3 --decoder-layers 3 --dropout 0.1 --share-all-embeddings"
        )
        return ["train", "pairs", *sizes.split(), "--max-tokens", "1024", *train]
    if job == "language model training":
        sizes = "--arch transformer_lm --task language_modeling --decoder-layers 4 --decoder-attention-heads 8 --dropout 0.1"
        lengths = (
            "--share-decoder-input-output-embed --tokens-per-sample 512 --max-tokens 2048 --sample-break-mode none"
        )
        return ["train", "text", *sizes.split(), *lengths.split(), *train]
    if job == "generate":
        search = "--beam 5 --min-len 15 --max-len-a 0 --max-len-b 15 --max-tokens 256 --quiet --cpu"
        return ["generate", "pairs", *plugin, "--path", f"tran-{preset}/checkpoint_last.pt", *search.split()]
    window = "--gen-subset test --tokens-per-sample 512 --context-window 400 --max-tokens 2048 --cpu"
    return [
        "eval_lm",
        "text",
        *plugin,
        "--task",
        "language_modeling",
        "--path",
        f"lang-{preset}/checkpoint_last.pt",
        *window.split(),
    ]


def llama(attention: str, what: str, updates: int) -> None:
    """Train a small Llama, or generate with it, and print the seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fairseq_lowrank.huggingface import apply_attention

    torch.manual_seed(1)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, attn_implementation="sdpa", **sizes))
    if attention != "sdpa":
        apply_attention(model, attention)
    optimizer, tokens = torch.optim.Adam(model.parameters(), lr=1e-4), torch.randint(8000, (2, 512))
    for step in range(updates + 1):  # the first is not counted
        if step == 1:
            start = time.process_time()
        if what == "training":
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        elif step in (0, 1):
            new = 16 if step == 0 else 4 * updates
            model.eval().generate(tokens[:, :64], max_new_tokens=new, min_new_tokens=new, do_sample=False, num_beams=2)
    print(f"seconds {time.process_time() - start:.3f}")


def child(words: list[str], profile: bool) -> None:
    """Run a command in this process; with `profile`, print its time by kind of operation."""
    from importlib import import_module

    import torch

    def work() -> None:
        if words[0] == "llama":
            return llama(words[1], words[2], int(words[3]))
        sys.argv = [f"fairseq-{words[0]}", *words[1:]]
        if words[0] not in STEPS:
            return import_module(f"fairseq_cli.{words[0]}").cli_main()
        module, kind, name = STEPS[words[0]]
        owner, taken = getattr(import_module(module), kind), []
        step = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.process_time()
            found = step(*args, **kwargs)
            taken.append(time.process_time() - start)
            return found

        setattr(owner, name, timed)
        import_module(f"fairseq_cli.{words[0]}").cli_main()
        print(f"seconds {sum(taken[1:] or taken):.3f}")

    if not profile:
        return work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
    times: dict[str, float] = {}
    for event in found.key_averages():
        kind = next((name for name, pattern in KINDS.items() if re.search(pattern, event.key)), "other")
        times[kind] = times.get(kind, 0) + event.self_cpu_time_total
    print("kinds", json.dumps({kind: round(one / sum(times.values()), 3) for kind, one in times.items()}))


def run(words: list[str], folder: Path, *, onednn: bool = False, profile: bool = False) -> dict:
    """Run a command in a new process; return its seconds, its CPU seconds and its memory in MiB."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LOWRANK_ENABLE": "onednn-linear" if onednn else ""}
    line = [sys.executable, __file__, *(["--profile"] if profile else []), "--child", *words]
    if "--save-dir" in words:  # a training that was finished there would be resumed
        shutil.rmtree(folder / words[words.index("--save-dir") + 1], ignore_errors=True)
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(line, cwd=folder, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{text[-3000:]}")
    seconds = re.findall(r"^seconds ([\d.]+)", text, re.MULTILINE)
    kinds = re.findall(r"^kinds (.*)", text, re.MULTILINE)
    return {
        "seconds": float(seconds[-1]) if seconds else None,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "mebibytes": used.ru_maxrss // 1024,
        "kinds": json.loads(kinds[-1]) if kinds else None,
    }


def quickstart(folder: Path, smoke: bool) -> dict:
    """Run the quickstart in an empty folder; return its seconds, and the last lines that it prints."""
    settings = {"SETUP": "0", "LOWRANK_WORK": str(folder / "work"), "DIRTY": "1", "SMOKE": "1" if smoke else ""}
    before, start = os.times(), time.perf_counter()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "scripts" / "quickstart.sh"], env=os.environ | {"PATH": path} | settings, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    after = os.times()
    used = sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"(mha|mixhead-a) +[\d,]+ ", line)]
    seconds = round(time.perf_counter() - start, 1)
    return {"seconds": seconds, "cpu_seconds": round(used, 1), "bleu": {row[0]: float(row[-1]) for row in rows}}


def measured(options: argparse.Namespace) -> list[dict]:
    """Run every job; return a result for each row."""
    end, found = time.monotonic() + 60 * options.minutes, []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus(folder, options.size)
        for number, (job, rows) in enumerate(JOBS.items(), 1):
            rounds: list[dict[str, dict]] = []
            share = (end - time.monotonic()) / (
                len(JOBS) - number + 2
            )  # each job and the quickstart get as much of what is left
            stop = time.monotonic() + share
            while len(rounds) < options.rounds and (not rounds or time.monotonic() < stop):
                rounds.append({row: run(command(job, row, options), folder, onednn="oneDNN" in row) for row in rows})
                print(
                    f"{job}, round {len(rounds)}: {' '.join(str(one['seconds']) for one in rounds[-1].values())}",
                    flush=True,
                )
            for row in rows:
                own = [one[row] for one in rounds]
                profiled = (
                    run(command(job, row, options), folder, onednn="oneDNN" in row, profile=True)
                    if row == "mixhead-a"
                    else {}
                )
                ratios = [one[row]["seconds"] / one[rows[0]]["seconds"] for one in rounds]
                found.append(
                    {
                        "job": job,
                        "row": row,
                        "rounds": len(rounds),
                        "seconds": round(measure.quartiles([one["seconds"] for one in own])[1], 2),
                        "ratio": round(measure.quartiles(ratios)[1], 3),
                        "cpu_seconds": measure.quartiles([one["cpu_seconds"] for one in own])[1],
                        "mebibytes": max(one["mebibytes"] for one in own),
                        "kinds": profiled.get("kinds"),
                    }
                )
        found.append({"job": "quickstart", **quickstart(folder, options.tiny)})
    return found


def table(results: list[dict]) -> str:
    """Return the Markdown table of a file of results."""
    lines = [
        "| job | attention | time | seconds | peak MiB | where the time goes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        kinds = one.get("kinds") or {}
        shares = ", ".join(
            f"{name} {100 * share:.0f} %" for name, share in sorted(kinds.items(), key=lambda item: -item[1])[:3]
        )
        if one["job"] == "quickstart":
            bleu = ", ".join(f"{row} {score}" for row, score in one["bleu"].items())
            lines.append(
                f"| quickstart | both | – | {one['seconds']:.0f} ({one['cpu_seconds']:.0f} of CPU) | – | BLEU: {bleu} |"
            )
        else:
            cells = (
                one["job"],
                f"`{one['row']}`",
                f"{one['ratio']:.2f}",
                f"{one['seconds']:.1f}",
                f"{one['mebibytes']:,}",
                shares or "–",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=measure.new_file(".json"), help="file of results")
    parser.add_argument("--table", type=Path, help="print the table of a file of results, and measure nothing")
    parser.add_argument("--page", type=Path, help="with --table: the page whose table of jobs is replaced")
    parser.add_argument(
        "--tiny", action="store_true", help="one round of two updates each, and a quickstart with SMOKE=1"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=10.5, help="start no further round when a job's share of this is over"
    )
    parser.add_argument("--updates", type=int, default=16, help="updates of a training")
    parser.add_argument("--size", type=int, default=100, help="size of the corpus, in units of 40 pairs")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.profile)
    if options.table:
        shown = table(json.loads(options.table.read_text())["results"])
        if options.page:
            text, count = re.subn(r"\| job \| attention .*\n(\|.*\n)*", shown + "\n", options.page.read_text())
            options.page.write_text(text if count == 1 else parser.error(f"--page {options.page}: no table of jobs"))
        return print(shown)
    if options.tiny:
        options.rounds, options.updates, options.size = 1, 2, 5
    results = measured(options)
    settings = {name: getattr(options, name) for name in ("rounds", "updates", "size", "minutes", "tiny")}
    measure.write(options.output, {"machine": measure.machine("cpu"), "settings": settings, "results": results})
    print(table(results))
    return None


if __name__ == "__main__":
    main()
