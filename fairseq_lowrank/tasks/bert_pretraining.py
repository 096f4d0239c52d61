"""BERT's pre-training: masked words and next sentences at once (Devlin et al. 2019, sections 3.1 and A.2).

fairseq's ``masked_lm`` has no next sentences. Its ``legacy_masked_lm`` has them, but fails: it loads its dictionary and its
data with arguments that they do not accept. It also uses the same masks in every epoch. This task trains fairseq's own BERT
(``--arch bert_base``) too.
"""

import math
import os
from dataclasses import dataclass, field

import numpy as np
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import (
    Dictionary,
    IdDataset,
    MaskTokensDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    RawLabelDataset,
    RightPadDataset,
    SortDataset,
    data_utils,
)
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models.masked_lm import MaskedLMModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from fairseq_lowrank.messages import FlagError, UserError, flag_name
from fairseq_lowrank.tasks.sentence_pairs import (
    DocumentText,
    FrameWithSpecialTokens,
    SegmentLabels,
    SentencePairs,
    sample_pairs,
)


@dataclass
class BertPretrainingConfig(FairseqDataclass):
    data: str = field(
        default=MISSING,
        metadata={"help": "folder of the data: one sentence per line and an empty line after each document. Several folders, "
                          "separated by colons, are used in turn, one per epoch"},
    )  # fmt: skip
    tokens_per_sample: int = field(
        default=512, metadata={"help": "greatest number of tokens of a pair, its three special symbols included"}
    )
    short_pair_prob: float = field(default=0.1, metadata={"help": "probability of a pair of a shorter, random length"})
    mask_prob: float = field(default=0.15, metadata={"help": "probability that a word is to be predicted"})
    leave_unmasked_prob: float = field(
        default=0.1, metadata={"help": "probability that a predicted word is not masked"}
    )
    random_token_prob: float = field(
        default=0.1, metadata={"help": "probability that a predicted word is replaced by a random word"}
    )
    seed: int = II("common.seed")


