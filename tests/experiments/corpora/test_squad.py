"""Questions on paragraphs in SQuAD's format, and SQuAD 2.0's questions without an answer."""

import json
from pathlib import Path

import pytest

from experiments.corpora.cutting import words
from experiments.corpora.squad import read_paragraphs
from experiments.corpora.xquad import unanswerable
from fairseq_lowrank.tasks.spans import SubwordOffsets


def write(path: Path, *paragraphs: dict) -> Path:
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "T", "paragraphs": list(paragraphs)}]}))
    return path


def question(name="q", text="308", start=2, **more) -> dict:
    return {"id": name, "question": "How many?", "answers": [{"text": text, "answer_start": start}], **more}


def test_answers_stand_where_they_are_said_to(tmp_path):
    right = {"context": "Up 308 points", "qas": [question(start=3)]}
    assert list(read_paragraphs(write(tmp_path / "a.json", right))) == [right]
    with pytest.raises(ValueError, match=r"a.json: the answer to q is not at character 2"):
        list(read_paragraphs(write(tmp_path / "a.json", {"context": "Up 308 points", "qas": [question()]})))
    (tmp_path / "a.json").write_text('{"data": [{"title": "T"}]}')
    with pytest.raises(ValueError, match="not in SQuAD's format"):
        list(read_paragraphs(tmp_path / "a.json"))


def test_nearly_every_answer_of_real_paragraphs_can_be_said_in_whole_words(corpus):
    answers, exact = 0, 0
    for paragraph in read_paragraphs(corpus("xquad") / "xquad.en.json.gz"):
        spans = words(paragraph["context"])
        pieces = SubwordOffsets(spans, [1] * len(spans))
        for asked in paragraph["qas"]:
            text, start = asked["answers"][0]["text"], asked["answers"][0]["answer_start"]
            begin, end = pieces.characters(*pieces.covering(start, start + len(text)))
            answers, exact = answers + 1, exact + (paragraph["context"][begin:end] == text)
    assert answers == 1190 and exact >= 0.998 * answers


def test_unanswerable_questions_are_asked_of_paragraphs_that_do_not_hold_their_answer(corpus):
    paragraphs = list(read_paragraphs(corpus("xquad") / "xquad.en.json.gz"))[:20]
    before = {asked["id"]: asked for one in paragraphs for asked in one["qas"]}
    moved = unanswerable(paragraphs)
    after = {asked["id"]: (asked, one["context"]) for one in moved for asked in one["qas"]}
    assert after.keys() == before.keys()
    impossible = [name for name, (asked, _) in after.items() if asked.get("is_impossible")]
    assert len(impossible) == len(before) // 3
    assert all(
        before[name]["answers"][0]["text"] not in after[name][1] and not after[name][0]["answers"]
        for name in impossible
    )
