"""Write a German-English corpus from a small synchronous grammar.

A random tree (``trees.py``) is written as a sentence twice, by ``german.py`` and ``english.py``. The grammar has the features
that make German hard to translate word by word: gender, case and agreement, separable verbs, and the participle or infinitive
at the end. The verb is last in subordinate clauses, and second in main clauses after any first phrase.
"""

import argparse
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from experiments.corpora.grammar import english, german
from experiments.corpora.grammar.lexicon import (
    ADJECTIVES,
    CITIES,
    CONTROL_VERBS,
    EXPERIENCES,
    FREQUENCIES,
    MODALS,
    NAMES,
    NOUNS,
    SEIN,
    THAT_VERBS,
    TIMES,
    VERBS,
    WHETHER_VERBS,
    Adjective,
    Noun,
    Slot,
    Time,
    Verb,
)
from experiments.corpora.grammar.trees import (
    Argument,
    Clause,
    Gap,
    Name,
    Nominal,
    NounPhrase,
    Pronoun,
    Quality,
    Sentence,
)

SPLITS = {"train": 24_000, "valid": 500, "test": 500}

SUBJECT_PRONOUNS = [Pronoun(p, n, g) for p, n, g in german.PRONOUNS]
# "sie" as an object may be "her" or "them"; the other forms tell person and number.
OBJECT_PRONOUNS = {
    "acc": [p for p in SUBJECT_PRONOUNS if german.noun_phrase(p, "acc") != ["sie"]],
    "dat": SUBJECT_PRONOUNS,
}
EVENTS = [verb for verb in VERBS if not verb.stative]


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation as tokens, with their tree and construction."""

    tree: Sentence
    german: tuple[str, ...]
    english: tuple[str, ...]


@functools.cache
def _nouns(kinds: tuple[str, ...]) -> list[Noun]:
    """Return the nouns of one of the kinds."""
    return [noun for noun in NOUNS if not set(kinds).isdisjoint(noun.kinds)]


@functools.cache
def _adjectives(kinds: tuple[str, ...]) -> list[Adjective]:
    """Return the adjectives for a noun of these kinds."""
    return [adjective for adjective in ADJECTIVES if not set(kinds).isdisjoint(adjective.kinds)]


def _is_person(phrase: Nominal) -> bool:
    return not isinstance(phrase, NounPhrase) or "person" in phrase.noun.kinds


def _pronoun_for(phrase: Nominal) -> Pronoun | None:
    """Return the pronoun for a person; None for neuter nouns, which are he or she in English."""
    if isinstance(phrase, Pronoun):
        return phrase
    if isinstance(phrase, Gap) or not _is_person(phrase) or (phrase.gender == "n" and not phrase.plural):
        return None
    return Pronoun(3, phrase.plural, "" if phrase.plural else phrase.gender)


def _is_indefinite(phrase: Nominal) -> bool:
    return isinstance(phrase, NounPhrase) and phrase.determiner in ("a", "two", "three", "many", None)


class Sampler:
    """A generator of random trees. All random numbers have one source, so a seed fixes the corpus."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.used: set[str] = set()
        self.constructions: dict[str, tuple[Callable[[], Sentence], int]] = {
            "statement": (self.statement, 16),
            "inversion": (self.inversion, 20),
            "question": (self.question, 8),
            "wh-question": (self.wh_question, 8),
            "predicate": (self.predicate, 8),
            "relative": (self.relative_sentence, 12),
            "adverbial clause": (self.adverbial_clause, 12),
            "that clause": (self.that_clause, 8),
            "infinitive": (self.infinitive_sentence, 8),
            "coordination": (self.coordination, 6),
        }

    def sentence(self) -> Sentence:
        self.used.clear()
        makers, weights = zip(*self.constructions.values(), strict=True)
        return self.random.choices(makers, weights)[0]()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def weighted(self, weights: dict):
        return self.random.choices(list(weights), list(weights.values()))[0]

    # --- noun phrases -----------------------------------------------------------------------------------------------

    def noun(self, kinds: tuple[str, ...]) -> Noun:
        """Return a noun of one of the kinds that is not in the sentence yet, if there is one."""
        nouns = _nouns(kinds)
        noun = self.random.choice([noun for noun in nouns if noun.english not in self.used] or nouns)
        self.used.add(noun.english)
        return noun

    def noun_phrase(
        self, kinds: tuple[str, ...], *, owner: Pronoun | None = None, definite: bool = False
    ) -> NounPhrase:
        """Return a noun phrase; a possessive may refer to `owner`, and `definite` excludes "a", bare nouns and numbers."""
        noun = self.noun(kinds)
        plural = not noun.mass and "single" not in noun.kinds and self.chance(0.1 if "place" in noun.kinds else 0.3)
        if noun.mass:
            determiner = "the" if definite else self.weighted({None: 7, "the": 3})
        else:
            indefinite = {None: 3, "two": 1, "three": 1, "many": 1} if plural else {"a": 6}
            possessive = 0 if "public" in noun.kinds else 8 if "kin" in noun.kinds else 4
            if definite or "kin" in noun.kinds:
                indefinite = {}
            kind = self.weighted({"the": 10, "this": 2, "possessive": possessive, **indefinite})
            determiner = self.possessive(owner) if kind == "possessive" else kind
        phrase = NounPhrase(noun, plural, determiner)
        adjectives = _adjectives(noun.kinds)
        if adjectives and self.chance(0.35):
            phrase = replace(phrase, adjective=self.random.choice(adjectives))
        if determiner == "the" and not noun.mass and self.chance(0.1) and not {"place", "event"} & set(noun.kinds):
            phrase = replace(phrase, owner=self.owner())
        return phrase

    def possessive(self, owner: Pronoun | None) -> Pronoun:
        if owner and self.chance(0.7):
            return owner
        return self.random.choice([Pronoun(1, False), Pronoun(1, True), Pronoun(2, False)])

    def owner(self) -> Name | NounPhrase:
        if self.chance(0.5):
            return self.name()
        noun = self.noun(("person",))
        mine = "public" not in noun.kinds and self.chance(0.5)
        return NounPhrase(noun, determiner=Pronoun(1, False) if mine else "the")

    def name(self) -> Name:
        name = self.random.choice([name for name in NAMES if name not in self.used])
        self.used.add(name)
        return Name(name, NAMES[name])

    def subject(self, kinds: tuple[str, ...], *, pronouns: bool = True) -> Nominal:
        if "person" in kinds:
            kind = self.weighted({"pronoun": 5 * pronouns, "name": 2, "noun": 9})
            if kind == "pronoun":
                return self.random.choice(SUBJECT_PRONOUNS)
            if kind == "name":
                return self.name()
        return self.noun_phrase(kinds, definite=not set(kinds) & {"person", "animal"})

    def object(self, slot: Slot, subject: Nominal, *, definite: bool = False) -> Argument:
        """Return a complement for a slot of a verb with this subject."""
        if slot.case == "direction":
            place = self.noun_phrase(("place",), definite=True)
            preposition, case, english_preposition = place.noun.direction
            return Argument(place, case, preposition, english_preposition)
        preposition, english_preposition = self.random.choice(slot.prepositions or (("", ""),))
        if "city" in slot.kinds:
            return Argument(Name(self.random.choice(CITIES)), slot.case, preposition, english_preposition)
        definite = definite or slot.case == "dat" or bool(preposition)
        phrase: Nominal = self.noun_phrase(slot.kinds, owner=_pronoun_for(subject), definite=definite)
        if isinstance(phrase, NounPhrase) and "person" in phrase.noun.kinds:
            kind = self.weighted({"pronoun": 4, "name": 3, "noun": 9})
            if kind == "pronoun":
                others = [p for p in OBJECT_PRONOUNS[slot.case] if p.person == 3 or p.person != subject.person]
                phrase = self.random.choice(others)
            elif kind == "name":
                phrase = self.name()
        return Argument(phrase, slot.case, preposition, english_preposition)

    def place(self) -> Argument:
        place = self.noun_phrase(("place",), definite=True)
        preposition, case, english_preposition = place.noun.location
        return Argument(place, case, preposition, english_preposition)

    def companion(self, subject: Nominal) -> Argument:
        return self.object(Slot("dat", ("person",), (("mit", "with"),)), subject)

    def may_have_company(self, clause: Clause) -> bool:
        """Return True for verbs of going or being busy, without an object: after one, "mit" would seem to belong to it."""
        person = _is_person(clause.subject) and not isinstance(clause.subject, Gap)
        going = all(slot.case == "direction" or "city" in slot.kinds for slot in clause.verb.slots)
        return person and going and not clause.verb.stative

    # --- clauses ----------------------------------------------------------------------------------------------------

    def tense(self, verb: Verb, person: bool) -> str:
        """Return present, habit, past, future, modal, since or experience, if the verb allows it."""
        weights = {"present": 26, "past": 12 if verb.stative else 24, "since": 8 * verb.durative}
        if not verb.stative and set(verb.subjects) & {"person", "animal"}:
            weights |= {"habit": 20, "future": 10, "modal": 18, "experience": 5 * (person and not verb.durative)}
        return self.weighted(weights)

    def time(self, use: str) -> Time:
        return self.random.choice([time for time in TIMES if use in time.uses])

    def complements(self, verb: Verb, subject: Nominal, gap: tuple[int, Gap] | None = None) -> tuple[Argument, ...]:
        """Return complements for the verb's slots; `gap` is the index of one slot and its content."""
        parts = []
        for index, slot in enumerate(verb.slots):
            if gap and gap[0] == index:
                german_preposition, english_preposition = (slot.prepositions or (("", ""),))[0]
                parts.append(Argument(gap[1], slot.case, german_preposition, english_preposition))
            else:
                parts.append(self.object(slot, subject))
        return tuple(parts)

    def clause(
        self,
        *,
        verb: Verb | None = None,
        subject: Nominal | None = None,
        complements: tuple[Argument, ...] | None = None,
        tense: str | None = None,
        extras: bool = True,
    ) -> Clause:
        """Return a clause that begins with its subject. Without `extras` it has only the adverbials that its tense needs."""
        if verb is None:
            verb = self.random.choice([v for v in VERBS if subject is None or "person" in v.subjects])
        subject = subject or self.subject(verb.subjects)
        if complements is None:
            complements = self.complements(verb, subject)
        person = _is_person(subject)
        tense = tense or self.tense(verb, person)
        clause = Clause(subject, verb, complements, tense)
        if tense == "modal":
            modal = self.random.choice(MODALS)
            clause = replace(clause, modal=modal, tense="past" if modal.past and self.chance(0.35) else "present")
        if tense == "habit":
            clause = self.with_habit(clause, person)
        elif tense == "experience":
            clause = replace(clause, adverb=self.random.choice(list(EXPERIENCES)))
        elif tense == "since":
            clause = replace(clause, time=self.time("since"))
        elif extras and self.chance(0.4) and not verb.stative:
            modal_present = clause.modal and clause.tense == "present"
            use = "future" if modal_present else {"present": "now"}.get(clause.tense, clause.tense)
            clause = replace(clause, time=self.time(use))
        if extras and verb.located and self.chance(0.3):
            clause = replace(clause, place=self.place())
        elif extras and self.chance(0.3) and self.may_have_company(clause):
            clause = replace(clause, companion=self.companion(subject))
        return clause

    def with_habit(self, clause: Clause, person: bool) -> Clause:
        """Mark a habit by a frequency, a time, or "gern"."""
        sudden = clause.verb.reflexive or (clause.verb.auxiliary == "sein" and not clause.verb.slots)
        mark = self.weighted({"frequency": 4, "time": 4, "gern": 3 * (person and not sudden)})
        if mark == "time":
            return replace(clause, time=self.time("habit"))
        return replace(clause, adverb="gern" if mark == "gern" else self.random.choice(list(FREQUENCIES)))

    def negate(self, clause: Clause) -> Clause:
        """Return the clause negated by "nicht" or "kein" if that is natural; else the unchanged clause."""
        parts = clause.complements
        if (
            clause.adverb not in ("", "gern")
            or clause.tense in ("since", "experience")
            or _is_indefinite(clause.subject)
        ):
            return clause
        indefinite = [i for i, part in enumerate(parts) if _is_indefinite(part.phrase)]
        if clause.adverb or not indefinite:
            return replace(clause, negated=True)
        index = indefinite[0]
        phrase = parts[index].phrase
        if len(indefinite) > 1 or parts[index].german or phrase.determiner not in ("a", None):
            return clause
        part = replace(parts[index], phrase=replace(phrase, determiner="no"))
        return replace(clause, negated=True, complements=(*parts[:index], part, *parts[index + 1 :]))

    def maybe_negate(self, clause: Clause, probability: float = 0.18) -> Clause:
        return self.negate(clause) if self.chance(probability) else clause

    def quality_clause(self, subject: Nominal | None = None, *, comparison: bool = True) -> Clause:
        """Return a clause such as "X is old", or "X is older than Y"."""
        subject = subject or self.subject(
            self.random.choice([("person",), ("animal",), ("thing", "clothing", "vehicle"), ("place",), ("text",)])
        )
        if isinstance(subject, NounPhrase):
            subject = replace(subject, adjective=None)
        kinds = subject.noun.kinds if isinstance(subject, NounPhrase) else ("person",)
        adjectives = _adjectives(kinds)
        adjective = self.random.choice(adjectives)
        tense = self.weighted({"present": 3, "past": 1})
        if comparison and adjective.comparative and self.chance(0.6):
            than = self.subject((kinds[0],), pronouns=False)
            return Clause(subject, SEIN, tense="present", quality=Quality(adjective, than))
        time = None
        if adjective.english in ("tired", "hungry", "sick", "happy", "sad") and self.chance(0.4):
            time = self.random.choice(
                [
                    t
                    for t in TIMES
                    if t.english in (("today", "now") if tense == "present" else ("yesterday", "last week"))
                ]
            )
        return Clause(subject, SEIN, tense=tense, quality=Quality(adjective), time=time)

    # --- sentences --------------------------------------------------------------------------------------------------

    def statement(self) -> Sentence:
        return Sentence("statement", self.maybe_negate(self.clause()))

    def inversion(self) -> Sentence:
        """Return a sentence that begins with a time, a place, or an object whose case is visible."""
        while True:
            clause = self.maybe_negate(self.clause())
            fronts: list[str | int] = []
            if clause.time and clause.time.frontable:
                fronts += ["time"] * 3
            if clause.place:
                fronts += ["place"] * 2
            fronts += [i for i, part in enumerate(clause.complements) if self.can_front(part, clause)]
            if fronts:
                return Sentence("inversion", replace(clause, front=self.random.choice(fronts)))

    def can_front(self, part: Argument, clause: Clause) -> bool:
        phrase = part.phrase
        if part.german or not isinstance(phrase, NounPhrase) or clause.negated:
            return False
        if part.case == "dat":
            return clause.verb.swap or len(clause.complements) == 1
        return phrase.gender == "m" and not phrase.plural and phrase.determiner is not None

    def question(self) -> Sentence:
        subject = self.random.choice([Pronoun(2, False), Pronoun(2, True)]) if self.chance(0.3) else None
        return Sentence("question", replace(self.maybe_negate(self.clause(subject=subject), 0.1), question=True))

    def wh_question(self) -> Sentence:
        kind = self.weighted({"subject": 3, "object": 5, "why": 2, "when": 2, "where": 2, "where to": 1})
        if kind == "subject":
            verb = self.random.choice([v for v in VERBS if v.subjects[0] == "person"])
            clause = self.clause(verb=verb, subject=Gap("who"))
        elif kind == "object":
            verb, index, word = self.random.choice(list(_askable()))
            subject = self.subject(verb.subjects)
            parts = self.complements(verb, subject, (index, Gap(word, animate=word == "who")))
            clause = replace(self.clause(verb=verb, subject=subject, complements=parts), front=index)
        elif kind == "where to":
            verb = self.random.choice([v for v in VERBS if v.slots and v.slots[0].case == "direction"])
            clause = replace(self.clause(verb=verb, complements=()), front="where to")
        else:
            asked = {"when": "time", "where": "place"}.get(kind)
            verbs = [v for v in EVENTS if v.located] if kind == "where" else EVENTS
            tense = self.weighted({"present": 1, "past": 1, "future": 1}) if kind == "when" else None
            clause = self.clause(verb=self.random.choice(verbs), tense=tense)
            clause = replace(clause, front=kind, **({asked: None} if asked else {}))
        return Sentence("wh-question", replace(clause, question=True))

    def predicate(self) -> Sentence:
        return Sentence("predicate", self.maybe_negate(self.quality_clause()))

    def relative_sentence(self) -> Sentence:
        """Return a sentence with a relative clause on the subject, or on the last object."""
        if self.chance(0.5):
            verb = self.random.choice([v for v in VERBS if not v.swap])
            phrase = self.with_relative(self.noun_phrase(verb.subjects, definite=True))
            if self.chance(0.3):
                return Sentence("relative", self.quality_clause(phrase, comparison=False))
            return Sentence("relative", self.clause(verb=verb, subject=phrase))
        verb = self.random.choice(
            [v for v in VERBS if v.slots and not v.swap and all(_is_plain(slot) for slot in v.slots)]
        )
        subject = self.subject(verb.subjects)
        parts = self.complements(verb, subject)
        last = parts[-1].phrase
        if not isinstance(last, NounPhrase):
            return self.relative_sentence()
        parts = (*parts[:-1], replace(parts[-1], phrase=self.with_relative(last)))
        tense = self.weighted({"present": 2, "past": 1})
        return Sentence(
            "relative", self.clause(verb=verb, subject=subject, complements=parts, tense=tense, extras=False)
        )

    def with_relative(self, phrase: NounPhrase) -> NounPhrase:
        kinds = set(phrase.noun.kinds)
        gap = Gap("relative", bool({"person"} & kinds), phrase.gender, phrase.plural)
        as_subject = [(verb, None) for verb in VERBS if kinds & set(verb.subjects)]
        as_object = [
            (verb, index)
            for verb in VERBS
            for index, slot in enumerate(verb.slots)
            if kinds & set(slot.kinds) and slot.case != "direction" and (not slot.prepositions or len(verb.slots) == 1)
        ]
        while True:
            verb, index = self.random.choice(self.random.choice([pool for pool in (as_subject, as_object) if pool]))
            subject = gap if index is None else self.subject(verb.subjects)
            parts = self.complements(verb, subject, None if index is None else (index, gap))
            tense = self.weighted({"present": 2, "past": 2})
            clause = self.clause(verb=verb, subject=subject, complements=parts, tense=tense, extras=index is None)
            if not self.may_be_reversed(clause):
                break
        clause = replace(clause, front="subject" if index is None else index)
        determiner = phrase.determiner if phrase.determiner == "a" else "the"
        return replace(phrase, determiner=determiner, owner=None, relative=clause)

    def may_be_reversed(self, clause: Clause) -> bool:
        """Return True if a relative clause has two readings, as in "die Frau, die Anna sieht"."""
        if not clause.complements or clause.complements[0].case != "acc" or clause.complements[0].german:
            return False
        if {"person", "animal"}.isdisjoint(clause.verb.slots[0].kinds):
            return False
        subject, thing = clause.subject, clause.complements[0].phrase
        same_verb = (subject.person, subject.plural) == (thing.person, thing.plural)
        return same_verb and _is_nominative_like(subject) and _is_nominative_like(thing)

    def second_subject(self, first: Nominal) -> Nominal | None:
        """Return the first subject as a pronoun in half of the cases; else None."""
        return _pronoun_for(first) if self.chance(0.5) else None

    def second_clause(self, first: Clause) -> Clause:
        subject = self.second_subject(first.subject)
        if self.chance(0.25):
            return self.maybe_negate(self.quality_clause(subject or self.subject(("person",)), comparison=False))
        return self.maybe_negate(self.clause(subject=subject, extras=self.chance(0.4)))

    def adverbial_clause(self) -> Sentence:
        link = self.weighted({"weil": 4, "obwohl": 2, "wenn": 3, "als": 2, "bevor": 1})
        if link in ("weil", "obwohl"):
            first = self.clause(extras=self.chance(0.4))
            second = self.second_clause(first)
        else:
            tense = {"wenn": "habit", "als": "past"}.get(link) or self.random.choice(["habit", "past"])
            first, second = (self.event(tense) for _ in range(2))
            if self.chance(0.5) and (pronoun := _pronoun_for(first.subject)):
                second = self.event(tense, pronoun)
        second_first = self.chance({"wenn": 0.6, "als": 0.6}.get(link, 0.25))
        if second_first:  # the noun comes before its pronoun
            first, second = (second, first) if isinstance(second.subject, Pronoun) else (first, second)
        return Sentence("adverbial clause", first, link, second, second_first)

    def event(self, tense: str, subject: Nominal | None = None) -> Clause:
        """Return a clause without adverbials, for "when he comes back, …"; a habit needs no mark there."""
        verb = self.random.choice(
            [v for v in EVENTS if {"person", "animal"} & set(v.subjects) and (not subject or "person" in v.subjects)]
        )
        subject = subject or self.subject(verb.subjects)
        return Clause(subject, verb, self.complements(verb, subject), tense)

    def that_clause(self) -> Sentence:
        whether = self.chance(0.35)
        verb = self.random.choice(WHETHER_VERBS if whether else THAT_VERBS)
        clause = Clause(self.subject(("person",)), verb, negated=whether and verb.infinitive == "wissen")
        return Sentence("that clause", clause, "ob" if whether else "dass", self.second_clause(clause))

    def infinitive_sentence(self) -> Sentence:
        """Return a sentence such as "versuchen, … zu lesen" or "in die Stadt gehen, um … zu kaufen"."""
        action = self.random.choice([v for v in EVENTS if "person" in v.subjects and v.slots])
        if self.chance(0.65):
            verb = self.random.choice(CONTROL_VERBS)
            subject = self.subject(("person",))
            inner = Clause(subject, action, self.complements(action, subject))
            tense = self.weighted({"present": 1, "past": 1})
            return Sentence("infinitive", Clause(subject, verb, tense=tense, infinitive=inner))
        verb = self.random.choice([v for v in VERBS if v.slots and v.slots[0].case == "direction"])
        subject = self.subject(("person",))
        first = self.clause(
            verb=verb,
            subject=subject,
            tense=self.weighted({"present": 2, "past": 2, "future": 1, "modal": 1}),
            extras=False,
        )
        return Sentence("infinitive", first, "um", Clause(subject, action, self.complements(action, subject)))

    def coordination(self) -> Sentence:
        first = self.clause(extras=False)
        link = self.weighted({"und": 3, "aber": 2, "denn": 2})
        return Sentence("coordination", first, link, self.second_clause(first))


