"""Models of ``transformers``, as subjects of a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.pytorch_utils import Conv1D

from fairseq_lowrank.files import read_lines
from fairseq_lowrank.huggingface import attention_calls, attention_modules
from fairseq_lowrank.huggingface.added import parts_of
from fairseq_lowrank.huggingface.apply import add_plain_attention
from fairseq_lowrank.huggingface.models import head_sizes
from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.parts.projection import is_plain_linear
from fairseq_lowrank.tools.measuring.layers import score_rank
from fairseq_lowrank.tools.measuring.subject import (
    BITS,
    COSINE,
    DECISIONS,
    MOST,
    TOKENS,
    CallHook,
    Layer,
    Subject,
    Values,
    decision_bits,
    draw,
    enough,
    frequency_bits,
    mean_decision_bits,
)
from fairseq_lowrank.tools.transformers import pretrained

MASKED_SHARE = 0.15
PROJECTIONS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("query_proj", "key_proj"))
FUSED = ("c_attn", "qkv_proj")
"""Joint projections whose queries come first, then keys, then values."""
OUTPUTS = ("o_proj", "out_proj", "out_lin", "c_proj", "o", "Wo", "dense", "output.dense", "proj")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "qk_norm")

HEADS = (
    ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("translation", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ("classes", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ("classes", auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
)
"""What a class of models says about tokens, by the tables of transformers."""
METRICS = {"causal": BITS, "masked": BITS, "translation": BITS, "classes": DECISIONS, "states": COSINE}


def task_of(model: PreTrainedModel) -> str:
    """Return what a model is measured by: causal, masked, translation, classes or states.

    Raises:
        UserError: the model reads no tokens, or its outputs are neither words, classes nor states of tokens.
    """
    name = type(model).__name__
    if not attention_modules(model):
        raise UserError(
            f"{name} computes its attention itself, so its queries and keys cannot be read. "
            "Use a model that fairseq-lowrank params --list transformers shows."
        )
    pretrained.refuse_other_inputs(model)
    for task, names in HEADS:
        classes = [each for value in names.values() for each in (value if isinstance(value, tuple) else (value,))]
        if name in classes:
            return "translation" if model.config.is_encoder_decoder and task != "classes" else task
    if name not in _base_models():
        raise UserError(
            f"{name} gives neither words, classes nor states of tokens, so a cut of its heads has no measured cost. "
            "Use the base model, or the one for language modelling, masked words, translation or classes."
        )
    if model.config.is_encoder_decoder:
        raise UserError(f"{name} has no head that gives words. Use the model for conditional generation.")
    return "states"


def _base_models() -> set[str]:
    values = auto.MODEL_MAPPING_NAMES.values()
    return {each for value in values for each in (value if isinstance(value, tuple) else (value,))}


class TransformersSubject(Subject):
    """A model of ``transformers`` and token sequences.

    Args:
        model: in evaluation mode; its attention becomes this package's, with unchanged outputs.
        samples: tokens ``[1, T]`` for each sequence, or pairs of source and target for a model that translates.
        mask_token: the token that hides words from a masked model.
        special_tokens: tokens that are never masked.
        seed: for the masked positions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samples: list[Tensor] | list[tuple[Tensor, Tensor]],
        *,
        mask_token: int | None = None,
        special_tokens: tuple[int, ...] = (),
        seed: int = 1,
    ) -> None:
        self.task = task_of(model)
        add_plain_attention(model)
        self.model, self.samples, self.name = model, samples, type(model).__name__
        self.metric, self.compares = METRICS[self.task], self.task in ("classes", "states")
        self.mask_token, self.special_tokens, self.seed = mask_token, torch.tensor(special_tokens or (-1,)), seed
        self.layers = list(_layers(model))
        tokens = [each.size(1) for sample in samples for each in (sample if isinstance(sample, tuple) else (sample,))]
        self.sequence_length = sum(tokens) / max(1, len(tokens))
        self.references: dict[int, Tensor] = {}
        self.binary = False
        if self.task == "classes":
            problem = getattr(model.config, "problem_type", None)
            if problem == "regression":
                raise UserError(
                    f"{self.name} predicts numbers, not labels, so it makes no decisions. Use a classifier."
                )
            self.binary = problem == "multi_label_classification" or model.config.num_labels == 1
        if self.task == "masked" and mask_token is None:
            raise UserError(f"{self.name} predicts masked words, and its tokenizer has no mask token. Give it one.")
        if self.task == "translation" and not isinstance(samples[0], tuple):
            raise UserError(
                f"{self.name} reads a source and a target. Add --target FILE, a line for each line of --text."
            )

    def hooked(self, hook: CallHook) -> AbstractContextManager[None]:
        return attention_calls(self.model, hook)

    def prepare(self, indices: list[int]) -> None:
        if self.compares:
            self.references = {index: self._output(index) for index in indices}

    @torch.no_grad()
    def evaluate(self, index: int) -> tuple[float, ...]:
        if self.compares:
            output = self._output(index)
            reference = self.references.get(index, output)
            if self.task == "states":
                return F.cosine_similarity(output, reference, dim=0).item(), 1.0
            decisions = output.numel() if self.binary else len(output)
            return decision_bits(output, reference, binary=self.binary), float(decisions)
        sample, target = self.samples[index], self._words(index)
        if self.task == "translation":
            logits = self.model(input_ids=sample[0], labels=target).logits
        elif self.task == "masked":
            hidden = self._hidden(index, sample)
            logits = self.model(input_ids=sample.masked_fill(hidden, self.mask_token)).logits[hidden]
        else:
            logits = self.model(input_ids=sample).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum").item()
        return nats / math.log(2), float(target.numel())

    def constant(self, basis: list[int], held_out: list[int]) -> Values:
        first, second = ([self._known(index) for index in part] for part in (basis, held_out))
        if self.task == "states":
            mean = torch.stack(first).mean(0)
            found = [(F.cosine_similarity(mean, state, dim=0).item(), 1.0) for state in second]
        elif self.task == "classes":
            found = mean_decision_bits(first, second, binary=self.binary)
        else:
            found = frequency_bits(first, second, self.model.config.get_text_config().vocab_size)
        return dict(zip(held_out, found, strict=True))

    def _known(self, index: int) -> Tensor:
        """Return the words that a sample asks for, or the uncut model's output."""
        return self.references[index] if self.compares else self._words(index)

    def _words(self, index: int) -> Tensor:
        """Return the words that the model predicts on a sample."""
        sample = self.samples[index]
        if self.task == "translation":
            return sample[1]
        return sample[self._hidden(index, sample)] if self.task == "masked" else sample[:, 1:]

    @torch.no_grad()
    def _output(self, index: int) -> Tensor:
        output = self.model(input_ids=self.samples[index])
        if self.task == "classes":
            return output.logits.flatten(0, -2)
        return output.last_hidden_state[0].double().mean(0)

    def _hidden(self, index: int, tokens: Tensor) -> Tensor:
        """Return the positions ``[1, T]`` whose words are masked, the same at each call: 15 % of the words, at least one."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        order = torch.rand(tokens.shape, generator=generator).masked_fill(torch.isin(tokens, self.special_tokens), 2.0)
        count = max(1, round(MASKED_SHARE * int((order < 2).sum())))
        return order <= order.flatten().sort().values[count - 1]


def _layers(model: PreTrainedModel) -> Iterator[Layer]:
    names = {module: name for name, module in model.named_modules()}
    for module, site, layer in attention_modules(model):
        sizes = head_sizes(module)
        heads, size, mixed = sizes.num_heads, sizes.head_dim, "score_mixing" in parts_of(module)
        query, key = (None, None) if mixed else projection_weights(module, heads, sizes.key_value_heads, size)
        yield Layer(
            names[module],
            site,
            layer,
            heads,
            size,
            score_rank(pretrained.layer_like(module)),
            query,
            key,
            _output_weight(model, names[module], heads, size),
        )


def projection_weights(
    module: nn.Module, heads: int, groups: int, size: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the weights ``[H, d, D]`` of queries and keys of a module, or None twice if it has no such matrices."""
    if any(getattr(module, name, None) is not None for name in NORMS):
        return None, None
    for names in PROJECTIONS:
        pair = [_plain_weight(getattr(module, name, None)) for name in names]
        if None not in pair and all(
            weight.dim() == 2 and len(weight) == count * size
            for weight, count in zip(pair, (heads, groups), strict=True)
        ):
            query, key = (weight.unflatten(0, (-1, size)).mT for weight in pair)
            return query, key.repeat_interleave(heads // groups, dim=0)
    for name in FUSED:
        fused = getattr(module, name, None)
        if (weight := _plain_weight(fused)) is None:
            continue
        if isinstance(fused, Conv1D):
            weight = weight.t()
        elif name == "c_attn" and groups == heads:  # GPT-BigCode joins queries, keys and values of each head
            continue
        if len(weight) == (heads + 2 * groups) * size:
            query, key, _ = weight.split((heads * size, groups * size, groups * size))
            query, key = (part.unflatten(0, (-1, size)).mT for part in (query, key))
            return query, key.repeat_interleave(heads // groups, dim=0)
    return None, None


def _output_weight(model: nn.Module, name: str, heads: int, size: int) -> Tensor | None:
    """Return W_O ``[H, D, d]`` of an attention module, which may be in the module around it (BERT); None if unknown."""
    for place in (name, name.rpartition(".")[0]):
        for output in OUTPUTS:
            try:
                module = model.get_submodule(f"{place}.{output}".lstrip("."))
            except AttributeError:
                continue
            if is_plain_linear(module) and module.in_features == heads * size:
                return module.weight.t().unflatten(0, (heads, size))
    return None


def _plain_weight(module: nn.Module | None) -> Tensor | None:
    """Return the weight of a projection if it is all that the projection computes, unlike that of adapters and quantised layers."""
    plain = module is not None and any(is_plain_linear(module, kind) for kind in (nn.Linear, Conv1D))
    return module.weight if plain else None


def load(
    folder: Path, *, text: Path, target: Path | None, count: int | None, seed: int, length: int, tokens: int = TOKENS
) -> TransformersSubject:
    """Return the model of a folder and ``count`` sequences of a text as a subject.

    A text is cut into blocks of ``length`` tokens, with the tokenizer's special tokens. With ``target``, each line of the text is
    a source, and the same line of the target its translation. Without ``count``, :func:`.enough` sequences for ``tokens`` are taken.

    Raises:
        UserError: the folder holds no such model or no tokenizer, or the text has no such sequence.
    """
    model = pretrained.load(folder)
    task = task_of(model)
    rank = max(score_rank(pretrained.layer_like(module)) for module, _, _ in attention_modules(model))
    with pretrained.reading(folder):
        tokenizer = AutoTokenizer.from_pretrained(**pretrained.source_of(folder))
    if task == "translation":
        if target is None:
            reason = f"{type(model).__name__} reads a source and a target"
            raise FlagError("--text", text, reason, "Add --target FILE, a line for each line of the text.")
        samples, available = _pairs(tokenizer, text, target, count or MOST, seed, length)
        if count is None:
            samples = samples[: enough([labels.size(1) for _, labels in samples], tokens, rank)]
    elif target is not None:
        raise FlagError("--target", target, f"{type(model).__name__} reads one text", "Remove the flag.")
    else:
        samples, available = _blocks(tokenizer, text, count or enough([length] * MOST, tokens, rank), seed, length)
    rows = [each for sample in samples for each in (sample if isinstance(sample, tuple) else (sample,))]
    pretrained.check_length(model, rows, "--length", length, "Give a smaller --length.")
    special = tuple(getattr(tokenizer, "all_special_ids", ()) or ())
    mask = getattr(tokenizer, "mask_token_id", None)
    subject = TransformersSubject(model, samples, mask_token=mask, special_tokens=special, seed=seed)
    subject.available = available
    subject.about = "weights from a GGUF file, dequantised to float32" if pretrained.is_gguf(folder) else ""
    return subject


def _blocks(tokenizer, text: Path, count: int, seed: int, length: int) -> tuple[list[Tensor], int]:
    """Return ``count`` blocks ``[1, length]`` of a text, drawn without replacement, and the number of all blocks."""
    joined = " ".join(line.strip() for line in read_lines(text) if line.strip())
    tokens = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("", verbose=False)["input_ids"]  # such as [CLS] [SEP]
    ends = around[-1:] == [getattr(tokenizer, "eos_token_id", None)] != [getattr(tokenizer, "bos_token_id", None)]
    middle = len(around) // 2 if ends else (len(around) + 1) // 2
    before, after = around[:middle], around[middle:]
    inner = length - len(around)
    if inner < 2:
        raise FlagError("--length", length, "too short for a sequence", "Give at least 4 tokens.")
    available = len(tokens) // inner
    starts = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    if len(starts) < 2:
        reason = f"has {len(tokens)} tokens, too few for two blocks of {length}"
        raise FlagError("--text", text, reason, "Give a longer text, or a smaller --length.")
    blocks = [torch.tensor([[*before, *tokens[start * inner : (start + 1) * inner], *after]]) for start in starts]
    return blocks, available


def _pairs(
    tokenizer, text: Path, target: Path, count: int, seed: int, length: int
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Return ``count`` pairs of lines, both of at most ``length`` tokens, drawn without replacement, and the number of lines."""
    sources, targets = ([*read_lines(file)] for file in (text, target))
    if len(sources) != len(targets):
        reason = f"has {len(targets)} lines, and {text} has {len(sources)}"
        raise FlagError("--target", target, reason, "Give a line for each line of the text.")

    def read(index: int) -> tuple[Tensor, Tensor] | None:
        if not (sources[index].strip() and targets[index].strip()):
            return None
        source = tokenizer(sources[index], return_tensors="pt", verbose=False)["input_ids"]
        labels = tokenizer(text_target=targets[index], return_tensors="pt", verbose=False)["input_ids"]
        return (source, labels) if max(source.size(1), labels.size(1)) <= length else None

    pairs = draw(len(sources), count, seed, read)
    if len(pairs) < 2:
        reason = f"fewer than two pairs of lines have at most {length} tokens"
        raise FlagError("--text", text, reason, "Give longer texts, or a greater --length.")
    return pairs, len(sources)
