"""The grammar's German and English, and the corpus that it makes."""

import hashlib
import logging
import re
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from experiments.corpora.grammar import EDITION, NAME, corpus, english, german
from experiments.corpora.grammar.lexicon import ADJECTIVES, MODALS, NOUNS, PRONOUNS, SEIN, THAT_VERBS, TIMES, VERBS
from experiments.corpora.grammar.trees import Argument, Clause, NounPhrase, Sentence

NOUN = {noun.german: noun for noun in NOUNS}
ADJECTIVE = {adjective.german: adjective for adjective in ADJECTIVES}
TIME = {time.german: time for time in TIMES}
ICH, _, ER, SIE, WIR, IHR, _ = PRONOUNS
ALL_VERBS = (*VERBS, *THAT_VERBS, SEIN)


def verb(infinitive: str):
    """The first verb of that infinitive."""
    return next(verb for verb in ALL_VERBS if verb.prefix + verb.infinitive == infinitive)


@pytest.fixture(scope="module")
def sample() -> list[tuple[list[str], list[str]]]:
    return [(source.split(), target.split()) for source, target in islice(corpus.pairs(5), 4000)]


# --- inflection, against tables written by hand ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noun", "determiner", "adjective", "singular", "plural"),
    [
        (
            "Mann",
            "the",
            "alt",
            "der alte Mann, den alten Mann, dem alten Mann",
            "die alten Männer, die alten Männer, den alten Männern",
        ),
        (
            "Student",
            "this",
            "müde",
            "dieser müde Student, diesen müden Studenten, diesem müden Studenten",
            "diese müden Studenten, diese müden Studenten, diesen müden Studenten",
        ),
        (
            "Auto",
            WIR,
            "teuer",
            "unser teures Auto, unser teures Auto, unserem teuren Auto",
            "unsere teuren Autos, unsere teuren Autos, unseren teuren Autos",
        ),
        (
            "Lampe",
            IHR,
            "schön",
            "eure schöne Lampe, eure schöne Lampe, eurer schönen Lampe",
            "eure schönen Lampen, eure schönen Lampen, euren schönen Lampen",
        ),
        ("Nachbar", "a", "klein", "ein kleiner Nachbar, einen kleinen Nachbarn, einem kleinen Nachbarn", None),
        ("Kaffee", None, "kalt", "kalter Kaffee, kalten Kaffee, kaltem Kaffee", None),
        ("Milch", None, "frisch", "frische Milch, frische Milch, frischer Milch", None),
        ("Kind", "two", "klug", None, "zwei kluge Kinder, zwei kluge Kinder, zwei klugen Kindern"),
    ],
)
def test_noun_phrases_decline(noun, determiner, adjective, singular, plural):
    for is_plural, expected in ((False, singular), (True, plural)):
        phrase = NounPhrase(NOUN[noun], is_plural, determiner, ADJECTIVE[adjective])
        if expected:
            forms = [" ".join(german.noun_phrase(phrase, case)) for case in german.CASES]
            assert forms == expected.split(", ")


@pytest.mark.parametrize(
    ("infinitive", "forms"),
    [
        ("lesen", "lese liest liest lesen lest lesen"),
        ("vergessen", "vergesse vergisst vergisst vergessen vergesst vergessen"),
        ("arbeiten", "arbeite arbeitest arbeitet arbeiten arbeitet arbeiten"),
        ("einladen", "lade lädst lädt laden ladet laden"),
        ("füttern", "füttere fütterst füttert füttern füttert füttern"),
        ("waschen", "wasche wäschst wäscht waschen wascht waschen"),
        ("öffnen", "öffne öffnest öffnet öffnen öffnet öffnen"),
        ("sitzen", "sitze sitzt sitzt sitzen sitzt sitzen"),
        ("mitnehmen", "nehme nimmst nimmt nehmen nehmt nehmen"),
        ("wissen", "weiß weißt weiß wissen wisst wissen"),
    ],
)
def test_verbs_conjugate(infinitive, forms):
    assert verb(infinitive).present == forms.split()


# --- sentences, against translations written by hand ----------------------------------------------------------------

