"""The list of all corpora that modules of this package declare, and the lookup of a corpus by a variant's name."""

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


def is_taken(name: str) -> bool:
    """Return True if a corpus, or a variant of one, has a name that your own text may not have."""
    return any(
        name == known or (known != "own" and corpus.values(name) is not None) for known, corpus in CORPORA.items()
    )


def parse_corpus_name(name: str) -> tuple[Corpus, dict[str, object]]:
    """Return the corpus of a variant's name, and the values of the arguments in the name.

    A path, which begins with a slash, is the name of binarised data.

    Raises:
        UserError: no corpus has such a name; the message lists the names.
    """
    if name.startswith("/"):
        return binarised(name), {}
    for corpus in CORPORA.values():
        if (values := corpus.values(name)) is not None:
            return corpus, values
    expected = ", ".join(corpus.usage for corpus in CORPORA.values())
    raise UserError(f"no corpus '{name}' here. Use one of {expected}.")
