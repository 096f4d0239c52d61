"""Answering questions by spans: from paragraphs in SQuAD's form to a model's answers in their words."""

import json

import pytest

pytest.importorskip("fairseq")

import torch

from experiments.__main__ import main
from experiments.bert.predictions import predict
from experiments.corpora.squad import read_paragraphs
from fairseq_lowrank.tools.fairseq.checkpoints import load_model

SPANS = "--task question_answering --criterion question_answering"
COLOURS = ["red", "green", "blue", "black", "white", "brown", "grey", "pink"]
THINGS = ["house", "door", "roof", "wall", "fence", "gate", "tower", "bridge"]


def paragraph(number: int, length: int = 1) -> dict:
    """A paragraph of sentences such as "The door is red." and a question on each of two things in it."""
    things = [(THINGS[(number + i) % 8], COLOURS[(3 * number + i) % 8]) for i in range(4)]
    text = " ".join(f"The {thing} is {colour}." for thing, colour in things)
    text = " ".join(["It was so."] * (length - 1) + [text])
    asked = [
        {
            "id": f"{number}-{thing}",
            "question": f"Which colour has the {thing}?",
            "answers": [{"text": colour, "answer_start": text.index(f"is {colour}") + 3}],
        }
        for thing, colour in things[:2]
    ]
    return {"context": text, "qas": asked}


def test_it_learns_four_paragraphs(corpus, prepare_questions, train, tmp_path, capsys):
    paragraphs = read_paragraphs(corpus("xquad") / "xquad.en.json.gz")
    data = prepare_questions(sorted(paragraphs, key=lambda one: len(one["context"]))[:4], pieces=600)
    rate = "--lr 4e-3 --lr-scheduler polynomial_decay --warmup-updates 10 --total-num-update 80 --max-update 80"
    model = train(data, f"{SPANS} --arch roberta_base --attention mha --window 300 --max-tokens 4000 {rate}")
    assert main(["bert", "predict", str(model), "--data", str(data), "--output", str(tmp_path / "said")]) == 0
    [scores] = json.loads((tmp_path / "said" / "scores.json").read_text()).values()
    assert scores["score"] == scores["measures"]["f1"] > 90 and scores["measures"]["em"] > 85
    said = json.loads((tmp_path / "said" / "valid.json").read_text())
    texts = {
        asked["id"]: one["context"]
        for one in read_paragraphs(corpus("xquad") / "xquad.en.json.gz")
        for asked in one["qas"]
    }
    assert all(answer and answer in texts[name] for name, answer in said.items())


@pytest.fixture
def dataset(prepare_questions):
    """``dataset(paragraphs, **settings)``: the training part as the task reads it."""
    from fairseq_lowrank.tasks.question_answering import QuestionAnsweringConfig, QuestionAnsweringTask

    def make(paragraphs: list[dict], **settings):
        config = QuestionAnsweringConfig(data=str(prepare_questions(paragraphs, pieces=300)), **settings)
        config.seed = 1
        task = QuestionAnsweringTask.setup_task(config)
        return task.load_dataset("train"), task.source_dictionary

    return make


def said_by(tokens, dictionary) -> str:
    return "".join(dictionary[token] for token in tokens).replace("▁", " ").strip()


def test_targets_are_the_tokens_of_the_answer_and_the_first_token_where_it_is_not_in_the_window(dataset):
    paragraphs = [paragraph(number, length=12) for number in range(3)]
    examples, dictionary = dataset(paragraphs, window=80, doc_stride=16, max_question_length=20)
    assert len(examples) > len(examples.asked) == 6
    inside = set()
    for index, window in enumerate(examples.windows):
        tokens, (first, last) = examples[index]["tokens"], examples[index]["target"]
        assert len(tokens) == examples.size(index) <= 80
        assert tokens[0] == dictionary.bos() and tokens[-1] == dictionary.eos()
        question = paragraphs[window.paragraph]["qas"][window.question % 2]
        begin = tokens.tolist().index(dictionary.eos())
        assert said_by(tokens[1:begin], dictionary).startswith("Which colour has the ")
        if first:
            assert said_by(tokens[first : last + 1], dictionary) == question["answers"][0]["text"]
            inside.add(window.question)
        else:
            assert last == 0
    assert inside == set(range(6))  # each answer is in some window
    batch = examples.collater([examples[0], examples[len(examples) - 1]])
    assert batch["net_input"]["src_tokens"].shape == (2, max(examples.size(0), examples.size(len(examples) - 1)))
    assert batch["target"].shape == (2, 2) and batch["nsentences"] == 2


