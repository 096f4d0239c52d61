"""German: inflection, and the order of words in main and subordinate clauses."""

from experiments.corpora.grammar.lexicon import WORDS, Pronoun
from experiments.corpora.grammar.trees import Argument, Clause, NounPhrase, Sentence

CASES = ("nom", "acc", "dat")
FORMS = {verb: forms.split() for verb, forms in WORDS["german_forms"].items()}


def _ending(table: str, gender: str, case: str) -> str:
    return WORDS["endings"][table][gender].split()[CASES.index(case)].replace("-", "")


def _noun(phrase: NounPhrase, case: str) -> str:
    noun = phrase.noun
    if phrase.plural:
        return noun.plural + ("n" if case == "dat" and noun.plural[-1] not in "ns" else "")
    if noun.weak and case != "nom":
        return noun.german + ("n" if noun.german[-1] in "er" else "en")
    return noun.german


def _determiner(phrase: NounPhrase, case: str) -> tuple[list[str], str]:
    """Return the determiner's words, and the table of endings for an adjective after them."""
    determiner = phrase.determiner
    if determiner in (None, "two", "three"):
        return [WORDS["numbers"][determiner]] if determiner else [], "strong"
    if determiner in ("the", "this"):
        return [_ending(determiner, phrase.gender, case)], "weak"
    stem = determiner.german[4] if isinstance(determiner, Pronoun) else "ein"
    ending = _ending("ein", phrase.gender, case)
    return [("eur" if stem == "euer" and ending else stem) + ending], "mixed"


def noun_phrase(phrase: Pronoun | NounPhrase, case: str) -> list[str]:
    """Return the words of a noun phrase in one of CASES."""
    if isinstance(phrase, Pronoun):
        return [phrase.german[CASES.index(case)]]
    words, endings = _determiner(phrase, case)
    if phrase.adjective:
        words.append((phrase.adjective.stem or phrase.adjective.german) + _ending(endings, phrase.gender, case))
    return [*words, _noun(phrase, case)]


def argument(part: Argument) -> list[str]:
    """Return a complement or a place with its preposition, which may absorb the article ("im Garten")."""
    words = [*part.german.split(), *noun_phrase(part.phrase, part.case)]
    short = WORDS["contractions"].get(" ".join(words[:2]))
    return [short, *words[2:]] if short else words


def _verbs(clause: Clause) -> tuple[str, str]:
    """Return the finite verb, and what closes the clause: the prefix, the participle or the infinitive."""
    verb, past = clause.verb, clause.tense == "past"
    if clause.modal:
        forms, closing = clause.modal.past if past else clause.modal.present, verb.prefix + verb.infinitive
    elif clause.tense == "future":
        forms, closing = FORMS["werden"], verb.prefix + verb.infinitive
    elif past and clause.quality:
        forms, closing = FORMS["war"], ""
    elif past:
        forms, closing = FORMS[verb.auxiliary], verb.participle
    else:
        forms, closing = verb.present, verb.prefix
    return forms[clause.subject.person - 1 + 3 * clause.subject.plural], closing


def _parts(clause: Clause) -> dict[str, list[str]]:
    """Return all but the verbs in the order of a clause that begins with its verb, by the names of `Clause.front`."""
    groups: dict[str, list[str]] = {"pronouns": [], "objects": [], "prepositional": []}
    for part in clause.complements:
        # "ihr" counts as a noun phrase: put before the subject ("Leiht ihr Anna das Hemd?") it would read as "you".
        early = isinstance(part.phrase, Pronoun) and argument(part) != ["ihr"]
        groups["prepositional" if part.german else "pronouns" if early else "objects"] += argument(part)
    itself = clause.subject.german[3] if isinstance(clause.subject, Pronoun) else "sich"
    subject = {"subject": noun_phrase(clause.subject, "nom")}
    return {
        "why": ["warum"] if clause.front == "why" else [],
        # A pronoun stands before a subject that is not one: "Heute hilft ihm der Mann". The first place counts.
        **(subject if isinstance(clause.subject, Pronoun) else {}),
        "reflexive": [itself] if clause.verb.reflexive else [],
        "pronouns": groups["pronouns"],
        **subject,
        "time": clause.time.german.split() if clause.time else [],
        "objects": groups["objects"],
        "negation": ["nicht"] if clause.negated else [],
        "place": argument(clause.place) if clause.place else [],
        "prepositional": groups["prepositional"],
        "quality": [clause.quality.german] if clause.quality else [],
    }


def clause_words(clause: Clause, verb_position: str) -> list[str]:
    """Return the words of a clause whose finite verb is `second`, `first` or `last`."""
    finite, closing = _verbs(clause)
    parts = _parts(clause)
    first = parts.pop(clause.front) if verb_position != "first" else []
    rest = [word for words in parts.values() for word in words]
    if verb_position != "last":
        return [*first, finite, *rest, *([closing] if closing else [])]
    return [*first, *rest, *([closing + finite] if closing == clause.verb.prefix else [closing, finite])]


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, the final mark included."""
    verb_first = tree.second_first or (tree.question and tree.clause.front == "subject")
    words = clause_words(tree.clause, "first" if verb_first else "second")
    if tree.second:
        second = [tree.link, *clause_words(tree.second, "second" if tree.link in ("und", "aber", "denn") else "last")]
        comma = [] if tree.link == "und" else [","]
        words = [*second, ",", *words] if tree.second_first else [*words, *comma, *second]
    return [words[0][0].upper() + words[0][1:], *words[1:], "?" if tree.question else "."]
