"""What trains after attention was chosen."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.huggingface.added import added_parameters

TRAIN = {
    "all": "every parameter",
    "mixing": "what is added, and the head of the task",
    "mixing-only": "what is added",
}
"""What may train, and what each value means."""


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
