"""All corpora: those modules of this package that declare one, and whose form a name is."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from experiments import corpora
from experiments.corpora.corpus import Corpus
from experiments.corpora.own import binarised
from fairseq_lowrank.messages import UserError

_MODULES = (name for _, name, _ in pkgutil.iter_modules(corpora.__path__) if name not in ("__main__", "catalogue"))
_FOUND = (getattr(import_module(f"{corpora.__name__}.{name}"), "CORPUS", None) for name in _MODULES)
CORPORA: dict[str, Corpus] = {corpus.name: corpus for corpus in _FOUND if corpus}


def parse(name: str) -> tuple[Corpus, dict[str, object]]:
    """The corpus that a form's name is of, and the values of the arguments that show in it; that of binarised data for a path.

    Raises:
        UserError: it is none's; the message says what names there are.
    """
    if name.startswith("/"):
        return binarised(name), {}
    for corpus in CORPORA.values():
        if (values := corpus.values(name)) is not None:
            return corpus, values
    expected = ", ".join(corpus.usage for corpus in CORPORA.values())
    raise UserError(f"no corpus '{name}' here; expected one of {expected}")
