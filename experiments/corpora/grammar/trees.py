"""The trees that a sentence pair is read from, once in German and once in English.

A tree says what is meant: who does what to whom, when, negated or not. Order, agreement and inflection are left to
``german.py`` and ``english.py``, which makes the grammar synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.corpora.grammar.lexicon import Adjective, Modal, Noun, Pronoun, Time, Verb


@dataclass(frozen=True)
class NounPhrase:
    """A noun with its determiner and adjective; a name is a noun without a determiner."""

    noun: Noun
    plural: bool = False
    determiner: str | Pronoun | None = "the"  # the, a, this, two, three, a possessive; bare: None
    adjective: Adjective | None = None
    person = 3

    @property
    def gender(self) -> str:
        """Return m, f or n, and p for every plural."""
        return "p" if self.plural else self.noun.gender

    @property
    def kinds(self) -> Sequence[str]:
        return self.noun.kinds

    @property
    def definite(self) -> bool:
        return self.determiner not in ("a", "two", "three", None) or "name" in self.kinds


@dataclass(frozen=True)
class Argument:
    """A noun phrase with its case, and its preposition in each language, if any."""

    phrase: Pronoun | NounPhrase
    case: str
    german: str = ""
    english: str = ""


@dataclass(frozen=True)
class Clause:
    """A clause with its verb."""

    subject: Pronoun | NounPhrase
    verb: Verb
    complements: tuple[Argument, ...] = ()
    tense: str = "present"  # or habit, past, future; a modal verb has past and future, which is its present
    modal: Modal | None = None
    negated: bool = False
    time: Time | None = None
    place: Argument | None = None
    quality: Adjective | None = None  # the predicate of "sein"
    front: str = "subject"  # before the finite verb: also time, place or, in a question, why


@dataclass(frozen=True)
class Sentence:
    """One clause, or two with a conjunction (its German word) as their link."""

    clause: Clause
    link: str = ""
    second: Clause | None = None
    second_first: bool = False
    question: bool = False