def test_two_separators_move_the_target(dataset):
    single, dictionary = dataset([paragraph(1)], window=200)
    single.config.double_separator = True
    double = type(single)(single.lines, single.questions, single.paragraphs, single.config, dictionary, shuffle=False)
    one, two = single[0], double[0]
    assert two["tokens"].tolist().count(dictionary.eos()) == 3 and two["target"] == tuple(
        place + 1 for place in one["target"]
    )


def test_questions_without_an_answer_and_a_pre_trained_model(prepare_questions, train, tmp_path):
    paragraphs = [paragraph(number) for number in range(8)]
    for one in paragraphs[::2]:
        one["qas"][0] |= {"answers": [], "is_impossible": True, "question": "Who built it?"}
    data = prepare_questions(paragraphs, unanswerable=True, pieces=300)
    # what was learnt before has no head for spans; and the model is this package's BERT, with other attention
    sizes = "--arch lowrank_bert_base --attention mixhead-b"
    pretrain = tmp_path / "pretrain"
    pretrain.mkdir()
    for name in ("dict.txt", "train.bin", "train.idx"):
        (pretrain / name).symlink_to(data / "paragraph" / name)
    masked = "--task masked_lm --criterion masked_lm --tokens-per-sample 64 --max-tokens 1024 --lr 1e-3 --max-update 2"
    base = train(pretrain, f"{sizes} {masked}", name="base")
    rate = "--lr 3e-3 --lr-scheduler polynomial_decay --warmup-updates 10 --total-num-update 120 --max-update 120"
    model = train(data, f"{SPANS} {sizes} --window 200 --batch-size 8 {rate} --finetune-from-model {base}")
    found = predict(model, data, ["valid"], 4000)["valid"]
    answers = json.loads(found.files["valid.json"])
    assert found.measures["unanswered"] == 100 and found.measures["f1_answered"] > 80
    assert all(answers[one["qas"][0]["id"]] == "" for one in paragraphs[::2])
    # asked as in SQuAD 1.1, every question gets an answer
    about = json.loads((data / "task.json").read_text())
    (data / "task.json").write_text(json.dumps(about | {"unanswerable": False}))
    assert all(json.loads(predict(model, data, ["valid"], 4000)["valid"].files["valid.json"]).values())
    # without being asked for features the model does what it did before
    loaded, task = load_model(model, data=data)
    tokens = torch.arange(10)[None] + 4
    assert loaded(tokens)[0].shape == (1, 10, len(task.source_dictionary))
    assert loaded(tokens, features_only=True)[0].shape == (1, 10, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window 60", "--window 60: expected 68 (--max-question-length"),
        ("--window 301", "--window 301: expected 68"),
        ("--doc-stride 0 --window 200", "--doc-stride 0: expected a number of tokens >= 1"),
        ("--max-question-length 0 --window 200", "--max-question-length 0: expected a number of tokens >= 1"),
        ("--max-answer-length -1 --window 200", "--max-answer-length -1: expected a number of tokens >= 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(prepare_questions, refusal, flags, message):
    data = prepare_questions([paragraph(1)], pieces=300)
    words = f"{SPANS} --arch roberta_base --max-positions 300 --optimizer adam --cpu --max-tokens 1000 {flags}".split()
    assert message in refusal("train", data, *words)


def test_data_and_models_of_another_kind_are_refused(prepare_questions, refusal, language_model_data):
    words = f"{SPANS} --window 200 --optimizer adam --cpu --max-tokens 1000".split()
    message = refusal("train", language_model_data, "--arch", "roberta_base", *words)
    assert f"{language_model_data} has no task.json" in message
    data = prepare_questions([paragraph(1)], pieces=300)
    message = refusal("train", data, "--arch", "transformer_iwslt_de_en", *words)
    assert "transformer_iwslt_de_en does not return features" in message
