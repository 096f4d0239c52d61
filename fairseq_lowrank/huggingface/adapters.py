"""Adapters of PEFT that hold mixing: which modules they save, and no load that leaves the mixing out in silence."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from fairseq_lowrank.files import whole_files
from fairseq_lowrank.huggingface.added import ADDED_AXES, parts_of
from fairseq_lowrank.huggingface.apply import apply_attention
from fairseq_lowrank.huggingface.recorded import CONFIG, recorded_attention
from fairseq_lowrank.huggingface.saving import load_attention
from fairseq_lowrank.messages import UserError
from fairseq_lowrank.parts import PLAIN, LayerPart

MARK = " with mixing: load it with fairseq_lowrank.huggingface.load_adapter"
"""The end of the ``peft_type`` of an adapter whose base model has chosen attention.

PEFT knows no such type. So a process that does not import this package fails with this text, and does not leave the mixing out.
"""

_saved_choice: ContextVar[dict | None] = ContextVar("_saved_choice", default=None)
"""The chosen attention of the model that is being saved."""


def peft_modules(model: nn.Module) -> list[str]:
    """Return the names of what :func:`apply_attention` added, for ``modules_to_save`` of a configuration of PEFT."""
    return sorted({axis for module in model.modules() for axis in parts_of(module)})


def load_adapter(folder: str | os.PathLike, model: PreTrainedModel | None = None, **options: Any) -> Any:
    """Load an adapter of PEFT that was saved with mixing, and return the model of PEFT.

    Args:
        folder: what ``save_pretrained`` of PEFT wrote.
        model: the base model; by default the one that the adapter names.
        options: of ``PeftModel.from_pretrained``, such as ``is_trainable``.

    Raises:
        UserError: the folder does not say which attention was chosen, or which class of model it needs.
    """
    from peft import PeftConfig, PeftModel

    folder = Path(folder)
    if (record := recorded_attention(folder)) is None:
        raise UserError(
            f"{folder}: no {CONFIG} here, so the chosen attention is unknown. Call apply_attention(model, preset), and then "
            "PeftModel.from_pretrained(model, folder)."
        )
    config = PeftConfig.from_pretrained(str(folder))
    base = Path(config.base_model_name_or_path or "")
    if model is None:
        model = _base_class(config, folder).from_pretrained(str(base))
    if not peft_modules(model):
        if base.is_dir() and recorded_attention(base):
            load_attention(model, base)
        else:
            apply_attention(model, PLAIN, **record)
    return PeftModel.from_pretrained(model, str(folder), **options)


def _base_class(config: Any, folder: Path) -> Any:
    """Return the class of ``transformers`` that loads the base model of an adapter."""
    from peft import auto

    mapping = config.auto_mapping or {}
    if config.task_type is None and mapping.get("parent_library", "").startswith("transformers."):
        return getattr(transformers, mapping["base_model_class"])
    wanted = auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type)
    for kind in vars(auto).values():
        if wanted is not None and getattr(kind, "_target_peft_class", None) is wanted:
            return kind._target_class
    raise UserError(f"{folder}: the class of the base model is unknown. Give the model: load_adapter(folder, model).")


def watch_peft() -> None:
    """Wrap what PEFT does with adapters: it saves the chosen attention with them, and refuses to lose their mixing."""
    from peft import PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import AuxiliaryTrainingWrapper

    for kind, name, wrap in (
        (PeftModel, "save_pretrained", _save_choice),
        (PreTrainedModel, "save_pretrained", _save_choice),  # of a model with add_adapter
        (PeftConfigMixin, "save_pretrained", _write_choice),
        (PeftConfigMixin, "from_json_file", _read_marked),
        (PeftModel, "load_adapter", _refuse_unexpected),
        (BaseTuner, "inject_adapter", _refuse_absent),
        (AuxiliaryTrainingWrapper, "_check_forward_args", _refuse_several),
    ):
        setattr(kind, name, wrap(inspect.getattr_static(kind, name)))


def _save_choice(save: Callable) -> Callable:
    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = self if isinstance(self, PreTrainedModel) else self.get_base_model()
        token = _saved_choice.set(getattr(getattr(base, "config", None), "lowrank_attention", None))
        try:
            return save(self, *args, **kwargs)
        finally:
            _saved_choice.reset(token)

    return save_pretrained


def _write_choice(save: Callable) -> Callable:
    """Wrap ``save_pretrained`` of a configuration: write the chosen attention next to it, and mark the adapter."""

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: str, *args: Any, **kwargs: Any) -> None:
        save(self, save_directory, *args, **kwargs)
        if (record := _saved_choice.get()) is None:
            return
        path = Path(save_directory) / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["peft_type"] = config["peft_type"].removesuffix(MARK) + MARK
        with whole_files(path.with_name(CONFIG), path) as (choice, marked):
            marked.write(json.dumps(config, indent=2, sort_keys=True))
            choice.write(json.dumps(record, indent=1) + "\n")

    return save_pretrained


def _read_marked(read: classmethod) -> classmethod:
    """Wrap ``from_json_file`` of configurations: return the type without the mark."""

    @functools.wraps(read.__func__)
    def from_json_file(cls: type, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config = read.__func__(cls, *args, **kwargs)
        if isinstance(kind := config.get("peft_type"), str):
            config["peft_type"] = kind.removesuffix(MARK)
        return config

    return classmethod(from_json_file)


# modules_to_save may name parts that a model has not, so the tensors decide.
def _refuse_unexpected(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_adapter(self: Any, model_id: str, *args: Any, **kwargs: Any) -> Any:
        found = load(self, model_id, *args, **kwargs)
        if lost := [name for name in found.unexpected_keys if not set(ADDED_AXES).isdisjoint(name.split("."))]:
            raise _lost(f"{model_id}: the adapter has {lost[0]}, and the model has not")
        return found

    return load_adapter


def _refuse_absent(inject: Callable) -> Callable:
    @functools.wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        saved = getattr(self.peft_config[adapter_name], "modules_to_save", None) or ()
        # Exported models have parts of their own. One list may serve several methods, so one name that is there is enough.
        there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        if (named := [name for name in saved if name in ADDED_AXES]) and there.isdisjoint(named):
            raise _lost(f"the adapter has {named[0]}, and {type(model).__name__} has not")
        inject(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _refuse_several(check: Callable) -> Callable:
    @functools.wraps(check)
    def _check_forward_args(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("adapter_names") is not None and isinstance(self.original_module, LayerPart):
            raise UserError(
                f"adapter_names={kwargs['adapter_names']}: {type(self.original_module).__name__} of several adapters in one batch is "
                "not computed. Call set_adapter, and pass the sentences of one adapter at a time."
            )
        check(self, *args, **kwargs)

    return _check_forward_args


def _lost(problem: str) -> UserError:
    return UserError(
        f"{problem}. Load it with fairseq_lowrank.huggingface.load_adapter(folder), or call apply_attention on the model first."
    )
