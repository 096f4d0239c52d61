"""Predictions for plain text are those for the same text in a prepared corpus."""

import io
import json
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

from fairseq.data import Dictionary

from experiments.__main__ import main
from experiments.bert import text_predictions
from experiments.bert.text_predictions import predict_text
from fairseq_lowrank.files import write_lines
from fairseq_lowrank.messages import FlagError, UserError

WORDS = ["good", "bad", "fine", "poor", "film", "play", "so", "it", "is"]
FEW = "--lr 1e-2 --max-update 4 --batch-size 4"


@pytest.fixture
def prepare_sentences(fairseq_command, tmp_path):
    """``prepare_sentences(columns, targets, labels)``: a prepared corpus whose valid part is its training part."""

    def prepare(columns, targets, labels):
        data = tmp_path / "bin"
        write_lines(tmp_path / "dict.txt", [f"{word} 1" for word in WORDS])
        write_lines(tmp_path / "labels.txt", [f"{label} 1" for label in labels])
        fields = {f"input{number}": column for number, column in enumerate(columns)}
        for name, lines in (fields | ({"label": targets} if labels else {})).items():
            write_lines(tmp_path / name, lines)
            words = tmp_path / ("labels.txt" if name == "label" else "dict.txt")
            prefixes = [f"--{part}pref={tmp_path / name}" for part in ("train", "valid")]
            fairseq_command(
                "preprocess", "--only-source", "--srcdict", words, *prefixes, "--destdir", data / name, "--workers", 1
            )
        if not labels:
            (data / "label").mkdir()
            for part in ("train", "valid"):
                write_lines(data / "label" / f"{part}.label", targets)
        measures = ["accuracy"] if labels else ["pearson"]
        about = {"name": "own", "labels": labels, "measures": measures, "server": None, "answers": None, "names": None}
        (data / "task.json").write_text(json.dumps(about))
        return data

    return prepare


def text_of(*columns):
    return ["\t".join(row) for row in zip(*columns, strict=True)]


SENTENCES = [f"{WORDS[number % 4]} {WORDS[4 + number % 5]} it is {WORDS[(3 * number) % 9]}" for number in range(12)]
CLASSES = (
    "--task sentence_prediction --criterion sentence_prediction --init-token 0 --arch roberta_base --attention mha"
)


