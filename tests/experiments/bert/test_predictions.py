"""Predictions of fine-tuned models, in the files that the benchmarks' servers take, and their means in reports."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

pytest.importorskip("fairseq")

from experiments.bert.predictions import batches, check_task, server_file
from experiments.corpora.glue import TASKS
from experiments.papers.comparison import AVERAGES, build_report
from experiments.papers.values import load_papers
from fairseq_lowrank.messages import UserError


def test_glues_server_takes_columns_and_numbers_in_their_range():
    assert server_file("RTE.tsv", ["entailment", "not_entailment"], {}) == (
        "index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    )
    assert server_file("STS-B.tsv", [-0.25, 3.14159, 5.5], {}) == "index\tprediction\n0\t0.000\n1\t3.142\n2\t5.000\n"


def test_superglues_server_takes_json_lines_in_its_own_words():
    lines = server_file("BoolQ.jsonl", ["1", "0"], {"0": "false", "1": "true"}).splitlines()
    assert [json.loads(line) for line in lines] == [{"idx": 0, "label": "true"}, {"idx": 1, "label": "false"}]


def line(row: str, task: str, value: float, parameters: int, seed: int = 1, **more) -> dict:
    about = {"paper": "mhe", "table": "encoder", "row": row, "task": task, "metric": task, "value": value, "seed": seed}
    about |= {
        "split": "valid",
        "smoke": False,
        "architecture": "lowrank_bert_base",
        "flags": "",
        "updates": 1,
        "parameters": 9,
    }
    return about | {"attention_parameters": parameters, "tokens_per_second": None} | more


def scores(tables: list[dict], row: str) -> dict:
    [ours] = [one["ours"] for one in tables[0]["rows"] if one["row"] == row]
    return {score["metric"]: score for score in ours["scores"]}


def test_tasks_of_a_row_stand_together_with_their_mean_and_its_ratios():
    lines = []
    for seed in (1, 2):
        for row, value, size in (("mha", 80.0, 400), ("sha", 70.0, 100), ("mhe-mul", 77.0, 110)):
            lines += [line(row, task, value + seed, size, seed) for task in AVERAGES["superglue-5"]]
    lines.append(line("mha", "squad1.1", 88.0, 400, scores={"squad1.1-em": 80.0}))
    tables = build_report(lines, load_papers())
    mul, mha = scores(tables, "mhe-mul"), scores(tables, "mha")
    assert mul["superglue-5"]["mean"] == pytest.approx(78.5) and mul["superglue-5"]["spread"] == pytest.approx(0.5**0.5)
    assert mul["superglue-5"]["prr"] == pytest.approx(100 * 78.5 / 81.5)
    assert mul["superglue-5"]["peop"] == pytest.approx((78.5 / 71.5 - 1) / 0.1)
    assert mha["squad1.1"]["mean"] == 88 and mha["squad1.1-em"]["mean"] == 80
    # a task is missing: no mean
    assert "superglue-5" not in scores(build_report(lines[1:3], load_papers()), "mha")


def test_a_mean_over_tasks_is_of_one_seed_whatever_the_order_of_lines():
    tasks = AVERAGES["superglue-5"]
    lines = [
        line("mha", task, 10.0 * seed, 400, seed)
        for number, task in enumerate(tasks)
        for seed in ((1, 2, 3), (3, 1, 2))[number % 2]
    ]
    mean = scores(build_report(lines, load_papers()), "mha")["superglue-5"]
    assert mean["mean"] == 20 and mean["spread"] == 10
    # of other seeds in one task: no mean that could be compared with another row's
    lines = [one for one in lines if (one["task"] == tasks[0]) <= (one["seed"] > 1)]
    assert "superglue-5" not in scores(build_report(lines, load_papers()), "mha")


def test_papers_name_scores_as_tasks_do():
    papers = load_papers()
    names = {
        metric
        for paper, table in (
            ("mixhead", "table5"),
            ("mixhead", "table6"),
            ("fixedhead", "table1"),
            ("fixedhead", "table2a"),
        )
        for row in papers[paper]["tables"][table]["rows"]
        for metric in row["values"]
    }
    known = {*AVERAGES["glue"], "mnli-mm", "squad1.1", "squad1.1-em"}
    parts = {f"{name}-{part}" for name in ("qqp", "mrpc", "sts-b") for part in TASKS[name].task.measures}
    assert names <= known | parts and {"squad1.1", "mnli-m", "rte", "qqp-f1"} <= names


SENTENCES = {"task": {"_name": "sentence_prediction", "num_classes": 2, "regression_target": False}}
NUMBERS = {"task": {"_name": "sentence_prediction", "num_classes": 1, "regression_target": True}}


@pytest.mark.parametrize(
    ("trained", "asks", "labels", "message"),
    [
        (SENTENCES, "sentence_prediction", ["a", "b", "c"], "predicts 2 labels, and bin has 3 labels"),
        (SENTENCES, "sentence_prediction", [], "predicts 2 labels, and bin has numbers"),
        (NUMBERS, "sentence_prediction", ["a", "b"], "predicts numbers, and bin has 2 labels"),
        (SENTENCES, "question_answering", [], "Use a model of --task question_answering for bin"),
    ],
)
def test_a_model_of_another_task_is_refused(trained, asks, labels, message):
    with pytest.raises(UserError, match=message):
        check_task({"cfg": trained}, Path("model.pt"), asks, {"labels": labels}, Path("bin"))
    check_task({"cfg": SENTENCES}, Path("model.pt"), "sentence_prediction", {"labels": ["a", "b"]}, Path("bin"))
    check_task({"cfg": NUMBERS}, Path("model.pt"), "sentence_prediction", {"labels": []}, Path("bin"))


@pytest.mark.parametrize(("max_tokens", "limit", "flag"), [(100, 6, "--subset valid"), (6, 20, "--max-tokens 6")])
def test_texts_that_are_too_long_are_named_with_flags_of_predict(max_tokens, limit, flag):
    from fairseq.data import FairseqDataset

    class Texts(FairseqDataset):
        sizes = numpy.array([3, 7, 5])

        def __len__(self):
            return len(self.sizes)

        def size(self, index):
            return int(self.sizes[index])

        num_tokens = size

    task = SimpleNamespace(dataset=lambda split: Texts(), max_positions=lambda: limit)
    with pytest.raises(UserError) as caught:
        next(batches(None, task, "valid", max_tokens))
    message = str(caught.value)
    assert message.startswith(flag) and "text 2 " in message and "7" in message and "--skip" not in message
