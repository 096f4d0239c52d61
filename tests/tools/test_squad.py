"""SQuAD's scores against cases made by hand, in the words of its evaluation scripts."""

import pytest

from fairseq_lowrank.tools.squad import evaluate, exact_match, f1, normalise


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


def test_exact_match_and_f1_of_pairs():
    assert exact_match("the Denver Broncos.", "Denver broncos") == 1
    assert exact_match("Denver", "Denver Broncos") == 0
    assert f1("Denver", "Denver Broncos") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert f1("very very good", "very good indeed") == pytest.approx(2 / 3)  # a word counts as often as both have it
    assert f1("New York", "Denver") == 0
    assert f1("", "Denver") == f1("the", "Denver") == f1("Denver", "") == 0
    assert f1("", "") == f1("the", "a") == 1


def test_the_best_of_several_answers_counts_for_each_score():
    scores = evaluate({"q": "the red car"}, {"q": ["a big red car", "car"]})
    assert scores == {"em": 0, "f1": pytest.approx(100 * 2 * 2 / 5)}


def test_questions_without_an_answer():
    answers = {"a": ["blue"], "b": [], "c": []}
    scores = evaluate({"a": "blue", "b": "", "c": "something"}, answers)
    assert scores["em"] == scores["f1"] == pytest.approx(200 / 3)
    assert (scores["em_answered"], scores["f1_answered"], scores["unanswered"]) == (100, 100, 50)
    assert evaluate({"a": "", "b": "x", "c": "y"}, answers)["f1"] == 0
    assert evaluate({"b": "", "c": ""}, {"b": [], "c": []}) == {"em": 100, "f1": 100}


def test_an_answer_of_articles_alone_counts_only_where_there_is_no_other():
    assert evaluate({"q": ""}, {"q": ["the", "blue"]})["em"] == 0
    assert evaluate({"q": ""}, {"q": ["the"]})["em"] == 100


def test_every_question_needs_a_prediction():
    with pytest.raises(ValueError, match="1 questions have no prediction, such as b"):
        evaluate({"a": "x"}, {"a": ["x"], "b": ["y"]})
