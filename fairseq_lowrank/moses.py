"""Moses's rules from tokens to text, with the sides of typographic quotation marks and apostrophes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

LEFT, RIGHT, BOTH = "left", "right", "both"
"""The neighbours of a mark without a blank between them: a closing mark has the left one, an apostrophe both."""
# Private characters stand for marks while sacremoses joins the other tokens, and the last one for private characters of the text.
PRIVATE = {RIGHT: 0xE000, LEFT: 0xE100, BOTH: 0xE200}
OF_TEXT = "\ue300"
STANDS_IN = re.compile("[\ue000-\ue300]")
PARTNERS = {"“": "”", "„": "“”", "‘": "’", "‚": "‘’", "«": "»", "»": "«", "‹": "›", "›": "‹"}
"""The marks that close each mark that can open a quotation."""
MARKS = "“”„‘’‚«»‹›"
# Languages that write „…“, where others write “…”; »…« where others write «…»; and ”…” with one mark for both sides.
LOW_QUOTES = {"de", "cs", "sk", "sl", "bg", "lt", "et", "is", "hr", "sr"}
REVERSED_GUILLEMETS = {"de", "da", "cs", "sk", "sl", "hr", "sr"}
ONE_MARK = {"fi", "sv"}
APART = {"fr": "«»‹›"}  # marks with blanks on both sides
CONTRACTIONS = {"s", "t", "re", "ve", "ll", "d", "m", "n"}  # of English
# words that start with an apostrophe
CLIPPED = {"en": {"em", "cause", "til", "tis", "twas", "bout", "cos"}, "de": {"n", "ne", "nem", "nen", "ner", "nes"}}


def detokeniser(language: str) -> Callable[[Sequence[str]], str]:
    """Return a function from tokens to text, by sacremoses.

    sacremoses takes typographic marks for words, or counts them to tell the first from the second. Here the marks themselves, their
    neighbours and the language decide.

    Args:
        language: the language's code, such as `en`.
    """
    from sacremoses import MosesDetokenizer

    class Detokeniser(MosesDetokenizer):
        IS_CURRENCY_SYMBOL = re.compile(f"{MosesDetokenizer.IS_CURRENCY_SYMBOL.pattern}|^[\ue000-\ue0ff]$")
        IS_PUNCT = re.compile(f"{MosesDetokenizer.IS_PUNCT.pattern}|^[\ue100-\ue2ff]$")

    inner = Detokeniser(language)

    def detokenise(tokens: Sequence[str]) -> str:
        found: list[str] = []
        replaced: list[str] = []  # in the order of the text
        for token, side in zip(tokens, sides(tokens, language), strict=True):
            replaced += STANDS_IN.findall(token) if side is None else [token]
            found.append(STANDS_IN.sub(OF_TEXT, token) if side is None else chr(PRIVATE[side] + MARKS.index(token)))
        text = re.sub("([\ue200-\ue2ff]) ", r"\1", inner.detokenize(found))
        given = iter(replaced)
        return STANDS_IN.sub(lambda _: next(given), text)

    return detokenise


def sides(tokens: Sequence[str], language: str) -> list[str | None]:
    """Return for each token the side on which it has no blank; None for a token that is no mark."""
    found: list[str | None] = []
    opened: list[str] = []
    for place, token in enumerate(tokens):
        side = None
        if len(token) == 1 and token in MARKS and token not in APART.get(language, ""):
            closed = next((mark for mark in reversed(opened) if token in PARTNERS.get(mark, mark)), None)
            if token == "’":
                side = _apostrophe(tokens, place, language, closed is not None)
            elif closed is not None:
                side = LEFT
            else:
                side = RIGHT if _opens(tokens, place, language) else LEFT
            if side == RIGHT and token != "’":
                opened.append(token)
            elif side == LEFT and closed is not None:
                del opened[len(opened) - 1 - opened[::-1].index(closed) :]
        found.append(side)
    return found


def _opens(tokens: Sequence[str], place: int, language: str) -> bool:
    """Return True if a mark that closes no quotation of the sentence opens one."""
    mark = tokens[place]
    if mark in "„‚‘":
        return True
    if mark == "”":
        return language in ONE_MARK
    # “ and the guillemets open or close by language, unless the other one of a pair follows
    both = language in (LOW_QUOTES if mark == "“" else REVERSED_GUILLEMETS)
    if not both:
        return mark in "“«‹" or language in ONE_MARK
    rest = tokens[place + 1 :]
    follows = next((token for token in rest if token == mark or token in PARTNERS[mark]), mark)
    return follows != mark or mark in "»›"


def _apostrophe(tokens: Sequence[str], place: int, language: str, opened: bool) -> str:
    """Return the side of ’, which may also close a quotation.

    Args:
        opened: a single quotation mark is open.
    """
    before, after = tokens[:place][-1:], tokens[place + 1 :][:1]
    if not before:
        return RIGHT
    word, following = before[0].lower(), after[0].lower() if after else ""
    if not (word[-1].isalpha() and following[:1].isalpha()):
        # the year in ’90s
        return RIGHT if not opened and following[:1].isdigit() and not word[-1].isdigit() else LEFT
    if following in (CONTRACTIONS if language == "en" else {"s"}) or (language == "en" and word == "n"):
        return BOTH
    if not opened and following in CLIPPED.get(language, ()):
        return RIGHT
    if language == "de":
        return LEFT
    if language == "en":
        return LEFT if opened or word[-1] == "s" else BOTH  # the dogs’ bowl
    if word == "po":  # Italian un po’
        return LEFT
    if word[-2:] in ("qu", "ll") or len(word) < 3:  # elisions of French and Italian
        return BOTH
    return LEFT if opened else BOTH
