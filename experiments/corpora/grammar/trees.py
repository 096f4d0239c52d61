"""The trees of sentence pairs, which are written once in German and once in English.

A tree has the meaning: who does what to whom, when, negated or not. ``german.py`` and ``english.py`` add order, agreement and
inflection. So the grammar is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.corpora.grammar.lexicon import Adjective, Modal, Noun, Time, Verb


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun, or as a determiner a possessive: first person plural is "wir" or "unser"."""

    person: int
    plural: bool
    gender: str = ""  # of the third person singular: m or f


@dataclass(frozen=True)
class Name:
    """A person or a city, spelt alike in both languages."""

    name: str
    gender: str = "n"
    person: int = 3
    plural: bool = False


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase; `determiner` is the, a, this, no, two, three, many, a possessive, or None (for bare nouns)."""

    noun: Noun
    plural: bool = False
    determiner: str | Pronoun | None = "the"
    adjective: Adjective | None = None
    owner: NounPhrase | Name | None = None  # das Rad des Lehrers, Annas Rad
    relative: Clause | None = None
    person: int = 3

    @property
    def gender(self) -> str:
        return self.noun.gender


@dataclass(frozen=True)
class Gap:
    """A gap in a clause: a question word ("wer") or, with the gender of its noun, a relative pronoun."""

    word: str  # who, what or relative
    animate: bool = True
    gender: str = "m"
    plural: bool = False
    person: int = 3


Nominal = Pronoun | Name | NounPhrase | Gap


@dataclass(frozen=True)
class Argument:
    """A noun phrase with its case and, if there is one, its preposition in each language."""

    phrase: Nominal
    case: str
    german: str = ""
    english: str = ""


@dataclass(frozen=True)
class Quality:
    """A predicate of "sein": "müde", or with `than` a comparison."""

    adjective: Adjective
    than: Nominal | None = None


@dataclass(frozen=True)
class Clause:
    """A clause; `tense` is present, habit, since, past, experience or future.

    `front` is the part before the finite verb: subject, time, place, a question word ("why", "when", "where") or the index of a
    complement.
    """

    subject: Nominal
    verb: Verb
    complements: tuple[Argument, ...] = ()
    tense: str = "present"
    modal: Modal | None = None
    negated: bool = False
    adverb: str = ""  # gern, or a key of FREQUENCIES or EXPERIENCES
    time: Time | None = None
    place: Argument | None = None
    companion: Argument | None = None
    quality: Quality | None = None
    front: str | int = "subject"
    question: bool = False
    infinitive: Clause | None = None  # versuchen, das Buch zu lesen


@dataclass(frozen=True)
class Sentence:
    """One or two clauses. `link` is a conjunction (its German word); `second_first` puts the subordinate clause first."""

    construction: str
    clause: Clause
    link: str = ""
    second: Clause | None = None
    second_first: bool = False
