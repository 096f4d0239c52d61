"""English: inflection, auxiliaries and do-support, and the order of words."""

from experiments.corpora.grammar.lexicon import WORDS, Adjective
from experiments.corpora.grammar.trees import Argument, Clause, Gap, Name, Nominal, NounPhrase, Pronoun, Sentence

VOWELS = tuple("aeiou")


def adjective(phrase: Nominal, described: Adjective, comparative: bool = False) -> list[str]:
    """Return an adjective's translation, which may depend on what the adjective describes."""
    for kind, *forms in described.english_of:
        if kind in phrase.kinds:
            return [forms[comparative]]
    return (described.comparative[1] if comparative else described.english).split()


def noun_phrase(phrase: Nominal, *, subject: bool = False) -> list[str]:
    """Return the words of a noun phrase, with its relative clause."""
    if isinstance(phrase, Pronoun):
        return [phrase.english[0 if subject else 1]]
    if isinstance(phrase, Name):
        return [phrase.name]
    if isinstance(phrase, Gap):
        return [phrase.word if phrase.word != "relative" else "who" if phrase.animate and subject else "that"]
    words = [phrase.noun.english_plural if phrase.plural else phrase.noun.english]
    if phrase.adjective:
        words = adjective(phrase, phrase.adjective) + words
    return _determiner(phrase, words[0]) + words + (clause_words(phrase.relative) if phrase.relative else [])


def _determiner(phrase: NounPhrase, following: str) -> list[str]:
    determiner = phrase.determiner
    if phrase.owner:
        return [*noun_phrase(phrase.owner), "'s"]
    if isinstance(determiner, Pronoun):
        return [determiner.english[2]]
    if determiner == "no":
        determiner = "any" if phrase.plural or phrase.noun.mass else "a"
    if determiner == "a" and following.startswith(VOWELS):
        return ["an"]
    return ["these" if determiner == "this" and phrase.plural else determiner] if determiner else []


def argument(part: Argument) -> list[str]:
    """Return a complement or adverbial; a gap leaves its preposition ("the man that she is waiting for")."""
    return part.english.split() + ([] if isinstance(part.phrase, Gap) else noun_phrase(part.phrase))


def finite(base: str, past: bool, subject: Nominal, regular_past: str) -> str:
    """Return the finite form of a verb."""
    third = subject.person == 3 and not subject.plural
    if base in WORDS["english_forms"]:
        form = 1 if third else 0 if subject.person == 1 and not subject.plural else 2
        return WORDS["english_forms"][base][past].split()[form]
    if past:
        return regular_past
    if not third:
        return base
    if base.endswith("y") and base[-2] not in VOWELS:
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "x", "ch", "sh")) else "s")


def _spine(clause: Clause) -> tuple[str, list[str], bool]:
    """Return the finite verb's base, what follows it, and whether it is an auxiliary."""
    base, _, participle, present_participle = clause.verb.english
    if clause.modal:
        return (
            clause.modal.english,
            [*clause.modal.rest, base],
            clause.modal.english in ("be", "can", "should", "would"),
        )
    if clause.tense == "future":
        return "will", [base], True
    if clause.tense == "experience":
        return "have", [WORDS["experiences"][clause.adverb], participle], True
    if clause.tense == "since":
        return "have", [participle] if clause.verb.stative else ["been", present_participle], True
    if clause.adverb == "gern":
        return "like", ["to", base], False
    if clause.tense == "present" and not clause.verb.stative:
        return "be", [present_participle], True
    return base, [], base == "be"


def _tail(clause: Clause, complements: list[Argument]) -> list[str]:
    """Return what follows the verb: particle, objects, prepositional complements, then company, place and time."""
    bare = [part for part in complements if not part.english]
    words = argument(bare.pop(0)) if bare and isinstance(bare[0].phrase, Pronoun) else []
    words += clause.verb.particle.split()
    for part in bare + [part for part in complements if part.english]:
        words += argument(part)
    if len(bare) > 1 and isinstance(bare[0].phrase, Gap):
        words.append("to")  # the man that she gave the book to
    if clause.quality:
        words += adjective(clause.subject, clause.quality, comparative=clause.than is not None)
    if clause.than:
        words += ["than", *noun_phrase(clause.than)]
    if clause.infinitive:
        words += clause_words(clause.infinitive, "gerund" if clause.verb.gerund else "infinitive")
    for name, part in (("companion", clause.companion), ("place", clause.place)):
        words += argument(part) if part and clause.front != name else []
    return words + (clause.time.english.split() if clause.time and clause.front != "time" else [])


def clause_words(clause: Clause, form: str = "finite") -> list[str]:
    """Return the words of a clause; in the forms `infinitive` and `gerund` it has no subject."""
    subject, complements, front = clause.subject, list(clause.complements), clause.front
    if clause.verb.swap:
        subject, complements = complements[0].phrase, [Argument(subject, "acc")]
    tail = _tail(clause, complements)
    if form != "finite":
        return [*(["to", clause.verb.english[0]] if form == "infinitive" else [clause.verb.english[3]]), *tail]
    if front in WORDS["questions"]:
        first = [WORDS["questions"][front][1]]
    elif gaps := [part.phrase for part in complements if isinstance(part.phrase, Gap)]:
        first = noun_phrase(gaps[0])
    else:
        first = clause.time.english.split() if front == "time" else argument(clause.place) if front == "place" else []
    base, rest, auxiliary = _spine(clause)
    past = clause.tense == "past"
    inverted = clause.question and not isinstance(subject, Gap)
    if not auxiliary and (clause.negated or inverted):
        base, rest, auxiliary = "do", [base, *rest], True
    verb = finite(base, past, subject, clause.verb.english[1])
    adverb = WORDS["frequencies"].get(clause.adverb, "").split()
    negation = ["not"] if clause.negated else []
    who = noun_phrase(subject, subject=True)
    if inverted:
        return [*first, verb, *who, *negation, *adverb, *rest, *tail]
    if not auxiliary:
        return [*first, *who, *adverb, verb, *rest, *tail]
    verbs = ["cannot"] if verb == "can" and negation else [verb, *negation]
    return [*first, *who, *verbs, *adverb, *rest, *tail]


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, the final mark included."""
    words = clause_words(tree.clause)
    if tree.second:
        second = WORDS["links"][tree.link].split()
        second += clause_words(tree.second, "infinitive" if tree.link == "um" else "finite")
        words = [*second, ",", *words] if tree.second_first else [*words, *("," * (tree.link == "aber")), *second]
    words.append("?" if tree.clause.question else ".")
    return [words[0][0].upper() + words[0][1:], *words[1:]]
