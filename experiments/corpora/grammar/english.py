"""English: inflection, auxiliaries and do-support, and the order of words."""

from experiments.corpora.grammar.lexicon import WORDS, Pronoun
from experiments.corpora.grammar.trees import Argument, Clause, NounPhrase, Sentence


def noun_phrase(phrase: Pronoun | NounPhrase, *, subject: bool = False) -> list[str]:
    """Return the words of a noun phrase."""
    if isinstance(phrase, Pronoun):
        return [phrase.english[0 if subject else 1]]
    words = [phrase.adjective.english] if phrase.adjective else []
    words.append(phrase.noun.english_plural if phrase.plural else phrase.noun.english)
    determiner = phrase.determiner
    if isinstance(determiner, Pronoun):
        return [determiner.english[2], *words]
    if determiner == "a" and words[0][0] in "aeiou":
        return ["an", *words]
    return ["these" if determiner == "this" and phrase.plural else determiner, *words] if determiner else words


def argument(part: Argument) -> list[str]:
    """Return a complement or a place with its preposition."""
    return part.english.split() + noun_phrase(part.phrase)


def _spine(clause: Clause) -> tuple[list[str], list[str], bool]:
    """Return the finite verb's base, third person and past, what follows it, and whether it is an auxiliary."""
    *forms, present_participle = clause.verb.english
    if clause.modal:
        auxiliary = clause.modal.english in ("be", "can", "should", "would")
        return [clause.modal.english], [*clause.modal.rest, forms[0]], auxiliary
    if clause.tense == "future":
        return ["will"], [forms[0]], True
    if clause.tense == "present" and not clause.verb.stative:
        return ["be"], [present_participle], True
    return forms, [], forms[0] == "be"


def finite(forms: list[str], past: bool, subject: Pronoun | NounPhrase) -> str:
    """Return the finite form of a verb; a table has those of auxiliaries."""
    number = 2 if subject.plural or subject.person == 2 else 0 if subject.person == 1 else 1
    if forms[0] in WORDS["english_forms"]:
        return WORDS["english_forms"][forms[0]][past].split()[number]
    return forms[2] if past else forms[number == 1]


def _tail(clause: Clause, complements: list[Argument]) -> list[str]:
    """Return what follows the verb: particle, objects, prepositional complements, then place and time."""
    bare = [part for part in complements if not part.english]
    words = argument(bare.pop(0)) if bare and isinstance(bare[0].phrase, Pronoun) else []
    words += clause.verb.particle.split()
    for part in bare + [part for part in complements if part.english]:
        words += argument(part)
    return words + ([clause.quality.english] if clause.quality else [])


def clause_words(clause: Clause, question: bool = False) -> list[str]:
    """Return the words of a clause; a question has its subject after the finite verb."""
    subject, complements = clause.subject, list(clause.complements)
    if clause.verb.swap:
        subject, complements = complements[0].phrase, [Argument(subject, "acc")]
    forms, rest, auxiliary = _spine(clause)
    if not auxiliary and (clause.negated or question):
        forms, rest, auxiliary = ["do"], [forms[0], *rest], True
    verb = [finite(forms, clause.tense == "past", subject)]
    who = noun_phrase(subject, subject=True)
    adverbials = {
        "place": argument(clause.place) if clause.place else [],
        "time": clause.time.english.split() if clause.time else [],
        "why": ["why"] if clause.front == "why" else [],
    }
    first = adverbials.pop(clause.front, [])
    rest = [*rest, *_tail(clause, complements), *(word for words in adverbials.values() for word in words)]
    negation = ["not"] if clause.negated else []
    if question:
        return [*first, *verb, *who, *negation, *rest]
    return [*first, *who, *(["cannot"] if verb == ["can"] and negation else verb + negation), *rest]


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, the final mark included."""
    words = clause_words(tree.clause, tree.question)
    if tree.second:
        second = [WORDS["english_links"][tree.link], *clause_words(tree.second)]
        words = [*second, ",", *words] if tree.second_first else [*words, *("," * (tree.link == "aber")), *second]
    return [words[0][0].upper() + words[0][1:], *words[1:], "?" if tree.question else "."]
