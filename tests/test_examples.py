"""The recipes: every command that they would run is one that fairseq accepts."""

import gzip
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from published_tiny_bert import publish
from warm_python import python_of_shells

from experiments.recipes import sizes
from experiments.recipes.__main__ import main
from fairseq_lowrank.records.results import read_results

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
    if path.parent.name != "quickstart" and path.stem != "published_models"  # it trains nothing, and takes models
)


# Stands for Python in a recipe's shell: keeps what it is called with, and the rows on its standard input. Programs run.
KEEP = """() {
    if [ "$1" = -c ]; then "$WARM" "$@"; return; fi
    local call="$CALLS/$(printf %03d "$(ls "$CALLS" | wc -l)")"
    mkdir "$call"
    printf '%s\\n' "$@" >"$call/arguments"
    env -0 >"$call/environment"
    cat >"$call/rows"
    if [ "${*: -1}" = results ]; then echo "$RESULTS"; fi
}"""


def shell(name: str, *arguments: str, **variables) -> subprocess.CompletedProcess:
    """Run a recipe with nothing in its environment but these variables and where things are."""
    here = ("PATH", "HOME", "LOWRANK_DATA", "CUDA_VISIBLE_DEVICES", "DIRTY")
    environment = {key: os.environ[key] for key in here if key in os.environ}
    environment |= python_of_shells() | {key: str(value) for key, value in variables.items()}
    command = ["bash", ROOT / "examples" / name, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def count(monkeypatch):
    """The function that counts a model's parameters. Building all models takes minutes, so tests build none."""
    real = sizes.sizes
    names = ("total", "embeddings", "attention")
    monkeypatch.setattr(sizes, "sizes", lambda run: dict.fromkeys(names, sizes.vocab_size(run)))
    return real


@pytest.fixture
def recipe(tmp_path, capsys, count, warm_python):
    """``recipe(name, **variables)``: a dry run of a recipe, its engine in this process; its status and what it said."""
    calls = itertools.count()

    def run(name: str, *, fails: bool = False, **variables) -> subprocess.CompletedProcess:
        kept = tmp_path / f"calls-{next(calls)}"
        kept.mkdir()
        work = {"LOWRANK_WORK": tmp_path / "work", "RESULTS": tmp_path / "results.jsonl", "DRY_RUN": 1, "THREADS": 1}
        if name.startswith("own/"):
            work |= {"CORPUS": tmp_path, "SEEDS": 1}
        stands_in = {"CALLS": kept, "BASH_FUNC_python%%": KEEP, "WARM": warm_python / "python"}
        done = shell(name, **work | stands_in | variables)
        for call in sorted(kept.iterdir()):
            *_, command = arguments = (call / "arguments").read_text().splitlines()[2:]
            if done.returncode == 0 and command != "results":
                environment = dict(
                    text.split("=", 1) for text in (call / "environment").read_text().split("\0") if text
                )
                with open(call / "rows", newline="") as rows:
                    done.returncode = main(arguments, environment, rows)
                said = capsys.readouterr()
                done.stdout += said.err + said.out
        assert (done.returncode != 0) == fails, done.stdout
        return done

    return run


def commands(output: str, name: str) -> list[list[str]]:
    """The arguments of each printed command called `name`."""
    words = [shlex.split(line.removeprefix("+ ")) for line in output.splitlines() if line.startswith("+ ")]
    assert words
    return [command[1:] for command in words if command[0] == name]


def outermost(found: list[list[str]], seen: set) -> list[list[str]]:
    """Of commands that differ in paths and numbers alone, the first and the last; none if ``seen`` has one like them."""
    groups = {}
    for command in found:
        shape = tuple(word for word in command if not re.search(r"[\d/]", word))
        groups.setdefault(shape, []).append(command)
    new = [group for shape, group in groups.items() if shape not in seen]
    seen.update(groups)
    return [command for group in new for command in (group[0], group[-1])[: len(group)]]


@pytest.fixture(scope="module")
def seen():
    """Keep what was checked in one recipe: shapes of commands, and sets of flags that were converted."""
    return {"shapes": set(), "flags": set()}


@pytest.mark.parametrize("smoke", ["", "1"], ids=["full", "smoke"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_is_one_that_fairseq_accepts(recipe, name, smoke, plugins_leave, seen):
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    output = recipe(name, SMOKE=smoke).stdout
    training = commands(output, "fairseq-train")
    assert training
    for command in outermost(training, seen["shapes"]):
        # parsing builds a small model of these flags too
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=command)
        flags = (args.arch, frozenset(word for word in command if word.startswith("--")))
        if flags not in seen["flags"]:
            seen["flags"].add(flags)
            convert_namespace_to_omegaconf(args)
    for command in training:
        last = dict(pairwise(command))
        assert last["--seed"] == "1" or name.endswith("seeds.sh")
        assert last["--log-format"] == "json"
        ends = [int(value) for flag, value in pairwise(command) if flag == "--max-update"]
        assert smoke or ends == sorted(ends)  # a report takes a run that has fewer than its flags say for one cut short
    programs = ("fairseq-generate", "fairseq-eval-lm", "fairseq-validate", "python")
    scoring = [command for program in programs for command in commands(output, program)]
    # of what is fine-tuned the pre-training is not scored
    scored = [command for command in training if "--finetune-from-model" in command] or training
    assert len(scoring) >= len(scored)
    for command in outermost(commands(output, "fairseq-generate"), seen["shapes"]):
        options.parse_args_and_arch(options.get_generation_parser(), input_args=command)
    for command in outermost(commands(output, "fairseq-eval-lm"), seen["shapes"]):
        options.parse_args_and_arch(options.get_eval_lm_parser(), input_args=command)
    for command in outermost(commands(output, "fairseq-validate"), seen["shapes"]):
        options.parse_args_and_arch(options.get_validation_parser(), input_args=command)


@pytest.mark.parametrize("smoke", ["", "1"], ids=["full", "smoke"])
@pytest.mark.parametrize(("name", "corpus"), [("mixhead/table5.sh", "rte"), ("mixhead/table6.sh", "xquad")])
def test_a_published_bert_is_imported_and_gives_the_sizes(recipe, name, corpus, smoke, tmp_path):
    from fairseq import options

    folder = tmp_path / "tiny-bert"
    publish(folder)
    (folder / "model.safetensors").unlink()  # a dry run reads the configuration alone
    said = recipe(name, BERT=folder, SMOKE=smoke).stdout
    (imported,) = commands(said, "python")[:1]
    assert imported[:5] == ["-m", "experiments", "bert", "import", str(folder)]
    training = commands(said, "fairseq-train")
    output = imported[imported.index("--output") + 1]
    assert all(f"{output}/model.pt" in command for command in training)
    for command in training:
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=command)
        assert (args.encoder_layers, args.encoder_embed_dim, args.encoder_attention_heads) == (2, 16, 4)
        assert f"-{folder.name}/" in args.save_dir and args.max_positions == 12
    assert not smoke or f"{corpus}-from-{folder.name}" in training[0][0]


def test_a_recipe_without_a_published_model_refuses_bert(recipe, tmp_path):
    publish(tmp_path / "tiny-bert")
    said = recipe("brown/fine_tuning.sh", BERT=tmp_path / "tiny-bert", fails=True).stdout
    assert "no row of this recipe starts from a published BERT" in said
    assert "config.json does not exist" in recipe("mixhead/table5.sh", BERT=tmp_path, fails=True).stdout


@pytest.mark.usefixtures("quick_starts")
def test_a_published_bert_is_fine_tuned_in_a_smoke_run(slices, tmp_path):
    publish(tmp_path / "tiny-bert", max_position_embeddings=64)
    settings = {"SMOKE": 1, "ROWS": "mixhead-b@sst-2", "LOWRANK_DATA": slices, "BERT": tmp_path / "tiny-bert"}
    settings |= {"LOWRANK_WORK": tmp_path / "work", "RESULTS": tmp_path / "results.jsonl", "THREADS": 1}
    done = shell("mixhead/table5.sh", **settings)
    assert done.returncode == 0, done.stdout
    [line] = read_results(tmp_path / "results.jsonl")
    assert (line["table"], line["row"], line["task"]) == ("table5-tiny-bert", "mixhead-b", "sst-2")
    # two layers of four projections without biases, and Mixhead B of four heads of size 4
    assert line["attention_parameters"] == 2 * (4 * 16 * 16 + 2 * 4 * 4)
    assert line["corpus"] == "sentence-polarity-from-tiny-bert" and 0 <= line["value"] <= 100


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if "translation_rows" in (ROOT / "examples" / name).read_text()]
)
def test_a_search_of_your_own_reaches_every_translation(recipe, name):
    searches = commands(recipe(name, GENERATE="--beam 7").stdout, "fairseq-generate")
    assert searches and all(search.count("--beam") == 1 and "7" in search for search in searches)


