"""Scores, read from the outputs of fairseq's commands."""

import sys

import pytest

from fairseq_lowrank.files import write_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.records import scores

END = "Generate test with beam=5: BLEU4 = 9.00, 50.0/25.0/6.2/3.1 (BP=1.000, ratio=1.000, syslen=9, reflen=9)"
START = "2026-01-01 00:00:00 | INFO | fairseq_cli.generate | loading model(s) from checkpoint_best.pt"


def run_of(hypotheses):
    lines = [f"T-{number}\treference\nH-{number}\t-0.5\t{text}" for number, text in enumerate(hypotheses)]
    return "\n".join(lines).split("\n")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*run_of("ab"), END, *run_of("cd"), END], ["c", "d"]),
        ([START, *run_of("ab"), END, START, *run_of("c"), END], ["c"]),
        ([*run_of("ab")[:3], *run_of("cd"), END], ["c", "d"]),  # the first run was killed
        ([START, *run_of("ab")[:2], START, *run_of("cd"), END], ["c", "d"]),
    ],
)
def test_the_last_run_of_a_log_is_scored(tmp_path, lines, expected):
    write_lines(tmp_path / "out", lines)
    assert scores.read_run(tmp_path / "out").hypotheses == expected


@pytest.mark.parametrize(
    "lines",
    [run_of("ab"), [START], [*run_of("ab"), END, START], [*run_of("ab"), END, *run_of("ab")], [START, *run_of("ab")]],
)
def test_a_run_without_its_end_is_refused(tmp_path, lines):
    write_lines(tmp_path / "out", lines)
    with pytest.raises(UserError, match="the last run has no end"):
        scores.read_run(tmp_path / "out")


@pytest.mark.parametrize("scored", [True, False])
def test_a_log_of_scored_references_is_refused(tmp_path, scored):
    settings = f"2026 | INFO | fairseq_cli.generate | {{'generation': {{'beam': 5, 'score_reference': {scored}}}}}"
    write_lines(tmp_path / "out", [settings, START, *run_of(["reference"]), END])
    if scored:
        with pytest.raises(UserError, match="without --score-reference"):
            scores.read_run(tmp_path / "out")
    else:
        assert scores.read_run(tmp_path / "out") == (["reference"], ["reference"], True)


def test_hypotheses_come_in_the_order_of_the_corpus(tmp_path):
    lines = [
        "S-1\tb",
        "T-1\tB",
        "T-0\tA",
        "H-1\t-0.5\ttwo words",
        "D-1\t-0.5\ttwo words",
        "P-1\t-0.5",
        "H-0\t-0.1\t",
        "W-0\t1\ts",
    ]
    write_lines(tmp_path / "out", [*lines, END])
    assert scores.read_run(tmp_path / "out").hypotheses == ["", "two words"]
    write_lines(tmp_path / "out", [*lines[:4], "H-1\t-0.9\tthe second best", *lines[4:], "H-0\t-0.2\tthe other", END])
    assert scores.read_run(tmp_path / "out").hypotheses == ["", "two words"]
    assert scores.read_run(tmp_path / "out").references == ["A", "B"]
    write_lines(tmp_path / "out", [*lines[:6], END])
    with pytest.raises(ValueError, match="not those with the numbers 0 to 0"):
        scores.read_run(tmp_path / "out")


RAW = {
    "zh": (["今天 天气 很 好 。", "我 喜欢 这 本 书 。"], "tok:zh"),
    "zho": (["今天 天气 很 好 。"], "tok:zh"),
    "zh_CN": (["今天 天气 很 好 。"], "tok:zh"),
    "th": (["วันนี้ อากาศ ดี มาก", "ฉัน ชอบ หนังสือ เล่ม นี้"], "tok:char"),
    "ru": (["Она сказала : « Нет » .", "Это длинная книга ."], "tok:13a"),
}
WRITTEN = {"th": ["วันนี้อากาศดีมาก", "ฉันชอบหนังสือเล่มนี้"], "ru": ["Она сказала: «Нет».", "Это длинная книга."]}


@pytest.mark.parametrize("language", RAW)
def test_bleu_of_the_references_is_100_in_languages_without_blanks(language):
    tokens, signature = RAW[language]
    raw = WRITTEN.get(language, ["".join(line.split()) for line in tokens])
    score = scores.bleu(tokens, tokens, raw, language)
    assert score["value"] == 100 and signature in score["signature"]
    assert sum(one[0] for one in score["sentence_counts"]) > 4