def test_labels_of_pairs_are_those_of_the_prepared_corpus(prepare_sentences, train, tmp_path, capsys, monkeypatch):
    second, labels = SENTENCES[::-1], ["yes", "no", "maybe"]
    data = prepare_sentences([SENTENCES, second], [labels[number % 3] for number in range(12)], labels)
    model = train(data, f"{CLASSES} --num-classes 3 --separator-token 2 {FEW}")
    assert main(["bert", "predict", str(model), "--data", str(data), "--output", str(tmp_path / "corpus")]) == 0
    expected = (tmp_path / "corpus" / "valid.txt").read_text().splitlines()
    write_lines(tmp_path / "text", text_of(SENTENCES, second))
    capsys.readouterr()
    assert (
        main(["bert", "predict", str(model), "--text", str(tmp_path / "text"), "--output", str(tmp_path / "said")]) == 0
    )
    assert capsys.readouterr().out.splitlines() == expected and set(expected) <= set(labels)
    assert (tmp_path / "said" / "predictions.txt").read_text().splitlines() == expected
    # without the data of the training the flags say what is needed
    shutil.move(data, tmp_path / "gone")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(text_of(SENTENCES, second)) + "\n"))
    given = ["--dict", str(tmp_path / "gone" / "input0" / "dict.txt"), "--labels", "a", "b", "c"]
    assert main(["bert", "predict", str(model), "--text", "-", *given]) == 0
    assert capsys.readouterr().out.split() == ["abc"[labels.index(label)] for label in expected]
    for flags, words in ((given[:2], "--labels"), (given[2:], "--dict"), ([*given[:2], "--labels", "a"], "--labels a")):
        assert main(["bert", "predict", str(model), "--text", str(tmp_path / "text"), *flags]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_numbers_are_those_of_the_prepared_corpus(prepare_sentences, train, tmp_path, capsys):
    data = prepare_sentences([SENTENCES], [str(number / 4) for number in range(12)], [])
    model = train(data, f"{CLASSES} --num-classes 1 --regression-target {FEW}")
    assert main(["bert", "predict", str(model), "--data", str(data), "--output", str(tmp_path / "corpus")]) == 0
    expected = [float(line) for line in (tmp_path / "corpus" / "valid.txt").read_text().splitlines()]
    write_lines(tmp_path / "text", SENTENCES)
    capsys.readouterr()
    assert main(["bert", "predict", str(model), "--text", str(tmp_path / "text"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in rows] == SENTENCES
    assert [float(row["prediction"]) for row in rows] == pytest.approx(expected, abs=1e-5)
    write_lines(tmp_path / "text", [*SENTENCES[:2], "good\tbad"])
    assert main(["bert", "predict", str(model), "--text", str(tmp_path / "text")]) == 2
    assert "line 3" in capsys.readouterr().err
    write_lines(tmp_path / "text", ["unheard words"])
    assert main(["bert", "predict", str(model), "--text", str(tmp_path / "text")]) == 0
    assert "2 of 2 tokens" in capsys.readouterr().err


SPANS = "--task question_answering --criterion question_answering"


def paragraph(number: int, length: int) -> dict:
    """A paragraph in SQuAD's form with a question on each of two things."""
    things = [("door", "red"), ("roof", "grey"), ("wall", "blue"), ("gate", "pink")][number : number + 2]
    text = "It was so. " * length + " ".join(f"The {thing} is {colour}." for thing, colour in things)
    asked = [
        {
            "id": f"{number}-{thing}",
            "question": f"Which colour has the {thing}?",
            "answers": [{"text": colour, "answer_start": text.index(f"is {colour}") + 3}],
        }
        for thing, colour in things
    ]
    return {"context": text, "qas": asked}


@pytest.mark.parametrize("unanswerable", [False, True])
def test_answers_are_those_of_the_prepared_corpus(prepare_questions, train, tmp_path, capsys, unanswerable):
    paragraphs = [paragraph(number, 1 + 8 * number) for number in range(3)]
    data = prepare_questions(paragraphs, unanswerable=unanswerable, pieces=300)
    window = "--window 60 --doc-stride 16 --max-question-length 20"
    model = train(data, f"{SPANS} --arch roberta_base --attention mha {window} {FEW}")
    assert main(["bert", "predict", str(model), "--data", str(data), "--output", str(tmp_path / "corpus")]) == 0
    expected = json.loads((tmp_path / "corpus" / "valid.json").read_text())
    asked = [(one["question"], each["context"], one["id"]) for each in paragraphs for one in each["qas"]]
    write_lines(tmp_path / "text", [f"{question}\t{context}" for question, context, _ in asked])
    pieces = ["--pieces", str(tmp_path / "data" / "own" / "bpe.model")]
    flags = [*pieces, *["--unanswerable"] * unanswerable]
    capsys.readouterr()
    assert main(["bert", "predict", str(model), "--text", str(tmp_path / "text"), *flags, "--json"]) == 0
    assert [row["prediction"] for row in json.loads(capsys.readouterr().out)] == [expected[name] for *_, name in asked]
    assert any(expected.values()) or unanswerable


def test_flags_of_text_are_refused_without_it(tmp_path, capsys):
    model = tmp_path / "model.pt"
    model.touch()
    assert main(["bert", "predict", str(model), "--data", "bin", "--labels", "a", "--unanswerable"]) == 2
    assert "--labels --unanswerable" in capsys.readouterr().err
    assert main(["bert", "predict", str(model), "--text", "nowhere"]) == 2
    assert "--text nowhere" in capsys.readouterr().err


@pytest.fixture
def predicting(tmp_path, monkeypatch):
    """``predicting(task, lines, **settings)``: the files of the temporary corpus, without a model."""

    def run(task, lines, *, trained_on=(), numbers=False, dictionary="good 1\n", **settings):
        for name in trained_on:
            (tmp_path / name).mkdir()
        (tmp_path / "dict.txt").write_text(dictionary)
        cfg = {"_name": task, "data": str(tmp_path), "num_classes": 2, "regression_target": numbers}
        monkeypatch.setattr(text_predictions, "load_state", lambda path: {"cfg": {"task": cfg}})
        found = {}

        def predict(checkpoint, folder, splits, max_tokens):
            found["label"] = len(Dictionary.load(str(folder / "label" / "dict.txt"))) - Dictionary().nspecial
            found.update(json.loads((folder / "task.json").read_text()))
            return {"text": SimpleNamespace(files={"text.txt": "one\n"})}

        monkeypatch.setattr(text_predictions, "predict", predict)
        predict_text(tmp_path / "model.pt", lines, dictionary=tmp_path / "dict.txt", **settings)
        return found

    return run


def test_labels_may_repeat_or_be_symbols_of_fairseq(predicting):
    for labels in (["no", "no"], ["<pad>", "very good"]):
        found = predicting("sentence_prediction", ["good"], labels=labels)
        assert (found["labels"], found["label"]) == (labels, 2)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("question_answering", {"labels": ["a"]}, "--labels a: .* predicts answers"),
        ("sentence_prediction", {"labels": ["a"], "numbers": True}, "--labels a: .* predicts numbers"),
        ("sentence_prediction", {"unanswerable": True}, "--unanswerable: .* answers no questions"),
        ("sentence_prediction", {"trained_on": ["input0", "input1"]}, "line 1 has 1 columns. Give two sentences"),
        ("sentence_prediction", {"labels": ["a", "b"], "dictionary": "a\n"}, r"dict\.txt is not a dictionary"),
        ("sentence_prediction", {"labels": ["a", "b"], "dictionary": "a 1\na 1\n"}, r"dict\.txt is not a dictionary"),
    ],
)
def test_what_a_model_cannot_read_is_refused(predicting, task, settings, message):
    with pytest.raises(UserError, match=message):
        predicting(task, ["good"], **settings)


def test_a_line_that_is_too_long_is_of_the_text(tmp_path, monkeypatch, capsys):
    for name in ("model.pt", "text"):
        (tmp_path / name).write_text("good\n")

    def refuse(*args, **settings):
        raise FlagError("--subset", "text", "text 1 has 9 tokens", "Shorten it.")

    monkeypatch.setattr(text_predictions, "predict_text", refuse)
    words = ["bert", "predict", str(tmp_path / "model.pt"), "--text", str(tmp_path / "text")]
    assert main(words) == 2
    assert f"--text {tmp_path / 'text'}: text 1 has 9 tokens" in capsys.readouterr().err
    assert main([*words, "--subset", "test"]) == 2
    assert "--subset test: works only with --data" in capsys.readouterr().err