def test_rows_of_an_own_comparison_are_any_methods_with_their_options(recipe):
    rows = "mha gain gqa --key-value-heads 2 mixhead-b --mixing-lr-scale 4 --head-mixing-normalization columns"
    trained = commands(recipe("own/compare.sh", ROWS=rows, HEADS=4).stdout, "fairseq-train")
    chosen = [" ".join(words[words.index("--attention") : words.index("--arch")]) for words in trained]
    assert chosen == [
        "--attention mha",
        "--attention gain --mixing-lr-scale 4",
        "--attention gqa --key-value-heads 2",
        "--attention mixhead-b --mixing-lr-scale 4 --head-mixing-normalization columns",
    ]
    folders = [words[words.index("--save-dir") + 1] for words in trained]
    assert "/gqa-key-value-heads-2-seed1-" in folders[2]
    refused = recipe("own/compare.sh", ROWS="mha 2 --key-value-heads", fails=True).stdout
    assert "ROWS: '2' is not a method. Choose from mha " in refused


def test_an_own_comparison_prints_its_tables_in_a_format(recipe):
    said = recipe("own/compare.sh", FORMAT="latex", ROWS="mha mixhead-a", SEEDS="1 2").stdout
    assert len(commands(said, "fairseq-train")) == 4
    [report], [compare] = commands(said, "python"), commands(said, "fairseq-lowrank")
    assert report[:3] == ["-m", "experiments", "report"] and compare[0] == "compare"
    assert report[-2:] == compare[-2:] == ["--format", "latex"]
    assert "FORMAT=pdf: expected latex or markdown" in recipe("own/compare.sh", FORMAT="pdf", fails=True).stdout


