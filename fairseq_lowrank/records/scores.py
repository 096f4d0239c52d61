"""Scores in the outputs of fairseq's commands: sentences and BLEU of fairseq-generate, perplexity of fairseq-eval-lm."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.moses import detokeniser
from fairseq_lowrank.records.logs import START
from fairseq_lowrank.subwords import check_words

# A setting that fairseq-generate logs before it starts, and its last line.
REFERENCES_SCORED = "the hypotheses are the references. Run fairseq-generate without --score-reference."
SCORED_REFERENCES = re.compile(r"'score_reference': (True|False)")
END = re.compile(r"Generate \S+ with beam=\d+:")
# sacrebleu's tokenisers by language, where words have no blanks between them. Other languages have 13a.
TOKENISERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"} | dict.fromkeys(
    ("th", "lo", "km", "my", "bo", "dz"), "char"
)
LONG_CODES = {"zho": "zh", "cmn": "zh", "jpn": "ja", "kor": "ko", "tha": "th", "lao": "lo", "khm": "km", "mya": "my"}
LONG_CODES |= {"bod": "bo", "dzo": "dz"}
# Moses's entities, and marks that a tokeniser separates from words.
ENTITIES = re.compile(r"&(?:apos|quot|amp|lt|gt|bar|#91|#93|#124);| @-@ ")
STOPS = re.compile(r"[.,] ")
ALONE = re.compile(r" [.,] ")
# Letters of the scripts of these languages.
THEIR_LETTERS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]"
)


class Generated(NamedTuple):
    """The sentences of a run of fairseq-generate, in the corpus's order.

    Args:
        hypotheses: the best hypotheses.
        references: the targets.
        decoded: the log says that the model made the hypotheses, which `--score-reference` replaces by the references.
    """

    hypotheses: list[str]
    references: list[str]
    decoded: bool


def read_run(path: Path) -> Generated:
    """Return the last run in an output of fairseq-generate; without sentences if it has none.

    Raises:
        UserError: the run is not complete, or scored the references.
    """
    found: dict[str, dict[int, str]] = {"H": {}, "T": {}, "S": {}}
    started = ended = False
    scored_references = None
    for line in read_lines(path):
        if setting := SCORED_REFERENCES.search(line):
            scored_references = setting[1] == "True"
        if START in line:
            found, started, ended = {kind: {} for kind in found}, True, False
            continue
        if END.match(line):
            ended = True
            continue
        name, tab, text = line.partition("\t")
        letter, _, number = name.partition("-")
        if not (tab and letter in found and number.isdecimal()):
            continue
        if ended or (
            letter != "H" and int(number) in found[letter]
        ):  # another run; with --nbest, a sentence has several H
            found, ended = {kind: {} for kind in found}, False
        if letter == "H":
            text = text.partition("\t")[2]  # the score is before the text
        found[letter].setdefault(int(number), text)  # the best comes first
    hypotheses, references = (_in_order(path, found[letter]) for letter in "HT")
    if not ended and (hypotheses or started):
        raise UserError(
            f"{path}: the last run has no end, a line 'Generate … with beam=…'. Run fairseq-generate again."
        )
    if scored_references:
        raise UserError(f"{path}: {REFERENCES_SCORED}")
    return Generated(hypotheses, references, scored_references is False)


def _in_order(path: Path, found: dict[int, str]) -> list[str]:
    """Return texts in the order of their numbers."""
    if sorted(found) != list(range(len(found))):
        raise UserError(
            f"{path} has {len(found)} sentences, but not those with the numbers 0 to {len(found) - 1}. Run fairseq-generate on "
            "all sentences."
        )
    return [found[index] for index in range(len(found))]


def code_of(language: str) -> str | None:
    """Return the short code of a language such as `zh`, `zho` or `zh_CN`; None if it is no code."""
    code = re.split("[-_]", language.lower())[0]
    return LONG_CODES.get(code, code) if re.fullmatch("[a-z]{2,3}", code) else None


def tokeniser(language: str | None, texts: list[str]) -> str:
    """Return the name of sacrebleu's tokeniser for texts of a language.

    Raises:
        UserError: the texts need the tokeniser of another language.
    """
    name = TOKENISERS.get((code_of(language) if language else None) or "", "13a")
    theirs = sum(len(THEIR_LETTERS.findall(text)) for text in texts)
    if name == "13a" and 2 * theirs > sum(map(str.isalpha, "".join(texts))):
        given = f"language {language!r}" if language else "no language"
        raise UserError(
            f"{given}: the text needs a tokeniser of its language. Give the right code (--language {', '.join(TOKENISERS)})."
        )
    return name


def are_tokenised(lines: list[str]) -> bool:
    """Return True if text was tokenised: it has entities such as `&apos;`, or its full stops and commas stand alone more often than not."""
    text = " \n".join(lines) + " "
    return bool(ENTITIES.search(text)) or 2 * len(ALONE.findall(text)) > len(STOPS.findall(text))


def tokenised_bleu(hypotheses: list[str], references: list[str]) -> dict:
    """Return BLEU on the tokens as they are, like multi-bleu.perl, with its signature and the counts of each sentence.

    A tokeniser would count the parts of an entity such as `&apos;` as matches.

    Raises:
        UserError: the numbers of lines differ, or a text is cut into subwords.
    """
    from sacrebleu.metrics import BLEU

    if len(references) != len(hypotheses):
        raise UserError(
            f"{len(hypotheses)} hypotheses for {len(references)} references. Run fairseq-generate on all sentences."
        )
    check_words("hypotheses", hypotheses)
    check_words("references", references)
    corpus, sentence = (BLEU(tokenize="none", force=True, effective_order=each) for each in (False, True))
    pairs = zip(hypotheses, references, strict=True)
    counted = [sentence.sentence_score(hypothesis, [reference]) for hypothesis, reference in pairs]
    return {
        "metric": "tokenised_bleu",
        "value": round(corpus.corpus_score(hypotheses, [references]).score, 2),
        "tokenised_signature": str(corpus.get_signature()),
        "text": "tokenised",
        "sentence_counts": [[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in counted],
    }


def bleu(
    hypotheses: list[str], references: list[str], raw: list[str] | None = None, language: str | None = None
) -> dict:
    """Return BLEU of tokenised hypotheses, by sacrebleu (`value`, with its signature) and on the given tokens.

    sacrebleu tokenises text by its language: 13a, its default, or another tokeniser if words have no blanks between them. If the
    publisher's text is known (`raw`), it gets this text and detokenised hypotheses, without case if the hypotheses have none. Else
    both sides are tokenised. `tokenised_bleu` uses the given tokens, like multi-bleu.perl and most papers of the time.
    `sentence_counts` has the counts of each sentence for `value`: lengths of hypothesis and reference, matching n-grams and all
    n-grams of orders 1 to 4.

    Args:
        language: the code of the language, such as `de`. Without it, words have blanks between them.

    Raises:
        UserError: the numbers of lines differ, a text is cut into subwords, or the language has another tokeniser, or none that is
            installed.
    """
    from sacrebleu.metrics import BLEU

    given, lowercase = hypotheses, False
    if raw is not None:
        detokenise = detokeniser((code_of(language) if language else None) or "en")
        given = [detokenise(line.split()) for line in hypotheses]
        lowercase = not any(line != line.lower() for line in hypotheses)
    for text in (references, raw):
        if text is not None and len(text) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} hypotheses for {len(text)} references. Run fairseq-generate on all sentences."
            )
    check_words("hypotheses", hypotheses)
    check_words("references", references)
    name = tokeniser(language, raw or references)
    # Both sides may be tokenised on purpose; force switches sacrebleu's warning off.
    options: dict[str, Any] = {"tokenize": name, "lowercase": lowercase, "force": True}
    try:
        standard = BLEU(**options)
    except (ImportError, RuntimeError) as error:  # MeCab is not installed
        code = code_of(language or "")
        raise UserError(
            f"language {language!r}: sacrebleu's tokeniser {name} is not installed. Run pip install 'sacrebleu[{code}]'."
        ) from error
    tokens = BLEU(tokenize="none", force=True)
    # the counts are those of `standard`; without this flag sacrebleu warns at every sentence
    sentence = BLEU(**options, effective_order=True)
    pairs = zip(given, raw or references, strict=True)
    counted = [sentence.sentence_score(hypothesis, [reference]) for hypothesis, reference in pairs]
    return {
        "metric": "sacrebleu",
        "value": round(standard.corpus_score(given, [raw or references]).score, 2),
        "signature": str(standard.get_signature()),
        "text": "tokenised" if raw is None else "detokenised",
        "tokenised_bleu": round(tokens.corpus_score(hypotheses, [references]).score, 2),
        "tokenised_signature": str(tokens.get_signature()),
        "sentence_counts": [[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in counted],
    }


def read_perplexity(path: Path, metric: str = "perplexity") -> dict:
    """Return the score in a fairseq-eval-lm log, and the number of scored tokens.

    Args:
        metric: `perplexity`, or `loss` in nats per token, its natural logarithm (fairseq logs it in base 2).
    """
    # fairseq-eval-lm has no other output: these lines are the same with --log-format json.
    text = "\n".join(read_lines(path)).rpartition(START)[2]  # of the last run
    scores = re.findall(r"Loss \(base 2\): ([\d.]+|nan|inf), Perplexity: ([\d.]+|nan|inf)", text)
    tokens = re.findall(r"Evaluated ([\d,]+) tokens", text)
    if not scores or not tokens:
        raise UserError(f"{path} has no perplexity, or not of its last run. Give the log of fairseq-eval-lm.")
    loss, perplexity = map(float, scores[-1])
    value = perplexity if metric == "perplexity" else round(loss * math.log(2), 4)
    return {"metric": metric, "value": value, "tokens": int(tokens[-1].replace(",", ""))}
