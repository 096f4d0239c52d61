"""Dictionaries of checkpoints: saved with a model, and compared wherever a model loads a checkpoint.

fairseq keeps no dictionary in a checkpoint, so data of another dictionary gives wrong words in silence. A training saves the
symbols of each dictionary, :func:`remember_dictionaries` hands them over with the tensors of a model, and
:func:`refuse_other_dictionaries` compares them with those of the model that loads the tensors.
"""

import collections
import functools
import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar

import numpy
import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_lowrank.messages import FlagError, UserError
from fairseq_lowrank.repairs.search import log_once

logger = logging.getLogger(__name__)

ENTRY = "dictionaries"
"""The entry of a checkpoint, and of the metadata of a model's state, with a dictionary for each encoder and decoder."""
FILE = "file"
"""The attribute of a dictionary with the path that it was loaded from."""
_moving: ContextVar[str | None] = ContextVar("the value of --embeddings-by-word while it applies", default=None)
ROWS = re.compile(r"\.(embed_tokens|output_projection|lm_head|embed_out)\.(weight|bias)$")
"""The tensors with a row for each word."""
BANDS = re.compile(r"\.(embed_tokens\.embeddings\.\d|adaptive_softmax)\.")
"""The tensors of adaptive embeddings and softmax, which keep words in bands of frequency."""


class OtherDictionary(UserError):
    """A checkpoint of another dictionary than that of the data or of another model.

    Args:
        path: the checkpoint.
        difference: what differs, with both files.
        remedy: a full sentence that says what to do.
    """

    def __init__(self, path: str, difference: str, remedy: str) -> None:
        super().__init__(path, difference, remedy)
        self.path, self.difference, self.remedy = path, difference, remedy

    def __str__(self) -> str:
        return f"{self.path} was trained with another dictionary: {self.difference}. {self.remedy}"


def keep_file_of_dictionary(load: Callable) -> Callable:
    """Wrap ``Dictionary.load``: the dictionary keeps the path of its file."""

    @functools.wraps(load)
    def load_dictionary(cls, f, *args, **kwargs):
        dictionary = load(cls, f, *args, **kwargs)
        if isinstance(f, str | os.PathLike):
            setattr(dictionary, FILE, os.path.abspath(f))
        return dictionary

    return load_dictionary


def dictionaries_of(model: nn.Module) -> dict[str, Dictionary]:
    """Return the dictionary of each encoder and decoder by the name of the module, without parts of one that share its dictionary."""
    found: dict[str, Dictionary] = {}
    for name, module in model.named_modules():
        dictionary = getattr(module, "dictionary", None)
        above = (found[outer] for outer in found if name.startswith(f"{outer}.") or not outer)
        if isinstance(dictionary, Dictionary) and not any(dictionary is other for other in above):
            found[name] = dictionary
    return found


def packed(dictionary: Dictionary) -> dict[str, object]:
    """Return a dictionary as a checkpoint keeps it: a hash, its compressed symbols, and the path of its file."""
    symbols = "\n".join(dictionary.symbols).encode()
    compressed = torch.from_numpy(numpy.frombuffer(zlib.compress(symbols), dtype=numpy.uint8).copy())
    return {"hash": hashlib.sha256(symbols).hexdigest(), "symbols": compressed, FILE: getattr(dictionary, FILE, None)}


def symbols_of(saved: Mapping) -> list[str]:
    """Return the symbols of a dictionary in a checkpoint."""
    return zlib.decompress(saved["symbols"].numpy().tobytes()).decode().split("\n")


def save_dictionaries(save: Callable) -> Callable:
    """Wrap ``Trainer.state_dict``: add the dictionaries of the model."""

    @functools.wraps(save)
    def state_dict(self):
        dictionaries = dictionaries_of(self._model)
        one = {id(dictionary): packed(dictionary) for dictionary in dictionaries.values()}
        return save(self) | {ENTRY: {name: one[id(dictionary)] for name, dictionary in dictionaries.items()}}

    return state_dict


