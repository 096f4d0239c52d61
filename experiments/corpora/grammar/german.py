"""German: inflection, and the order of words in main, subordinate and infinitive clauses."""

from experiments.corpora.grammar.lexicon import LONG_GENITIVE, Verb
from experiments.corpora.grammar.trees import Argument, Clause, Gap, Name, Nominal, NounPhrase, Pronoun, Sentence

CASES = ("nom", "acc", "dat", "gen")

# Endings by gender (p: plural), in the order of CASES.
DEFINITE = {"m": "er en em es", "f": "ie ie er er", "n": "as as em es", "p": "ie ie en er"}
DEMONSTRATIVE = {"m": "er en em es", "f": "e e er er", "n": "es es em es", "p": "e e en er"}
POSSESSIVE = {"m": "- en em es", "f": "e e er er", "n": "- - em es", "p": "e e en er"}
WEAK = {"m": "e en en en", "f": "e e en en", "n": "e e en en", "p": "en en en en"}
MIXED = {"m": "er en en en", "f": "e e en en", "n": "es es en en", "p": "en en en en"}
STRONG = {"m": "er en em en", "f": "e e er er", "n": "es es em en", "p": "e e en er"}

PRONOUNS = {
    (1, False, ""): "ich mich mir mich mein",
    (2, False, ""): "du dich dir dich dein",
    (3, False, "m"): "er ihn ihm sich sein",
    (3, False, "f"): "sie sie ihr sich ihr",
    (1, True, ""): "wir uns uns uns unser",
    (2, True, ""): "ihr euch euch euch euer",
    (3, True, ""): "sie sie ihnen sich ihr",
}
INTERROGATIVES = {
    ("who", "nom"): "wer",
    ("who", "acc"): "wen",
    ("who", "dat"): "wem",
    ("what", "nom"): "was",
    ("what", "acc"): "was",
}
QUESTION_ADVERBS = {"why": "warum", "when": "wann", "where": "wo", "where to": "wohin"}
COUNTS = {"two": "zwei", "three": "drei", "many": "viele"}
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("an", "das"): "ans",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
}

SEIN = (("bin", "bist", "ist", "sind", "seid", "sind"), ("war", "warst", "war", "waren", "wart", "waren"))
HABEN = ("habe", "hast", "hat", "haben", "habt", "haben")
WISSEN = ("weiß", "weißt", "weiß", "wissen", "wisst", "wissen")
WERDEN = ("werde", "wirst", "wird", "werden", "werdet", "werden")


def _ending(table: dict[str, str], gender: str, case: str) -> str:
    return table[gender].split()[CASES.index(case)].replace("-", "")


def _pronoun(phrase: Pronoun, form: int) -> str:
    return PRONOUNS[phrase.person, phrase.plural, phrase.gender].split()[form]


# --- noun phrases ---------------------------------------------------------------------------------------------------


def _noun(phrase: NounPhrase, case: str) -> str:
    noun = phrase.noun
    if phrase.plural:
        return noun.plural + ("n" if case == "dat" and noun.plural[-1] not in "ns" else "")
    if noun.weak and case != "nom":
        return noun.german + ("n" if noun.german[-1] in "er" else "en")
    if case == "gen" and noun.gender != "f":
        return noun.german + ("es" if noun.german in LONG_GENITIVE else "s")
    return noun.german


def _determiner(phrase: NounPhrase, gender: str, case: str) -> tuple[list[str], dict[str, str]]:
    """Return the determiner's words, and the table of endings for the adjective after it."""
    determiner = phrase.determiner
    if isinstance(phrase.owner, Name):
        return [phrase.owner.name + "s"], STRONG
    if determiner is None:
        return [], STRONG
    if determiner in COUNTS:
        return [COUNTS[determiner] + ("n" if determiner == "many" and case == "dat" else "")], STRONG
    if determiner == "the":
        return ["d" + _ending(DEFINITE, gender, case)], WEAK
    if determiner == "this":
        return ["dies" + _ending(DEMONSTRATIVE, gender, case)], WEAK
    stem = _pronoun(determiner, 4) if isinstance(determiner, Pronoun) else {"a": "ein", "no": "kein"}[determiner]
    ending = _ending(POSSESSIVE, gender, case)
    return [("eur" if stem == "euer" and ending else stem) + ending], MIXED


