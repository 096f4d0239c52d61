"""Write a German-English corpus, made up from a small synchronous grammar.

A tree (``trees.py``) is drawn at random and read off twice, by ``german.py`` and ``english.py``. German stays hard to
translate word by word: gender, case and agreement, separable verbs, the participle or infinitive at the end, the verb
last in subordinate clauses and second in main clauses whatever comes first.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from experiments.corpora.grammar import english, german, lexicon
from experiments.corpora.grammar.lexicon import PRONOUNS, WORDS, Pronoun, Slot
from experiments.corpora.grammar.trees import Argument, Clause, NounPhrase, Sentence

SPLITS = {"train": 24_000, "valid": 500, "test": 500}


def _pronoun_for(phrase: Pronoun | NounPhrase) -> Pronoun | None:
    """Return the pronoun for a person named before; none for neuter nouns, which English calls he or she."""
    if isinstance(phrase, Pronoun):
        return phrase
    third = {pronoun.gender: pronoun for pronoun in PRONOUNS if pronoun.person == 3}
    return third.get(phrase.gender) if "person" in phrase.kinds else None


class Sampler:
    """A source of trees. One generator of random numbers decides everything, so a seed fixes the corpus."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.choose = self.random.choice
        self.used: list[str | list[str]] = []

    def sentence(self) -> Sentence:
        """Draw a sentence of any construction."""
        self.used.clear()
        return getattr(self, self.weighted(WORDS["constructions"]))()  # each is a method

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def weighted(self, weights: dict):
        return self.random.choices(list(weights), list(weights.values()))[0]

    def word(self, words: Sequence, kinds: Sequence[str] = ()):
        """Draw a word, of one of the kinds if some are given, that the sentence does not contain yet if there is any."""
        words = [word for word in words if not kinds or not set(kinds).isdisjoint(word.kinds)]
        word = self.choose([word for word in words if word.english not in self.used] or words)
        self.used.append(word.english)
        return word

    def noun_phrase(self, kinds: Sequence[str], owner: Pronoun | None = None, definite: bool = False) -> NounPhrase:
        """Draw a noun phrase; a possessive may refer to `owner`, and `definite` leaves out "a", bare nouns and numbers."""
        noun = self.word(lexicon.NOUNS, kinds)
        if "name" in noun.kinds:
            return NounPhrase(noun, determiner=None)
        plural = not noun.mass and self.chance(0.3)
        weights = {"the": 10, "this": 2, "possessive": 0 if "public" in noun.kinds else 4}
        if not definite:
            weights |= {None: 30} if noun.mass else {None: 3, "two": 1, "three": 1} if plural else {"a": 6}
        determiner = self.weighted(weights)
        if determiner == "possessive":
            determiner = owner if owner and self.chance(0.7) else self.choose([p for p in PRONOUNS if p.person < 3])
        adjective = self.word(lexicon.ADJECTIVES, noun.kinds) if self.chance(0.35) else None
        return NounPhrase(noun, plural, determiner, adjective)

    def subject(self, kinds: Sequence[str]) -> Pronoun | NounPhrase:
        if "person" in kinds and self.chance(0.3):
            return self.choose(PRONOUNS)
        return self.noun_phrase(kinds, definite="person" not in kinds)

    def object(self, slot: Slot, subject: Pronoun | NounPhrase) -> Argument:
        """Draw what fills a slot of a verb with this subject."""
        if slot.case in ("location", "direction"):
            place = self.noun_phrase(slot.kinds, definite=True)
            return Argument(place, *getattr(place.noun, slot.case))
        prepositions = self.choose(slot.prepositions)
        bare = prepositions[0] == ""
        phrase = self.noun_phrase(slot.kinds, _pronoun_for(subject), definite=slot.case == "dat" or not bare)
        # a bare name after a noun would seem to belong to it: "dass der Bäcker Peter ruft"
        if "person" in phrase.kinds and (self.chance(0.15) or (bare and "name" in phrase.kinds)):
            others = [p for p in PRONOUNS if p.person == 3 or p.person != subject.person]
            # "sie" as an object may be "her" or "them"; the other forms tell person and number
            phrase = self.choose([p for p in others if german.noun_phrase(p, slot.case) != ["sie"]])
        return Argument(phrase, slot.case, *prepositions)

    def clause(self, subject: Pronoun | NounPhrase | None = None, extras: bool = True) -> Clause:
        """Draw a clause, with this subject if it is given; without `extras` it has no time and no place."""
        if self.chance(0.12):
            return self.quality_clause(subject)
        verb = self.word([verb for verb in lexicon.VERBS if subject is None or "person" in verb.subjects])
        subject = subject or self.subject(verb.subjects)
        complements = tuple(self.object(slot, subject) for slot in verb.slots)
        tenses = {"present": 26, "past": 24, "habit": 20 * extras, "future": 10, "modal": 18}
        tense = self.weighted({"present": 2, "past": 1} if verb.stative else tenses)
        clause = Clause(subject, verb, complements, tense)
        if tense == "modal":
            modal = self.choose(lexicon.MODALS)
            clause = replace(clause, modal=modal, tense="past" if modal.past and self.chance(0.35) else "future")
        if tense == "habit" or (extras and not verb.stative and self.chance(0.4)):
            clause = replace(clause, time=self.choose([time for time in lexicon.TIMES if clause.tense in time.uses]))
        if extras and verb.located and self.chance(0.3):
            clause = replace(clause, place=self.object(Slot("location", ("place",)), subject))
        known = all(phrase.definite for phrase in (subject, *(part.phrase for part in complements)))
        return replace(clause, negated=known and tense != "habit" and self.chance(0.18))

    def quality_clause(self, subject: Pronoun | NounPhrase | None = None) -> Clause:
        """Draw a clause that says that someone or something is old."""
        subject = subject or self.subject((self.choose(["person", "animal", "thing", "clothing", "place", "text"]),))
        if isinstance(subject, NounPhrase):
            subject = replace(subject, adjective=None)
        quality = self.word(lexicon.ADJECTIVES, subject.kinds)
        negated = subject.definite and self.chance(0.18)
        return Clause(subject, lexicon.SEIN, (), self.choose(["present", "past"]), negated=negated, quality=quality)

    def second_clause(self, first: Clause) -> Clause:
        """Draw a clause whose subject is, half of the time, the first clause's as a pronoun."""
        subject = _pronoun_for(first.subject) if self.chance(0.5) else None
        return self.clause(subject, extras=self.chance(0.4))

    def statement(self) -> Sentence:
        """Return a sentence that starts with its subject, its time or its place."""
        clause = self.clause()
        fronts = [front for front in ("time", "place") if getattr(clause, front)]
        return Sentence(replace(clause, front=self.choose(["subject", *fronts * 2])))

    def question(self) -> Sentence:
        """Return a question that starts with its verb or with "why"."""
        return Sentence(replace(self.clause(), front=self.choose(["subject", "why"])), question=True)

    def two_clauses(self) -> Sentence:
        first = self.clause(extras=self.chance(0.4))
        second, link = self.second_clause(first), self.weighted(WORDS["links"])
        if link in ("weil", "obwohl") and self.chance(0.3):  # the noun comes before its pronoun
            return Sentence(second, link, first, second_first=True)
        return Sentence(first, link, second)

    def that_clause(self) -> Sentence:
        first = Clause(self.subject(("person",)), self.choose(lexicon.THAT_VERBS))
        link = "ob" if first.verb.infinitive == "fragen" else "dass"
        return Sentence(first, link, self.second_clause(first))


def pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Yield German and English sentences without end; no sentence repeats in either language."""
    sampler = Sampler(seed)
    seen: set[str] = set()
    while True:
        tree = sampler.sentence()
        pair = " ".join(german.sentence(tree)), " ".join(english.sentence(tree))
        if seen.isdisjoint(pair):
            seen.update(pair)
            yield pair


def write(folder: Path, sizes: dict[str, int], seed: int) -> None:
    """Write SPLIT.de and SPLIT.en."""
    folder.mkdir(parents=True, exist_ok=True)
    source = pairs(seed)
    for split, size in sizes.items():
        for language, sentences in zip(("de", "en"), zip(*islice(source, size), strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("".join(text + "\n" for text in sentences), "utf-8")
