"""Rows, run one after another: skipped, shared with other processes, scored, and recorded in one line each."""

import gzip
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import __main__ as experiments
from experiments.papers import comparison
from experiments.recipes import engine as engines
from experiments.recipes import training
from experiments.recipes.engine import RunLocked
from experiments.recipes.recipe import Recipe, differences, effective_flags, last_value, records, smoke_corpus
from fairseq_lowrank import cli
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import provenance
from fairseq_lowrank.records.contrasts import compare_rows
from fairseq_lowrank.records.results import read_results

TRAINED = ["prepare.sh iwslt14", "fairseq-train"]
SHORT = {"generate": ("--beam", "1", "--max-len-b", "5")}


def test_a_translation_row_becomes_one_line_with_its_log_and_is_not_run_again(
    recipe, settings, engine, commands, tmp_path, capsys
):
    own, settings = recipe(mha="--attention mha"), settings(valid=True, **SHORT)
    engine(own, settings).run_rows()
    assert commands.calls == [*TRAINED, "fairseq-generate", "fairseq-generate"]
    [line] = read_results(settings.results)
    assert (line["paper"], line["table"], line["row"], line["seed"]) == ("own", "tiny", "mha", 1)
    assert line["position"] == 0
    assert (line["metric"], line["updates"], line["architecture"]) == ("sacrebleu", 3, "lowrank_transformer")
    assert line["valid_tokenised_bleu"] >= 0 and line["alone"] is False
    head, now = (commit.removesuffix("-dirty") for commit in (line["commit"], provenance.commit(own.root)))
    assert head == now and line["machine"]["cores"] >= 1
    assert [point.keys() for point in line["curve"]] == [{"updates", "train_loss", "valid_loss"}]
    log = gzip.decompress((settings.results.parent / line["log"]).read_bytes()).decode()
    assert line["log"] == "logs/own-tiny/mha-seed1.log.gz" and "done training" in log and str(tmp_path) not in log
    engine(own, settings).run_rows()
    assert len(read_results(settings.results)) == 1 and "mha (seed 1): done already, see" in capsys.readouterr().err


def test_a_row_whose_flag_the_common_flags_replace_is_refused(recipe):
    with pytest.raises(ValueError, match=r"row 'wide' has --lr 0\.5, and COMMON has --lr 0\.01, which wins"):
        recipe(mha="--attention mha --lr 0.01", wide="--attention mha --lr 0.5")


