"""Write a German-English corpus, made up from a small synchronous grammar.

A tree (``trees.py``) is drawn at random and read off twice, by ``german.py`` and ``english.py``. What makes German
hard to translate word by word is all there: gender, case and agreement, separable verbs, the participle or infinitive
at the end, the verb last in subordinate clauses and second in main clauses whatever comes first.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.corpora.grammar import english, german, lexicon
from experiments.corpora.grammar.lexicon import ADJECTIVES, NOUNS, TIMES, VERBS, WORDS, Noun, Slot, Time, Verb
from experiments.corpora.grammar.trees import Argument, Clause, Gap, Name, Nominal, NounPhrase, Pronoun, Sentence

SPLITS = {"train": 24_000, "valid": 500, "test": 500}
PRONOUNS = [Pronoun(*key) for key in lexicon.PRONOUNS]
EVENTS = [verb for verb in VERBS if not verb.stative]
GOING = [verb for verb in VERBS if verb.slots and verb.slots[0].case == "direction"]


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation as tokens, with the name of their construction."""

    construction: str
    german: tuple[str, ...]
    english: tuple[str, ...]


def _of_kinds(words: Sequence, kinds: Sequence[str]) -> list:
    return [word for word in words if not set(kinds).isdisjoint(word.kinds)]


def _pronoun_for(phrase: Nominal) -> Pronoun | None:
    """Return the pronoun for a person named before; none for neuter nouns, which English calls he or she."""
    if isinstance(phrase, Pronoun):
        return phrase
    if isinstance(phrase, Gap) or "person" not in phrase.kinds or (phrase.gender == "n" and not phrase.plural):
        return None
    return Pronoun(3, phrase.plural, "" if phrase.plural else phrase.gender)


def _is_nominative_like(phrase: Nominal) -> bool:
    """Return True if the accusative looks like the nominative, so that it may be taken for the subject."""
    return german.noun_phrase(phrase, "acc") == german.noun_phrase(phrase, "nom")


def _may_be_reversed(clause: Clause) -> bool:
    """Return True if a relative clause can be read both ways, as in "die Frau, die Anna sieht"."""
    if not clause.complements or clause.complements[0].case != "acc" or clause.complements[0].german:
        return False
    subject, thing = clause.subject, clause.complements[0].phrase
    same_verb = (subject.person, subject.plural) == (thing.person, thing.plural)
    living = not {"person", "animal"}.isdisjoint(clause.verb.slots[0].kinds)
    return living and same_verb and _is_nominative_like(subject) and _is_nominative_like(thing)


def _may_have_company(verb: Verb) -> bool:
    """Return True for verbs of going and being busy; after an object, "mit" would seem to belong to the object."""
    return not verb.stative and all(slot.case == "direction" or "city" in slot.kinds for slot in verb.slots)


def _can_front(part: Argument, clause: Clause) -> bool:
    """Return True if a complement in front is known by its case."""
    phrase = part.phrase
    if part.german or not isinstance(phrase, NounPhrase) or clause.negated:
        return False
    if part.case == "dat":
        return clause.verb.swap or len(clause.complements) == 1
    return phrase.gender == "m" and not phrase.plural and phrase.determiner is not None


def _askable() -> Iterator[tuple[Verb, int, str]]:
    """Yield verbs with the index of a complement that one can ask for, and the question word."""
    for verb in VERBS:
        for index, slot in enumerate(verb.slots):
            if slot.kinds[0] == "person":
                yield verb, index, "who"
            elif slot.case == "acc" and not any(preposition for preposition, _ in slot.prepositions):
                yield verb, index, "what"


