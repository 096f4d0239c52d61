"""Scores in the outputs of fairseq's commands: sentences and BLEU of fairseq-generate, perplexity of fairseq-eval-lm."""

from __future__ import annotations

import math
import re
from pathlib import Path

from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.subwords import check_words


def read_hypotheses(path: Path) -> list[str]:
    """Return the best hypotheses in a fairseq-generate output (subwords already joined), in the corpus's order."""
    return [text.partition("\t")[2] for text in _read_column(path, "H")]  # the score is before the text


def read_references(path: Path) -> list[str]:
    """Return the target sentences in a fairseq-generate output (subwords already joined), in the corpus's order."""
    return _read_column(path, "T")


def _read_column(path: Path, kind: str) -> list[str]:
    """Return the texts after the tab in lines `KIND-NUMBER<tab>TEXT`, in the order of their numbers."""
    found: dict[int, str] = {}
    for line in read_lines(path):
        name, tab, text = line.partition("\t")
        letter, _, number = name.partition("-")
        if tab and letter == kind and number.isdecimal():
            found.setdefault(int(number), text)  # with --nbest, the best comes first
    if sorted(found) != list(range(len(found))):
        raise UserError(
            f"{path} has {len(found)} sentences, but not those with the numbers 0 to {len(found) - 1}. Run fairseq-generate on "
            "all sentences."
        )
    return [found[index] for index in range(len(found))]


def bleu(hypotheses: list[str], references: list[str], raw: list[str] | None = None, language: str = "en") -> dict:
    """Return BLEU of tokenised hypotheses, by sacrebleu (`value`, with its signature) and on the given tokens.

    sacrebleu tokenises text (13a, its default). If the publisher's text is known (`raw`), it gets this text and detokenised
    hypotheses, without case if the hypotheses have none. Else both sides are tokenised. `tokenised_bleu` uses the given tokens,
    like multi-bleu.perl and most papers of the time. `sentence_counts` has the counts of each sentence for `value`: lengths of
    hypothesis and reference, matching n-grams and all n-grams of orders 1 to 4.

    Raises:
        UserError: the numbers of lines differ, or a text is cut into subwords.
    """
    from sacrebleu.metrics import BLEU
    from sacremoses import MosesDetokenizer

    given, lowercase = hypotheses, False
    if raw is not None:
        detokenise = MosesDetokenizer(language).detokenize
        given = [detokenise(line.split()) for line in hypotheses]
        lowercase = not any(line != line.lower() for line in hypotheses)
    for text in (references, raw):
        if text is not None and len(text) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} hypotheses for {len(text)} references. Run fairseq-generate on all sentences."
            )
    check_words("hypotheses", hypotheses)
    check_words("references", references)
    # Both sides may be tokenised on purpose; force switches sacrebleu's warning off.
    standard, tokens = BLEU(lowercase=lowercase, force=True), BLEU(tokenize="none", force=True)
    # the counts are those of `standard`; without this flag sacrebleu warns at every sentence
    sentence = BLEU(lowercase=lowercase, force=True, effective_order=True)
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
    text = "\n".join(read_lines(path))
    scores = re.findall(r"Loss \(base 2\): ([\d.]+|nan|inf), Perplexity: ([\d.]+|nan|inf)", text)
    tokens = re.findall(r"Evaluated ([\d,]+) tokens", text)
    if not scores or not tokens:
        raise UserError(f"{path} has no perplexity. Give the log of fairseq-eval-lm.")
    loss, perplexity = map(float, scores[-1])
    value = perplexity if metric == "perplexity" else round(loss * math.log(2), 4)
    return {"metric": metric, "value": value, "tokens": int(tokens[-1].replace(",", ""))}