MAN, WOMAN, CHILD = (NounPhrase(NOUN[noun]) for noun in ("Mann", "Frau", "Kind"))
GARDEN = NounPhrase(NOUN["Garten"])
PETER = NounPhrase(NOUN["Peter"], determiner=None)
BOOK = Argument(NounPhrase(NOUN["Buch"]), "acc")
A_BOOK = Argument(NounPhrase(NOUN["Buch"], determiner="a", adjective=ADJECTIVE["alt"]), "acc")
CALLS = Clause(MAN, verb("anrufen"), (Argument(WOMAN, "acc"),))
READS = Clause(SIE, verb("lesen"), (BOOK,))
MUST = MODALS[1]


def statement(*args, **options) -> Sentence:
    return Sentence(Clause(*args, **options))


@pytest.mark.parametrize(
    ("tree", "source", "target"),
    [
        (Sentence(CALLS), "Der Mann ruft die Frau an .", "The man is calling the woman ."),
        (
            statement(SIE, verb("lesen"), (A_BOOK,), "past"),
            "Sie hat ein altes Buch gelesen .",
            "She read an old book .",
        ),
        (
            statement(ICH, verb("lesen"), (BOOK,), negated=True),
            "Ich lese das Buch nicht .",
            "I am not reading the book .",
        ),
        (
            statement(ICH, verb("einkaufen"), modal=MODALS[0], tense="future", negated=True),
            "Ich kann nicht einkaufen .",
            "I cannot go shopping .",
        ),
        (
            statement(WOMAN, verb("helfen"), (Argument(ER, "dat"),), time=TIME["heute"], front="time"),
            "Heute hilft ihm die Frau .",
            "Today the woman is helping him .",
        ),
        (
            statement(BOOK.phrase, verb("gefallen"), (Argument(ICH, "dat"),)),
            "Das Buch gefällt mir .",
            "I like the book .",
        ),
        (
            statement(SIE, verb("freuen"), (Argument(NounPhrase(NOUN["Fest"]), "acc", "auf", "to"),)),
            "Sie freut sich auf das Fest .",
            "She is looking forward to the party .",
        ),
        (
            statement(MAN, verb("legen"), (BOOK, Argument(NounPhrase(NOUN["Tisch"]), "acc", "auf", "on")), "past"),
            "Der Mann hat das Buch auf den Tisch gelegt .",
            "The man put the book on the table .",
        ),
        (
            statement(BOOK.phrase, verb("liegen"), (Argument(NounPhrase(NOUN["Tisch"]), "dat", "auf", "on"),)),
            "Das Buch liegt auf dem Tisch .",
            "The book lies on the table .",
        ),
        (
            Sentence(CALLS, "weil", Clause(SIE, verb("aufräumen"), (Argument(NounPhrase(NOUN["Zimmer"]), "acc"),))),
            "Der Mann ruft die Frau an , weil sie das Zimmer aufräumt .",
            "The man is calling the woman because she is tidying up the room .",
        ),
        (
            Sentence(READS, "obwohl", Clause(MAN, verb("zurückkommen"), tense="past"), second_first=True),
            "Obwohl der Mann zurückgekommen ist , liest sie das Buch .",
            "Although the man came back , she is reading the book .",
        ),
        (
            Sentence(READS, "aber", Clause(PETER, SEIN, quality=ADJECTIVE["müde"], negated=True)),
            "Sie liest das Buch , aber Peter ist nicht müde .",
            "She is reading the book , but Peter is not tired .",
        ),
        (
            Sentence(Clause(ICH, verb("glauben")), "dass", replace(READS, subject=CHILD, modal=MODALS[1])),
            "Ich glaube , dass das Kind das Buch lesen muss .",
            "I believe that the child has to read the book .",
        ),
        (
            Sentence(Clause(ICH, verb("fragen")), "ob", replace(READS, tense="future")),
            "Ich frage , ob sie das Buch lesen wird .",
            "I ask whether she will read the book .",
        ),
        (
            Sentence(replace(READS, tense="habit", time=TIME["jeden Tag"]), question=True),
            "Liest sie jeden Tag das Buch ?",
            "Does she read the book every day ?",
        ),
        (
            Sentence(Clause(SIE, verb("warten"), (Argument(PETER, "acc", "auf", "for"),), front="why"), question=True),
            "Warum wartet sie auf Peter ?",
            "Why is she waiting for Peter ?",
        ),
        (
            statement(SIE, verb("gehen"), (Argument(GARDEN, "acc", "in", "into"),), "past"),
            "Sie ist in den Garten gegangen .",
            "She went into the garden .",
        ),
        (
            statement(SIE, verb("schlafen"), place=Argument(GARDEN, "dat", "in", "in"), front="place"),
            "Im Garten schläft sie .",
            "In the garden she is sleeping .",
        ),
    ],
)
def test_a_tree_reads_as_german_and_as_english(tree, source, target):
    assert " ".join(german.sentence(tree)) == source
    assert " ".join(english.sentence(tree)) == target