@register_task("bert_pretraining", dataclass=BertPretrainingConfig)
class BertPretrainingTask(FairseqTask):
    """A task with pairs of segments, ``<s> a </s> b </s>``, in which words are masked.

    In about half of the pairs, the second segment follows the first in the text. The share is lower for short pairs; the
    criterion logs it. Pairs depend on the seed, masks on the seed and the epoch. Special symbols are never masked.
    """

    def __init__(self, cfg: BertPretrainingConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self.mask_index = dictionary.add_symbol("<mask>")

    @classmethod
    def setup_task(cls, cfg: BertPretrainingConfig, **kwargs) -> "BertPretrainingTask":
        check_settings(cfg)
        return cls(cfg, Dictionary.load(os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")))

    @classmethod
    def check_model(cls, model: type, args) -> None:
        """Refuse a model without a next-sentence head.

        Raises:
            UserError: the model is neither ours nor fairseq's BERT with ``--sent-loss``.
        """
        fairseqs = issubclass(model, MaskedLMModel) and getattr(args, "sent_loss", False)
        if not (fairseqs or getattr(model, "predicts_next_sentences", False)):
            raise UserError(
                f"--task bert_pretraining: {args.arch} has no next-sentence head. Use --arch lowrank_bert_base or bert_base."
            )

    def build_model(self, cfg, from_checkpoint: bool = False):
        """Build the model.

        Raises:
            UserError: the model is too short for the pairs, or has only one token type.
        """
        length, positions = self.cfg.tokens_per_sample, getattr(cfg, "max_positions", None)
        if positions is not None and 0 < positions < length:
            reason = f"expected at most {positions}, the model's --max-positions"
            raise FlagError("--tokens-per-sample", length, reason, "Give a smaller number.")
        if getattr(cfg, "num_segment", None) == 1:
            raise UserError("--num-segment 1: a pair has two segments. Use --num-segment 2.")
        return super().build_model(cfg, from_checkpoint)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Make the pairs of a split.

        Raises:
            UserError: the split has fewer than two documents.
            FileNotFoundError: the split does not exist.
        """
        paths = utils.split_paths(self.cfg.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, combine=combine)
        if lines is None:
            raise FileNotFoundError(f"Dataset not found: {split} ({path})")
        text = DocumentText(lines, lines.sizes)
        documents = text.documents()
        if len(documents) < 2:
            raise UserError(
                f"{path} has {len(documents)} document{'s' * (len(documents) != 1)}: expected several, for sentences that do not "
                "follow one another. Add an empty line after each document."
            )
        random = np.random.default_rng(self.cfg.seed)
        pairs = list(sample_pairs(documents, self.cfg.tokens_per_sample - 3, self.cfg.short_pair_prob, random))
        dataset = SentencePairs(text, pairs)
        self.datasets[split] = SortDataset(
            self._samples(dataset), sort_order=[random.permutation(len(dataset)), dataset.sizes]
        )

    def _samples(self, pairs: SentencePairs) -> NestedDictionaryDataset:
        dictionary, cfg = self.dictionary, self.cfg
        masked, hidden = MaskTokensDataset.apply_mask(
            pairs,
            dictionary,
            pad_idx=dictionary.pad(),
            mask_idx=self.mask_index,
            seed=cfg.seed,
            mask_prob=cfg.mask_prob,
            leave_unmasked_prob=cfg.leave_unmasked_prob,
            random_token_prob=cfg.random_token_prob,
        )
        tokens = FrameWithSpecialTokens(masked, pairs.lengths, dictionary.bos(), dictionary.eos())
        targets = FrameWithSpecialTokens(hidden, pairs.lengths, dictionary.pad(), dictionary.pad())
        return NestedDictionaryDataset(
            {
                "id": IdDataset(),
                "net_input": {
                    "src_tokens": RightPadDataset(tokens, pad_idx=dictionary.pad()),
                    "src_lengths": NumelDataset(tokens, reduce=False),
                    "segment_labels": RightPadDataset(SegmentLabels(tokens), pad_idx=0),
                },
                "target": RightPadDataset(targets, pad_idx=dictionary.pad()),
                "sentence_target": RawLabelDataset([int(pair.random) for pair in pairs.pairs]),
                "nsentences": NumSamplesDataset(),
                "ntokens": NumelDataset(tokens, reduce=True),
            },
            sizes=[tokens.sizes],
        )

    def get_batch_iterator(self, *args, **kwargs):
        """Return fairseq's iterator with new workers in each epoch: persistent ones would keep the masks of the first."""
        batches = super().get_batch_iterator(*args, **kwargs)
        batches.persistent_workers = False
        return batches

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary


def check_settings(cfg: BertPretrainingConfig) -> None:
    """Check lengths and probabilities.

    Raises:
        UserError: a flag has a value that is not accepted.
    """
    if cfg.tokens_per_sample < 5:
        reason = "expected at least 5, for two words and three symbols"
        raise FlagError("--tokens-per-sample", cfg.tokens_per_sample, reason, "Give a larger number.")
    for name in ("short_pair_prob", "leave_unmasked_prob", "random_token_prob"):
        if not 0 <= (value := getattr(cfg, name)) <= 1:
            raise UserError(f"{flag_name(name)} {value:g}: expected a number from 0 to 1.")
    if not 0 < cfg.mask_prob < 1:
        raise UserError(f"--mask-prob {cfg.mask_prob:g}: expected a number between 0 and 1.")
    if (both := cfg.leave_unmasked_prob + cfg.random_token_prob) > 1:
        raise UserError(f"--leave-unmasked-prob and --random-token-prob add up to {both:g}: expected at most 1.")


@dataclass
class BertPretrainingLossConfig(FairseqDataclass):
    next_sentence_weight: float = field(
        default=1.0, metadata={"help": "factor of the loss of next sentences; with 0, only masked words are trained"}
    )


@register_criterion("bert_pretraining", dataclass=BertPretrainingLossConfig)
class BertPretrainingLoss(FairseqCriterion):
    """The mean loss of masked words plus a factor times the mean loss of next sentences."""

    def __init__(self, cfg: BertPretrainingLossConfig, task) -> None:
        super().__init__(task)
        if not 0 <= cfg.next_sentence_weight < math.inf:
            raise UserError(f"--next-sentence-weight {cfg.next_sentence_weight:g}: expected a number >= 0.")
        self.weight = cfg.next_sentence_weight

    @classmethod
    def check_args(cls, args) -> None:
        """Refuse a task without pairs of segments.

        Raises:
            UserError: the task is not ``bert_pretraining``.
        """
        if args.task != "bert_pretraining":
            raise UserError(
                f"--criterion bert_pretraining: does not work with --task {args.task}. Use --task bert_pretraining."
            )

    def forward(self, model, sample, reduce=True):
        """Return the loss times the number of masked words, this number, and the values to log.

        Raises:
            UserError: the model has no next-sentence head, or the task has no pairs.
        """
        targets = sample["target"]
        masked = targets.ne(self.padding_idx)
        logits, extra = model(**sample["net_input"], masked_tokens=masked)
        if extra.get("sentence_logits") is None or "sentence_target" not in sample:
            raise UserError(
                "--criterion bert_pretraining: needs pairs and a next-sentence head. Use --task bert_pretraining and a model such "
                "as --arch lowrank_bert_base."
            )
        size, pairs = masked.sum(), sample["sentence_target"].numel()
        words = F.cross_entropy(logits.float(), targets[masked], reduction="sum")
        sentences = F.cross_entropy(extra["sentence_logits"].float(), sample["sentence_target"], reduction="sum")
        correct = extra["sentence_logits"].argmax(dim=1).eq(sample["sentence_target"]).sum()
        log = {
            **{"mlm_loss": words.detach(), "nsp_loss": sentences.detach(), "nsp_correct": correct},
            "nsp_random": sample["sentence_target"].sum(),
            **{"sample_size": size, "nsentences": pairs, "ntokens": sample["ntokens"]},
        }
        loss = words + self.weight * sentences * size / pairs
        return loss, size, log | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        def total(name: str) -> float:
            return sum(log.get(name, 0) for log in logging_outputs)

        size, pairs = max(total("sample_size"), 1), max(total("nsentences"), 1)
        metrics.log_scalar("loss", total("loss") / size / math.log(2), size, round=3)
        metrics.log_scalar("mlm_loss", total("mlm_loss") / size / math.log(2), size, round=3)
        metrics.log_scalar("nsp_loss", total("nsp_loss") / pairs / math.log(2), pairs, round=3)
        metrics.log_scalar("nsp_accuracy", 100 * total("nsp_correct") / pairs, pairs, round=1)
        # the accuracy of a head that always predicts "random"; one that always predicts the opposite has 100 minus this
        metrics.log_scalar("nsp_random", 100 * total("nsp_random") / pairs, pairs, round=1)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
