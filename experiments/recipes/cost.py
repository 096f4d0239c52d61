"""What a recipe costs before it is run: tokens, hours, memory, disk and downloads. All of it is estimated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.corpora.catalogue import parse_corpus_name
from experiments.recipes.recipe import Run, effective_flags, last_value, tokens_of_update
from experiments.recipes.sizes import sizes, vocab_size
from fairseq_lowrank.messages import UserError

H100_RATE = 2.9e14
"""Operations a second of training on one H100: 230,136 tokens a second of 16 layers of d 1024 (mha, benchmarks/results/gpu.json)."""
H100_UPDATE = 0.09
"""Seconds of the shortest update there: 2,048 tokens at 22,374 a second in rows next to each other (head-maps, results/evidence.jsonl)."""
CPU_RATE = 1.2e11
"""The same on 2 cores: 1,127 tokens a second of 4 layers of d 512 (mha, benchmarks/results/training-512.json). Narrower models are slower."""
SPEED = {"mha": 1.0, "mixhead-a": 0.66, "mixhead-b": 0.57}
"""Tokens a second on the H100 as a share of those of mha, for 16 heads of 64 in the kernels (training, benchmarks/results/gpu.json)."""
KERNEL_SIZES = ((8, 32), (16, 32), (8, 64), (12, 64), (16, 64))
"""Numbers and sizes of heads that the kernels were compiled for when these speeds were measured."""
SPEED_OF_BLOCKS = 0.21
"""The same of mixhead-a by blocked, which computes mixing of head counts and sizes that the kernels do not take."""
MOST_CPU_HOURS = 1000
EPOCH_TOKENS = {"iwslt14": 4_000_000, "multi30k": 420_000}
"""Target tokens of a training part, for recipes that count epochs."""
VOCABULARIES = {"wikitext-103": 267_744, "wikitext-2": 33_278, "lm1b": 793_470, "wmt14": 32_768, "brown": 40_000}
"""Sizes of dictionaries that are not known before the corpus is prepared; of others :data:`SUBWORDS`."""
SUBWORDS = 10_000
TEST_TOKENS = {
    "lm1b-all-heldout": 8_000_000,
    "lm1b": 160_000,
    "iwslt14": 180_000,
    "wmt14": 95_000,
    "multi30k": 15_000,
    "brown": 120_000,
}
"""Tokens of a test set, roughly, of a corpus that is not prepared; of others those of WikiText's, 245,569."""
FREQUENT = 20_000
"""Columns of the output that a token costs at most; an adaptive softmax multiplies those of rare words for few tokens."""


class Cost(NamedTuple):
    """What one training costs, on one GPU and alone."""

    tokens: float
    gpu_hours: float
    cpu_hours: float
    disk: float
    """Gigabytes of checkpoints."""
    gpu_scoring: float = 0
    cpu_scoring: float = 0
    """Hours of scoring on one GPU and on 2 cores, which the other hours do not have."""

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(one + another for one, another in zip(self, other, strict=True)))


