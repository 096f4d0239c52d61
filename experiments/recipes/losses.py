"""What a model loses on each sentence: at evaluation, so without dropout, and without label smoothing."""

from __future__ import annotations

import math

import torch
from fairseq.data import LanguagePairDataset
from torch import Tensor

from fairseq_lowrank.messages import UserError


def sentence_losses(
    model,
    task,
    subset: str,
    *,
    count: int | None = None,
    seed: int = 1,
    max_tokens: int = 4096,
    own_source: bool = True,
) -> tuple[Tensor, Tensor]:
    """−log₂ p(target | source) of each sentence of a subset, in bits, and its target tokens (its end counts as one).

    Args:
        model, task: as :func:`~fairseq_lowrank.tools.checkpoints.load_model` gives them.
        subset: train, valid, test.
        count: that many sentences, drawn with ``seed`` and then in the corpus's order; all where there are not more.
        max_tokens: of a batch.
        own_source: of a translation model. If not, each sentence gets the source of the next one chosen: what that costs
            shows whether the model uses its source (it counts how far a wrong one misleads it too).

    Raises:
        UserError: the subset is missing, or a source is named where no source is.
    """
    try:
        task.load_dataset(subset)
    except FileNotFoundError as error:
        raise UserError(f"no subset {subset!r} in the data: {error}") from error
    dataset = task.dataset(subset)
    if not (own_source or isinstance(dataset, LanguagePairDataset)):
        raise UserError(
            f"own_source is False: expected a translation task, whose sentences have a source; {subset!r} has none"
        )
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    place = {index: position for position, index in enumerate(chosen.tolist())}
    other = dict(zip(chosen.tolist(), chosen.roll(-1).tolist(), strict=True))

    def example(index: int) -> dict:
        return dataset[index] if own_source else dataset[index] | {"source": dataset[other[index]]["source"]}

    by_length = [index for index in dataset.ordered_indices() if index in place]
    bits, tokens = torch.zeros(len(chosen), dtype=torch.float64), torch.zeros(len(chosen), dtype=torch.long)
    for batch in dataset.batch_by_size(by_length, max_tokens=max_tokens):
        sample = dataset.collater([example(index) for index in batch])
        positions = [place[index] for index in sample["id"].tolist()]
        bits[positions], tokens[positions] = _losses(model, sample, task.target_dictionary.pad())
    return bits, tokens


@torch.no_grad()
def _losses(model, sample: dict, padding: int) -> tuple[Tensor, Tensor]:
    output = model(**sample["net_input"])
    target = model.get_targets(sample, output)
    log_probabilities = model.get_normalized_probs(output, log_probs=True, sample=sample)
    chosen = log_probabilities.gather(-1, target[..., None])[..., 0]
    counted = target != padding
    return -(chosen.double() * counted).sum(-1) / math.log(2), counted.sum(-1)