def remember_dictionaries(load: Callable) -> Callable:
    """Wrap ``load_checkpoint_to_cpu``: the metadata of the model's state has the path and the dictionaries of the checkpoint."""

    @functools.wraps(load)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        state = load(path, *args, **kwargs)
        if isinstance(state.get("model"), Mapping):
            if not hasattr(state["model"], "_metadata"):
                state["model"] = collections.OrderedDict(state["model"])
                state["model"]._metadata = collections.OrderedDict()
            origin = {"path": os.fspath(path), ENTRY: state.get(ENTRY)}
            state["model"]._metadata[""] = {**state["model"]._metadata.get("", {}), ENTRY: origin}
        return state

    return load_checkpoint_to_cpu


def refuse_other_dictionaries(load: Callable) -> Callable:
    """Wrap ``load_state_dict`` of models: refuse the state of a checkpoint with another dictionary, or move its embeddings.

    Raises:
        OtherDictionary: the symbols differ, or their number, and the tensors do not fit.
    """

    @functools.wraps(load)
    def load_state_dict(self, state_dict, *args, **kwargs):
        origin = getattr(state_dict, "_metadata", {}).get("", {}).get(ENTRY)
        if origin is None:  # not of a file
            return load(self, state_dict, *args, **kwargs)
        if (folder := _moving.get()) is not None:
            state_dict = move_embeddings(self, state_dict, origin, folder)
        else:
            check(dictionaries_of(self), origin)
        try:
            return load(self, state_dict, *args, **kwargs)
        except RuntimeError as error:  # torch's, for tensors that do not fit
            dictionaries = dictionaries_of(self)
            for name, dictionary in dictionaries.items():
                rows = getattr(state_dict.get(f"{name}.embed_tokens.weight"), "shape", (len(dictionary),))[0]
                if rows != len(dictionary):
                    raise _other_size(origin, name, dictionaries, rows) from error
            raise

    return load_state_dict


def check(dictionaries: Mapping[str, Dictionary], origin: Mapping) -> None:
    """Compare dictionaries with those of a checkpoint, by the names of encoders and decoders.

    A dictionary that only adds symbols at the end of another one gives each word the same number, so it passes.

    Raises:
        OtherDictionary: a number stands for another word.
    """
    for name, dictionary in dictionaries.items():
        if origin[ENTRY] is None:
            where = getattr(dictionary, FILE, "that of the data")
            log_once(f"{origin['path']} has no dictionary, so it cannot be compared with {where}")
        elif (saved := origin[ENTRY].get(name)) and saved["hash"] != packed(dictionary)["hash"]:
            pairs = enumerate(zip(symbols_of(saved), dictionary.symbols, strict=False))
            if differing := next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), None):
                number, (theirs, ours) = differing
                difference = f"word {number} is {theirs!r} in {_file(saved)} and {ours!r} in {_file(vars(dictionary))}"
                raise OtherDictionary(origin["path"], difference, _remedy(name, dictionaries, saved))


def check_checkpoints(path: str, state: Mapping, other_path: str, other: Mapping) -> None:
    """Compare the dictionaries of two checkpoints.

    Raises:
        OtherDictionary: they differ.
    """
    for name, saved in (state.get(ENTRY) or {}).items():
        theirs = (other.get(ENTRY) or {}).get(name, saved)
        if theirs["hash"] != saved["hash"]:
            difference = f"that of the {name} is {_file(theirs)}, and that of {path} {_file(saved)}"
            raise OtherDictionary(other_path, difference, "Use checkpoints of one training.")


def _file(fields: Mapping) -> str:
    return fields.get(FILE) or "a file that is not known"


def _remedy(name: str, names: Mapping, saved: Mapping) -> str:
    of_target = name.endswith("decoder") and f"{name.removesuffix('decoder')}encoder" in names
    flag = "--tgtdict" if of_target else "--srcdict"
    return f"Give the data that it was trained on; fairseq-preprocess makes it with {flag} {saved.get(FILE) or 'FILE'}."


def _other_size(origin: Mapping, name: str, dictionaries: Mapping[str, Dictionary], rows: int) -> OtherDictionary:
    saved, dictionary = (origin[ENTRY] or {}).get(name, {}), dictionaries[name]
    difference = (
        f"{rows:,} words in {saved.get(FILE) or 'the checkpoint'}, {len(dictionary):,} in {_file(vars(dictionary))}"
    )
    return OtherDictionary(origin["path"], difference, _remedy(name, dictionaries, saved))


