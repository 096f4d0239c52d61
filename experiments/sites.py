"""Write the lists of `fairseq-lowrank params --list`: each model, and the sites where its attention can be chosen.

    python -m experiments.sites                  builds every model without memory; takes minutes

Each architecture of fairseq and each base model of transformers is built on the meta device with few layers.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Collection, Iterable
from importlib.metadata import version

from fairseq_lowrank.cli.params import SITES
from fairseq_lowrank.progress import Progress, tracked

Row = tuple[str, str, str]
"""The name of a model, its sites with a blank between them, and why attention cannot be chosen at the others."""


def of_fairseq(names: Collection[str] = ()) -> list[Row]:
    """Return a row for each named architecture, or for every registered one, sorted by model."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY

    from fairseq_lowrank.plugin import architectures

    names = sorted(names or ARCH_MODEL_NAME_REGISTRY, key=lambda name: (ARCH_MODEL_NAME_REGISTRY[name], name))
    rows = map(architectures.coverage, tracked(names, "building", "models"))
    return [(row.architecture, " ".join(row.sites), row.reason) for row in rows]


def of_transformers(names: Collection[str] = ()) -> list[Row]:
    """Return a row for each named class, or for every base model of the installed transformers."""
    import transformers

    mapped = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES.values()
    known = sorted({name for entry in mapped for name in ([entry] if isinstance(entry, str) else entry)})
    return [_of_class(getattr(transformers, name)) for name in tracked(list(names) or known, "building", "models")]


def _of_class(kind) -> Row:
    from fairseq_lowrank.huggingface.models import describe, other_attention, sites_of_class, small_model

    try:
        sites, others = sites_of_class(kind), other_attention(small_model(kind))
    except Exception as error:  # a model whose defaults do not build: its own message says why
        return kind.__name__, "", f"not built: {' '.join(str(error).split())[:80] or type(error).__name__}"
    reason = f"not: {describe(others)}" if sites and others else "" if sites else "computes its attention itself"
    return kind.__name__, " ".join(sites), reason


def write(name: str, of: str, rows: Iterable[Row]) -> None:
    """Write a list; its header names the package and the version `of` which the models are."""
    with (SITES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([(of, "sites", "why not at others"), *rows])


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with Progress("sites"):
        write("fairseq", f"fairseq {version('fairseq-fixed')}", of_fairseq())
        write("transformers", f"transformers {version('transformers')}", of_transformers())


if __name__ == "__main__":
    main()
