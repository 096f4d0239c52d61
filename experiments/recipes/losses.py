"""The loss of a model on each sentence, without dropout and label smoothing."""

from __future__ import annotations

import math

import torch
from fairseq import utils
from fairseq.data import LanguagePairDataset
from torch import Tensor

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.progress import tracked


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
    """Return −log₂ p(target | source) of each sentence of a subset in bits, and its target tokens, its end included.

    Args:
        model, task: see :func:`~fairseq_lowrank.tools.fairseq.checkpoints.load_model`.
        subset: train, valid or test.
        count: number of random sentences, chosen with ``seed`` and used in the corpus's order; all if there are fewer.
        max_tokens: the greatest number of tokens of a batch.
        own_source: if False, each sentence of a translation model gets the source of the next one. The difference shows the use of
            the source (and how far a shuffled source misleads the model).

    Raises:
        UserError: the subset is missing, or sentences have no source although ``own_source`` is False.
    """
    try:
        task.load_dataset(subset)
    except FileNotFoundError as error:
        raise UserError(f"subset {subset!r}: the data has no such subset ({error}). Choose another one.") from error
    dataset = task.dataset(subset)
    if not (own_source or isinstance(dataset, LanguagePairDataset)):
        raise UserError(f"own_source=False: sentences of {subset!r} have no source. Use a translation task.")
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    place = {index: position for position, index in enumerate(chosen.tolist())}
    other = dict(zip(chosen.tolist(), chosen.roll(-1).tolist(), strict=True))

    def example(index: int) -> dict:
        return dataset[index] if own_source else dataset[index] | {"source": dataset[other[index]]["source"]}

    by_length = [index for index in dataset.ordered_indices() if index in place]
    bits, tokens = torch.zeros(len(chosen), dtype=torch.float64), torch.zeros(len(chosen), dtype=torch.long)
    batches = dataset.batch_by_size(by_length, max_tokens=max_tokens)
    for batch in tracked(batches, f"losses of {subset}", "batches"):
        sample = dataset.collater([example(index) for index in batch])
        positions = [place[index] for index in sample["id"].tolist()]
        bits[positions], tokens[positions] = _losses(model, sample, task.target_dictionary.pad())
    return bits, tokens


@torch.no_grad()
def _losses(model, sample: dict, padding: int) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    sample = utils.apply_to_sample(lambda tensor: tensor.to(device), sample)
    output = model(**sample["net_input"])
    target = model.get_targets(sample, output)
    log_probabilities = model.get_normalized_probs(output, log_probs=True, sample=sample)
    chosen = log_probabilities.gather(-1, target[..., None])[..., 0]
    counted = target != padding
    return -(chosen.double() * counted).sum(-1).cpu() / math.log(2), counted.sum(-1).cpu()