# --- facts of German, in every sentence of a sample -----------------------------------------------------------------

ARTICLES = {  # gender (p: plural) and case
    "der": "m1 f3",
    "die": "f1 f2 p1 p2",
    "das": "n1 n2",
    "den": "m2 p3",
    "dem": "m3 n3",
    "im": "m3 n3",
    "am": "m3 n3",
    "zum": "m3 n3",
    "ins": "n2",
}
ENDINGS = {"e": "f1 f2 p1 p2", "en": "m2 p3", "em": "m3 n3", "er": "f3"}
EIN_WORDS = {"": "m1 n1 n2", **ENDINGS}
DIES_WORDS = ENDINGS | {"er": "m1 f3", "es": "n1 n2"}


def readings(word: str) -> tuple[set[str], str]:
    """The genders and cases a determiner may stand for, and its class; no readings if it is no determiner."""
    word = word.lower()
    if word in ARTICLES:
        return set(ARTICLES[word].split()), "definite"
    if (match := re.fullmatch(r"dies(e[nmrs]?)", word)) and match[1] in DIES_WORDS:
        return set(DIES_WORDS[match[1]].split()), "definite"
    match = re.fullmatch(r"(?:ein|mein|dein|sein|ihr|unser|eur|euer)(e[nmrs]?|)", word)
    # "ihr" alone may be a pronoun before a bare plural
    return (set(EIN_WORDS[match[1]].split()), "indefinite") if match and word != "ihr" else (set(), "")


def adjective_endings(gender_and_case: str, kind: str) -> str:
    """The ending an adjective has after a determiner of this kind."""
    gender, case = gender_and_case
    if gender == "p" or case == "3" or gender_and_case == "m2":
        return "en"
    return "e" if kind == "definite" or gender == "f" else {"m": "er", "n": "es"}[gender]


def noun_readings(word: str) -> set[str]:
    """The genders, numbers and cases a noun's form may stand for."""
    found = set()
    for noun in NOUNS:
        singular = {"1": noun.german, "2": noun.german, "3": noun.german}
        if noun.weak:
            singular |= dict.fromkeys("23", noun.plural)
        plural = dict.fromkeys("12", noun.plural)
        plural["3"] = noun.plural if noun.plural[-1] in "ns" else noun.plural + "n"
        found |= {noun.gender + case for case, form in singular.items() if form == word}
        found |= {"p" + case for case, form in plural.items() if form == word and not noun.mass}
    return found


def test_determiner_adjective_and_noun_agree_in_every_noun_phrase(sample):
    stems = {adjective.stem: adjective for adjective in ADJECTIVES}
    known = {
        form: noun_readings(form) for form in {word for source, _ in sample for word in source if word[0].isupper()}
    }
    checked = 0
    for source, _ in sample:
        words = (*source, "", "")
        for word, *rest in zip(words, words[1:], words[2:], strict=False):
            expected, kind = readings(word)
            adjective = re.fullmatch(r"(.+?)(e[nmrs]?)", rest[0])
            described = bool(adjective and adjective[1] in stems)
            noun = rest[described]
            if not expected or not known.get(noun):
                continue
            agreed = expected & known[noun]
            if described:
                agreed = {reading for reading in agreed if adjective_endings(reading, kind) == adjective[2]}
            assert agreed, f"{' '.join((word, *rest[: described + 1]))} in: {' '.join(source)}"
            checked += 1
    assert checked > len(sample)


