"""Folders of ``save_pretrained`` bring their chosen attention with them: ``from_pretrained`` restores it.

This happens in each process that imports this package. A folder names a file of code too, which ``trust_remote_code=True`` runs: it
imports this package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.utils import cached_file

from fairseq_lowrank.huggingface.added import ADDED_AXES, MARKER, SLOT
from fairseq_lowrank.huggingface.exchange import has_choice
from fairseq_lowrank.huggingface.recorded import record_in
from fairseq_lowrank.huggingface.saving import load_attention

CODE = "lowrank_attention.py"
"""The file of code in a folder."""

_TEXT = f'''"""The model's classes with the attention that fairseq_lowrank saved here. See {CODE} of no other folder."""

import fairseq_lowrank.huggingface  # its from_pretrained restores the attention
import transformers


def __getattr__(name):
    kind = globals()[name] = type(name, (getattr(transformers, name),), {{"__module__": __name__}})
    return kind
'''
_HUB = ("revision", "cache_dir", "token", "subfolder", "local_files_only")


def _folder(name: Any, options: dict[str, Any]) -> Path | None:
    """Return the folder of a saved model, also of one from the Hub; None if there is none."""
    if name is None or options.get("state_dict") is not None or options.get("gguf_file") is not None:
        return None
    if os.path.isdir(name):
        return Path(name, options.get("subfolder") or "")
    given = {option: options[option] for option in _HUB if options.get(option) is not None}
    try:
        file = cached_file(str(name), "config.json", _raise_exceptions_for_missing_entries=False, **given)
    except OSError:  # from_pretrained says it in its own words
        return None
    return None if file is None else Path(file).parent


@contextlib.contextmanager
def _expecting_parts(kind: type[PreTrainedModel]) -> Iterator[None]:
    """Leave the parts out of the report on unexpected tensors, while a model is loaded that gets them afterwards."""
    own = vars(kind).get("_keys_to_ignore_on_load_unexpected")
    names = "|".join((*ADDED_AXES, MARKER))
    kind._keys_to_ignore_on_load_unexpected = [
        *(kind._keys_to_ignore_on_load_unexpected or ()),
        rf"\.({names})(\.|$)",
    ]
    try:
        yield
    finally:
        if own is None:
            del kind._keys_to_ignore_on_load_unexpected
        else:
            kind._keys_to_ignore_on_load_unexpected = own


def _restore_attention(load: classmethod) -> classmethod:
    """Wrap ``from_pretrained``: load the attention that the folder records too, whatever attention function is requested."""

    @functools.wraps(load.__func__)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **options: Any) -> Any:
        folder = _folder(pretrained_model_name_or_path, options)
        if folder is None or record_in(folder / "config.json") is None:
            return load.__func__(cls, pretrained_model_name_or_path, *args, **options)
        with _expecting_parts(cls):
            loaded = load.__func__(cls, pretrained_model_name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        empty = all(parameter.is_meta for parameter in model.parameters()) and not hasattr(model, "hf_device_map")
        if not empty and not any(SLOT in vars(module) for module in model.modules()):
            load_attention(model, folder)
        return loaded

    return classmethod(from_pretrained)


def _auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Return which class of the file of code each Auto class of ``transformers`` takes for a configuration."""
    found, kind, own = {}, type(model.config), Path(CODE).stem
    for name, auto in vars(transformers.models.auto.modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and kind in mapping:
            classes = mapping[kind]
            names = [one.__name__ for one in (classes if isinstance(classes, (list, tuple)) else [classes])]
            same = type(model).__name__
            found[name] = f"{own}.{same if same in names else names[0]}"
    return found


def _write_code(save: Callable) -> Callable:
    """Wrap ``save_pretrained``: a model with chosen attention names the file of code, and writes it."""

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, save_directory: Any, *args: Any, **options: Any) -> Any:
        chosen = getattr(self.config, SLOT, None) is not None
        if not chosen and has_choice(self):
            print(
                f"fairseq-lowrank: attention was chosen for a part of this {type(self).__name__}, so from_pretrained leaves it out. "
                "Call apply_attention on the whole model with sites= or layers=, or save_attention on the part.",
                file=sys.stderr,
            )
        if not chosen or not (found := _auto_map(self)):
            return save(self, save_directory, *args, **options)
        before = getattr(self.config, "auto_map", None)
        self.config.auto_map = (before or {}) | found
        try:
            result = save(self, save_directory, *args, **options)
        finally:
            self.config.auto_map = before
            if before is None:
                del self.config.auto_map
        if Path(save_directory, "config.json").is_file():  # only the first of several workers writes
            Path(save_directory, CODE).write_text(_TEXT, encoding="utf-8")
        return result

    return save_pretrained


for _name, _wrap in (("from_pretrained", _restore_attention), ("save_pretrained", _write_code)):
    setattr(PreTrainedModel, _name, _wrap(vars(PreTrainedModel)[_name]))
