"""A refusal where ``Trainer`` would resume a training with other attention, whose tensors may have the same names and sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fairseq_lowrank.huggingface.choice import chosen_axes
from fairseq_lowrank.huggingface.recorded import CONFIG, recorded_attention
from fairseq_lowrank.messages import UserError


def watch_trainer() -> None:
    """Wrap how ``Trainer`` loads the model of a checkpoint."""
    from transformers.trainer import Trainer

    setattr(Trainer, "_load_from_checkpoint", _refuse_another_choice(Trainer._load_from_checkpoint))  # noqa: B010


def _refuse_another_choice(load: Callable) -> Callable:
    @functools.wraps(load)
    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        check_resumed(self.model, Path(resume_from_checkpoint))
        load(self, resume_from_checkpoint, *args, **kwargs)

    return _load_from_checkpoint


def check_resumed(model: Any, folder: Path) -> None:
    """Check that a checkpoint of ``Trainer`` was saved with the attention that a model has.

    Raises:
        UserError: it was not.
    """
    if not isinstance(model, PreTrainedModel):
        model = model.get_base_model() if hasattr(model, "get_base_model") else None
    if not isinstance(model, PreTrainedModel) or not any((folder / name).is_file() for name in (CONFIG, "config.json")):
        return
    saved, here = (
        chosen_axes(record or {})
        for record in (recorded_attention(folder), getattr(model.config, "lowrank_attention", None))
    )
    if differing := [name for name in saved if saved[name] != here[name]]:
        name = differing[0]
        raise UserError(
            f"{folder} was trained with {name} {saved[name]!r}, and the model has {here[name]!r}. Call apply_attention as before the "
            "training, or start without resume_from_checkpoint."
        )
