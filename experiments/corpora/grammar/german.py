"""German: inflection, and the order of words in main, subordinate and infinitive clauses."""

from experiments.corpora.grammar.lexicon import WORDS, Verb
from experiments.corpora.grammar.trees import Argument, Clause, Gap, Name, Nominal, NounPhrase, Pronoun, Sentence

CASES = ("nom", "acc", "dat", "gen")
FORMS = {verb: forms.split() for verb, forms in WORDS["german_forms"].items()}


def _ending(table: str, gender: str, case: str) -> str:
    return WORDS["endings"][table][gender].split()[CASES.index(case)].replace("-", "")


def _noun(phrase: NounPhrase, case: str) -> str:
    noun = phrase.noun
    if phrase.plural:
        return noun.plural + ("n" if case == "dat" and noun.plural[-1] not in "ns" else "")
    if noun.weak and case != "nom":
        return noun.german + ("n" if noun.german[-1] in "er" else "en")
    if case == "gen" and noun.gender != "f":
        return noun.german + ("es" if noun.german in WORDS["long_genitive"] else "s")
    return noun.german


def _determiner(phrase: NounPhrase, gender: str, case: str) -> tuple[list[str], str]:
    """Return the determiner's words, and the table of endings for an adjective after them."""
    determiner, counts = phrase.determiner, WORDS["counts"]
    if isinstance(phrase.owner, Name):
        return [phrase.owner.name + "s"], "strong"
    if determiner is None:
        return [], "strong"
    if determiner in counts:
        return [counts[determiner] + ("n" if determiner == "many" and case == "dat" else "")], "strong"
    if determiner in ("the", "this"):
        return [_ending(determiner, gender, case)], "weak"
    stem = determiner.german[4] if isinstance(determiner, Pronoun) else {"a": "ein", "no": "kein"}[determiner]
    ending = _ending("ein", gender, case)
    return [("eur" if stem == "euer" and ending else stem) + ending], "mixed"


def noun_phrase(phrase: Nominal, case: str) -> list[str]:
    """Return the words of a noun phrase in one of CASES, without its relative clause."""
    if isinstance(phrase, Pronoun):
        return [phrase.german[CASES.index(case)]]
    if isinstance(phrase, Name):
        return [phrase.name]
    gender = "p" if phrase.plural else phrase.gender
    if isinstance(phrase, Gap):
        return [_ending(phrase.word, gender, case)]
    words, endings = _determiner(phrase, gender, case)
    if phrase.adjective:
        words.append(phrase.adjective.stem + _ending(endings, gender, case))
    return [
        *words,
        _noun(phrase, case),
        *(noun_phrase(phrase.owner, "gen") if isinstance(phrase.owner, NounPhrase) else []),
    ]


def argument(part: Argument) -> list[str]:
    words = [*part.german.split(), *noun_phrase(part.phrase, part.case)]
    short = WORDS["contractions"].get(" ".join(words[:2])) if isinstance(part.phrase, NounPhrase) else None
    return [short, *words[2:]] if short else words


def present(verb: Verb) -> list[str]:
    """Return the present for ich, du, er, wir, ihr, sie, without the separable prefix."""
    if verb.infinitive in FORMS:
        return FORMS[verb.infinitive]
    stem, root = verb.infinitive.removesuffix("n").removesuffix("e"), verb.third[:-1]
    du = root + ("t" if root.endswith(("s", "ß", "z")) else "st")
    ihr = stem + ("et" if stem.endswith(("t", "d", "ffn")) else "t")
    return [stem + "e", du, verb.third, verb.infinitive, ihr, verb.infinitive]


def _verbs(clause: Clause) -> tuple[str, list[str]]:
    """Return the finite verb, and what closes the clause: the prefix, the participle or the infinitive."""
    verb, past = clause.verb, clause.tense == "past"
    if clause.modal:
        forms, closing = clause.modal.past if past else clause.modal.present, verb.prefix + verb.infinitive
    elif clause.tense == "future":
        forms, closing = FORMS["werden"], verb.prefix + verb.infinitive
    elif past and verb.infinitive == "sein":
        forms, closing = FORMS["war"], ""
    elif past or clause.tense == "experience":
        forms, closing = FORMS[verb.auxiliary], verb.participle
    else:
        forms, closing = present(verb), verb.prefix
    return forms[clause.subject.person - 1 + 3 * clause.subject.plural], [closing] if closing else []


