"""Sizes of the models of a recipe, before training."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator

from experiments.corpora.catalogue import parse_corpus_name
from experiments.recipes.recipe import Run, last_value
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError


def lines(runs: Iterable[Run]) -> Iterator[str]:
    """Yield the lines of a table of models: all parameters, those without embeddings, and those of attention."""
    yield f"{'':<24}{'parameters':>13}{'no embeddings':>15}{'attention':>13}"
    for run in runs:
        counts = sizes(run)
        numbers = counts["total"], counts["total"] - counts["embeddings"], counts["attention"]
        yield f"{run.row:<24}{numbers[0]:>13,}{numbers[1]:>15,}{numbers[2]:>13,}"


def sizes(run: Run, vocabulary: int | None = None) -> dict:
    """Return :func:`fairseq_lowrank.tools.fairseq.parameters.count` of a run's model, without memory for its parameters.

    Args:
        vocabulary: size of the dictionary, if it is not that of the run's corpus.
    """
    from fairseq_lowrank.tools.fairseq import architecture, parameters

    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # hydra logs every configuration
    try:
        args = architecture.parse_architecture(last_value(run.flags, "--arch", ""), run.flags)
        return parameters.count(architecture.build_model(args, vocabulary or vocab_size(run)))
    finally:
        logging.disable(disabled)


def vocab_size(run: Run) -> int:
    """Return the size of a run's dictionary; before preparation, the padded number of its subwords.

    Raises:
        UserError: there is no dictionary yet, and the corpus has words instead of subwords.
    """
    special = 4
    if found := sorted(run.bin.glob("dict*.txt")):  # of two languages the larger one
        return max(sum(1 for _ in read_lines(dictionary)) for dictionary in found) + special
    pieces = parse_corpus_name(run.corpus)[1].get("pieces")
    if pieces is None:
        raise UserError(
            f"{run.bin / 'dict.txt'} does not exist yet, so the size of the vocabulary is unknown. Prepare the corpus first."
        )
    return 8 * math.ceil((pieces - 1 + special) / 8)  # one piece is the unknown one, which is also a special symbol
