"""Rows that are fine-tuned: pre-trained once, scored by their task's measures, one line for each task of a table's row."""

import argparse
import gzip
import json
from dataclasses import replace

import pytest

from experiments.corpora.rte import CORPUS, TASK
from experiments.corpora.sentences import Example, write_task_data
from experiments.corpora.steps import preprocess
from experiments.corpora.text import BytePieces
from experiments.recipes.recipe import Recipe, Row, checksum, smoke_corpus
from experiments.recipes.scoring import read_scores
from experiments.recipes.settings import Settings
from fairseq_lowrank.files import write_lines
from fairseq_lowrank.records.logs import progress
from fairseq_lowrank.records.results import read_results

MODEL = "--arch lowrank_bert_base --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
TRAINING = "--max-positions 32 --optimizer adam --lr 0.01 --max-update 3 --cpu --no-epoch-checkpoints --num-workers 0 --required-batch-size-multiple 1"
MASKED = f"{MODEL} {TRAINING} --task masked_lm --criterion masked_lm --tokens-per-sample 32 --max-tokens 100"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with a corpus in sub-words, and sentences in pairs that are cut into them."""
    import sentencepiece

    monkeypatch.setenv("LOWRANK_WORK", str(tmp_path))
    corpus = tmp_path / "data" / "brown-bpe300"
    corpus.mkdir(parents=True)
    lines = ["the cat sat on the mat", "no dogs were seen", "what follows from what is said"] * 8
    write_lines(tmp_path / "text", lines)
    BytePieces.train([tmp_path / "text"], corpus / "bpe.model", 300)
    cut = BytePieces(corpus / "bpe.model")
    write_lines(tmp_path / "pieces", map(cut, lines))
    model = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "bpe.model"))
    write_lines(tmp_path / "dict.txt", [f"{model.id_to_piece(i)} 1" for i in range(1, len(model))])
    files = [f"--{split}pref={tmp_path / 'pieces'}" for split in ("train", "valid")]
    preprocess(corpus / "bin", "--only-source", f"--srcdict={tmp_path / 'dict.txt'}", *files)
    args = argparse.Namespace(
        output=tmp_path / "data" / "rte-by-brown-bpe300", pieces_of="brown-bpe300", bert=None, workers=1, corpus=CORPUS
    )
    examples = [Example((line, lines[0]), TASK.labels[place % 2]) for place, line in enumerate(lines[:12])]
    write_task_data(args, TASK, {"train": examples, "valid": examples[:5], "test": examples[5:]})
    return tmp_path


def recipe(root, **rows: str) -> Recipe:
    records = [["paper", "own"], ["table", "tiny"], ["common", *TRAINING.split(), "--batch-size", "4"]]
    for name in dict.fromkeys(rows.values()):
        records.append(["pretraining", name, "brown-bpe300", "", "", *MASKED.split(), "--attention", name])
    for name, base in rows.items():
        records.append(["row", name, "rte-by-brown-bpe300", base, "", *MODEL.split(), "--attention", base])
    return Recipe.read("fine-tuning", root, records)


def test_each_task_of_a_row_becomes_one_line_after_one_pre_training(work, engine, commands, request, capsys):
    own = recipe(request.config.rootpath, **{"mha@rte": "mha", "mha@again": "mha"})
    settings = Settings(work=work, results=work / "results" / "own.jsonl")
    engine(own, settings).run_rows()
    prepare = ["prepare.sh brown-bpe300", "prepare.sh rte-by-brown-bpe300"]
    one = ["fairseq-train", "python"]
    assert commands.calls == [*prepare, "fairseq-train", *one, *one]
    first, second = read_results(settings.results)
    assert (first["row"], first["task"], second["row"], second["task"]) == ("mha", "rte", "mha", "again")
    assert (first["metric"], first["split"], first["updates"]) == ("rte", "test", 3)
    assert (
        first["value"]
        == first["measures"]["test"]["accuracy"]
        == pytest.approx(100 * round(7 * first["value"] / 100) / 7, abs=0.01)
    )
    assert first["measures"].keys() == {"valid", "test"} and first["attention_parameters"] == 4 * 16 * 16
    assert first["pretraining"]["updates"] == 3 and first["pretraining"]["corpus"] == "brown-bpe300"
    assert first["pretraining"]["log"] == second["pretraining"]["log"] == "logs/own-pretraining/mha-seed1.log.gz"
    kept = gzip.decompress((settings.results.parent / first["pretraining"]["log"]).read_bytes()).decode()
    assert "--task masked_lm" in kept.splitlines()[0] and "done training" in kept and str(work) not in kept
    assert str(work) not in json.dumps(first)
    log = (own.run(own.rows["mha@rte"], settings).log).read_text()
    assert "--finetune-from-model" in log and "loading pretrained model from" in log
    engine(own, settings).run_rows()
    assert len(read_results(settings.results)) == 2 and "mha@rte (seed 1): done already" in capsys.readouterr().err


def test_a_pre_training_in_two_parts_continues_the_first(work, engine, commands, request):
    own = recipe(request.config.rootpath, **{"mha@rte": "mha"})
    whole = own.bases.pop("mha")
    flags = (*whole.flags, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "10")
    own.declare("pretraining", replace(whole, name="mha-short", flags=(*flags, "--tokens-per-sample", "16")))
    own.declare("pretraining", replace(whole, base="mha-short", flags=(*flags, "--max-update", "5")))
    settings = Settings(work=work, results=work / "results" / "own.jsonl")
    engine(own, settings).run_rows()
    assert commands.calls.count("fairseq-train") == 3
    [line] = read_results(settings.results)
    second, first = line["pretraining"], line["pretraining"]["continued"]
    assert (first["row"], first["updates"], second["updates"]) == ("mha-short", 3, 5)
    assert {first["log"], second["log"]} == {
        f"logs/own-pretraining/{name}-seed1.log.gz" for name in ("mha-short", "mha")
    }
    # the warm-up continues from update 3
    log = own.run(own.rows["mha@rte"], settings).base.log
    rates = [
        found[1]["lr"] for text in log.read_text().splitlines() if (found := progress(text)) and found[0] == "train"
    ]
    assert float(rates[-1]) == pytest.approx(0.01 * 5 / 10, rel=0.01)


def test_the_seed_is_that_of_fine_tuning_and_other_pre_training_makes_another_folder(work, request):
    own = recipe(request.config.rootpath, **{"mha@rte": "mha"})
    runs = [own.run(own.rows["mha@rte"], Settings(work=work, seed=seed)) for seed in (1, 2)]
    assert runs[0].base.folder == runs[1].base.folder and runs[0].folder != runs[1].folder
    longer = recipe(request.config.rootpath, **{"mha@rte": "mha"})
    longer.declare("pretraining", Row("long", "brown-bpe300", (*MASKED.split(), "--max-update", "4")))
    longer.declare("row", replace(longer.rows["mha@rte"], name="mha@long", base="long"))
    names = [longer.run(longer.rows[name], Settings(work=work)).fingerprint for name in ("mha@rte", "mha@long")]
    assert names[0] != names[1]


def test_rows_are_asked_for_by_their_label_too(work, request):
    own = recipe(request.config.rootpath, **{"mha@rte": "mha", "mqa@rte": "mqa", "mha@cb": "mha"})
    chosen = [[row.name for row in own.select(Settings(work=work, rows=rows))] for rows in (("mha",), ("mqa@rte",))]
    assert chosen == [["mha@rte", "mha@cb"], ["mqa@rte"]]
    with pytest.raises(ValueError, match="no row 'rte' here"):
        own.select(Settings(work=work, rows=("rte",)))


def test_a_published_checkpoint_stands_for_a_pre_training_but_not_in_a_trial(work, engine, commands, request):
    own = recipe(request.config.rootpath, **{"mha@rte": "mha"})
    checkpoint = str(work / "bert-base" / "model.pt")
    own.declare("pretraining", Row("published", "brown-bpe300", tuple(MASKED.split()), checkpoint=checkpoint))
    own.declare("row", Row("mha@published", "rte-by-brown-bpe300", tuple(MODEL.split()), "published"))
    settings = Settings(work=work, rows=("mha@published",))
    with pytest.raises(
        ValueError,
        match=r"bert-base/model\.pt does not exist. Make it from a published BERT: python -m experiments bert import",
    ):
        engine(own, settings).run_rows()
    assert commands.calls == []
    run = own.run(own.rows["mha@published"], settings)
    assert run.base.last == work / "bert-base" / "model.pt"
    folders = [run.folder]
    (work / "bert-base").mkdir(parents=True)
    for content in ("a model", "another model"):
        run.base.last.write_text(content)
        checksum.cache_clear()
        folders.append(own.run(own.rows["mha@published"], settings).folder)
    assert len(set(folders)) == 3
    trial = own.run(own.rows["mha@published"], Settings(work=work, smoke=True))
    assert trial.base.published is None and trial.base.corpus == "brown-head500-bpe300"
    assert trial.corpus == "rte-by-brown-head500-bpe300"


@pytest.mark.parametrize(
    ("corpus", "small"),
    [
        ("glue-mnli", "rte-by-brown-head500-bpe2000"),
        ("glue-sst-2", "sentence-polarity-by-brown-head500-bpe2000"),
        ("sentence-polarity-by-brown-bpe8000", "sentence-polarity-by-brown-head500-bpe2000"),
        ("squad-1.1", "xquad-by-brown-head500-bpe2000"),
        ("squad-2.0-by-wikitext-103-bpe30000", "xquad-unanswerable-by-brown-head500-bpe2000"),
    ],
)
def test_a_trial_takes_small_tasks_of_the_same_form(corpus, small):
    assert smoke_corpus("fine-tuning", corpus, "brown-head500-bpe2000") == small


def test_a_row_of_a_pre_training_that_is_not_declared_is_refused(request):
    records = [["paper", "own"], ["table", "tiny"], ["row", "mha@rte", "rte", "bert", "", "--attention", "mha"]]
    with pytest.raises(ValueError, match=r"^row 'mha@rte': no pre-training 'bert' is declared\. Declare it first\.$"):
        Recipe.read("fine-tuning", request.config.rootpath, records)


def scores(**splits) -> dict:
    return {
        split: {
            "name": name,
            "score": sum(measures.values()) / max(len(measures), 1) if measures else None,
            "measures": measures,
        }
        for split, (name, measures) in splits.items()
    }


def test_scores_of_a_line_are_of_the_test_part_where_its_answers_are_known(tmp_path):
    file = tmp_path / "scores.json"
    file.write_text(
        json.dumps(
            scores(valid=("mnli-m", {"accuracy": 80.0}), valid1=("mnli-mm", {"accuracy": 81.0}), test=("mnli-m", {}))
        )
    )
    line = read_scores(file)
    assert (line["metric"], line["value"], line["split"], line["scores"]) == (
        "mnli-m",
        80.0,
        "valid",
        {"mnli-mm": 81.0},
    )
    file.write_text(
        json.dumps(
            scores(valid=("squad1.1", {"em": 70.0, "f1": 80.0}))
            | {"valid": {"name": "squad1.1", "score": 80.0, "measures": {"em": 70.0, "f1": 80.0}}}
        )
    )
    assert read_scores(file)["scores"] == {"squad1.1-em": 70.0} and read_scores(file)["value"] == 80
    file.write_text(json.dumps(scores(valid=("mrpc", {"f1": 90.0, "accuracy": 86.0}))))
    line = read_scores(file)
    assert line["value"] == 88 and line["scores"] == {"mrpc-f1": 90.0, "mrpc-accuracy": 86.0}
    file.write_text(json.dumps(scores(test=("rte", {}))))
    with pytest.raises(ValueError, match="has no scores"):
        read_scores(file)