def cost(run: Run) -> Cost:
    """Estimate the cost of a run.

    A token takes 6 operations for each weight that multiplies it, forward and backward; those of attention over n positions are
    left out. On a GPU the method's measured speed divides the hours. On CPUs, where linear layers take most of the time, every
    method counts like plain attention. A checkpoint holds weights and two averages of Adam in float32.

    Raises:
        UserError: the number of tokens is not known.
    """
    flags = effective_flags(run.flags)
    vocabulary, counts = _model(run)
    width = int(flags.get("--decoder-embed-dim") or flags.get("--encoder-embed-dim") or 512)
    weights = counts["total"] - counts["embeddings"] + min(vocabulary, FREQUENT) * width
    step = tokens_of_update(run.flags)
    if updates := int(flags.get("--max-update", 0)):
        tokens = updates * step
    elif epoch := epoch_tokens(run):
        tokens = int(flags["--max-epoch"]) * epoch
        updates = -(-tokens // step)
    else:
        raise UserError(
            f"{run.corpus} is not prepared yet, so its number of tokens is not known. Prepare it with "
            "scripts/prepare.sh, or give EXTRA='--max-update N'."
        )
    operations = 6 * weights * tokens
    kept = 2 + int(last_value(run.flags, "--keep-interval-updates", "0"))
    seconds = max(operations / H100_RATE / (speed(run) or 1.0), updates * H100_UPDATE)
    disk = kept * 12 * counts["total"] / 1e9
    return Cost(tokens, seconds / 3600, operations / CPU_RATE / 3600, disk, *scoring(run, weights))


def scoring(run: Run, weights: int) -> tuple[float, float]:
    """Estimate the hours of scoring on one GPU and on 2 cores.

    A weight takes 2 operations for each token that is computed. A language model computes a block with its context of 25/32, and
    a beam of 5 a translation five times. A step on a GPU takes a third of the shortest update. A translation of 4,096 tokens takes 50 steps.
    """
    known = (number for name, number in TEST_TOKENS.items() if run.corpus.startswith(name))
    tokens, flags = tokens_of_split(run.bin, "test") or next(known, 245_569), effective_flags(run.flags)
    if translates := "--source-lang" in flags:
        tokens *= 5
    elif flags.get("--task", "") == "language_modeling":
        tokens *= 32 / 7
    operations = 2 * weights * tokens
    steps = tokens / 4096 * 50 / 5 if translates else tokens / 2048
    return max(operations / H100_RATE, steps * H100_UPDATE / 3) / 3600, operations / CPU_RATE / 3600


COUNTS: dict[tuple[int, str], dict] = {}
"""The numbers of parameters of models that were built, by vocabulary and flags without the seed."""


def _model(run: Run) -> tuple[int, dict]:
    """Return the size of a run's vocabulary, and the numbers of its parameters."""
    try:
        vocabulary = vocab_size(run)
    except UserError:
        names = (size for name, size in VOCABULARIES.items() if run.corpus.startswith(name))
        vocabulary = next(names, SUBWORDS)
    key = vocabulary, str(effective_flags(run.flags) | {"--seed": ""})
    if key not in COUNTS:
        COUNTS[key] = sizes(run, vocabulary)
    return vocabulary, COUNTS[key]


def epoch_tokens(run: Run) -> int:
    """Return the target tokens of a training part, counted if it is prepared; 0 if the number is not known."""
    language = last_value(run.flags, "--target-lang", "")
    counted = tokens_of_split(run.bin, "train", f"*.{language}" if language else "*")
    return counted or EPOCH_TOKENS.get(parse_corpus_name(run.corpus)[0].name, 0)


def tokens_of_split(folder: Path, split: str, names: str = "*") -> int:
    """Return the most tokens that a file of a binarised split has; 0 without such a file."""
    most = 0
    for index in folder.glob(f"{split}{names}.idx"):
        from fairseq.data.indexed_dataset import MMapIndexedDataset

        dataset = MMapIndexedDataset(str(index.with_suffix("")))  # it closes its file, which holds the sizes
        most = max(most, int(dataset.sizes.sum()))
    return most


def warmup(folder: Path, epochs: int, tokens: int, longest: int = 400) -> int:
    """Return the updates in which the learning rate rises: at most a tenth of all, with this number of tokens in each."""
    return max(1, min(longest, epochs * tokens_of_split(folder, "train") // tokens // 10))


def speed(run: Run) -> float | None:
    """Return the measured speed of a run's method on a GPU as a share of that of mha; None if it was never measured."""
    flags = effective_flags(run.flags)
    method = flags.get("--attention", "mha")
    if set(flags) & {"--score-mixing", "--head-mixing", "--attention-activation"} or method not in SPEED:
        return None
    heads = int(flags.get("--decoder-attention-heads") or flags.get("--encoder-attention-heads") or 8)
    width = int(flags.get("--decoder-embed-dim") or flags.get("--encoder-embed-dim") or 512)
    if method != "mha" and (heads, int(flags.get("--head-dim") or width // heads)) not in KERNEL_SIZES:
        return SPEED_OF_BLOCKS
    return SPEED[method]


def memory(run: Run) -> float:
    """Estimate the gigabytes of one GPU's memory that a training in 16 bits needs.

    A parameter takes 16 bytes: weight and gradient in 16 bits, and a float32 copy with two averages of Adam. A token of a step
    keeps 10 d + 8 h·d_k + 4 f bytes in each layer (34 d for f = 4 d, arXiv 2205.05198, without the scores), as much again
    without the last term for attention to a source, and 10 bytes for each logit.
    """
    flags = effective_flags(run.flags)
    vocabulary, counts = _model(run)
    tokens, total = int(flags.get("--max-tokens", 4096)), 0
    for side in ("encoder", "decoder"):
        layers = int(flags.get(f"--{side}-layers") or (6 if f"--{side}-embed-dim" in flags else 0))
        width = int(flags.get(f"--{side}-embed-dim") or 512)
        heads = int(flags.get(f"--{side}-attention-heads") or 8)
        inner = heads * int(flags.get("--head-dim") or width // heads)
        attention = 10 * width + 8 * inner
        total += layers * (attention + 4 * int(flags.get(f"--{side}-ffn-embed-dim") or 4 * width))
        if side == "decoder" and "--encoder-embed-dim" in flags:
            total += layers * attention
    return (16 * counts["total"] + tokens * (total + 10 * min(vocabulary, FREQUENT))) / 1e9


def trainings(runs: Iterable[Run]) -> list[Run]:
    """Return the runs and what they start from, each once, without published models."""
    found: dict[Path, Run] = {}
    for run in runs:
        chain = [run]
        while (base := chain[-1].base) and not base.published:
            chain.append(base)
        found |= {one.folder: one for one in reversed(chain)}
    return list(found.values())


def lines(runs: Iterable[Run], gpus: int = 1) -> Iterator[str]:
    """Yield a line for each training, the sum with what is downloaded, and what the numbers mean.

    Args:
        gpus: also give the hours on this number of GPUs.

    Raises:
        UserError: the number of tokens is known of no training.
    """
    every = trainings(runs)
    total, unknown, counted_as_plain, largest = Cost(0, 0, 0, 0), [], [], 0.0
    for run in every:
        try:
            found = cost(run)
        except UserError as error:
            unknown.append(run.row)
            if len(unknown) == len(every):
                raise
            yield f"{run}: {error}"
            continue
        total, largest = total + found, max(largest, found.disk)
        if speed(run) is None:
            counted_as_plain.append(run.row)
        yield f"{run}: {_described(found, gpus)}, {_number(memory(run))} GB of memory on each GPU"
    corpora = {corpus.name: corpus for corpus in (parse_corpus_name(one.corpus)[0] for one in every)}
    megabytes = sum(corpus.download for corpus in corpora.values())
    seeds = len({run.seed for run in every})
    left_out = f", without {len(unknown)} trainings" if unknown else ""
    yield f"{len(every)} trainings (estimates{left_out}): {_described(total, gpus)}; at most {megabytes:,} MB of downloads"
    yield (
        "Each training alone on one GPU" + (f", or on {gpus} at {gpus} times its speed" if gpus > 1 else "") + ", "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}. Scoring takes {_number(total.gpu_scoring)} more hours on it, or {_number(total.cpu_scoring)} on 2 cores. Once a row has "
        f"its line, its checkpoints may be deleted: then {_number(largest)} GB are enough."
    )
    if counted_as_plain:
        yield f"Never timed on a GPU, and counted like plain attention: {' '.join(dict.fromkeys(counted_as_plain))}"


def _described(cost: Cost, gpus: int = 1) -> str:
    large = cost.tokens >= 1e9
    tokens = f"{_number(cost.tokens / (1e9 if large else 1e6))} {'billion' if large else 'million'}"
    on_cores = f"{_number(cost.cpu_hours)} hours on 2 cores" if cost.cpu_hours <= MOST_CPU_HOURS else "not on a CPU"
    return (
        f"{tokens} tokens, {_number(cost.gpu_hours)} hours on one H100"
        + (f", {_number(cost.gpu_hours / gpus)} on {gpus}" if gpus > 1 else "")
        + f", {on_cores}, {_number(cost.disk)} GB of checkpoints"
    )


def _number(value: float) -> str:
    """Return a number with two significant digits."""
    return (
        f"{float(f'{value:.2g}'):,.{0 if value >= 9.5 else 1 if value >= 0.95 else 2}f}"
        if value >= 0.095
        else f"{value:.2g}"
    )
