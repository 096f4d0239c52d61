"""What trains after attention was chosen, and in which groups."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.huggingface.added import added_parameters

TRAIN = ("all", "mixing", "mixing-only")
"""What may train: all, or what is added with or without the head of the task."""


def freeze(model: PreTrainedModel, train: str) -> None:
    """Make trainable what ``train`` names. What an earlier call froze is trainable again first."""
    names = dict(model.named_parameters())
    for name in vars(model).pop("lowrank_frozen", ()):
        if name in names:
            names[name].requires_grad_(True)
    if train == "all":
        return
    kept = {id(parameter) for module in model.modules() for parameter in added_parameters(module)}
    if train == "mixing":
        kept |= {id(parameter) for parameter in _task_head(model)}
    frozen = [name for name, parameter in names.items() if parameter.requires_grad and id(parameter) not in kept]
    for name in frozen:
        names[name].requires_grad_(False)
    vars(model)["lowrank_frozen"] = tuple(frozen)


def _task_head(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of a head that a task adds to a base model, such as a classifier.

    The matrix that predicts tokens is no such head: it is as old as the model.
    """
    if model.base_model is model or model.get_output_embeddings() is not None:
        return []
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in base]


def parameter_groups(
    model: PreTrainedModel,
    *,
    learning_rate: float,
    mixing_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict]:
    """Return groups of parameters for an optimizer of torch, or for ``Trainer(optimizers=…)``.

    Weight decay would pull mixing and gates to 0, not to the identity, so these have none, nor have biases and norms.

    Args:
        learning_rate: of the model's own parameters.
        mixing_learning_rate: of what is added; by default 10 times ``learning_rate``, which measured best in fine-tuning a BERT.
        weight_decay: of the model's own matrices.

    Returns:
        Up to three groups, of the parameters that are trainable.
    """
    added = {id(parameter): parameter for module in model.modules() for parameter in added_parameters(module)}
    own = [parameter for parameter in model.parameters() if id(parameter) not in added and parameter.requires_grad]
    rate = 10 * learning_rate if mixing_learning_rate is None else mixing_learning_rate
    groups = [
        {"params": [p for p in own if p.dim() > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() <= 1], "lr": learning_rate, "weight_decay": 0.0},
        {"params": [p for p in added.values() if p.requires_grad], "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
