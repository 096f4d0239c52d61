"""The recipes: every command that they would run is one that fairseq accepts."""

import fcntl
import gzip
import os
import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from fairseq_lowrank.runs.results import read_results

SIZES = {
    *("--decoder-layers", "--decoder-embed-dim", "--decoder-input-dim", "--decoder-output-dim"),
    *("--decoder-ffn-embed-dim", "--tokens-per-sample", "--max-tokens", "--update-freq", "--max-update"),
    *("--warmup-updates", "--adaptive-input-cutoff", "--adaptive-softmax-cutoff", "--required-batch-size-multiple"),
}
ROOT = Path(__file__).resolve().parent.parent
# Those over the shared helper; the quick start is tested by itself.
RECIPES = sorted(
    path.relative_to(ROOT / "examples").as_posix()
    for path in (ROOT / "examples").glob("*/*.sh")
    if path.parent.name != "quickstart"
)


@pytest.fixture
def recipe(tmp_path):
    """``recipe(name, **environment)``: run a recipe, by default without running any command of fairseq."""

    def run(name: str, *, fails: bool = False, **environment) -> subprocess.CompletedProcess:
        keep = {
            name: os.environ[name]
            for name in ("PATH", "HOME", "LOWRANK_DATA", "CUDA_VISIBLE_DEVICES")
            if name in os.environ
        }
        work = {
            "LOWRANK_WORK": str(tmp_path / "work"),
            "RESULTS": str(tmp_path / "results.jsonl"),
            "DRY_RUN": "1",
            "THREADS": "1",
        }
        done = subprocess.run(
            ["bash", ROOT / "examples" / name],
            env=keep | work | {key: str(value) for key, value in environment.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stdout
        return done

    return run


# Stands for fairseq's commands and Python: notes its call in CALLS, fails if it is named in FAILS; training leaves a checkpoint.
STAND_IN = """#!/usr/bin/env bash
name="$(basename "$0")"
case "$name $*" in
    *" finished "*) echo "$FINISHED"; exit ;;
    *.corpora*) exit ;;
    python*) name="$3" ;;
esac
echo "$name" >>"$CALLS"
[ "$name" != "${FAILS:-}" ] || exit 1
if [ "$name" = fairseq-train ]; then
    while [ "$1" != --save-dir ]; do shift; done
    mkdir -p "$2" && touch "$2/checkpoint_best.pt"
fi
"""


@pytest.fixture
def rehearse(tmp_path):
    """``rehearse(name, **environment)``: run a copy of a recipe over stand-ins; the calls it made, or what it said if it failed."""
    root, tools, calls = tmp_path / "repository", tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, root / folder)
    for name in ("python", "fairseq-train", "fairseq-generate", "fairseq-eval-lm"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def run(name: str, *, fails: str = "", **environment) -> list[str]:
        calls.write_text("")
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "LOWRANK_WORK": tmp_path / "work", "CALLS": calls}
        own |= {"FAILS": fails, "FINISHED": "", "THREADS": "1"}
        done = subprocess.run(
            ["bash", root / "examples" / name],
            env={key: str(value) for key, value in (own | environment).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) == bool(fails), done.stdout
        return calls.read_text().split()

    return run


def commands(output: str, name: str) -> list[list[str]]:
    """The arguments of each printed command called `name`."""
    words = [shlex.split(line.removeprefix("+ ")) for line in output.splitlines() if line.startswith("+ ")]
    return [command[1:] for command in words if command[0] == name]


def outermost(found: list[list[str]]) -> list[list[str]]:
    """Of commands that differ in paths and numbers alone, the first and the last."""
    groups = {}
    for command in found:
        shape = tuple(word for word in command if not re.search(r"[\d/]", word))
        groups.setdefault(shape, []).append(command)
    return [command for group in groups.values() for command in (group[0], group[-1])[: len(group)]]


@pytest.mark.parametrize("smoke", ["", "1"], ids=["full", "smoke"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_is_one_that_fairseq_accepts(recipe, name, smoke):
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_lowrank.models.options import as_namespace

    output = recipe(name, SMOKE=smoke).stdout
    training = commands(output, "fairseq-train")
    assert training
    for command in outermost(training):
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=command)
        if hasattr(model := ARCH_MODEL_REGISTRY[args.arch], "check_args"):
            model.check_args(as_namespace(convert_namespace_to_omegaconf(args).model))
        assert args.seed == 1 and args.log_format == "simple"
    scoring = commands(output, "fairseq-generate") + commands(output, "fairseq-eval-lm")
    assert len(scoring) >= len(training)
    for command in outermost(commands(output, "fairseq-generate")):
        options.parse_args_and_arch(options.get_generation_parser(), input_args=command)
    for command in outermost(commands(output, "fairseq-eval-lm")):
        options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=command)


@pytest.fixture(scope="session")
def slices(corpus, tmp_path_factory):
    """A folder of corpora as the recipes find them, the first lines of each."""
    root = tmp_path_factory.mktemp("corpora")
    for name, sizes in {"multi30k": (400, 40), "brown": (600, 60)}.items():
        (root / name).mkdir()
        for file in corpus(name).glob("*.gz"):
            lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
            (root / name / file.name).write_bytes(
                gzip.compress(b"".join(lines[: sizes[not file.name.startswith("train")]]))
            )
    return root


@pytest.mark.parametrize(
    "name, row, metric, prepare",
    [
        ("multi30k/compare.sh", "mixhead-b-h32", "sacrebleu", "--pieces 300"),
        ("brown/compare.sh", "mhe-mul", "perplexity", ""),
    ],
)
def test_a_smoke_run_ends_in_one_line_and_is_not_run_twice(recipe, slices, tmp_path, name, row, metric, prepare):
    settings = {"DRY_RUN": "", "SMOKE": 1, "ROWS": row, "LOWRANK_DATA": slices, "PREPARE": prepare}
    recipe(name, **settings)
    [line] = read_results(tmp_path / "results.jsonl")
    assert (line["row"], line["metric"], line["smoke"]) == (row, metric, True)
    assert line["updates"] > 0 and line["value"] >= 0 and line["attention_parameters"] < line["parameters"]
    assert f"{row} (seed 1): done already" in recipe(name, **settings).stdout
    assert len(read_results(tmp_path / "results.jsonl")) == 1


def test_a_run_that_was_interrupted_after_training_is_only_scored(rehearse):
    row = {"ROWS": "mha"}
    assert rehearse("multi30k/compare.sh", fails="fairseq-generate", **row) == ["fairseq-train", "fairseq-generate"]
    assert rehearse("multi30k/compare.sh", **row) == ["fairseq-generate", "bleu"]
    longer = row | {"EXTRA": "--max-epoch 13"}
    assert rehearse("multi30k/compare.sh", fails="fairseq-train", **longer) == ["fairseq-train"]
    # the checkpoint is now neither of the first length nor of the second
    assert rehearse("multi30k/compare.sh", **row) == ["fairseq-train", "fairseq-generate", "bleu"]


@pytest.mark.parametrize(
    "name, pieces", [("mixhead/table4.sh", "subword_nmt"), ("multi30k/compare.sh", "sentencepiece")]
)
def test_pieces_are_joined_as_the_corpus_was_cut_whatever_the_folder_is_called(recipe, tmp_path, name, pieces):
    for work in ("multi30k-trials", "iwslt14"):
        said = recipe(name, LOWRANK_WORK=tmp_path / work).stdout
        assert {found[found.index("--remove-bpe") + 1] for found in commands(said, "fairseq-generate")} == {pieces}


def tokens_per_update(output: str, gpus: int) -> set[int]:
    """Of each training that a recipe printed, taking into account that a step takes only whole sequences."""
    found = set()
    for command in commands(output, "fairseq-train"):
        last = {flag: int(number) for flag, number in pairwise(command) if flag in SIZES and number.isdigit()}
        length = last.get("--tokens-per-sample", 1)
        assert last["--max-tokens"] >= length
        sequences = last["--max-tokens"] // length
        if length > 1 and sequences > (multiple := last.get("--required-batch-size-multiple", 8)):
            sequences -= sequences % multiple
        found.add(sequences * length * last["--update-freq"] * gpus)
    return found


@pytest.mark.parametrize(
    "name, tokens", [("mixhead/table4.sh", 4096), ("mixhead/table9.sh", 36864), ("mhe/wmt14.sh", 25088)]
)
def test_an_update_sees_as_many_tokens_on_any_number_of_gpus(recipe, name, tokens):
    for gpus in (0, 1, 2, 4, 8):
        assert tokens_per_update(recipe(name, GPUS=gpus).stdout, gpus or 1) == {tokens}
    for gpus in (3, 5):
        assert tokens_per_update(recipe(name, GPUS=gpus).stdout, gpus).pop() == pytest.approx(tokens, rel=0.05)


def test_sequences_that_fill_a_step_make_an_update_as_near_as_they_can(recipe):
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=2).stdout, 2) == {65536}
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=5).stdout, 5) == {61440}
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=8, N=512).stdout, 8) == {65536}
    assert tokens_per_update(recipe("mixhead/table2.sh", GPUS=4).stdout, 4) == {32768}
    for length in ("0", "long"):
        refused = recipe("mixhead/table3.sh", N=length, fails=True)
        assert f"N={length}: expected the number of tokens in a block\n" in refused.stdout


