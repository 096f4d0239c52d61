"""Tokens of Moses and the text that they came from."""

import pytest

pytest.importorskip("sacremoses")

from sacremoses import MosesTokenizer

from fairseq_lowrank.moses import detokeniser

SENTENCES = {
    "en": [
        "She said “no” twice, and it’s true.",
        "The dogs’ bowl: ‘don’t’ isn’t “enough”.",
        "He said, “I can’t. ‘Never,’ she said.”",
        "In the ’90s we’d rock’n’roll; get ’em!",
        "The end of a quotation.” Then “more”?",
        "“Why?” (they asked) “Because.”",
        'It\'s "plain" here.',
    ],
    "de": [
        "»Nein«, rief sie.",
        "„Nein“, rief sie, „ich geh’s an!“",
        "Ich frag’ ihn, ob’s ’ne Wucht ist.",
        "Hans’ Auto sagt «ja» und »nein«.",
        "‚Ja‘, sagte er.",
        "Ende.“ Dann kam „Anna“.",
        "“Nein”, sagte sie.",
    ],
    "fr": ["L’ami d’Eve n’est pas là.", "Qu’est-ce que c’est aujourd’hui ?", "« L’ami », “ça” n’ira."],
    "it": ["L’amico dell’arte disse: «Un’altra».", "“Sì”, disse, “è un po’ tardi”."],
    "ru": ["Она сказала: «Нет».", "«Да!» — ответил он.", "конец цитаты». Потом «ещё».", "Он сказал “нет” и „да“."],
    "cs": ["Řekl: „Ne“, a šel.", "»Ano!« zvolal."],
    "es": ["Dijo «no» y “sí”.", "¿“Qué”? ¡«Nada»!"],
    "uk": ["П’ять «слів» і „ще“."],
    "sv": ["Han sa ”nej” och ”ja”."],
    "pl": ["Powiedział: „Nie”, i poszedł."],
}


@pytest.mark.parametrize("language", SENTENCES)
def test_text_comes_back_from_its_tokens(language):
    tokenizer, detokenise = MosesTokenizer(language), detokeniser(language)
    for text in SENTENCES[language]:
        assert detokenise(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("tokens", [[], ["’"], ["“"], ["”", "”"], ["’", "tis"], ["a", "’"], ["5", "’", "6"]])
def test_lone_marks_stay(tokens):
    assert detokeniser("en")(tokens).replace(" ", "") == "".join(tokens)


def test_private_characters_of_a_text_stay():
    text = "\ue000 “a\ue201” \ue0ff \ue300b."
    assert detokeniser("en")(["\ue000", "“", "a\ue201", "”", "\ue0ff", "\ue300b", "."]) == text