@pytest.fixture(scope="module")
def finite_verbs() -> set[str]:
    """Finite forms, also with the prefix attached, as at the end of a clause."""
    forms = {form for modal in MODALS for form in (*modal.present, *modal.past)}
    forms |= {form for verb in german.FORMS.values() for form in verb}
    for v in ALL_VERBS:
        forms |= {v.prefix + form for form in v.present} | set(v.present)
    return forms


def test_the_verb_is_last_in_every_subordinate_clause(sample, finite_verbs):
    subordinators = {"weil", "obwohl", "dass", "ob"}
    checked = Counter()
    for source, _ in sample:
        for clause in re.split(r" [,.?] ?", " ".join(source)):
            first = clause.split(" ")[0].lower()
            if first in subordinators:
                checked[first] += 1
                assert clause.split(" ")[-1] in finite_verbs, clause
    assert checked.keys() == subordinators


def test_the_verb_is_second_after_a_time_in_front(sample, finite_verbs):
    starts = [time.german[0].upper() + time.german[1:] + " " for time in TIMES]
    checked = 0
    for source, _ in sample:
        text = " ".join(source)
        for start in starts:
            if text.startswith(start):
                checked += 1
                assert text.removeprefix(start).split(" ")[0] in finite_verbs, text
    assert checked > 100


def test_separable_verbs_are_split_and_joined(sample):
    prefixes = {v.prefix for v in VERBS if v.prefix}
    split = {source[-2] for source, _ in sample} & prefixes
    finite = {v.prefix + form: v.prefix for v in VERBS if v.prefix for form in v.present if form != v.infinitive}
    joined = {finite[word] for source, _ in sample for word in source if word in finite}
    assert len(split) > 8
    assert len(joined) > 8


def test_a_indefinite_article_fits_the_next_english_word(sample):
    for _, target in sample:
        for article, word in pairwise(target):
            if article in ("a", "an"):
                assert (article == "an") == (word[0] in "aeiou" or word == "hour"), " ".join(target)


# --- the corpus -----------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_corpus():
    first, again, other = (list(islice(corpus.pairs(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_corpus_is_that_of_its_edition(tmp_path):
    corpus.write(tmp_path, corpus.SPLITS, seed=1)
    content = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert hashlib.sha256(content).hexdigest()[:8] == EDITION


def test_no_sentence_repeats_and_none_of_valid_or_test_is_in_training(tmp_path):
    corpus.write(tmp_path, {"train": 3000, "valid": 300, "test": 300}, seed=1)
    for language in ("de", "en"):
        lines = [
            line for split in corpus.SPLITS for line in (tmp_path / f"{split}.{language}").read_text().splitlines()
        ]
        assert len(set(lines)) == len(lines) == 3600


def test_a_third_of_the_training_set_has_nearly_every_word_of_new_sentences(sample):
    pairs = [[text.split() for text in pair] for pair in islice(corpus.pairs(1), corpus.SPLITS["train"] // 3)]
    for language in (0, 1):
        known = {word for pair in pairs for word in pair[language]}
        words = [word for pair in sample for word in pair[language]]
        assert sum(word not in known for word in words) < 0.005 * len(words)


def test_the_grammar_is_a_corpus_like_any_other(prepare, tmp_path):
    folder = tmp_path / "work" / "data" / f"{NAME}-head300"
    (folder / "tok.0123abcd.part" / "of a process that was killed").mkdir(parents=True)
    status, said = prepare(NAME, "--head", 300)
    assert (status, said) == (0, str(folder / "bin"))
    assert (folder / "bin" / "train.de-en.de.bin").exists() and not [*folder.glob("*.part")]
    files = [getattr(handler, "baseFilename", "") for handler in logging.getLogger("fairseq_cli.preprocess").handlers]
    assert not [file for file in files if ".part" in file]  # no log stays open in a folder that has moved
    corpus.write(tmp_path / "again", corpus.SPLITS | {"train": 300}, seed=1)
    for file in (tmp_path / "again").iterdir():
        assert (folder / "tok" / file.name).read_text() == file.read_text()