def test_a_trial_of_an_own_comparison_trains_one_seed(recipe):
    trained = commands(recipe("own/compare.sh", SMOKE=1, SEEDS="").stdout, "fairseq-train")
    assert [words[words.index("--seed") + 1] for words in trained] == ["1", "1"]


def test_an_own_comparison_takes_one_seed_and_rows_in_several_lines(recipe):
    said = recipe("own/compare.sh", SEED=4, SEEDS="", ROWS="mha\ngqa\n  --key-value-heads 2\n").stdout
    chosen = [(flags["--attention"], flags["--seed"]) for flags in last_flags(said, "fairseq-train")]
    assert chosen == [("mha", "4"), ("gqa", "4")]


def test_a_figure_of_two_tables_takes_all_of_its_rows(recipe):
    assert (
        "ROWS=mha: figure 3 has fixed rows of two tables. Remove ROWS."
        in recipe("mixhead/fig3.sh", ROWS="mha", fails=True).stdout
    )


@pytest.fixture(scope="session")
def slices(corpus, tmp_path_factory):
    """A folder of corpora as the recipes find them, the first lines of each."""
    root = tmp_path_factory.mktemp("corpora")
    for name, counts in {"multi30k": (400, 40), "brown": (600, 60), "sentence-polarity": (40, 40)}.items():
        (root / name).mkdir()
        for file in corpus(name).glob("*.gz"):
            lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
            (root / name / file.name).write_bytes(
                gzip.compress(b"".join(lines[: counts[not file.name.startswith("train")]]))
            )
    return root


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    "name, row, metric, prepare",
    [
        pytest.param(
            *("multi30k/compare.sh", "mixhead-b-h32", "sacrebleu", "--pieces 300"), marks=pytest.mark.grid
        ),  # translations for real: test_quickstart.py
        ("brown/compare.sh", "mhe-mul", "perplexity", ""),
    ],
)
def test_a_smoke_run_ends_in_one_line_and_is_not_run_twice(slices, tmp_path, name, row, metric, prepare):
    settings = {"SMOKE": 1, "ROWS": row, "LOWRANK_DATA": slices, "PREPARE": prepare, "THREADS": 1}
    settings |= {"LOWRANK_WORK": tmp_path / "work", "RESULTS": tmp_path / "results.jsonl"}
    done = shell(name, **settings)
    assert done.returncode == 0, done.stdout
    [line] = read_results(tmp_path / "results.jsonl")
    assert (line["row"], line["metric"], line["smoke"]) == (row, metric, True)
    assert done.stdout.splitlines()[-1].endswith(f"parameters, smoke run), in {tmp_path / 'results.jsonl'}")
    assert line["updates"] > 0 and line["value"] >= 0 and line["attention_parameters"] < line["parameters"]
    assert line["machine"]["threads"] == 1 and line["alone"] is False and len(line["commit"]) >= 5
    log = gzip.decompress((tmp_path / line["log"]).read_bytes()).decode()
    assert log.startswith("+ fairseq-train $LOWRANK_WORK/data/") and str(tmp_path) not in log
    assert f"{row} (seed 1): done already" in shell(name, **settings).stdout
    assert len(read_results(tmp_path / "results.jsonl")) == 1


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
    one_billion = {"ROWS": "baevski-mha baevski-mixhead-a baevski-mixhead-b"}
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=2, **one_billion).stdout, 2) == {65536}
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=5, **one_billion).stdout, 5) == {61440}
    assert tokens_per_update(recipe("mixhead/table3.sh", GPUS=8, N=512, **one_billion).stdout, 8) == {65536}
    assert tokens_per_update(recipe("mixhead/table2.sh", GPUS=4, ROWS="vanilla-mha vanilla-mixhead-b").stdout, 4) == {
        32768
    }
    for length in ("0", "long"):
        refused = recipe("mixhead/table3.sh", N=length, fails=True)
        assert f"N={length}: expected the number of tokens in a block\n" in refused.stdout


