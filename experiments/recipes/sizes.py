"""How large the models of a recipe are, before any is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator

from experiments.corpora.catalogue import parse
from experiments.recipes.recipe import Run, last_value
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.messages import UserError


def lines(runs: Iterable[Run]) -> Iterator[str]:
    """A table of the runs' models: all parameters, those that are no embeddings, those of attention."""
    yield f"{'':<24}{'parameters':>13}{'no embeddings':>15}{'attention':>13}"
    for run in runs:
        counts = sizes(run)
        numbers = counts["total"], counts["total"] - counts["embeddings"], counts["attention"]
        yield f"{run.row:<24}{numbers[0]:>13,}{numbers[1]:>15,}{numbers[2]:>13,}"


def sizes(run: Run) -> dict:
    """See :func:`fairseq_lowrank.tools.parameters.count`; the model is not allocated."""
    from fairseq_lowrank.tools import architecture, parameters

    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # hydra tells of every configuration
    try:
        args = architecture.parse(last_value(run.flags, "--arch", ""), run.flags)
        return parameters.count(architecture.build(args, vocab_size(run)))
    finally:
        logging.disable(disabled)


def vocab_size(run: Run) -> int:
    """The size of a run's dictionary, or before its corpus is prepared that of its sub-words, as fairseq pads it.

    Raises:
        UserError: there is no dictionary yet, and the corpus is cut into words.
    """
    special = 4
    dictionary = run.bin / "dict.txt"
    if dictionary.exists():
        return sum(1 for _ in read_lines(dictionary)) + special
    pieces = parse(run.corpus)[1].get("pieces")
    if pieces is None:
        raise UserError(f"{dictionary} is not there yet: the size of the vocabulary is not known before preparation")
    return 8 * math.ceil((pieces - 1 + special) / 8)  # one piece stands for what is unknown, as a special symbol does
