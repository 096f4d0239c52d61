"""The words of the quickstart's grammar, which `lexicon.json` holds.

Nouns and adjectives have kinds (``person``, ``food``, …), and verbs say which kinds they take, so that sentences make sense.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Noun:
    """A German noun and its English counterpart."""

    german: str
    gender: str  # m, f or n
    plural: str
    english: str
    english_plural: str
    kinds: Sequence[str]
    weak: bool = False  # ends in -n in every case but the nominative singular
    mass: bool = False  # has no plural and no "a", like a name
    location: Sequence[str] = ()  # of a place: case, German preposition, English preposition
    direction: Sequence[str] = ()


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun, and as a determiner its possessive."""

    person: int
    plural: bool
    gender: str  # of the third person: m, f or p (plural)
    german: Sequence[str]  # nominative, accusative, dative, reflexive, possessive
    english: Sequence[str]  # subject, object, possessive
    kinds = ("person",)
    definite = True


@dataclass(frozen=True)
class Adjective:
    """An adjective; "groß" has two entries: a man is tall, a house is big."""

    german: str
    english: str
    kinds: Sequence[str]
    stem: str = ""  # if endings are added to another form: müd- of müde, teur- of teuer


@dataclass(frozen=True)
class Slot:
    """A complement of a verb: its case, the kinds of noun that it takes, and its (German, English) prepositions."""

    case: str  # acc or dat; "location" and "direction" take the noun's case and preposition
    kinds: Sequence[str]
    prepositions: Sequence[Sequence[str]] = (("", ""),)


@dataclass(frozen=True)
class Verb:
    """A German verb with its forms, and the English verb that translates it."""

    infinitive: str  # without the prefix
    prefix: str  # separable
    present: Sequence[str]  # for ich, du, er, wir, ihr, sie; without the prefix
    participle: str
    auxiliary: str
    english: Sequence[str]  # base, third person, past, -ing
    particle: str = ""
    slots: Sequence[Slot] = ()
    subjects: Sequence[str] = ("person",)
    stative: bool = False  # never progressive in English; no modal verb, no time
    reflexive: bool = False
    swap: bool = False  # the complement is the English subject: es gefällt mir, I like it
    located: bool = True  # may take a place adverbial


@dataclass(frozen=True)
class Modal:
    """A modal verb: its forms for ich, du, er, wir, ihr, sie; in English a finite verb and what follows it."""

    present: Sequence[str]
    past: Sequence[str]
    english: str
    rest: Sequence[str]


@dataclass(frozen=True)
class Time:
    """A time phrase, and the clauses that it goes with: present, habit, past, future (also with a modal verb)."""

    german: str
    english: str
    uses: Sequence[str]


WORDS = json.loads(Path(__file__).with_name("lexicon.json").read_text("utf-8"))


def _verbs(name: str) -> list[Verb]:
    return [Verb(**entry | {"slots": [Slot(**slot) for slot in entry.get("slots", ())]}) for entry in WORDS[name]]


NOUNS = [Noun(**entry) for entry in WORDS["nouns"]]
ADJECTIVES = [Adjective(**entry) for entry in WORDS["adjectives"]]
VERBS = _verbs("verbs")
THAT_VERBS = _verbs("that_verbs")  # glauben, dass …; fragen, ob …
[SEIN] = _verbs("be")
MODALS = [Modal(**entry) for entry in WORDS["modals"]]
TIMES = [Time(**entry) for entry in WORDS["times"]]
PRONOUNS = [Pronoun(*entry) for entry in WORDS["pronouns"]]
