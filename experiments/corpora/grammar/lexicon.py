"""The words of the quickstart grammar: nouns, adjectives, verbs and fixed phrases in German and English.

Entries are lines of ``lexicon.json``, with the fields of the classes below. ``german.py`` and ``english.py`` inflect;
``corpus.py`` combines words. A noun or adjective has kinds (``person``, ``food``, …), and a verb has the kinds of its
complements, so that sentences make sense.
"""

import json
from dataclasses import dataclass
from pathlib import Path

VOWELS = tuple("aeiou")


@dataclass(frozen=True)
class Noun:
    """A German noun and its English counterpart.

    `weak` nouns end in -n in every case but the nominative singular; `mass` nouns have no plural and no "a".
    For a noun that is a place, `location` and `direction` are (German, case, English) prepositions.
    """

    german: str
    gender: str  # m, f or n
    plural: str
    english: str
    english_plural: str
    kinds: tuple[str, ...]
    weak: bool = False
    mass: bool = False
    location: tuple[str, str, str] | None = None
    direction: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Adjective:
    """An adjective; `english_of` has translations for kinds of nouns: a man who is "groß" is tall, a house is big."""

    german: str
    english: str
    kinds: tuple[str, ...]
    comparative: tuple[str, str] | None = None
    english_of: tuple[tuple[str, str, str], ...] = ()

    @property
    def stem(self) -> str:
        """Return the stem for endings: müde → müd-, teuer → teur-."""
        if self.german.endswith("er") and self.german[-3] in "aeiou":
            return self.german[:-2] + "r"
        return self.german.removesuffix("e")


@dataclass(frozen=True)
class Slot:
    """A complement of a verb: its case, the kinds of its noun, and its prepositions, if any.

    `prepositions` are (German, English) pairs to choose from; the German one is empty if only English needs one.
    """

    case: str  # acc or dat; "direction" takes the noun's own preposition
    kinds: tuple[str, ...]
    prepositions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Verb:
    """A German verb (`prefix` is separable) with its forms, and its English translation."""

    infinitive: str  # without the prefix
    prefix: str
    third: str
    participle: str
    auxiliary: str
    english: tuple[str, str, str, str]  # base, past, participle, -ing
    particle: str = ""
    slots: tuple[Slot, ...] = ()
    subjects: tuple[str, ...] = ("person",)
    stative: bool = False  # never progressive in English, no modal verb
    durative: bool = False  # goes with "seit zwei Jahren"
    reflexive: bool = False
    swap: bool = False  # the complement is the English subject: es gefällt mir, I like it
    located: bool = True  # may take a place adverbial
    gerund: bool = False  # as a control verb: stop working, not stop to work


@dataclass(frozen=True)
class Modal:
    """A modal verb: German forms for ich, du, er, wir, ihr, sie; in English a finite verb and the words after it."""

    present: tuple[str, ...]
    past: tuple[str, ...]
    english: str
    rest: tuple[str, ...]


@dataclass(frozen=True)
class Time:
    """A time phrase, and the kinds of clause in which it can be used (see `corpus.Sampler.tense`)."""

    german: str
    english: str
    uses: tuple[str, ...]
    frontable: bool = True


def plural_or_third(singular: str) -> str:
    """Append -s: the plural of a regular noun, or the third person of a verb."""
    if singular.endswith(("s", "x", "ch", "sh")):
        return singular + "es"
    if singular.endswith("y") and singular[-2] not in VOWELS:
        return singular[:-1] + "ies"
    return singular + "s"


def _tuples(value):
    """Return a value of JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_WORDS = _tuples(json.loads(Path(__file__).with_name("lexicon.json").read_text(encoding="utf-8")))


def _verbs(name: str) -> list[Verb]:
    return [Verb(**entry | {"slots": tuple(Slot(**slot) for slot in entry.get("slots", ()))}) for entry in _WORDS[name]]


NOUNS = [Noun(**entry) for entry in _WORDS["nouns"]]
ADJECTIVES = [Adjective(**entry) for entry in _WORDS["adjectives"]]
VERBS, CONTROL_VERBS = _verbs("verbs"), _verbs("control_verbs")  # versuchen, das Buch zu lesen
THAT_VERBS, WHETHER_VERBS = _verbs("that_verbs"), _verbs("whether_verbs")  # glauben, dass …; fragen, ob …
[SEIN] = _verbs("be")
MODALS = [Modal(**entry) for entry in _WORDS["modals"]]
TIMES = [Time(**entry) for entry in _WORDS["times"]]  # uses: now, habit, past, future (also with a modal verb), since
# The genitive singular in -es where -s alone would be wrong or stiff; feminine and weak nouns need no entry.
LONG_GENITIVE = set(_WORDS["long_genitive"])
NAMES, CITIES = _WORDS["names"], _WORDS["cities"]
FREQUENCIES, EXPERIENCES = _WORDS["frequencies"], _WORDS["experiences"]
