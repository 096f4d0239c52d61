"""The trees that a sentence pair is read from, once in German and once in English.

A tree says what is meant: who does what to whom, when, negated or not. Order, agreement and inflection are left to
``german.py`` and ``english.py``, which makes the grammar synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.corpora.grammar.lexicon import PRONOUNS, Adjective, Modal, Noun, Time, Verb


class Nominal:
    """A subject or an object: someone known, in the third person singular, unless a subclass says otherwise."""

    person, plural, gender, definite, kinds = 3, False, "n", True, ("person",)
    determiner = relative = None


@dataclass(frozen=True)
class Pronoun(Nominal):
    """A personal pronoun, and as a determiner the possessive: first person plural is "wir" or "unser"."""

    person: int
    plural: bool
    gender: str = ""  # of the third person singular: m or f

    @property
    def german(self) -> list[str]:
        """Return the nominative, accusative, dative, reflexive and possessive."""
        return PRONOUNS[self.person, self.plural, self.gender][0]

    @property
    def english(self) -> list[str]:
        """Return the subject, object and possessive."""
        return PRONOUNS[self.person, self.plural, self.gender][1]


@dataclass(frozen=True)
class Name(Nominal):
    """A person or a city, spelt alike in both languages."""

    name: str
    gender: str = "n"


@dataclass(frozen=True)
class NounPhrase(Nominal):
    """A noun with what belongs to it."""

    noun: Noun
    plural: bool = False
    determiner: str | Pronoun | None = "the"  # the, a, this, no, two, three, many, a possessive; bare: None
    adjective: Adjective | None = None
    owner: NounPhrase | Name | None = None  # das Rad des Lehrers, Annas Rad
    relative: Clause | None = None

    @property
    def gender(self) -> str:
        return self.noun.gender

    @property
    def kinds(self) -> Sequence[str]:
        return self.noun.kinds

    @property
    def definite(self) -> bool:
        return self.determiner in ("the", "this") or isinstance(self.determiner, Pronoun)


@dataclass(frozen=True)
class Gap(Nominal):
    """What a clause misses: the word asked for ("wer") or, with the gender of its noun, a relative pronoun."""

    word: str  # who, what or relative
    animate: bool = True
    gender: str = "m"
    plural: bool = False


@dataclass(frozen=True)
class Argument:
    """A noun phrase with its case, and its preposition in each language, if any."""

    phrase: Nominal
    case: str
    german: str = ""
    english: str = ""


@dataclass(frozen=True)
class Clause:
    """A clause with its verb."""

    subject: Nominal
    verb: Verb
    complements: tuple[Argument, ...] = ()
    tense: str = "present"  # or habit, since, past, experience, future
    modal: Modal | None = None
    negated: bool = False
    adverb: str = ""  # gern, a frequency or an experience
    time: Time | None = None
    place: Argument | None = None
    companion: Argument | None = None
    quality: Adjective | None = None  # the predicate of "sein"
    than: Nominal | None = None  # what the quality is compared with
    front: str | int = "subject"  # before the finite verb: also time, place, a question word, a complement's index
    question: bool = False
    infinitive: Clause | None = None  # versuchen, das Buch zu lesen


@dataclass(frozen=True)
class Sentence:
    """One clause, or two with a conjunction (its German word) as their link."""

    clause: Clause
    link: str = ""
    second: Clause | None = None
    second_first: bool = False
