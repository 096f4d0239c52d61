"""English: inflection, auxiliaries and do-support, and the order of words."""

from experiments.corpora.grammar.lexicon import EXPERIENCES, FREQUENCIES, VOWELS, Verb, plural_or_third
from experiments.corpora.grammar.trees import Argument, Clause, Gap, Name, Nominal, NounPhrase, Pronoun, Sentence

PRONOUNS = {
    (1, False, ""): "I me my",
    (2, False, ""): "you you your",
    (3, False, "m"): "he him his",
    (3, False, "f"): "she her her",
    (1, True, ""): "we us our",
    (2, True, ""): "you you your",
    (3, True, ""): "they them their",
}
QUESTION_ADVERBS = {"why": "why", "when": "when", "where": "where", "where to": "where"}
LINKS = {
    "weil": "because",
    "obwohl": "although",
    "wenn": "when",
    "als": "when",
    "bevor": "before",
    "dass": "that",
    "ob": "whether",
    "und": "and",
    "aber": "but",
    "denn": "because",
    "um": "in order",
}
IRREGULAR = {  # first person singular, third person singular, the rest; and the past
    "be": ("am is are", "was was were"),
    "have": ("have has have", "had had had"),
    "do": ("do does do", "did did did"),
    "can": ("can can can", "could could could"),
    "go": ("go goes go", "went went went"),
}
INVARIABLE = {"will", "should", "would"}
AUXILIARIES = {"be", "can", "will", "should", "would"}


def _pronoun(phrase: Pronoun, form: int) -> str:
    return PRONOUNS[phrase.person, phrase.plural, phrase.gender].split()[form]


# --- noun phrases ---------------------------------------------------------------------------------------------------


def adjective(phrase: NounPhrase | Nominal, adjective, comparative: bool = False) -> list[str]:
    """Return the translation of an adjective, which may depend on the noun."""
    kinds = phrase.noun.kinds if isinstance(phrase, NounPhrase) else ("person",)
    for kind, positive, comparison in adjective.english_of:
        if kind in kinds:
            return [comparison if comparative else positive]
    return (adjective.comparative[1] if comparative else adjective.english).split()


def noun_phrase(phrase: Nominal, *, subject: bool = False) -> list[str]:
    if isinstance(phrase, Pronoun):
        return [_pronoun(phrase, 0 if subject else 1)]
    if isinstance(phrase, Name):
        return [phrase.name]
    if isinstance(phrase, Gap):
        if phrase.word != "relative":
            return [phrase.word]
        return ["who" if phrase.animate and subject else "that"]
    words = [phrase.noun.english_plural if phrase.plural else phrase.noun.english]
    if phrase.adjective:
        words = adjective(phrase, phrase.adjective) + words
    words = _determiner(phrase, words) + words
    if phrase.relative:
        words += clause_words(phrase.relative)
    return words


def _determiner(phrase: NounPhrase, words: list[str]) -> list[str]:
    determiner = phrase.determiner
    if phrase.owner:
        return [*noun_phrase(phrase.owner), "'s"]
    if isinstance(determiner, Pronoun):
        return [_pronoun(determiner, 2)]
    if determiner == "no":
        determiner = "any" if phrase.plural or phrase.noun.mass else "a"
    if determiner == "a":
        return ["an" if words[0].startswith(VOWELS) else "a"]
    if determiner == "this":
        return ["these" if phrase.plural else "this"]
    return [determiner] if determiner else []


def argument(part: Argument) -> list[str]:
    """Return a complement or adverbial; of a gap, only its preposition ("the man that she is waiting for")."""
    words = [] if isinstance(part.phrase, Gap) else noun_phrase(part.phrase)
    return part.english.split() + words


# --- verbs ----------------------------------------------------------------------------------------------------------


def finite(base: str, past: bool, subject: Nominal, verb: Verb | None = None) -> str:
    """Return the finite form of a verb; `verb` gives the past if it is not in IRREGULAR."""
    third = subject.person == 3 and not subject.plural
    first = subject.person == 1 and not subject.plural
    if base in INVARIABLE:
        return base
    if base in IRREGULAR:
        forms = IRREGULAR[base][past].split()
        if base == "be" and past and (third or first):
            return "was"
        return forms[1] if third else forms[0] if first else forms[2]
    if past:
        return verb.english[1] if verb and verb.english[0] == base else base.removesuffix("e") + "ed"
    return plural_or_third(base) if third else base