def name_other_dictionary(load: Callable) -> Callable:
    """Wrap ``Trainer.load_checkpoint``: raise :class:`OtherDictionary` itself, and move embeddings if a flag asks for it.

    fairseq raises a plain Exception over each error of a model that loads.
    """

    @functools.wraps(load)
    def load_checkpoint(self, filename, *args, **kwargs):
        tuning = filename == self.cfg.checkpoint.finetune_from_model
        token = _moving.set(getattr(self.cfg.model, "embeddings_by_word", None) if tuning else None)
        try:
            return load(self, filename, *args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OtherDictionary | FlagError):
                cause = cause.__context__
            if cause is None:
                raise
            if tuning and isinstance(cause, OtherDictionary):
                cause.remedy += " Or add --embeddings-by-word to give each word its own embedding."
            raise cause from None
        finally:
            _moving.reset(token)

    return load_checkpoint


def move_embeddings(
    model: nn.Module, state: Mapping[str, Tensor], origin: Mapping, folder: str
) -> Mapping[str, Tensor]:
    """Return a state whose rows of words are in the order of a model's dictionaries. A new word has the model's initial row.

    Args:
        folder: the folder of the dictionaries of a checkpoint that has none; "own" for those in the checkpoint.

    Raises:
        FlagError: the dictionaries of the checkpoint are not known, or its embeddings are adaptive.
    """
    flag = "--embeddings-by-word"
    if bands := next(filter(BANDS.search, state), None):
        raise FlagError(flag, folder, f"{bands} keeps words by their frequency", "Remove it.")
    moved, own = collections.OrderedDict(state), model.state_dict()
    for name, dictionary in dictionaries_of(model).items():
        old = {word: row for row, word in enumerate(_words(name, dictionary, origin, folder))}
        rows = [(new, old[word]) for new, word in enumerate(dictionary.symbols) if word in old]
        to, source = torch.tensor(rows).T
        for tensor in [each for each in state if each.startswith(f"{name}.") and ROWS.search(each) and each in own]:
            if len(state[tensor]) != len(old):
                reason = f"{tensor} has {len(state[tensor]):,} rows, and the checkpoint's dictionary {len(old):,} words"
                raise FlagError(flag, folder, reason, "Give the folder of the data that the checkpoint was trained on.")
            moved[tensor] = own[tensor].clone()
            moved[tensor][to] = state[tensor][source].to(own[tensor])
        logger.info(
            f"{name}: {len(rows):,} of {len(dictionary):,} words have their embeddings of {origin['path']}; the others are new"
        )
    vars(moved).update(vars(state))  # the metadata
    return moved


def _words(name: str, dictionary: Dictionary, origin: Mapping, folder: str) -> list[str]:
    """Return the symbols of a checkpoint's dictionary."""
    saved = (origin[ENTRY] or {}).get(name)
    flag = "--embeddings-by-word"
    if saved is not None:
        if folder != "own":
            raise FlagError(flag, folder, f"{origin['path']} has its dictionaries", "Remove the folder.")
        return symbols_of(saved)
    if folder == "own":
        reason = f"{origin['path']} has no dictionary, because it was saved by an older version"
        raise FlagError(flag, folder, reason, f"Add the folder of its data: {flag} FOLDER.")
    path = os.path.join(folder, os.path.basename(_file(vars(dictionary))))
    if not os.path.isfile(path):
        raise FlagError(flag, folder, f"{path} does not exist", "Give the folder of the data of the checkpoint.")
    return Dictionary.load(path).symbols


def refuse_other_language_model(init: Callable) -> Callable:
    """Wrap ``SequenceGenerator.__init__``: refuse a language model (``--lm-path``) whose words have other numbers.

    Raises:
        OtherDictionary: its dictionary is not that of the target.
    """

    @functools.wraps(init)
    def __init__(self, models, tgt_dict, *args, **kwargs):
        init(self, models, tgt_dict, *args, **kwargs)
        if self.lm_model is not None:
            for name, dictionary in dictionaries_of(self.lm_model).items():
                if dictionary.symbols != tgt_dict.symbols:
                    check({name: tgt_dict}, {"path": "--lm-path", ENTRY: {name: packed(dictionary)}})
                    raise _other_size({"path": "--lm-path", ENTRY: None}, name, {name: tgt_dict}, len(dictionary))

    return __init__
