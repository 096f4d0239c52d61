"""SQuAD's scores against cases made by hand, in the words of its evaluation scripts."""

import pytest

from experiments.bert.squad import evaluate, exact_match, f1, normalise
from fairseq_lowrank.messages import UserError


@pytest.mark.parametrize(
    ("answer", "normalised"),
    [
        ("The Panthers", "panthers"),
        ("an  apple a day", "apple day"),
        ("Another theory", "another theory"),
        ("U.S.A.", "usa"),
        ("rock-and-roll", "rockandroll"),
        ("The, a; AN!", ""),
        ("“the” ½", "“ ” ½"),  # only ASCII's punctuation goes
        (" \t\n", ""),
    ],
)
def test_answers_are_normalised(answer, normalised):
    assert normalise(answer) == normalised


def of_v1(predictions, answers):
    return evaluate(predictions, answers, unanswerable=False)


def of_v2(predictions, answers):
    return evaluate(predictions, answers, unanswerable=True)


@pytest.mark.parametrize("unanswerable", [False, True])
def test_exact_match_and_f1_of_pairs(unanswerable):
    def of(prediction, answer):
        return f1(prediction, answer, unanswerable=unanswerable)

    assert exact_match("the Denver Broncos.", "Denver broncos") == 1
    assert exact_match("Denver", "Denver Broncos") == 0
    assert of("Denver", "Denver Broncos") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert of("very very good", "very good indeed") == pytest.approx(2 / 3)  # a word counts as often as both have it
    assert of("New York", "Denver") == 0
    assert of("", "Denver") == of("the", "Denver") == of("Denver", "") == 0
    assert of("", "") == of("the", "a") == unanswerable


@pytest.mark.parametrize("evaluate", [of_v1, of_v2])
def test_the_best_of_several_answers_counts_for_each_score(evaluate):
    scores = evaluate({"q": "the red car"}, {"q": ["a big red car", "car"]})
    assert scores == {"em": 0, "f1": pytest.approx(100 * 2 * 2 / 5)}


def test_questions_without_an_answer():
    answers = {"a": ["blue"], "b": [], "c": []}
    scores = of_v2({"a": "blue", "b": "", "c": "something"}, answers)
    assert scores["em"] == scores["f1"] == pytest.approx(200 / 3)
    assert (scores["em_answered"], scores["f1_answered"], scores["unanswered"]) == (100, 100, 50)
    assert of_v2({"a": "", "b": "x", "c": "y"}, answers)["f1"] == 0
    assert of_v2({"b": "", "c": ""}, {"b": [], "c": []}) == {"em": 100, "f1": 100}


def test_squad_2_leaves_out_answers_of_articles_if_there_are_others():
    assert of_v2({"q": ""}, {"q": ["the", "blue"]}) == {"em": 0, "f1": 0}
    assert of_v2({"q": "a"}, {"q": ["the"]}) == {"em": 100, "f1": 100}


def test_squad_1_counts_every_answer_and_has_no_f1_without_words():
    # the script compares normalised texts, and words in common: "a" and "the" are equal, and share no word
    assert of_v1({"q": "a"}, {"q": ["the", "blue"]}) == {"em": 100, "f1": 0}
    assert of_v1({"q": "blue"}, {"q": ["the", "blue"]}) == {"em": 100, "f1": 100}


def test_every_question_needs_a_prediction():
    with pytest.raises(UserError, match="1 questions have no prediction, such as b"):
        of_v1({"a": "x"}, {"a": ["x"], "b": ["y"]})