def _spine(clause: Clause) -> tuple[str, bool, list[str], bool]:
    """Return the finite verb's base, True if it is past, the words after it, and True if it is an auxiliary."""
    base, _, participle, present_participle = clause.verb.english
    if clause.modal:
        modal = clause.modal.english
        return modal, clause.tense == "past", [*clause.modal.rest, base], modal in AUXILIARIES
    if clause.tense == "future":
        return "will", False, [base], True
    if clause.tense == "experience":
        return "have", False, [EXPERIENCES[clause.adverb], participle], True
    if clause.tense == "since":
        return "have", False, [participle] if clause.verb.stative else ["been", present_participle], True
    if clause.adverb == "gern":
        return "like", False, ["to", base], False
    if clause.tense == "present" and not clause.verb.stative and base != "be":
        return "be", False, [present_participle], True
    return base, clause.tense == "past", [], base == "be"


# --- clauses --------------------------------------------------------------------------------------------------------


def _tail(clause: Clause, complements: list[Argument]) -> list[str]:
    """Return the words after the verb: particle, objects, prepositional complements, company, place and time."""
    particle = clause.verb.particle.split()
    bare = [part for part in complements if not part.english]
    words = []
    if bare and isinstance(bare[0].phrase, Pronoun):
        words += argument(bare.pop(0))
    words += particle
    for part in bare + [part for part in complements if part.english]:
        words += argument(part)
    if len(bare) > 1 and isinstance(bare[0].phrase, Gap):
        words.append("to")  # the man that she gave the book to
    if clause.quality:
        than = clause.quality.than
        words += adjective(clause.subject, clause.quality.adjective, comparative=than is not None)
        words += ["than", *noun_phrase(than)] if than else []
    if clause.infinitive:
        words += clause_words(clause.infinitive, "gerund" if clause.verb.gerund else "infinitive")
    for name in ("companion", "place"):
        if clause.front != name and getattr(clause, name):
            words += argument(getattr(clause, name))
    if clause.time and clause.front != "time":
        words += clause.time.english.split()
    return words


def clause_words(clause: Clause, form: str = "finite") -> list[str]:
    """Return the words of a clause; in the forms `infinitive` and `gerund` it has no subject."""
    subject, complements = clause.subject, list(clause.complements)
    if clause.verb.swap:
        subject, complements = complements[0].phrase, [Argument(subject, "acc")]
    tail = _tail(clause, complements)
    if form == "infinitive":
        return ["to", clause.verb.english[0], *tail]
    if form == "gerund":
        return [clause.verb.english[3], *tail]

    base, past, rest, auxiliary = _spine(clause)
    gap = next((part.phrase for part in complements if isinstance(part.phrase, Gap)), None)
    inverted = clause.question and not isinstance(subject, Gap)
    if clause.front in QUESTION_ADVERBS:
        first = [QUESTION_ADVERBS[clause.front]]
    elif gap:
        first = noun_phrase(gap)
    elif clause.front == "time":
        first = clause.time.english.split()
    elif clause.front == "place":
        first = argument(clause.place)
    else:
        first = []
    if not auxiliary and (clause.negated or inverted):
        base, rest, auxiliary, past_verb = "do", [base, *rest], True, None
    else:
        past_verb = clause.verb
    verb = [finite(base, past, subject, past_verb)]
    adverb = [FREQUENCIES[clause.adverb]] if clause.adverb in FREQUENCIES else []
    negation = ["not"] if clause.negated else []
    who = noun_phrase(subject, subject=True)
    if inverted:
        return [*first, *verb, *who, *negation, *adverb, *rest, *tail]
    if verb == ["can"] and negation:
        verb, negation = ["cannot"], []
    if auxiliary:
        return [*first, *who, *verb, *negation, *adverb, *rest, *tail]
    return [*first, *who, *adverb, *verb, *rest, *tail]


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, with the final punctuation mark."""
    words = clause_words(tree.clause)
    if tree.second:
        link = LINKS[tree.link].split()
        second = clause_words(tree.second, "infinitive" if tree.link == "um" else "finite")
        if tree.second_first:
            words = [*link, *second, ",", *words]
        else:
            words += [*([","] if tree.link == "aber" else []), *link, *second]
    words.append("?" if tree.clause.question else ".")
    return [words[0][0].upper() + words[0][1:], *words[1:]]