@pytest.mark.parametrize(("language", "package"), [("ja", "MeCab"), ("ko", "mecab_ko"), ("ko_KR", "mecab_ko")])
def test_a_tokeniser_that_is_not_installed_is_named(language, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"Run pip install 'sacrebleu\[{language[:2]}\]'"):
        scores.bleu(["今日 は"], ["今日 は"], language=language)


@pytest.mark.parametrize("text", ["今天天气很好。", "วันนี้อากาศดีมาก", "오늘 날씨가 좋다", "今日は"])
@pytest.mark.parametrize("language", [None, "en", "src"])
def test_text_without_blanks_needs_the_tokeniser_of_its_language(text, language):
    with pytest.raises(UserError, match="--language zh, ja, ko, th"):
        scores.bleu([text], [text], language=language)


REFERENCES = ["a man isn &apos;t riding a brown horse , slowly .", "two dogs run through the deep snow ."]


def test_bleu_of_the_references_is_100_and_its_signatures_say_what_was_scored():
    score = scores.bleu(REFERENCES, REFERENCES)
    assert score["value"] == score["tokenised_bleu"] == 100
    assert "tok:13a" in score["signature"] and "tok:none" in score["tokenised_signature"]
    assert score["text"] == "tokenised"


def test_bleu_against_the_publishers_text_detokenises_and_ignores_case_where_hypotheses_have_none():
    raw = ["A man isn't riding a brown horse, slowly.", "Two dogs run through the deep snow."]
    score = scores.bleu(REFERENCES, REFERENCES, raw)
    assert score["value"] == 100 and "case:lc" in score["signature"] and score["text"] == "detokenised"
    cased = [line.capitalize() for line in REFERENCES]
    assert "case:mixed" in scores.bleu(cased, REFERENCES, raw)["signature"]
    worse = scores.bleu([REFERENCES[0], "two dogs run"], REFERENCES, raw)
    assert worse["value"] < 90 and worse["tokenised_bleu"] < 90
    with pytest.raises(ValueError, match="2 hypotheses for 1 references"):
        scores.bleu(REFERENCES, REFERENCES, raw[:1])


@pytest.mark.parametrize(
    ("line", "flag"),
    [("▁two ▁do gs ▁run", "sentencepiece"), ("two do@@ gs run", "subword_nmt"), ("two dogs ru@@", "subword_nmt")],
)
@pytest.mark.parametrize("side", ["hypotheses", "references"])
def test_bleu_of_subwords_is_refused(line, flag, side):
    texts = {"hypotheses": ["two dogs run", "a man"], "references": ["two dogs run", "a man"]}
    texts[side][1] = line
    with pytest.raises(UserError, match=rf"the {side} are cut into subwords \(line 2: .*Add --remove-bpe {flag}"):
        scores.bleu(texts["hypotheses"], texts["references"])


def test_signs_that_look_like_subwords_are_words():
    lines = ["well @-@ known", "a @@ b", "mail me@@home", "a_b"]
    assert scores.bleu(lines, lines)["value"] == 100


def test_perplexity_is_read_with_the_tokens_it_was_measured_on(tmp_path):
    write_lines(
        tmp_path / "out",
        ["… | Evaluated 58,034 tokens in 9.1s (6377.36 tokens/s)", "… | Loss (base 2): 8.1000, Perplexity: 274.37"],
    )
    assert scores.read_perplexity(tmp_path / "out") == {"metric": "perplexity", "value": 274.37, "tokens": 58034}
    loss = scores.read_perplexity(tmp_path / "out", "loss")
    assert loss == {"metric": "loss", "value": 5.6145, "tokens": 58034}  # ln 274.37 = 8.1 ln 2, nats a token
    results = ["… | Evaluated 58 tokens in 9.1s", "… | Loss (base 2): 8.1000, Perplexity: 274.37"]
    for lines in (["nothing"], [START, *results, START], [START, *results, START, results[0]]):
        write_lines(tmp_path / "out", lines)
        with pytest.raises(ValueError, match="no perplexity"):
            scores.read_perplexity(tmp_path / "out")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_perplexity_that_is_no_number_is_read_as_such(tmp_path, value):
    write_lines(tmp_path / "out", ["| Evaluated 58 tokens in 9.1s", f"| Loss (base 2): {value}, Perplexity: {value}"])
    assert str(scores.read_perplexity(tmp_path / "out")["value"]) == value