def noun_phrase(phrase: Nominal, case: str) -> list[str]:
    """Return the words of a noun phrase in one of CASES, without its relative clause."""
    if isinstance(phrase, Pronoun):
        return [_pronoun(phrase, CASES.index(case))]
    if isinstance(phrase, Name):
        return [phrase.name]
    gender = "p" if phrase.plural else phrase.gender
    if isinstance(phrase, Gap):
        if phrase.word != "relative":
            return [INTERROGATIVES[phrase.word, case]]
        return ["denen" if gender == "p" and case == "dat" else "d" + _ending(DEFINITE, gender, case)]
    words, endings = _determiner(phrase, gender, case)
    if phrase.adjective:
        words.append(phrase.adjective.stem + _ending(endings, gender, case))
    words.append(_noun(phrase, case))
    if isinstance(phrase.owner, NounPhrase):
        words += noun_phrase(phrase.owner, "gen")
    return words


def argument(part: Argument) -> list[str]:
    words = noun_phrase(part.phrase, part.case)
    if not part.german:
        return words
    contracted = CONTRACTIONS.get((part.german, words[0])) if _has_article(part.phrase) else None
    return [contracted, *words[1:]] if contracted else [part.german, *words]


def _has_article(phrase: Nominal) -> bool:
    return isinstance(phrase, NounPhrase) and phrase.determiner == "the" and not isinstance(phrase.owner, Name)


# --- verbs ----------------------------------------------------------------------------------------------------------


def _agreement(subject: Nominal) -> int:
    return subject.person - 1 + (3 if subject.plural else 0)


def present(verb: Verb) -> tuple[str, ...]:
    """Return the present for ich, du, er, wir, ihr, sie, without the separable prefix."""
    if verb.infinitive == "wissen":
        return WISSEN
    stem = verb.infinitive.removesuffix("n").removesuffix("e")
    root = verb.third[:-1]
    second = root + ("t" if root.endswith(("s", "ß", "z")) else "st")
    plural_second = stem + ("et" if stem.endswith(("t", "d", "ffn")) else "t")
    return stem + "e", second, verb.third, verb.infinitive, plural_second, verb.infinitive


def _verbs(clause: Clause) -> tuple[str, list[str]]:
    """Return the finite verb, and the words that end the clause; the prefix "ein|" is attached to a verb after it."""
    number, verb = _agreement(clause.subject), clause.verb
    infinitive = verb.prefix + verb.infinitive
    if clause.modal:
        return (clause.modal.past if clause.tense == "past" else clause.modal.present)[number], [infinitive]
    if clause.tense == "future":
        return WERDEN[number], [infinitive]
    if verb.infinitive == "sein":
        return SEIN[clause.tense == "past"][number], []
    if clause.tense in ("past", "experience"):
        return (SEIN[0] if verb.auxiliary == "sein" else HABEN)[number], [verb.participle]
    return present(verb)[number], [verb.prefix + "|"] if verb.prefix else []


# --- clauses --------------------------------------------------------------------------------------------------------


def _is_definite(part: Argument) -> bool:
    phrase = part.phrase
    if not isinstance(phrase, NounPhrase):
        return True
    return phrase.determiner in ("the", "this") or isinstance(phrase.determiner, Pronoun) or phrase.owner is not None


def _middle(clause: Clause) -> list[tuple[object, list[str]]]:
    """Return the parts after the subject, in order, each with its name in `Clause.front`."""
    parts = list(enumerate(clause.complements))
    bare = [(i, part) for i, part in parts if not part.german]
    # "ihr" counts as a noun phrase: put before the subject ("Leiht ihr Anna das Hemd?") it would read as "you".
    pronouns = [(i, part) for i, part in bare if isinstance(part.phrase, Pronoun) and argument(part) != ["ihr"]]
    definite = [(i, part) for i, part in bare if _is_definite(part) and (i, part) not in pronouns]
    negation = ["nicht"] if clause.negated and not _negates_with_kein(clause) else []
    reflexive = [_pronoun_like(clause.subject, 3)] if clause.verb.reflexive else []
    order: list[tuple[object, list[str]]] = [("reflexive", reflexive)]
    order += [(i, argument(part)) for i, part in pronouns]
    order.append(("time", clause.time.german.split() if clause.time else []))
    order += [(i, argument(part)) for i, part in definite]
    order.append(("adverb", negation + clause.adverb.split()))
    order += [(i, argument(part)) for i, part in bare if (i, part) not in pronouns + definite]
    order.append(("companion", argument(clause.companion) if clause.companion else []))
    order.append(("place", argument(clause.place) if clause.place else []))
    order += [(i, argument(part)) for i, part in parts if part.german]
    if clause.quality:
        than = clause.quality.than
        word = clause.quality.adjective.comparative[0] if than else clause.quality.adjective.german
        order.append(("quality", [word, *(["als", *noun_phrase(than, "nom")] if than else [])]))
    return order


