"""Groups of parameters for optimizers of torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import LayerPart, NoDecayModule


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    mixing_learning_rate: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict]:
    """Return groups of parameters for an optimizer of torch, or for ``Trainer(optimizers=…)``.

    Weight decay would pull mixing and gates to 0, not to the identity, so these have none, nor have head embeddings, biases and
    norms. Parameters are found by their modules, so groups are the same after ``fully_shard``.

    Args:
        model: a model with layers of this package, or one with :func:`~fairseq_lowrank.huggingface.apply_attention`.
        learning_rate: of the model's own parameters.
        mixing_learning_rate: of all parts: mixing, gains, head maps and gates, like ``--mixing-lr-scale`` times
            ``learning_rate`` in fairseq; by default ``learning_rate``.
        weight_decay: of the model's own matrices.

    Returns:
        Up to three groups, of the parameters that are trainable.
    """
    rate = learning_rate if mixing_learning_rate is None else mixing_learning_rate
    parts = _of_modules(model, LayerPart)
    exempt = _of_modules(model, NoDecayModule)
    own = {id(p): p for p in model.parameters() if p.requires_grad and id(p) not in parts}
    decayed = [p for key, p in own.items() if p.dim() > 1 and key not in exempt]
    groups = [
        {"params": decayed, "lr": learning_rate, "weight_decay": weight_decay},
        {
            "params": [p for key, p in own.items() if p.dim() <= 1 or key in exempt],
            "lr": learning_rate,
            "weight_decay": 0.0,
        },
        {"params": [p for p in parts.values() if p.requires_grad], "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters that Muon may update, and the others, which keep AdamW.

    Muon makes every update orthogonal, so it fits weights of linear maps of hidden features: those of ``nn.Linear`` outside of parts. An
    orthogonal step on an h × h mixing, a gate or a factor moves all of its directions alike, however small their gradients are.
    Weights that an embedding shares, with more than 8 times as many outputs as inputs, such as those of a vocabulary, or with fewer than
    16 outputs, such as those of a classifier, are others.
    """
    apart = _of_modules(model, NoDecayModule) | _of_modules(model, nn.Embedding)
    linear = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter)
    ]
    muon = {
        id(w): w
        for w in linear
        if w.dim() == 2 and w.requires_grad and id(w) not in apart and 16 <= w.size(0) <= 8 * w.size(1)
    }
    return [*muon.values()], [p for p in model.parameters() if p.requires_grad and id(p) not in muon]


def train_only(model: nn.Module, which: str) -> list[str]:
    """Let some parameters of a model train and freeze all others, and return the names of those that train.

    A tensor with several names, such as a shared embedding, trains if all of them are chosen. An optimizer must be built after
    this, from the trainable parameters.

    Args:
        model: a model with layers of this package.
        which: ``mixing`` (all parts: mixing, gains, head maps and gates), ``encoder``, ``decoder``, or a pattern of names, such as
            ``*.self_attn.*``.

    Raises:
        UserError: no parameter is chosen.
    """
    parts = _of_modules(model, LayerPart)
    pattern = f"{which}.*" if which in ("encoder", "decoder") else which
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    chosen = []
    for name, parameter in model.named_parameters():
        every = names[id(parameter)]
        trains = id(parameter) in parts if which == "mixing" else all(fnmatchcase(each, pattern) for each in every)
        parameter.requires_grad_(trains)
        chosen += [name] * trains
    if not chosen:
        example = next(iter(names.values()), ["nothing"])[0]
        raise UserError(
            f"train only {which!r}: the model has no such parameter. Use mixing, encoder, decoder or a pattern of names such as "
            f"{example}."
        )
    return chosen


def _of_modules(model: nn.Module, kind: type[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the parameters of all modules of a class, by their identity."""
    found = (module for module in model.modules() if isinstance(module, kind))
    return {id(parameter): parameter for module in found for parameter in module.parameters()}
