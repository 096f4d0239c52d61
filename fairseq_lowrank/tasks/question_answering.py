"""A task that answers questions by a span of a paragraph: SQuAD 1.1, and 2.0 with questions that have no answer."""

import contextlib
import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING, OmegaConf, open_dict
from torch import Tensor

from fairseq_lowrank.files import read_json
from fairseq_lowrank.messages import UserError, flag_name
from fairseq_lowrank.tasks.span_head import add_span_head
from fairseq_lowrank.tasks.spans import SubwordOffsets, windows

logger = logging.getLogger(__name__)


@dataclass
class QuestionAnsweringConfig(FairseqDataclass):
    """The flags of the task."""

    data: str = field(default=MISSING, metadata={"help": "path to data directory"})
    max_positions: int = field(
        default=512, metadata={"help": "number of positions of the model, as in its pre-training"}
    )
    window: int = field(
        default=384, metadata={"help": "greatest number of tokens of a question with a window of its paragraph"}
    )
    doc_stride: int = field(default=128, metadata={"help": "distance in tokens between the starts of two windows"})
    max_question_length: int = field(
        default=64, metadata={"help": "number of tokens after which a question is cut off"}
    )
    max_answer_length: int = field(default=30, metadata={"help": "greatest number of tokens of a predicted answer"})
    double_separator: bool = field(
        default=False, metadata={"help": "put two </s> between question and paragraph, as in RoBERTa's pre-training"}
    )
    seed: int = II("common.seed")


@dataclass(frozen=True)
class Window:
    """One window of a paragraph with one question; `begin` and `end` count subwords of the paragraph."""

    question: int
    paragraph: int
    begin: int
    end: int


