"""Repairs of the search for hypotheses: repeated n-grams and the limit of the length."""

import functools
import logging
import math

import torch
from fairseq.search import Search
from torch import Tensor

from fairseq_lowrank.repairs.patch import Patch

logger = logging.getLogger(__name__)


@functools.cache
def log_once(message: str) -> None:
    """Log a message the first time that a process calls this with it."""
    logger.info(message)


# fairseq compares the end of its padded buffer, which is padding, with the n-grams of a hypothesis. TorchScript compiles this
# method by its own name and without the variables of an enclosing function.
def _no_repeat_ngram(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
    """Set the log-probability of each token that would repeat an n-gram of its hypothesis to -inf.

    Args:
        tokens: [bsz * beam_size, T] the hypotheses in their first ``step + 1`` columns, and padding after them.
        lprobs: [bsz * beam_size, V] log-probabilities of the next token, changed in place.
    """
    size = self.no_repeat_ngram_size
    first = 1 if size == 1 else 0  # column 0 is the end of a sentence, which must stay possible
    if step + 1 - first < size:
        return lprobs
    ngrams = tokens[:, first : step + 1].unfold(1, size, 1)
    latest = tokens[:, step + 2 - size : step + 1]
    repeats = (ngrams[:, :, :-1] == latest.unsqueeze(1)).all(2)
    limits = torch.full_like(repeats, math.inf, dtype=lprobs.dtype).masked_fill(repeats, -math.inf)
    return lprobs.scatter_reduce_(1, ngrams[:, :, -1], limits, "amin")


def log_banned_ngrams(init):
    """Return an ``NGramRepeatBlock.__init__`` that logs that repeated n-grams are banned."""

    @functools.wraps(init)
    def __init__(self, no_repeat_ngram_size: int, use_extension: bool = True):
        init(self, no_repeat_ngram_size, use_extension)
        if not self.use_extension:
            log_once(
                f"--no-repeat-ngram-size {no_repeat_ngram_size}: repeated n-grams are banned. "
                "fairseq bans none without its CUDA extension."
            )

    return __init__


class OwnLengthLimit(Search):
    """A search that ends each hypothesis at ``max_len_a * n + max_len_b`` tokens, with n the length of its source.

    Args:
        search: the search that selects the candidates.
        own_source_length: if True, the limit is n (``--match-source-len``).

    Attributes:
        at_limit: [bsz], true for each sentence that has reached its limit, after a step.
    """

    def __init__(self, search: Search, tgt_dict, max_len_a: float, max_len_b: int, own_source_length: bool):
        super().__init__(tgt_dict)
        self.search = search
        self.max_len_a = 1.0 if own_source_length else float(max_len_a)
        self.max_len_b = 0 if own_source_length else max_len_b
        self.supports_constraints = search.supports_constraints
        self.stop_on_max_len = search.stop_on_max_len
        self.needs_src_lengths = True

    def set_src_lengths(self, src_lengths: Tensor) -> None:
        self.src_lengths = src_lengths
        self.search.set_src_lengths(src_lengths)

    def init_constraints(self, batch_constraints: Tensor | None, beam_size: int) -> None:
        self.search.init_constraints(batch_constraints, beam_size)

    def prune_sentences(self, batch_idxs: Tensor) -> None:
        self.search.prune_sentences(batch_idxs)

    def update_constraints(self, active_hypos: Tensor) -> None:
        self.search.update_constraints(active_hypos)

    def step(self, step: int, lprobs: Tensor, *args, **kwargs):
        limits = (self.max_len_a * self.src_lengths.double() + self.max_len_b).long()
        self.at_limit = (limits <= step).expand(lprobs.size(0))
        ends = self.at_limit.unsqueeze(1) & (lprobs[:, :, self.eos] > -math.inf)  # [bsz, beam]
        others = torch.arange(lprobs.size(2), device=lprobs.device) != self.eos
        return self.search.step(step, lprobs.masked_fill(ends.unsqueeze(2) & others, -math.inf), *args, **kwargs)


def limit_by_own_length(init):
    """Return a ``SequenceGenerator.__init__`` that limits each sentence by its own length."""

    @functools.wraps(init)
    def __init__(self, models, tgt_dict, *args, **kwargs):
        init(self, models, tgt_dict, *args, **kwargs)
        if self.max_len_a or self.match_source_len:
            self.search = OwnLengthLimit(self.search, tgt_dict, self.max_len_a, self.max_len_b, self.match_source_len)
            self.should_set_src_lengths = True
            flag = "--match-source-len" if self.match_source_len else f"--max-len-a {self.max_len_a}"
            log_once(f"{flag}: the limit follows each sentence's own length, not the longest sentence of the batch.")

    return __init__


def finish_at_own_limit(is_finished):
    """Return an ``is_finished`` that also ends the search for a sentence at the sentence's own limit."""

    @functools.wraps(is_finished)
    def is_finished_or_limited(self, step, unfin_idx, *args):
        if isinstance(self.search, OwnLengthLimit) and self.search.at_limit[unfin_idx]:
            return True
        return is_finished(self, step, unfin_idx, *args)

    return is_finished_or_limited


PATCHES = (
    Patch(
        name="no-repeat-ngrams",
        target="fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram",
        wrap=lambda original: _no_repeat_ngram,
        reason="Without its CUDA extension, fairseq compares n-grams with padding, so --no-repeat-ngram-size bans nothing.",
        remove_when="fairseq compares n-grams with the latest tokens of a hypothesis",
        group="fix",
    ),
    Patch(
        name="no-repeat-ngrams",
        target="fairseq.ngram_repeat_block.NGramRepeatBlock.__init__",
        wrap=log_banned_ngrams,
        reason="Users must see that hypotheses differ from those of fairseq alone.",
        remove_when="fairseq compares n-grams with the latest tokens of a hypothesis",
        group="fix",
    ),
    Patch(
        name="own-length-limit",
        target="fairseq.sequence_generator.SequenceGenerator.__init__",
        wrap=limit_by_own_length,
        reason="fairseq limits a hypothesis by the longest source of the batch, so hypotheses depend on the batch size.",
        remove_when="fairseq computes the limit of --max-len-a for each sentence",
        group="optional",
    ),
    Patch(
        name="own-length-limit",
        target="fairseq.sequence_generator.SequenceGenerator.is_finished",
        wrap=finish_at_own_limit,
        reason="A sentence at its own limit is finished, even if fewer hypotheses than --beam have ended.",
        remove_when="fairseq computes the limit of --max-len-a for each sentence",
        group="optional",
    ),
)