def _rank(part: Argument) -> int:
    """Return a complement's place among the others: pronouns, definite and other objects, prepositions."""
    if part.german:
        return 3
    # "ihr" counts as a noun phrase: put before the subject ("Leiht ihr Anna das Hemd?") it would read as "you".
    if isinstance(part.phrase, Pronoun) and argument(part) != ["ihr"]:
        return 0
    return 1 if part.phrase.definite else 2


def _parts(clause: Clause) -> dict[str | int, list[str]]:
    """Return all but the verbs in the order of a clause that begins with its verb, by the names of `Clause.front`."""
    pronouns, definite, others, prepositional = (
        {index: argument(part) for index, part in enumerate(clause.complements) if _rank(part) == rank}
        for rank in range(4)
    )
    kein = any(part.phrase.determiner == "no" for part in clause.complements)
    itself = clause.subject.german[3] if isinstance(clause.subject, Pronoun) else "sich"
    subject = {"subject": noun_phrase(clause.subject, "nom") + relative(clause.subject)}
    parts = {
        # A pronoun stands before a subject that is not one: "Heute hilft ihm der Mann". The first place counts.
        **(subject if isinstance(clause.subject, Pronoun) else {}),
        "reflexive": [itself] if clause.verb.reflexive else [],
        **pronouns,
        **subject,
        "time": clause.time.german.split() if clause.time else [],
        **definite,
        "adverb": ["nicht"] * (clause.negated and not kein) + clause.adverb.split(),
        **others,
        "companion": argument(clause.companion) if clause.companion else [],
        "place": argument(clause.place) if clause.place else [],
        **prepositional,
    }
    if clause.quality:
        comparison = [clause.quality.comparative[0], "als", *noun_phrase(clause.than, "nom")] if clause.than else None
        parts["quality"] = comparison or [clause.quality.german]
    return parts


def relative(phrase: Nominal) -> list[str]:
    """Return the relative clause of a phrase, if it has one."""
    return [",", *clause_words(phrase.relative, "last"), ","] if phrase.relative else []


def clause_words(clause: Clause, verb_position: str = "second") -> list[str]:
    """Return the words of a clause whose finite verb is `second`, `first`, `last`, or absent (`infinitive`)."""
    finite, closing = _verbs(clause)
    parts, front, verb = _parts(clause), clause.front, clause.verb
    first = []
    if verb_position != "first":
        first = [WORDS["questions"][front][0]] if front in WORDS["questions"] else parts.pop(front)
    rest = [word for words in parts.values() for word in words]
    # a complement's relative clause follows the whole clause: "Ich habe den Mann gesehen, der …"
    after = [word for part in clause.complements for word in relative(part.phrase)]
    if clause.infinitive:
        after += [",", *clause_words(clause.infinitive, "infinitive"), ","]
    if verb_position == "infinitive":
        return [*rest, *([f"{verb.prefix}zu{verb.infinitive}"] if verb.prefix else ["zu", verb.infinitive]), *after]
    if verb_position == "last":
        return [*first, *rest, *([verb.prefix + finite] if closing == [verb.prefix] else [*closing, finite]), *after]
    return [*first, finite, *rest, *closing, *after]


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, the final mark included."""
    clause, link = tree.clause, tree.link
    if not tree.second:
        begins_with_verb = clause.question and clause.front == "subject" and not isinstance(clause.subject, Gap)
        words = clause_words(clause, "first" if begins_with_verb else "second")
    else:
        position = {"und": "second", "aber": "second", "denn": "second", "um": "infinitive"}.get(link, "last")
        second = [link, *clause_words(tree.second, position)]
        if tree.second_first:
            words = [*second, ",", *clause_words(clause, "first")]
        else:
            words = [*clause_words(clause), *([] if link == "und" else [","]), *second]
    words.append("?" if clause.question else ".")
    # a comma that meets another mark is dropped
    kept = [
        word for word, following in zip(words, [*words[1:], ""], strict=True) if word != "," or following not in ",.?"
    ]
    return [kept[0][0].upper() + kept[0][1:], *kept[1:]]