def test_lm1b_follows_the_schedule_of_baevski_and_auli(recipe):
    rows = "baevski-mha baevski-mixhead-a baevski-mixhead-b"
    for command in commands(recipe("mixhead/table3.sh", ROWS=rows).stdout, "fairseq-train"):
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


def last_flags(output: str, name: str) -> list[dict[str, str]]:
    """Of each printed command called `name`, the value that counts of each flag."""
    return [
        {flag: value for flag, value in pairwise(command) if flag.startswith("--")}
        for command in commands(output, name)
    ]


@pytest.mark.parametrize("name", ["fig1", "fig3"])
def test_fixed_heads_are_trained_and_tested_on_single_sentences_of_256_pieces_at_most(recipe, name):
    said = recipe(f"fixedhead/{name}.sh").stdout
    for command in last_flags(said, "fairseq-train") + last_flags(said, "fairseq-eval-lm"):
        assert (command["--sample-break-mode"], command["--shorten-method"]) == ("eos", "truncate")
        assert command["--tokens-per-sample"] == "256" and command.get("--context-window", "0") == "0"
    assert "lm1b-all-heldout-bpe32000" in said


def test_the_sizes_of_both_curves_of_figure_1_are_printed(recipe, count, monkeypatch):
    monkeypatch.setattr(sizes, "sizes", count)
    said = recipe("fixedhead/fig1.sh", ROWS="d256-h8-mha d512-h8-mha h70-fixedhead").stdout
    found = {line.split()[0]: line.split()[1:] for line in said.splitlines() if re.match(r"(d\d+-)?h\d+-", line)}
    # 32,008 · d tied embeddings; 6 layers of 4·d·h·d_k + 8·d² weights with their biases and norms, and the last norm
    assert found["d256-h8-mha"] == ["12,933,120", "4,739,072", "1,579,008"]
    assert found["d512-h8-mha"][:2] == ["35,303,424", "18,915,328"]
    assert found["h70-fixedhead"][:2] == ["25,158,528", "16,964,480"]


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig3", "fig4"])
def test_the_vocabulary_bottleneck_is_the_loss_on_blocks_with_learned_positions(recipe, name):
    def run(**variables):
        return recipe(f"vocabulary_bottleneck/{name}.sh", SMOKE=1, **variables)

    said = run().stdout
    assert {command["--context-window"] for command in last_flags(said, "fairseq-eval-lm")} == {"0"}
    assert all("--decoder-learned-pos" in command for command in commands(said, "fairseq-train"))
    said = run(POSITIONS="sinusoidal").stdout
    assert f"{name}-sinusoidal/" in said and "--decoder-learned-pos" not in said
    assert run(POSITIONS="none", fails=True).stdout == "POSITIONS=none: expected learned or sinusoidal\n"