def _pronoun_like(subject: Nominal, form: int) -> str:
    """Return a pronoun's form for any subject: the reflexive of "der Mann" is that of "er"."""
    if isinstance(subject, Pronoun):
        return _pronoun(subject, form)
    return _pronoun(Pronoun(3, subject.plural, "" if subject.plural else "m"), form)


def _negates_with_kein(clause: Clause) -> bool:
    return any(isinstance(part.phrase, NounPhrase) and part.phrase.determiner == "no" for part in clause.complements)


def _relatives(clause: Clause) -> list[str]:
    """Return the relative clauses of complements, which follow the clause ("Ich habe den Mann gesehen, der …")."""
    words = []
    for part in clause.complements:
        if isinstance(part.phrase, NounPhrase) and part.phrase.relative:
            words += relative(part.phrase)
    return words


def relative(phrase: NounPhrase) -> list[str]:
    return [",", *clause_words(phrase.relative, "last"), ","]


def clause_words(clause: Clause, verb_position: str = "second") -> list[str]:
    """Return the words of a clause whose finite verb is `second`, `first`, `last`, or missing (`infinitive`)."""
    finite, closing = _verbs(clause)
    subject = noun_phrase(clause.subject, "nom")
    if isinstance(clause.subject, NounPhrase) and clause.subject.relative:
        subject += relative(clause.subject)
    middle = _middle(clause)
    front = clause.front
    if front in QUESTION_ADVERBS:
        first = [QUESTION_ADVERBS[front]]
    elif front == "subject":
        first = subject
    else:
        first = next(words for name, words in middle if name == front)
        middle = [(name, [] if name == front else words) for name, words in middle]
    if front != "subject" or verb_position == "first":
        # A pronoun comes before a subject that is not a pronoun: "Heute hilft ihm der Mann".
        light = 0 if isinstance(clause.subject, Pronoun) else [name for name, _ in middle].index("time")
        middle.insert(light, ("subject", subject))
    rest = [word for _, words in middle for word in words]
    attached = closing[0].removesuffix("|") if closing and closing[0].endswith("|") else ""
    after = _relatives(clause)
    if clause.infinitive:
        after += [",", *clause_words(clause.infinitive, "infinitive"), ","]

    if verb_position == "infinitive":
        verb = clause.verb
        last = [f"{verb.prefix}zu{verb.infinitive}"] if verb.prefix else ["zu", verb.infinitive]
        return rest + last + after
    if verb_position == "last":
        last = [attached + finite] if attached else [*closing, finite]
        return first + rest + last + after
    last = [attached] if attached else closing
    if verb_position == "first":
        return [finite, *rest, *last, *after]
    return [*first, finite, *rest, *last, *after]


COORDINATING = {"und", "aber", "denn"}


def sentence(tree: Sentence) -> list[str]:
    """Return the tokens of a sentence, with the final punctuation mark."""
    mark = "?" if tree.clause.question else "."
    if not tree.second:
        first = (
            "first"
            if tree.clause.question and tree.clause.front == "subject" and not isinstance(tree.clause.subject, Gap)
            else "second"
        )
        return _finish([*clause_words(tree.clause, first), mark])
    if tree.link in COORDINATING:
        return _finish(
            [
                *clause_words(tree.clause),
                *([] if tree.link == "und" else [","]),
                tree.link,
                *clause_words(tree.second),
                mark,
            ]
        )
    if tree.link == "um":
        return _finish([*clause_words(tree.clause), ",", "um", *clause_words(tree.second, "infinitive"), mark])
    subordinate = [tree.link, *clause_words(tree.second, "last")]
    if tree.second_first:
        return _finish([*subordinate, ",", *clause_words(tree.clause, "first"), mark])
    return _finish([*clause_words(tree.clause), ",", *subordinate, mark])


def _finish(words: list[str]) -> list[str]:
    """Drop commas next to another punctuation mark, and begin with a capital."""
    kept = [
        word
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word != "," or following not in {",", ".", "?"}
    ]
    return [kept[0][0].upper() + kept[0][1:], *kept[1:]]