def test_lm1b_follows_the_schedule_of_baevski_and_auli(recipe):
    for command in commands(recipe("mixhead/table3.sh").stdout, "fairseq-train"):
        last = dict(pairwise(command))
        warmup, first, updates = (
            int(last[f"--{name}"]) for name in ("warmup-updates", "lr-period-updates", "max-update")
        )
        # three cycles, each twice as long as the one before; the paper rounds to 975K
        assert updates == warmup + first * (1 + 2 + 4)


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig3", "fig4"])
def test_deep_models_have_layer_norms_before_sublayers(recipe, name):
    for command in commands(recipe(f"vocabulary_bottleneck/{name}.sh").stdout, "fairseq-train"):
        assert "--decoder-normalize-before" in command


def test_gpus_train_in_half_precision_unless_told_otherwise(recipe):
    def precision(**settings):
        (command,) = commands(recipe("mixhead/table4.sh", ROWS="h4-mha", **settings).stdout, "fairseq-train")
        return [word for word in command if word in ("--fp16", "--bf16")]

    assert precision(GPUS=0) == []
    assert precision(GPUS=2) == ["--fp16"]
    assert precision(GPUS=2, PRECISION="--bf16") == ["--bf16"]
    assert precision(GPUS=2, PRECISION="") == []