class Sampler:
    """A source of trees. One generator of random numbers decides everything, so a seed fixes the corpus."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.choose = self.random.choice
        self.used: set[str] = set()

    def sentence(self) -> tuple[str, Sentence]:
        """Draw a sentence, with the name of its construction."""
        self.used.clear()
        construction = self.weighted(WORDS["constructions"])  # each is a method
        return construction, getattr(self, construction)()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def weighted(self, weights: dict):
        return self.random.choices(list(weights), list(weights.values()))[0]

    # --- noun phrases -----------------------------------------------------------------------------------------------

    def noun(self, kinds: Sequence[str]) -> Noun:
        """Draw a noun of one of the kinds, if there is any that the sentence does not contain yet."""
        nouns = _of_kinds(NOUNS, kinds)
        noun = self.choose([noun for noun in nouns if noun.english not in self.used] or nouns)
        self.used.add(noun.english)
        return noun

    def noun_phrase(self, kinds: Sequence[str], *, owner: Pronoun | None = None, definite: bool = False) -> NounPhrase:
        """Draw a noun phrase; a possessive may refer to `owner`, and `definite` leaves out "a", bare nouns and numbers."""
        noun = self.noun(kinds)
        of = set(noun.kinds)
        plural = not noun.mass and "single" not in of and self.chance(0.1 if "place" in of else 0.3)
        if noun.mass:
            determiner = "the" if definite else self.weighted({None: 7, "the": 3})
        else:
            weights = {"the": 10, "this": 2, "possessive": 0 if "public" in of else 8 if "kin" in of else 4}
            if not definite and "kin" not in of:
                weights |= {None: 3, "two": 1, "three": 1, "many": 1} if plural else {"a": 6}
            determiner = self.weighted(weights)
        if determiner == "possessive":
            mine_ours_yours = [Pronoun(1, False), Pronoun(1, True), Pronoun(2, False)]
            determiner = owner if owner and self.chance(0.7) else self.choose(mine_ours_yours)
        phrase = NounPhrase(noun, plural, determiner)
        if (adjectives := _of_kinds(ADJECTIVES, noun.kinds)) and self.chance(0.35):
            phrase = replace(phrase, adjective=self.choose(adjectives))
        if determiner == "the" and not noun.mass and self.chance(0.1) and not {"place", "event"} & of:
            phrase = replace(phrase, owner=self.owner())
        return phrase

    def owner(self) -> Name | NounPhrase:
        if self.chance(0.5):
            return self.name()
        noun = self.noun(("person",))
        mine = "public" not in noun.kinds and self.chance(0.5)
        return NounPhrase(noun, determiner=Pronoun(1, False) if mine else "the")

    def name(self) -> Name:
        name = self.choose([name for name in WORDS["names"] if name not in self.used])
        self.used.add(name)
        return Name(name, WORDS["names"][name])

    def subject(self, kinds: Sequence[str], *, pronouns: bool = True) -> Nominal:
        if "person" in kinds:
            kind = self.weighted({"pronoun": 5 * pronouns, "name": 2, "noun": 9})
            if kind != "noun":
                return self.name() if kind == "name" else self.choose(PRONOUNS)
        return self.noun_phrase(kinds, definite={"person", "animal"}.isdisjoint(kinds))

    def object(self, slot: Slot, subject: Nominal) -> Argument:
        """Draw what fills a slot of a verb with this subject."""
        if slot.case == "direction":
            place = self.noun_phrase(("place",), definite=True)
            return Argument(place, *place.noun.direction)
        prepositions = self.choose(slot.prepositions)
        if "city" in slot.kinds:
            return Argument(Name(self.choose(WORDS["cities"])), slot.case, *prepositions)
        definite = slot.case == "dat" or prepositions[0] != ""
        phrase: Nominal = self.noun_phrase(slot.kinds, owner=_pronoun_for(subject), definite=definite)
        if "person" in phrase.kinds:
            kind = self.weighted({"pronoun": 4, "name": 3, "noun": 9})
            if kind == "pronoun":
                others = [p for p in PRONOUNS if p.person == 3 or p.person != subject.person]
                # "sie" as an object may be "her" or "them"; the other forms tell person and number
                phrase = self.choose([p for p in others if german.noun_phrase(p, slot.case) != ["sie"]])
            elif kind == "name":
                phrase = self.name()
        return Argument(phrase, slot.case, *prepositions)

    # --- clauses ----------------------------------------------------------------------------------------------------

    def tense(self, verb: Verb, person: bool) -> str:
        """Draw a tense, "modal" or "experience", as far as the verb allows."""
        weights = {"present": 26, "past": 12 if verb.stative else 24, "since": 8 * verb.durative}
        if not verb.stative and {"person", "animal"} & set(verb.subjects):
            weights |= {"habit": 20, "future": 10, "modal": 18, "experience": 5 * (person and not verb.durative)}
        return self.weighted(weights)

    def time(self, use: str) -> Time:
        return self.choose([time for time in TIMES if use in time.uses])

    def complements(self, verb: Verb, subject: Nominal, gap: Gap | None = None, at: int | None = None) -> tuple:
        """Draw what fills the verb's slots; the gap fills the slot at an index."""
        return tuple(
            Argument(gap, slot.case, *slot.prepositions[0]) if index == at else self.object(slot, subject)
            for index, slot in enumerate(verb.slots)
        )

    def clause(self, *, verb=None, subject=None, complements=None, tense=None, extras: bool = True) -> Clause:
        """Draw what is not given of a clause. Without `extras` it has no adverbials but those its tense needs."""
        verb = verb or self.choose([v for v in VERBS if subject is None or "person" in v.subjects])
        subject = subject or self.subject(verb.subjects)
        complements = self.complements(verb, subject) if complements is None else complements
        person = "person" in subject.kinds
        tense = tense or self.tense(verb, person)
        clause = Clause(subject, verb, complements, tense)
        if tense == "modal":
            modal = self.choose(lexicon.MODALS)
            clause = replace(clause, modal=modal, tense="past" if modal.past and self.chance(0.35) else "present")
        if tense == "habit":  # marked by how often, by when, or by "gern"
            sudden = verb.reflexive or (verb.auxiliary == "sein" and not verb.slots)
            mark = self.weighted({"frequency": 4, "time": 4, "gern": 3 * (person and not sudden)})
            if mark == "time":
                clause = replace(clause, time=self.time("habit"))
            else:
                adverb = "gern" if mark == "gern" else self.choose(list(WORDS["frequencies"]))
                clause = replace(clause, adverb=adverb)
        elif tense == "experience":
            clause = replace(clause, adverb=self.choose(list(WORDS["experiences"])))
        elif tense == "since":
            clause = replace(clause, time=self.time("since"))
        elif extras and self.chance(0.4) and not verb.stative:
            use = clause.tense if clause.tense != "present" else "future" if clause.modal else "now"
            clause = replace(clause, time=self.time(use))
        if extras and verb.located and self.chance(0.3):
            place = self.noun_phrase(("place",), definite=True)
            clause = replace(clause, place=Argument(place, *place.noun.location))
        elif extras and self.chance(0.3) and person and not isinstance(subject, Gap) and _may_have_company(verb):
            clause = replace(clause, companion=self.object(Slot("dat", ("person",), [("mit", "with")]), subject))
        return clause

    def negated(self, clause: Clause, probability: float = 0.18) -> Clause:
        """Deny a clause by "nicht" or "kein" with this probability, if that is natural."""
        parts = clause.complements
        if not self.chance(probability) or not clause.subject.definite:
            return clause
        if clause.adverb not in ("", "gern") or clause.tense in ("since", "experience"):
            return clause
        indefinite = [index for index, part in enumerate(parts) if not part.phrase.definite]
        if clause.adverb or not indefinite:
            return replace(clause, negated=True)
        index, phrase = indefinite[0], parts[indefinite[0]].phrase
        if len(indefinite) > 1 or parts[index].german or phrase.determiner not in ("a", None):
            return clause
        part = replace(parts[index], phrase=replace(phrase, determiner="no"))
        return replace(clause, negated=True, complements=(*parts[:index], part, *parts[index + 1 :]))

    def quality_clause(self, subject: Nominal | None = None, *, comparison: bool = True) -> Clause:
        """Draw a clause that says that someone or something is old, or older than something of its kind."""
        described = [("person",), ("animal",), ("thing", "clothing", "vehicle"), ("place",), ("text",)]
        subject = subject or self.subject(self.choose(described))
        if isinstance(subject, NounPhrase):
            subject = replace(subject, adjective=None)
        adjective = self.choose(_of_kinds(ADJECTIVES, subject.kinds))
        tense = self.weighted({"present": 3, "past": 1})
        if comparison and adjective.comparative and self.chance(0.6):
            return Clause(
                subject, lexicon.SEIN, quality=adjective, than=self.subject(subject.kinds[:1], pronouns=False)
            )
        clause = Clause(subject, lexicon.SEIN, tense=tense, quality=adjective)
        if adjective.english in ("tired", "hungry", "sick", "happy", "sad") and self.chance(0.4):
            times = ("today", "now") if tense == "present" else ("yesterday", "last week")
            clause = replace(clause, time=self.choose([time for time in TIMES if time.english in times]))
        return clause

    def with_relative(self, phrase: NounPhrase) -> NounPhrase:
        kinds = set(phrase.noun.kinds)
        gap = Gap("relative", "person" in kinds, phrase.gender, phrase.plural)
        as_subject = [(verb, None) for verb in VERBS if kinds & set(verb.subjects)]
        as_object = [
            (verb, index)
            for verb in VERBS
            for index, slot in enumerate(verb.slots)
            if kinds & set(slot.kinds) and slot.case != "direction" and (slot.bare or len(verb.slots) == 1)
        ]
        clause = None
        while clause is None or _may_be_reversed(clause):
            verb, index = self.choose(self.choose([pool for pool in (as_subject, as_object) if pool]))
            subject = gap if index is None else self.subject(verb.subjects)
            parts = self.complements(verb, subject, gap, index)
            tense = self.weighted({"present": 2, "past": 2})
            clause = self.clause(verb=verb, subject=subject, complements=parts, tense=tense, extras=index is None)
        clause = replace(clause, front="subject" if index is None else index)
        return replace(phrase, determiner="a" if phrase.determiner == "a" else "the", owner=None, relative=clause)

    def second_clause(self, first: Clause) -> Clause:
        """Draw a clause whose subject is, half of the time, the first clause's as a pronoun."""
        subject = _pronoun_for(first.subject) if self.chance(0.5) else None
        if self.chance(0.25):
            return self.negated(self.quality_clause(subject or self.subject(("person",)), comparison=False))
        return self.negated(self.clause(subject=subject, extras=self.chance(0.4)))

    def event(self, tense: str, subject: Nominal | None = None) -> Clause:
        """Draw a clause without adverbials, for "when he comes back, …"; a habit needs no mark there."""
        able = [verb for verb in EVENTS if {"person", "animal"} & set(verb.subjects)]
        verb = self.choose([verb for verb in able if not subject or "person" in verb.subjects])
        subject = subject or self.subject(verb.subjects)
        return Clause(subject, verb, self.complements(verb, subject), tense)

    # --- sentences --------------------------------------------------------------------------------------------------

    def statement(self) -> Sentence:
        return Sentence(self.negated(self.clause()))

    def inversion(self) -> Sentence:
        """Return a sentence that starts with a time, a place, or an object that its case gives away, not with the subject."""
        fronts: list[str | int] = []
        while not fronts:
            clause = self.negated(self.clause())
            fronts += ["time"] * 3 if clause.time and clause.time.frontable else []
            fronts += ["place"] * 2 if clause.place else []
            fronts += [index for index, part in enumerate(clause.complements) if _can_front(part, clause)]
        return Sentence(replace(clause, front=self.choose(fronts)))

    def question(self) -> Sentence:
        subject = self.choose([Pronoun(2, False), Pronoun(2, True)]) if self.chance(0.3) else None
        return Sentence(replace(self.negated(self.clause(subject=subject), 0.1), question=True))

    def wh_question(self) -> Sentence:
        kind = self.weighted({"subject": 3, "object": 5, "why": 2, "when": 2, "where": 2, "where to": 1})
        if kind == "subject":
            verb = self.choose([verb for verb in VERBS if verb.subjects[0] == "person"])
            clause = self.clause(verb=verb, subject=Gap("who"))
        elif kind == "object":
            verb, index, word = self.choose(list(_askable()))
            subject = self.subject(verb.subjects)
            parts = self.complements(verb, subject, Gap(word), index)
            clause = replace(self.clause(verb=verb, subject=subject, complements=parts), front=index)
        elif kind == "where to":
            clause = replace(self.clause(verb=self.choose(GOING), complements=()), front="where to")
        else:
            tense = self.weighted({"present": 1, "past": 1, "future": 1}) if kind == "when" else None
            verb = self.choose([verb for verb in EVENTS if verb.located or kind != "where"])
            asked = {"when": {"time": None}, "where": {"place": None}}.get(kind, {})
            clause = replace(self.clause(verb=verb, tense=tense), front=kind, **asked)
        return Sentence(replace(clause, question=True))

    def predicate(self) -> Sentence:
        return Sentence(self.negated(self.quality_clause()))

    def relative(self) -> Sentence:
        """Return a sentence with a relative clause on the subject, or on the last object."""
        if self.chance(0.5):
            verb = self.choose([verb for verb in VERBS if not verb.swap])
            phrase = self.with_relative(self.noun_phrase(verb.subjects, definite=True))
            if self.chance(0.3):
                return Sentence(self.quality_clause(phrase, comparison=False))
            return Sentence(self.clause(verb=verb, subject=phrase))
        transitive = [verb for verb in VERBS if verb.slots and not verb.swap]
        bare = [verb for verb in transitive if all(s.case != "direction" and s.bare for s in verb.slots)]
        verb = self.choose(bare)
        subject = self.subject(verb.subjects)
        *others, last = self.complements(verb, subject)
        if not isinstance(last.phrase, NounPhrase):
            return self.relative()
        parts = (*others, replace(last, phrase=self.with_relative(last.phrase)))
        tense = self.weighted({"present": 2, "past": 1})
        return Sentence(self.clause(verb=verb, subject=subject, complements=parts, tense=tense, extras=False))

    def adverbial_clause(self) -> Sentence:
        link = self.weighted({"weil": 4, "obwohl": 2, "wenn": 3, "als": 2, "bevor": 1})
        if link in ("weil", "obwohl"):
            first = self.clause(extras=self.chance(0.4))
            second = self.second_clause(first)
        else:
            tense = {"wenn": "habit", "als": "past"}.get(link) or self.choose(["habit", "past"])
            first, second = self.event(tense), self.event(tense)
            if self.chance(0.5) and (pronoun := _pronoun_for(first.subject)):
                second = self.event(tense, pronoun)
        second_first = self.chance({"wenn": 0.6, "als": 0.6}.get(link, 0.25))
        if second_first and isinstance(second.subject, Pronoun):  # the noun comes before its pronoun
            first, second = second, first
        return Sentence(first, link, second, second_first)

    def that_clause(self) -> Sentence:
        whether = self.chance(0.35)
        verb = self.choose(lexicon.WHETHER_VERBS if whether else lexicon.THAT_VERBS)
        clause = Clause(self.subject(("person",)), verb, negated=whether and verb.infinitive == "wissen")
        return Sentence(clause, "ob" if whether else "dass", self.second_clause(clause))

    def infinitive(self) -> Sentence:
        """Return a sentence such as: versuchen, … zu lesen; or: in die Stadt gehen, um … zu kaufen."""
        action = self.choose([verb for verb in EVENTS if "person" in verb.subjects and verb.slots])
        control = self.chance(0.65)
        verb = self.choose(lexicon.CONTROL_VERBS if control else GOING)
        subject = self.subject(("person",))
        if control:
            inner = Clause(subject, action, self.complements(action, subject))
            tense = self.weighted({"present": 1, "past": 1})
            return Sentence(Clause(subject, verb, tense=tense, infinitive=inner))
        tense = self.weighted({"present": 2, "past": 2, "future": 1, "modal": 1})
        first = self.clause(verb=verb, subject=subject, tense=tense, extras=False)
        return Sentence(first, "um", Clause(subject, action, self.complements(action, subject)))

    def coordination(self) -> Sentence:
        first = self.clause(extras=False)
        link = self.weighted({"und": 3, "aber": 2, "denn": 2})
        return Sentence(first, link, self.second_clause(first))


def pairs(seed: int) -> Iterator[Pair]:
    """Yield sentence pairs without end and repeat no German or English sentence."""
    sampler = Sampler(seed)
    seen: set[tuple[str, ...]] = set()
    while True:
        construction, tree = sampler.sentence()
        source, target = tuple(german.sentence(tree)), tuple(english.sentence(tree))
        if source not in seen and target not in seen:
            seen |= {source, target}
            yield Pair(construction, source, target)


def write(folder: Path, sizes: dict[str, int], seed: int) -> None:
    """Write SPLIT.de and SPLIT.en."""
    folder.mkdir(parents=True, exist_ok=True)
    source = pairs(seed)
    for split, size in sizes.items():
        chosen = [next(source) for _ in range(size)]
        (folder / f"{split}.de").write_text("".join(" ".join(pair.german) + "\n" for pair in chosen), "utf-8")
        (folder / f"{split}.en").write_text("".join(" ".join(pair.english) + "\n" for pair in chosen), "utf-8")