def test_a_work_folder_is_made_absolute_or_refused_where_fairseq_would_split_it(recipe):
    said = recipe("brown/compare.sh", LOWRANK_WORK="out").stdout
    for command in commands(said, "fairseq-train"):
        assert command[command.index("--save-dir") + 1].startswith(f"{os.getcwd()}/out/runs/")
    for name in ("/tmp/a,b", "/tmp/a:b"):
        refused = shell("brown/compare.sh", LOWRANK_WORK=name, DRY_RUN=1)
        assert refused.returncode == 2
        assert refused.stdout.startswith(f"LOWRANK_WORK={name}: expected a folder without ',' and ':'")


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path, monkeypatch):
    for package in ("fairseq", "fairseq_lowrank"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = shell("brown/compare.sh", DRY_RUN=1, ROWS="mha", LOWRANK_WORK=tmp_path)
    assert done.returncode == 0 and "+ fairseq-train" in done.stdout, done.stdout


def test_without_a_python_the_message_says_what_makes_one(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in ("bash", "sh", "dirname", "env", "nproc", "tr", "sed", "cat"):
        (bare / tool).symlink_to(shutil.which(tool))
    for script in ("examples/brown/compare.sh", "scripts/prepare.sh"):
        done = subprocess.run(
            ["bash", tmp_path / script, *(["brown"] if script.startswith("scripts") else [])],
            env={"PATH": str(bare), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr == "torch or fairseq is not installed. Run scripts/setup.sh first.\n"


def test_the_two_parts_of_table_2_have_rows_of_their_own(recipe):
    assert (
        "ROWS=h8-fixedhead: expected PART=A or PART=B"
        in recipe("fixedhead/table2.sh", ROWS="h8-fixedhead", fails=True).stdout
    )
    said = recipe("fixedhead/table2.sh", ROWS="h8-fixedhead", PART="A").stdout
    assert "--encoder-attention-heads 8 --head-dim 128" in said


def test_what_a_paper_trains_twice_is_pretrained_once(recipe):
    def folder(name):
        said = commands(recipe(f"fixedhead/{name}.sh").stdout, "fairseq-train")
        return {command[command.index("--save-dir") + 1] for command in said if "d1024-h16-" in " ".join(command)}

    pretrained = [{one for one in folder(name) if "/fixedhead-pretraining/" in one} for name in ("table1", "fig2")]
    assert pretrained[0] == pretrained[1] and len(pretrained[0]) == 2  # at length 128, then 512


def test_an_update_that_several_gpus_make_larger_is_announced(recipe):
    assert (
        "has 4096 tokens more or fewer than the 4096 of the recipe" in recipe("mixhead/concatenated.sh", GPUS=4).stdout
    )
    assert "more or fewer" not in recipe("mixhead/concatenated.sh", GPUS=2).stdout


def test_translations_mix_where_the_released_code_does(recipe):
    for name, rows in (("table4", "h4-mha h4-mixhead-b"), ("concatenated", "mha mixhead-b")):
        for sites, expected in (("", [None, "encoder,decoder"]), ("all", [None, None])):
            said = recipe(f"mixhead/{name}.sh", ROWS=rows, SITES=sites).stdout
            found = last_flags(said, "fairseq-train")
            assert [command.get("--attention-sites") for command in found] == expected
            assert (f"/mixhead-{name}-all-sites/" in said) == (sites == "all")
    refused = recipe("mixhead/table4.sh", SITES="cross", fails=True)
    assert refused.stdout == "SITES=cross: expected all, or encoder,decoder\n"


def test_bert_sees_128_tokens_in_nine_tenths_of_the_updates(recipe):
    said = recipe("fixedhead/table2.sh", PART="A", ROWS="h8-fixedhead").stdout
    first, second = [one for one in last_flags(said, "fairseq-train") if one["--task"] == "bert_pretraining"]
    assert (first["--tokens-per-sample"], first["--max-update"]) == ("128", "900000")
    assert (second["--tokens-per-sample"], second["--max-update"]) == ("512", "1000000")
    assert second["--restore-file"] == f"{first['--save-dir']}/checkpoint_last.pt" and "--reset-dataloader" in said
    sequences = [
        int(one["--max-tokens"]) * int(one["--update-freq"]) // int(one["--tokens-per-sample"])
        for one in (first, second)
    ]
    assert sequences == [256, 256]


def test_a_flag_with_a_space_reaches_the_command(recipe, tmp_path):
    script = tmp_path / "spaces.sh"
    script.write_text(
        f"source {ROOT}/examples/common.sh\nPAPER=own TABLE=spaces CORPUS=brown COMMON=(--x 'a b')\n"
        "row mha --model-overrides '{}' --y 'c  d' ''\nlanguage_model_rows\n"
    )
    (command,) = commands(recipe(str(script)).stdout, "fairseq-train")
    assert command[command.index("--y") + 1 :][:2] == ["c  d", ""] and command[command.index("--x") + 1] == "a b"


def test_seven_networks_are_trained_with_five_seeds_each(recipe):
    def seeds(**variables):
        said = recipe("vocabulary_bottleneck/seeds.sh", **variables).stdout
        # and scored alike: mean and spread are over what was scored with the same flags
        scoring = commands(said, "fairseq-eval-lm")
        assert {tuple(command[command.index("--context-window") :]) for command in scoring} == {
            ("--context-window", "400", "--max-tokens", "2048", "--path", command[-3], "--context-window", "0")
            for command in scoring
        }
        return Counter(command["--seed"] for command in last_flags(said, "fairseq-train"))

    assert seeds() == dict.fromkeys("12345", 7)
    assert seeds(SEED=3) == seeds(SEEDS=3) == {"3": 7}


def test_table_9_has_one_window_of_context_at_every_length(recipe):
    def windows(**variables):
        said = recipe("mixhead/table9.sh", **variables).stdout
        return {command["--context-window"] for command in last_flags(said, "fairseq-eval-lm")}

    assert windows() == {"20"} and windows(WINDOW=0) == {"0"}
    assert windows(EVALUATE="--context-window 5") == {"5"}
    for window in ("32", "-1", "some"):
        refused = recipe("mixhead/table9.sh", WINDOW=window, fails=True)
        assert refused.stdout.startswith(f"WINDOW={window}: expected a number of tokens from 0 to 31")


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
    for off in ("", "0"):
        said = recipe(**four, DRY_RUN=off, GPUS=3, CUDA_VISIBLE_DEVICES="1,3", fails=True).stdout
        assert said == "GPUS=3: expected a number up to 2, the GPUs that are here\n"
    command = ["bash", "-c", 'source "$0" && echo "$CUDA_VISIBLE_DEVICES"', ROOT / "examples" / "common.sh"]
    chosen = {"PATH": four["PATH"], "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3,1,0", "GPUS": "2"}
    assert subprocess.run(command, env=chosen, capture_output=True, text=True).stdout == "3,1\n"


def test_wmt14_has_the_learning_rate_of_fairseqs_recipe_for_each_size(recipe):
    rates = {}
    for command in commands(recipe("mhe/wmt14.sh").stdout, "fairseq-train"):
        rates.setdefault(command[command.index("--arch") + 1], set()).add(command[command.index("--lr") + 1])
        assert command.count("--lr") == 1
    assert rates == {"lowrank_transformer_wmt_en_de": {"0.0007"}, "lowrank_transformer_wmt_en_de_big": {"0.0005"}}


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("data", ["", "missing"])
def test_a_recipe_without_its_corpus_says_what_to_get_and_leaves_nothing_behind(tmp_path, data):
    work = {"LOWRANK_WORK": tmp_path / "work", "RESULTS": tmp_path / "results.jsonl"}
    done = shell("mixhead/table2.sh", ROWS="vanilla-mha", LOWRANK_DATA=tmp_path / data, **work)
    assert done.returncode == 2
    said = done.stdout.splitlines()[-1]
    assert "lacks wiki.train.tokens or train.txt" in said and "wikitext-2-v1.zip" in said
    assert 'LOWRANK_DATA=FOLDER, with the files in FOLDER/wikitext-2, or PREPARE="--download"' in said
    assert not (tmp_path / "results.jsonl").exists() and not (tmp_path / "work" / "runs").exists()


def test_costs_of_gpus_that_are_not_here_are_printed(recipe):
    one, eight = (recipe("mixhead/table3.sh", COST=1, GPUS=gpus, ROWS="baevski-mha").stdout for gpus in (1, 8))
    assert " hours on one H100, not on a CPU" in one
    tokens = re.match(r"baevski-mha \(seed 1\): (.*) tokens, (.*) hours on one H100", one)
    assert f"{tokens[1]} tokens, {tokens[2]} hours on one H100, " in eight and " on 8, not on a CPU" in eight


@pytest.mark.parametrize("name", ["mixhead/table4.sh", "mixhead/table3.sh"])
def test_time_in_the_head_of_a_recipe_is_its_cost(recipe, plugins_leave, name):
    said = re.search(
        r"^# Time: (.*) trainings, (?:about|at least) (.*) hours on one H100",
        (ROOT / "examples" / name).read_text(),
        re.M,
    )
    sums = re.search(
        r"^(.*) trainings \(estimates\): .* tokens, (.*?) hours on one H100", recipe(name, COST=1).stdout, re.M
    )
    assert said.groups() == sums.groups()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_explains_itself_and_refuses_arguments(name):
    shown = shell(name, "--help")
    head = (ROOT / "examples" / name).read_text().splitlines()[1].removeprefix("# ")
    assert shown.returncode == 0 and shown.stdout.startswith(head) and "  SMOKE=1 " in shown.stdout
    assert "fairseq-train" not in shown.stdout.replace("flags of fairseq-train", "")
    assert "\nRows:\n  " in shown.stdout or name == "own/compare.sh"  # whose rows depend on the corpus
    every_kind = ["mha"], ["--rows", "mha"], ["--help", "mha"], [""]
    for wrong in every_kind if name == RECIPES[0] else every_kind[:1]:  # examples/common.sh reads them
        refused = shell(name, *wrong)
        assert refused.returncode == 2 and refused.stdout.count("\n") == 1
        assert refused.stdout.startswith(f"{Path(name).name}: unknown argument '{wrong[0]}'")


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"SMOKE": "yes"}, "SMOKE=yes: expected 1, or 0 for off"),
        ({"DRY_RUN": "2"}, "DRY_RUN=2: expected 1, or 0 for off"),
        ({"ALONE": "perhaps"}, "ALONE=perhaps: expected 1, or 0 for off"),
        ({"SEED": "abc"}, "SEED=abc: expected a whole number from 0 to 2147483647"),
        ({"SEED": "-1"}, "SEED=-1: expected a whole number from 0 to 2147483647"),
        ({"SEED": "99999999999"}, "SEED=99999999999: expected a whole number from 0 to 2147483647"),
        ({"SEEDS": "1 b"}, "SEEDS=b: expected a whole number from 0 to 2147483647"),
        ({"JOBS": "all"}, "JOBS=all: expected a whole number from 1"),
        ({"JOBS": "2", "ALONE": "1"}, "ALONE=1: JOBS=2 trains rows at the same time. Set JOBS=1"),
        ({"THREADS": "0"}, "THREADS=0: expected a whole number from 1"),
        ({"THREADS": "many"}, "THREADS=many: expected a whole number from 1"),
        ({"EXTRA": "--lr '1"}, "EXTRA=--lr '1: no closing quotation"),
        ({"EXTRA": "--no-save"}, "EXTRA=--no-save: --no-save removes the checkpoint to score"),
        ({"EXTRA": "--checkpoint-suffix=x"}, "--checkpoint-suffix removes the usual name of the checkpoint to score"),
        (
            {"EXTRA": "--log-format=simple"},
            "EXTRA=--log-format=simple: --log-format removes the log",
        ),
        ({"EXTRA": "--see 3"}, "EXTRA=--see 3: the recipe sets --seed. Use SEED"),
        ({"GENERATE": "--qui"}, "GENERATE=--qui: --quiet leaves out the hypotheses to score"),
        ({"EXTRA": "--lr 1 --seed=3"}, "EXTRA=--lr 1 --seed=3: the recipe sets --seed. Use SEED"),
        (
            {"ROWS": "mha mixhead-c"},
            "no row 'mixhead-c' here. Choose from mha mixhead-a mixhead-b mixhead-random avghead",
        ),
        ({"RESULTS": "/"}, "RESULTS=/: is a folder"),
        ({"METRIC": "bleu"}, "METRIC=bleu: expected perplexity or loss"),
        ({"EVALUATE": "--gen-subset valid"}, "EVALUATE=--gen-subset valid: --gen-subset scores another split than"),
        (
            {"GENERATE": "--beam 4 --path=a.pt"},
            "GENERATE=--beam 4 --path=a.pt: --path scores another checkpoint. Remove",
        ),
        ({"EVALUATE": "--context-window '1"}, "EVALUATE=--context-window '1: no closing quotation"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(recipe, variables, message):
    refused = recipe("mixhead/table7.sh", fails=True, **variables)
    assert refused.returncode == 2 and message in refused.stdout and refused.stdout.count("\n") == 1


def test_language_models_may_be_scored_quietly(recipe):
    evaluated = commands(recipe("mixhead/table7.sh", EVALUATE="--quiet").stdout, "fairseq-eval-lm")
    assert evaluated and all(command[-1] == "--quiet" for command in evaluated)


def test_0_switches_a_trial_off(recipe):
    off, unset = (recipe("mixhead/table7.sh", SMOKE=value).stdout for value in ("0", ""))
    assert off == unset and "--max-update 286000" in off


def test_smoke_runs_take_the_first_and_the_last_row_and_change_sizes_alone(recipe):
    full, smoke = (commands(recipe("mixhead/table10.sh", SMOKE=value).stdout, "fairseq-train") for value in ("", "1"))
    assert len(full) == 15 and len(smoke) == 2
    for small, real in zip(smoke, (full[0], full[-1]), strict=True):
        assert small[1:3] == real[1:3] and small[5] == real[5] == "--log-interval"  # which fits an epoch
        assert small[7 : len(real)] == real[7:]  # but for where data and checkpoints are
        added = {word for word in small[len(real) :] if word.startswith("--")}
        assert added <= SIZES, added - SIZES


@pytest.mark.parametrize(
    ("name", "table"),
    [("brown/compare.sh", "compare"), ("brown/fine_tuning.sh", "fine-tuning"), ("multi30k/compare.sh", "compare")],
)
def test_recorded_lines_stand_where_the_recipe_declares_their_rows(recipe, name, table):
    paper = name.split("/")[0]
    trained = commands(recipe(name).stdout, "fairseq-train")
    folders = [Path(command[command.index("--save-dir") + 1]).parent for command in trained]
    declared = [folder.name.split("-seed")[0] for folder in folders if folder.parent.name == f"{paper}-{table}"]
    recorded = [line for line in read_results(ROOT / "results" / f"{paper}.jsonl") if line["table"] == table]
    assert recorded
    for line in recorded:
        row = f"{line['row']}@{line['task']}" if "task" in line else line["row"]
        assert line["position"] == declared.index(row)