@pytest.mark.parametrize("kind", ["translation", "language-model"])
def test_a_dry_run_prints_commands_and_touches_nothing(recipe, settings, tmp_path, capsys, kind):
    own, settings = recipe(kind, mha="--attention mha"), settings(dry_run=True, valid=True)
    run = own.run(own.rows["mha"], settings)
    run.folder.mkdir(parents=True)
    for name in ("generate-test.out", "generate-valid.out", "evaluate-test.out"):
        (run.folder / name).write_text("kept")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    engines.RecipeEngine(own, settings).run_rows()
    engines.RecipeEngine(own, settings).spectra("spectra", ["mha"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    scored = ["fairseq-generate"] * 2 if kind == "translation" else ["fairseq-eval-lm"]
    assert said == ["scripts/prepare.sh", "fairseq-train", *scored, "fairseq-lowrank"]


def test_data_binarised_elsewhere_is_scored_on_its_own_targets(recipe, settings, engine, commands, translation_data):
    own = recipe(mha="--attention mha")
    own.rows = {name: replace(row, corpus=str(translation_data)) for name, row in own.rows.items()}
    engine(own, settings(**SHORT)).run_rows()
    assert commands.calls == ["fairseq-train", "fairseq-generate"]
    [line] = read_results(settings().results)
    assert line["corpus"] == translation_data.name and line["text"] == "tokenised" and line["value"] >= 0


def test_fixed_mixing_is_no_parameter(recipe, settings, engine, translation_data):
    rows = {name: f"--attention {name}" for name in ("mixhead-a", "mixhead-random")}
    own, settings = recipe(**rows), settings(**SHORT)
    engine(own, settings).run_rows()
    counts = {line["row"]: line["attention_parameters"] for line in read_results(settings.results)}
    # an encoder's, a decoder's and a cross attention of width 16; 2 heads
    assert counts == {"mixhead-random": 3 * 4 * 16 * 16, "mixhead-a": 3 * 4 * 16 * 16 + 3 * 2 * 2}


def test_a_language_model_is_scored_by_its_perplexity(
    recipe, settings, engine, commands, tmp_path, language_model_data
):
    own, settings = recipe("language-model", mha="--attention mha"), settings()
    tiny = tmp_path / "work" / "data" / "iwslt14"
    (tiny / "bin").unlink()
    (tiny / "bin").symlink_to(language_model_data)
    engine(own, settings).run_rows()
    [line] = read_results(settings.results)
    assert commands.calls[2:] == ["fairseq-eval-lm"] and line["metric"] == "perplexity"
    assert line["value"] > 1 and line["valid_perplexity"] > 1 and line["attention_parameters"] == 4 * 16 * 16


@pytest.fixture
def quick(commands, monkeypatch):
    """Trainings and scores that only leave what the engine looks at."""

    def execute(words, log, keep=None, patches=""):
        commands.calls.append(words[0])
        if words[0] in commands.fails:
            raise RuntimeError(words[0])
        if words[0] == "fairseq-train":
            checkpoints = log.parent / "checkpoints"
            checkpoints.mkdir(exist_ok=True)
            for name in ("best", "last"):
                (checkpoints / f"checkpoint_{name}.pt").touch()
            log.write_text(commands.log)

    def score(kind, run, settings, execute):
        execute(["score"], run.folder / "score.out")
        return {"metric": "sacrebleu", "value": commands.value}

    def tool(words):
        commands.calls.append(words[0])
        return 0

    commands.fails, commands.value, commands.log = (), 1.0, LOG
    monkeypatch.setattr(type(commands), "__call__", lambda self, *arguments, **options: execute(*arguments, **options))
    monkeypatch.setattr(engines, "score", score)
    monkeypatch.setattr(engines, "parameters", lambda *_: {"parameters": 1000, "attention_parameters": 1})
    monkeypatch.setattr(cli, "main", tool)
    monkeypatch.setattr(experiments, "main", tool)
    return commands


LOG = """\
+ fairseq-train
x | INFO | train | {"epoch": 1, "train_loss": "9.5", "train_wpb": "1000", "train_num_updates": "3", "train_train_wall": "10"}
"""


def test_a_run_that_was_interrupted_after_training_is_only_scored(recipe, settings, engine, quick):
    own = recipe(mha="--attention mha")
    quick.fails = ("score",)
    with pytest.raises(RuntimeError):
        engine(own, settings()).run_rows()
    quick.fails = ()
    quick.calls.clear()
    engine(own, settings()).run_rows()
    assert quick.calls == ["prepare.sh iwslt14", "score"]


def test_a_row_recorded_under_other_flags_is_skipped_and_they_are_named(recipe, settings, engine, quick, capsys):
    own = recipe(mha="--attention mha")
    engine(own, settings()).run_rows()
    quick.calls.clear()
    engine(own, settings(extra=("--lr", "1e-7", "--log-interval", "9"))).run_rows()
    assert quick.calls == [] and "done already with other flags: --lr 1e-7 (0.01), see" in capsys.readouterr().err


def test_a_row_that_was_scored_otherwise_or_is_of_another_corpus_is_skipped_and_that_is_said(
    recipe, settings, engine, quick, capsys
):
    own = recipe(mha="--attention mha")
    engine(own, settings()).run_rows()
    [line] = read_results(settings().results)
    assert line["scoring"] == "--beam 5"
    engine(own, settings(generate=("--beam", "1"))).run_rows()
    assert "done already scored with --beam 5, not with --beam 1, see" in capsys.readouterr().err
    other = recipe(mha="--attention mha")
    other.rows = {name: replace(row, corpus="multi30k") for name, row in other.rows.items()}
    engine(other, settings(extra=("--lr", "1"))).run_rows()
    assert "done already with other flags: --lr 1 (0.01), on iwslt14, not on multi30k, see" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_not_recorded(recipe, settings, engine, quick, value):
    quick.value = value
    with pytest.raises(
        ValueError, match=rf"mha \(seed 1\): nothing is recorded: value is {value}, expected a finite number"
    ):
        engine(recipe(mha="--attention mha"), settings()).run_rows()
    assert not settings().results.exists()


def test_rows_at_which_another_process_is_are_left_to_it(recipe, settings, engine, quick, capsys):
    own, settings = recipe(mha="--attention mha", mqa="--attention mqa"), settings()
    with training.lock(own.run(own.rows["mha"], settings).folder):
        engine(own, settings).run_rows()
    assert [line["row"] for line in read_results(settings.results)] == ["mqa"]
    assert "mha (seed 1): another process is running this row" in capsys.readouterr().err


def test_a_row_that_another_process_ended_meanwhile_gets_no_second_line(recipe, settings, engine, quick):
    own, settings = recipe(mha="--attention mha"), settings()
    late = engine(own, settings)
    prepare = late.prepare

    def slow_prepare(corpus):
        engine(own, settings).run_rows()
        prepare(corpus)

    late.prepare = slow_prepare
    late.run_rows()
    assert len(read_results(settings.results)) == 1


def test_a_half_written_line_blocks_no_row(recipe, settings, engine, quick, capsys):
    own, settings = recipe(mha="--attention mha"), settings()
    settings.results.parent.mkdir()
    settings.results.write_text('{"paper": "own", "tab')
    engine(own, settings).run_rows()
    assert [line["row"] for line in read_results(settings.results)] == ["mha"]
    assert f"{settings.results}, line 1: not JSON" in capsys.readouterr().err


def leave_checkpoints(run) -> None:
    run.last.parent.mkdir(exist_ok=True)
    run.last.touch()
    run.best.touch()


def test_a_speed_is_marked_as_taken_alone_only_where_every_start_was(recipe, settings, engine, quick):
    own = recipe(mha="--attention mha")
    for name, starts in {"yes": (True,), "no": (False,), "partly": (False, True)}.items():
        chosen = settings(results=settings().results.parent / f"{name}.jsonl", extra=("--lr", f"0.0{len(name)}"))
        run = own.run(own.rows["mha"], chosen)
        run.folder.mkdir(parents=True)
        for alone in starts:
            training.record_start(run, type(chosen)(**vars(chosen) | {"alone": alone}), own.root)
            leave_checkpoints(run)
        run.log.write_text(LOG)
        training.write_manifest(run.folder, training.read_manifest(run.folder) | {"ended": True})
        engine(own, chosen).run_rows()
        assert read_results(chosen.results)[0]["alone"] is (name == "yes")


def test_a_training_that_went_on_elsewhere_names_every_place(recipe, settings, engine, quick, monkeypatch):
    own = recipe(mha="--attention mha")
    for places in (["One"], ["One", "One"], ["One", "Other"]):
        chosen = settings(
            results=settings().results.parent / f"{places}.jsonl", extra=("--lr", f"0.0{len(set(places))}{len(places)}")
        )
        run = own.run(own.rows["mha"], chosen)
        run.folder.mkdir(parents=True)
        for place in places:
            monkeypatch.setattr(training, "machine", lambda threads, place=place: {"cpu": place, "threads": threads})
            training.record_start(run, chosen, own.root)
            leave_checkpoints(run)
        run.log.write_text(LOG)
        training.write_manifest(run.folder, training.read_manifest(run.folder) | {"ended": True})
        engine(own, chosen).run_rows()
        [line] = read_results(chosen.results)
        assert line["machine"]["cpu"] == places[-1]
        assert [start["machine"]["cpu"] for start in line.get("earlier_starts", [])] == ["One"] * (len(set(places)) - 1)


def test_a_trial_is_no_real_run_nor_a_real_run_a_trial(recipe, settings, engine, quick):
    own = recipe(mha="--attention mha --max-update 3 --arch lowrank_transformer")
    for smoke in (True, False):
        engine(own, settings(smoke=smoke)).run_rows()
        engine(own, settings(smoke=smoke)).run_rows()
    assert [line["smoke"] for line in read_results(settings().results)] == [True, False]


def test_logs_of_different_runs_of_a_row_are_both_kept(recipe, settings, engine, quick):
    own, first = recipe(mha="--attention mha"), settings()
    engine(own, first).run_rows()
    other = settings(extra=("--lr", "0.1"), results=first.results.with_name("other.jsonl"))
    quick.log += "again\n"
    engine(own, other).run_rows()
    logs = [read_results(one.results)[0]["log"] for one in (first, other)]
    fingerprint = own.run(own.rows["mha"], other).fingerprint
    assert logs == ["logs/own-tiny/mha-seed1.log.gz", f"logs/own-tiny/mha-seed1-{fingerprint}.log.gz"]
    texts = [gzip.decompress((first.results.parent / log).read_bytes()) for log in logs]
    assert [b"again" in text for text in texts] == [False, True]


def test_kept_logs_name_no_folder_of_this_machine(recipe, settings, engine, quick):
    own, settings = recipe(mha="--attention mha"), settings()
    for place in (settings.work, own.root, sys.prefix, Path(sys.prefix).resolve()):
        quick.log += f"UserWarning in {place}/lib/module.py\n"
    engine(own, settings).run_rows()
    [line] = read_results(settings.results)
    text = gzip.decompress((settings.results.parent / line["log"]).read_bytes()).decode()
    said = [text.split("/lib")[0] for text in text.splitlines() if "UserWarning" in text]
    assert [text.split()[-1] for text in said] == ["$LOWRANK_WORK", "$ROOT", "$VIRTUAL_ENV", "$VIRTUAL_ENV"]


def test_spectra_train_rows_that_have_a_line_but_no_checkpoint_here(recipe, settings, engine, quick):
    own, settings = recipe(mha="--attention mha"), settings()
    quick.fails = ("fairseq-train",)
    with pytest.raises(RuntimeError):
        engine(own, settings).spectra("spectra", ["mha"])
    quick.fails = ()
    quick.calls.clear()
    assert engine(own, settings).spectra("spectra", ["mha"]) == 0
    assert quick.calls == [*TRAINED, "inspect"]
    quick.calls.clear()
    engine(own, settings).spectra("spectra", ["mha"])
    assert quick.calls == ["inspect"]
    with pytest.raises(ValueError, match=r"no row 'mqa' here\. Choose from mha"):
        engine(own, settings).spectra("spectra", ["mqa"])


def test_options_of_spectra_reach_the_command(recipe, settings, capsys):
    own, dry = recipe(mha="--attention mha"), settings(dry_run=True)
    assert engines.RecipeEngine(own, dry).spectra("spectra", ["--random-mixing", "mha"]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert "random-mixing" in said and "--labels mha --subset test" in said and "--spectrum" not in said
    folders = []
    for seed in (1, 2):
        engines.RecipeEngine(own, settings(dry_run=True, seed=seed)).spectra("spectra", ["mha"])
        folders.append(capsys.readouterr().err.split()[-1])
    assert folders[1] == f"{folders[0]}-seed2"
    engines.RecipeEngine(own, settings(dry_run=True, seeds=(2, 1))).spectra("spectra", ["mha"])
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == folders[::-1]


def test_results_that_cannot_be_opened_are_refused_before_training(recipe, settings, engine, commands, tmp_path):
    own, file = recipe(mha="--attention mha"), tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match=rf"{file}/results\.jsonl: "):
        engine(own, settings(results=file / "results.jsonl")).run_rows()
    with pytest.raises(UserError, match=rf"{file}/results\.jsonl: "):
        engine(own, settings(results=file / "results.jsonl")).run_at_once("declared")
    assert commands.calls == []


def test_rows_are_trained_for_each_results_file(recipe, settings, engine, quick):
    own, first = recipe(mha="--attention mha"), settings()
    other = settings(results=first.results.with_name("other.jsonl"))
    for one in (first, other, first, other):
        engine(own, one).run_rows()
    assert quick.calls.count("fairseq-train") == 2 and len(read_results(other.results)) == 1


def test_a_run_has_one_folder_for_each_spelling_of_its_results_file(recipe, settings, monkeypatch):
    own = recipe(mha="--attention mha")
    monkeypatch.chdir(own.root / "tests")
    folders = [
        {own.run(own.rows["mha"], settings(results=results and Path(results))).folder for results in spellings}
        for spellings in (
            (None, "../results/own.jsonl"),
            ("own.jsonl", "../tests/own.jsonl", Path("own.jsonl").absolute()),
        )
    ]
    assert [len(one) for one in folders] == [1, 1] and folders[0] != folders[1]


def test_a_checkpoint_of_other_code_is_refused_or_rerun(recipe, settings, engine, quick, monkeypatch):
    own, once = recipe(mha="--attention mha"), settings()
    quick.fails = ("score",)
    with pytest.raises(RuntimeError):
        engine(own, once).run_rows()
    quick.fails = ()
    quick.calls.clear()
    [theirs] = training.read_manifest(own.run(own.rows["mha"], once).folder)["starts"]
    monkeypatch.setattr(provenance, "code", lambda *_: "other")
    monkeypatch.setattr(provenance, "commit", lambda _: "now")
    with pytest.raises(UserError, match=f"commit {theirs['commit']}, .* commit now.* RERUN=1"):
        engine(own, once).run_rows()
    assert quick.calls == ["prepare.sh iwslt14"]
    engine(own, settings(rerun=True)).run_rows()
    assert quick.calls[1:] == ["prepare.sh iwslt14", "fairseq-train", "score"]
    [line] = read_results(once.results)
    assert line["commit"] == "now"
    earlier = own.run(own.rows["mha"], once).folder / "earlier" / "1"
    assert (
        training.read_manifest(earlier)["starts"] == [theirs] and (earlier / "checkpoints/checkpoint_best.pt").exists()
    )


def test_a_row_with_other_data_of_the_same_name_is_named(recipe, settings, engine, quick, capsys, translation_data):
    own = recipe(mha="--attention mha", gain="--attention gain")
    engine(own, settings(rows=("mha",))).run_rows()
    data = own.run(own.rows["mha"], settings()).bin
    data.unlink()
    shutil.copytree(translation_data, data)
    engine(own, settings(rows=("mha",))).run_rows()
    assert "other sentences" not in capsys.readouterr().err
    next(data.glob("test*.idx")).write_bytes(b"another test set")
    engine(own, settings()).run_rows()
    assert f"done already on other sentences or dictionaries than {data.parent} has now" in capsys.readouterr().err
    first, second = read_results(settings().results)
    assert first["data"] != second["data"]
    [table] = comparison.build_report([first, second], {})
    [contrast] = compare_rows([first, second], [("mha", "gain")], draws=1)
    for notes in (table["notes"], contrast.notes):
        assert any(note.startswith("Corpus iwslt14 was prepared again") for note in notes)


def test_a_start_that_left_no_checkpoint_does_not_count(recipe, settings, engine, quick, monkeypatch):
    own = recipe(mha="--attention mha")
    quick.fails = ("fairseq-train",)
    monkeypatch.setattr(provenance, "commit", lambda _: "a" * 40 + "-dirty")
    with pytest.raises(RuntimeError):
        engine(own, settings()).run_rows()
    quick.fails = ()
    monkeypatch.setattr(provenance, "code", lambda *_: "other")
    monkeypatch.setattr(provenance, "commit", lambda _: "b" * 40)
    monkeypatch.setenv("DIRTY", "0")
    engine(own, settings()).run_rows()
    [line] = read_results(settings().results)
    assert (line["commit"], line["code"]) == ("b" * 40, "other") and "earlier_starts" not in line


def test_a_commit_of_docs_keeps_a_training(recipe, settings, engine, quick, monkeypatch):
    own = recipe(mha="--attention mha")
    quick.fails = ("score",)
    with pytest.raises(RuntimeError):
        engine(own, settings()).run_rows()
    quick.fails = ()
    monkeypatch.setattr(provenance, "commit", lambda _: "another")
    engine(own, settings()).run_rows()
    assert quick.calls.count("fairseq-train") == 1 and len(read_results(settings().results)) == 1


def test_code_in_no_commit_is_refused_unless_asked_for(recipe, settings, engine, quick, monkeypatch):
    own = recipe(mha="--attention mha")
    monkeypatch.setattr(provenance, "commit", lambda _: "a" * 40 + "-dirty")
    monkeypatch.setenv("DIRTY", "")
    with pytest.raises(UserError, match="DIRTY=1"):
        engine(own, settings()).run_rows()
    assert not quick.calls  # a pre-training or a preparation can take days
    monkeypatch.setenv("DIRTY", "1")
    quick.fails = ("score",)
    with pytest.raises(RuntimeError):
        engine(own, settings()).run_rows()
    quick.fails = ()
    # a training that such code started stays refused
    monkeypatch.setattr(provenance, "commit", lambda _: "b" * 40)
    monkeypatch.setenv("DIRTY", "0")
    with pytest.raises(UserError, match="DIRTY=1"):
        engine(own, settings()).run_rows()
    monkeypatch.setenv("DIRTY", "1")
    engine(own, settings()).run_rows()
    line = read_results(settings().results)[-1]
    assert line["commit"].endswith("-dirty") and line["code"] == training.code_of(
        own.run(own.rows["mha"], settings()), own.root
    )


def test_code_is_the_files_of_the_package(tmp_path):
    def code(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return provenance.code(tmp_path)

    first = code(a="1")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").touch()
    assert code() == first and len({first, code(a="2"), code(b="1"), code(a="1")}) == 4


def test_patches_are_recorded_and_make_another_run(recipe, settings, engine, quick):
    own = recipe(mha="--attention mha")
    patched = settings(patches={"LOWRANK_ENABLE": "one,two"})
    assert own.run(own.rows["mha"], patched).folder != own.run(own.rows["mha"], settings()).folder
    engine(own, patched).run_rows()
    [line] = read_results(patched.results)
    assert line["patches"] == {"LOWRANK_ENABLE": "one,two"}


def test_an_argument_with_a_space_survives():
    sent = "2\0paper\0own\0" + "5\0row\0mha\0brown\0\0--x\0" + "3\0common\0--y\0a 'b c\0"
    found = list(records(sent))
    assert found == [["paper", "own"], ["row", "mha", "brown", "", "--x"], ["common", "--y", "a 'b c"]]
    assert effective_flags(["--y", "a b"]) != effective_flags(["--y", "a", "b"])


def test_preparations_of_another_form_of_a_corpus_are_refused(recipe, settings, engine, commands):
    own = recipe(mha="--attention mha")
    for flags, made in ((("--joined-dictionary",), "iwslt14-joined"), (("--output", "elsewhere"), "elsewhere")):
        with pytest.raises(ValueError, match=rf"makes {made}, and mha is trained on iwslt14\. Remove"):
            engine(own, settings(prepare=flags)).run_rows()
    # other data under the same name: a trial may be on such, a result not
    flags = ("--operations", "300", "--workers", "2")
    with pytest.raises(ValueError, match="300 --workers 2': --operations changes the data but not the name iwslt14"):
        engine(own, settings(prepare=flags)).run_rows()
    assert commands.calls == []
    trial = settings(prepare=("--pieces", "300"), smoke=True)
    engine(own, trial).prepare(own.run(own.rows["mha"], trial))
    assert commands.calls == ["prepare.sh multi30k-head500"]


def test_a_row_at_which_another_process_is_enters_no_spectra_or_report(recipe, settings, engine, quick):
    own, settings = recipe(mha="--attention mha"), settings()
    with training.lock(own.run(own.rows["mha"], settings).folder):
        for call in (lambda: engine(own, settings).report([]), lambda: engine(own, settings).spectra("s", ["mha"])):
            with pytest.raises(RunLocked, match=r"own tiny: another process is at mha \(seed 1\); call this again"):
                call()
    assert "report" not in quick.calls and "inspect" not in quick.calls
    assert engine(own, settings).report([]) == 0 and quick.calls[-1] == "report"


def test_a_run_is_named_for_every_flag_that_can_change_its_numbers(recipe, settings):
    own = recipe(mha="--attention mha")

    def folder(**changes):
        return own.run(own.rows["mha"], settings(**changes)).folder

    assert folder() == folder(extra=("--log-interval", "7", "--num-workers", "4", "--lr", "0.1", "--lr", "0.01"))
    others = [folder(extra=("--lr", "1")), folder(precision=("--bf16",)), folder(seed=2), folder(smoke=True)]
    assert len({folder(), *others}) == 5


@pytest.mark.parametrize(
    "flags, others, expected",
    [
        ("--lr 1 --lr 2", "--lr=2", ""),
        ("--lr 1", "--lr 2", "--lr 1 (2)"),
        ("--fp16", "", "--fp16 (no --fp16)"),
        ("", "--fp16", "no --fp16 (given)"),
        ("", "--dropout 0.1", "no --dropout (0.1)"),
        ("--save-dir a --log-interval 3 --lr -1", "--lr -1 --num-workers 2", ""),
    ],
)
def test_differences_name_flags_and_both_values(flags, others, expected):
    assert differences(flags.split(), others.split()) == expected


def test_the_last_of_a_repeated_flag_counts():
    assert effective_flags(["--adam-betas", "0.9", "--x", "-b", "de", "--adam-betas", "0.8"]) == {
        "--adam-betas": "0.8",
        "--x": "",
        "-b": "de",
    }
    # also in fairseq's other spelling
    assert last_value(["--arch", "transformer", "-a", "lowrank_transformer"], "--arch", "") == "lowrank_transformer"


@pytest.mark.parametrize(
    "kind, corpus, small",
    [
        ("translation", "iwslt14", "multi30k-head500"),
        ("translation", "wmt14", "multi30k-head500"),
        ("translation", "iwslt14-joined-x10", "multi30k-head500-x10"),
        ("translation", "multi30k-x3", "multi30k-head500-x3"),
        ("language-model", "wikitext-103", "brown-head500"),
        ("language-model", "wikitext-103-bpe257", "brown-head500-bpe257"),
        ("language-model", "lm1b-bpe5000", "brown-head500-bpe2000"),
        ("language-model", "brown", "brown-head500"),
    ],
)
def test_a_trial_takes_a_small_corpus_of_the_same_form(kind, corpus, small):
    assert smoke_corpus(kind, corpus) == small


def test_a_row_on_a_corpus_that_is_none_is_refused_before_anything_runs():
    records = [["paper", "own"], ["table", "tiny"], ["row", "mha", "brown-x10", "", "", "--attention", "mha"]]
    with pytest.raises(ValueError, match=r"^row 'mha': no corpus 'brown-x10' here\. Use one of brown\["):
        Recipe.read("language-model", Path(), records)


def test_a_commit_says_whether_code_was_changed_and_without_git_there_is_the_version(tmp_path):
    from fairseq_lowrank import __version__

    def git(*words):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", tmp_path, *author, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert provenance.commit(tmp_path) == __version__
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/own.jsonl"):
        (tmp_path / name).write_text("1\n")
    git("init")
    git("add", "-A")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "results" / "own.jsonl").write_text("2\n")
    assert provenance.commit(tmp_path) == head
    assert provenance.commit(tmp_path / "results") == __version__
    (tmp_path / "own.py").touch()
    assert provenance.commit(tmp_path) == head
    method = tmp_path / "fairseq_lowrank" / "methods" / "own.py"
    method.parent.mkdir(parents=True)
    method.touch()
    assert provenance.commit(tmp_path) == f"{head}-dirty"
    method.unlink()
    (tmp_path / "code.py").write_text("2\n")
    assert provenance.commit(tmp_path) == f"{head}-dirty"