class QuestionDataset(FairseqDataset):
    """A dataset of windows of questions and their paragraphs, `<s> question </s> window </s>`.

    Args:
        lines: the paragraphs, as in SPLIT.jsonl of a prepared corpus.
        questions, paragraphs: the tokens, each item ended by `</s>`.
        config: the sizes of windows.
        dictionary: the dictionary of all tokens.
        shuffle: if True, order the windows at random by `config.seed`; else by length.

    The target is the first and the last token of the answer, or 0, 0 (`<s>`) if the window does not contain it.
    """

    def __init__(self, lines: list[dict], questions, paragraphs, config, dictionary: Dictionary, *, shuffle: bool):
        self.lines, self.questions, self.paragraphs = lines, questions, paragraphs
        self.config, self.dictionary, self.shuffle = config, dictionary, shuffle
        self.separators = 2 if config.double_separator else 1
        self.asked = [(place, one) for place, line in enumerate(lines) for one in line["questions"]]
        if len(self.asked) != len(questions) or len(lines) != len(paragraphs):
            raise UserError(
                f"{len(questions)} of {len(self.asked)} questions and {len(paragraphs)} of {len(lines)} paragraphs are binarised. "
                "Prepare the corpus again."
            )
        pieces = [SubwordOffsets(line["words"], line["pieces"]) for line in lines]
        self.answers = [self._answer(pieces[place], one["answers"]) for place, one in self.asked]
        self.windows = [
            Window(number, place, begin, end)
            for number, (place, _) in enumerate(self.asked)
            for begin, end in windows(len(pieces[place]), self._room(number), config.doc_stride)
        ]
        self._sizes = np.array([self.first(window) + window.end - window.begin + 1 for window in self.windows])

    @staticmethod
    def _answer(pieces: SubwordOffsets, answers: list) -> tuple[int, int] | None:
        """Return the first and last subword of the first answer; None if there is no answer."""
        if not answers:
            return None
        start, text = answers[0]
        return pieces.covering(start, start + len(text))

    def _question(self, number: int) -> Tensor:
        return self.questions[number][:-1][: self.config.max_question_length]

    def _room(self, number: int) -> int:
        length = min(int(self.questions.sizes[number]) - 1, self.config.max_question_length)
        return self.config.window - length - 2 - self.separators

    def first(self, window: Window) -> int:
        """Return the position of a window's first subword among its tokens."""
        length = min(int(self.questions.sizes[window.question]) - 1, self.config.max_question_length)
        return 1 + length + self.separators

    def target(self, window: Window) -> tuple[int, int]:
        """Return the first and last token of the answer; 0, 0 if the window does not contain it."""
        answer = self.answers[window.question]
        if answer is None or answer[0] < window.begin or answer[1] >= window.end:
            return 0, 0
        first = self.first(window) - window.begin
        return first + answer[0], first + answer[1]

    def __getitem__(self, index: int) -> dict:
        window = self.windows[index]
        separator = torch.tensor([self.dictionary.eos()])
        tokens = [
            torch.tensor([self.dictionary.bos()]),
            self._question(window.question),
            *[separator] * self.separators,
        ]
        tokens += [self.paragraphs[window.paragraph][window.begin : window.end], separator]
        return {"id": index, "tokens": torch.cat([part.long() for part in tokens]), "target": self.target(window)}

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def sizes(self) -> np.ndarray:
        return self._sizes

    def num_tokens(self, index: int) -> int:
        return int(self._sizes[index])

    size = num_tokens

    def num_tokens_vec(self, indices) -> np.ndarray:
        return self._sizes[indices]

    def ordered_indices(self) -> np.ndarray:
        if not self.shuffle:
            return np.argsort(self._sizes, kind="stable")
        with data_utils.numpy_seed(self.config.seed):
            return np.random.permutation(len(self))

    def collater(self, samples: list[dict]) -> dict:
        if not samples:
            return {}
        tokens = [sample["tokens"] for sample in samples]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {
                "src_tokens": data_utils.collate_tokens(tokens, self.dictionary.pad()),
                "src_lengths": torch.tensor([len(one) for one in tokens]),
            },
            "target": torch.tensor([sample["target"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(len(one) for one in tokens),
        }


@register_task("question_answering", dataclass=QuestionAnsweringConfig)
class QuestionAnsweringTask(FairseqTask):
    """A task of questions on paragraphs, prepared by `scripts/prepare.sh squad`: an answer is a span, or there is none."""

    def __init__(self, cfg: QuestionAnsweringConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.folder = Path(cfg.data)
        self.unanswerable = read_json(self.folder / "task.json")["unanswerable"]

    @classmethod
    def setup_task(cls, cfg: QuestionAnsweringConfig, **kwargs):
        folder = Path(cfg.data)
        for name in ("task.json", "question/dict.txt"):
            if not (folder / name).is_file():
                raise UserError(f"{folder} has no {name}. Give the folder `bin` that scripts/prepare.sh squad makes.")
        for name in ("doc_stride", "max_answer_length", "max_question_length"):
            if getattr(cfg, name) < 1:
                raise UserError(f"{flag_name(name)} {getattr(cfg, name)}: expected a number of tokens >= 1.")
        least = cfg.max_question_length + 4 + cfg.double_separator
        if not least <= cfg.window <= cfg.max_positions:
            raise UserError(
                f"--window {cfg.window}: expected {least} (--max-question-length, a token of the paragraph and separators) to "
                f"{cfg.max_positions} (--max-positions)."
            )
        dictionary = Dictionary.load(str(folder / "question" / "dict.txt"))
        dictionary.add_symbol("<mask>")
        return cls(cfg, dictionary)

    def load_dataset(self, split: str, **kwargs) -> QuestionDataset:
        lines = self.folder / f"{split}.jsonl"
        if not lines.is_file():
            raise FileNotFoundError(f"Dataset not found: {split} ({lines})")
        questions, paragraphs = (
            data_utils.load_indexed_dataset(str(self.folder / name / split), self.dictionary)
            for name in ("question", "paragraph")
        )
        with open(lines, encoding="utf-8") as file:
            read = [json.loads(line) for line in file]
        dataset = QuestionDataset(read, questions, paragraphs, self.cfg, self.dictionary, shuffle=split == "train")
        logger.info(f"{split}: {len(dataset.asked)} questions on {len(read)} paragraphs in {len(dataset)} windows")
        self.datasets[split] = dataset
        return dataset

    @classmethod
    def check_model(cls, model: type, args) -> None:
        """Refuse a model that does not return features of each token.

        Raises:
            UserError: the model accepts no heads.
        """
        if not hasattr(model, "register_classification_head"):
            raise UserError(
                f"--task question_answering: {args.arch} does not return features of each token. Use an encoder, such as "
                "roberta_base or lowrank_bert_base."
            )

    def build_model(self, cfg, from_checkpoint: bool = False):
        with open_dict(cfg) if OmegaConf.is_config(cfg) else contextlib.ExitStack():
            cfg.max_positions = self.cfg.max_positions
        model = super().build_model(cfg, from_checkpoint)
        width = getattr(cfg, "encoder_embed_dim", None)
        if not hasattr(model, "classification_heads") or width is None:
            raise UserError(
                f"--task question_answering: {type(model).__name__} does not return features of each token. Use an encoder, such "
                "as roberta_base or lowrank_bert_base."
            )
        return add_span_head(model, width)

    def max_positions(self) -> int:
        return self.cfg.max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary


def span_scores(model, sample: dict, padding: int) -> Tensor:
    """Return the scores [B, T, 2] of each token as the first and as the last of the answer, in float32; −inf at padding."""
    scores, *_ = model(**sample["net_input"], features_only=True)
    padded = sample["net_input"]["src_tokens"].eq(padding)
    return scores.float().masked_fill(padded[..., None], float("-inf"))


@dataclass
class SpanCriterionConfig(FairseqDataclass):
    """A configuration without flags."""


@register_criterion("question_answering", dataclass=SpanCriterionConfig)
class SpanCriterion(FairseqCriterion):
    """The mean of −log p(first token of the answer) and −log p(last token); p is a softmax over the window's tokens."""

    def __init__(self, cfg, task):
        super().__init__(task)

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        scores = span_scores(model, sample, self.padding_idx)
        target = sample["target"]
        losses = torch.nn.functional.cross_entropy(scores, target, reduction="none").mean(dim=-1)
        loss = losses.sum() if reduce else losses
        size = len(target)
        right = (scores.argmax(dim=1) == target).all(dim=-1).sum()
        log = {"loss": losses.detach().sum(), "right": right, "nsentences": size, "sample_size": size}
        return loss, size, log | {"ntokens": sample["ntokens"]}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / size / math.log(2), size, round=3)
        right = sum(log.get("right", 0) for log in logging_outputs)
        metrics.log_scalar("span_accuracy", 100.0 * right / size, size, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