def _is_plain(slot: Slot) -> bool:
    return slot.case != "direction" and not slot.prepositions


def _is_nominative_like(phrase: Nominal) -> bool:
    """Return True if the accusative looks like the nominative, so it could be read as the subject."""
    return german.noun_phrase(phrase, "acc") == german.noun_phrase(phrase, "nom")


def _askable() -> Iterator[tuple[Verb, int, str]]:
    """Yield verbs with the index of a complement for which a question can ask, and the question word."""
    for verb in VERBS:
        for index, slot in enumerate(verb.slots):
            if slot.kinds == ("person",) or slot.kinds[0] == "person":
                yield verb, index, "who"
            elif slot.case == "acc" and not any(preposition for preposition, _ in slot.prepositions):
                yield verb, index, "what"


def pairs(seed: int) -> Iterator[Pair]:
    """Yield sentence pairs without end and repeat no German or English sentence."""
    sampler = Sampler(seed)
    seen: set[tuple[str, ...]] = set()
    while True:
        tree = sampler.sentence()
        source, target = tuple(german.sentence(tree)), tuple(english.sentence(tree))
        if source not in seen and target not in seen:
            seen |= {source, target}
            yield Pair(tree, source, target)


def detokenize(text: str) -> str:
    """Return tokens separated by spaces as ordinary text."""
    for mark in (",", ".", "?", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


def overlaps(folder: Path) -> dict[str, int]:
    """Count the German sentences of valid and test that are also in training."""
    sentences = {split: (folder / f"{split}.de").read_text("utf-8").splitlines() for split in SPLITS}
    training = set(sentences["train"])
    return {split: sum(line in training for line in sentences[split]) for split in ("valid", "test")}


def write(folder: Path, sizes: dict[str, int], seed: int) -> Counter[str]:
    """Write SPLIT.de and SPLIT.en, and return the number of sentences of each construction."""
    folder.mkdir(parents=True, exist_ok=True)
    source, constructions = pairs(seed), Counter()
    for split, size in sizes.items():
        chosen = [next(source) for _ in range(size)]
        constructions.update(pair.tree.construction for pair in chosen)
        (folder / f"{split}.de").write_text("".join(" ".join(p.german) + "\n" for p in chosen), "utf-8")
        (folder / f"{split}.en").write_text("".join(" ".join(p.english) + "\n" for p in chosen), "utf-8")
    return constructions


def main() -> None:
    parser = argparse.ArgumentParser(description="Print sentence pairs.")
    parser.add_argument("--seed", type=int, default=1, help="decides every sentence (default: %(default)s)")
    parser.add_argument("--show", type=int, metavar="N", default=20, help="how many (default: %(default)s)")
    arguments = parser.parse_args()
    for pair in islice(pairs(arguments.seed), arguments.show):
        print(detokenize(" ".join(pair.german)), detokenize(" ".join(pair.english)), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