def test_batches_are_split_over_the_gpus_that_fairseq_sees(recipe, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    four = {"name": "mixhead/table4.sh", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for visible, count in (("1,3", 2), ("GPU-2", 1), ("0,-1,1", 1), ("2,9,3", 1), ("", 1), ("0,1,2,3", 4)):
        assert tokens_per_update(recipe(**four, CUDA_VISIBLE_DEVICES=visible).stdout, count) == {4096}
    said = recipe(**four, DRY_RUN="", GPUS=3, CUDA_VISIBLE_DEVICES="1,3", fails=True).stdout
    assert said == "GPUS=3: expected a number up to 2, the GPUs that are here\n"
    shell = ["bash", "-c", 'source "$0" && echo "$CUDA_VISIBLE_DEVICES"', ROOT / "examples" / "common.sh"]
    chosen = {"PATH": four["PATH"], "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3,1,0", "GPUS": "2"}
    assert subprocess.run(shell, env=chosen, capture_output=True, text=True).stdout == "3,1\n"


def test_wmt14_has_the_learning_rate_of_fairseqs_recipe_for_each_size(recipe):
    rates = {}
    for command in commands(recipe("mhe/wmt14.sh").stdout, "fairseq-train"):
        rates.setdefault(command[command.index("--arch") + 1], set()).add(command[command.index("--lr") + 1])
        assert command.count("--lr") == 1
    assert rates == {"lowrank_transformer_wmt_en_de": {"0.0007"}, "lowrank_transformer_wmt_en_de_big": {"0.0005"}}


def test_spectra_train_rows_that_have_a_line_but_no_checkpoint_here(rehearse):
    row = {"ROWS": "mha-h32", "FINISHED": "mha-h32"}
    assert rehearse("brown/spectra.sh", fails="fairseq-train", **row) == ["fairseq-train"]
    assert rehearse("brown/spectra.sh", **row) == ["fairseq-train", "spectrum"]
    assert rehearse("brown/spectra.sh", **row) == ["spectrum"]


@pytest.mark.parametrize("name, row", [("brown/spectra.sh", "mha-h32"), ("mixhead/fig2.sh", "h4-mha")])
@pytest.mark.parametrize("finished", [True, False])
def test_a_row_at_which_another_process_is_enters_no_spectra_or_report(rehearse, tmp_path, name, row, finished):
    table = {"brown/spectra.sh": "brown-compare", "mixhead/fig2.sh": "mixhead-table4"}[name]
    run = tmp_path / "work" / "runs" / table / f"{row}-seed1"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "checkpoint_best.pt").touch()
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rehearse(name, ROWS=row, FINISHED=row if finished else "", fails="the lock") == []
    assert rehearse(name, ROWS=row, FINISHED=row)[-1] in ("spectrum", "report")


def test_a_row_that_a_recipe_does_not_have_is_refused_with_those_it_has(recipe):
    said = recipe("mixhead/table7.sh", ROWS="mha mixhead-c", fails=True).stdout
    assert said.splitlines()[-1] == "no row 'mixhead-c' here; rows: mha mixhead-a mixhead-b mixhead-random avghead"


def test_a_recipe_without_its_corpus_says_what_to_get(recipe, tmp_path):
    said = recipe("mixhead/table2.sh", DRY_RUN="", ROWS="vanilla-mha", LOWRANK_DATA=tmp_path, fails=True).stdout
    assert "lacks wiki.train.tokens or train.txt" in said and "wikitext-2-v1.zip" in said
    assert 'LOWRANK_DATA=FOLDER, with them in FOLDER/wikitext-2, or PREPARE="--download"' in said
    assert not (tmp_path / "results.jsonl").exists()


def test_smoke_runs_take_the_first_and_the_last_row_and_change_sizes_alone(recipe):
    full, smoke = (commands(recipe("mixhead/table10.sh", SMOKE=value).stdout, "fairseq-train") for value in ("", "1"))
    assert len(full) == 15 and len(smoke) == 2
    for small, real in zip(smoke, (full[0], full[-1]), strict=True):
        assert small[1:3] == real[1:3] and small[5 : len(real)] == real[5:]  # but for where data and checkpoints are
        added = {word for word in small[len(real) :] if word.startswith("--")}
        assert added <= SIZES, added - SIZES
