"""What the code writes into the documents.

These are docs/attention.md, tables in docs/fairseq.md, docs/transformers.md and docs/leaving-fairseq.md, and the numbers in the tables of docs/evidence.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fairseq_lowrank.attention import (
    AXES,
    METHODS,
    PRESETS,
    AttentionConfig,
    AttentionSpec,
    MultiheadAttention,
    build_attention,
    replace_attention,
)
from fairseq_lowrank.attention.classes import plain_attention
from fairseq_lowrank.messages import UserError

ROOT = Path(__file__).resolve().parents[1]
AS_PLAIN = ("as plain attention", "only with heads of the usual size")
"""How a method that equals plain attention of the usual sizes, for all its settings or for some, goes to CTranslate2."""


def text_of(name: str) -> str:
    """Return the text of a page, one of :data:`PAGES`, as the code and the results have it."""
    return PAGES[name]()


def attention_page() -> str:
    """Return docs/attention.md: the flags, and the arguments of the layer."""
    from fairseq_lowrank.plugin.criterions import RegulariserConfig
    from fairseq_lowrank.plugin.flags import MODEL_FLAGS

    regularisers = [
        (
            f"`--{one.name.replace('_', '-')}`",
            _cell(one.metadata["help"].replace("||", "‖").removesuffix(" (default: 0, off)")),
        )
        for one in dataclasses.fields(RegulariserConfig)
        if "help" in one.metadata
    ]
    names = {axis.flag: name for name, axis in AXES.items()} | {"attention": "preset", "attention_backend": "backend"}
    flags = [
        (
            f"`--{flag.replace('_', '-')}`",
            f"`{names[flag]}`" if flag in names else "–",
            "[all methods](variants/README.md#what-a-method-can-add)"
            if flag == "attention"
            else _values(kind, details),
            _cell(_without_values(text, details)).removesuffix(" (default: the method's choice)"),
        )
        for flag, (kind, details, text) in MODEL_FLAGS.items()
    ]
    arguments = (
        _arguments(AttentionConfig)
        | _arguments(MultiheadAttention)
        | {k: v for k, v in _arguments(build_attention).items() if k != "axes"}
    )
    signature = inspect.signature(build_attention).parameters
    rows = [
        (f"`{name}`", _default(signature[name].default), _cell(arguments.get(name, "the method's name")))
        for name in signature
        if name in arguments or name == "preset"
    ]
    return _page(
        "Attention: flags, layer, call",
        "This page is written from the code by `python -m experiments reference`.",
        "![The parts of attention and their flags](attention.svg)",
        "## Flags of fairseq's commands",
        'Every architecture takes them: `fairseq-train --user-dir "$(fairseq-lowrank user-dir)" --arch ARCH --attention mixhead-a …`. A flag for one part '
        "overrides the method. The second column is the keyword of `build_attention` in Python.",
        _table(("flag", "Python", "values", "meaning"), flags),
        "## Regularisers",
        "Every criterion of `fairseq-train` takes these weights, for models with `--attention`. The training loss gets weight · R. The loss "
        "that is logged, and the choice of the best checkpoint, do not contain it.",
        _table(("flag", "meaning"), regularisers),
        "## `build_attention(preset, embed_dim, num_heads, …)`",
        "It returns a layer that can replace `torch.nn.MultiheadAttention`. Import it from `fairseq_lowrank.attention`.",
        _table(("argument", "default", "meaning"), rows),
        _section(build_attention, "Raises"),
        "## `layer(query, key, value, …)`",
        "A call takes the arguments of `torch.nn.MultiheadAttention` and of fairseq's. T is the number of queries, S the number of keys, "
        "B the batch size, H the number of heads. `help(MultiheadAttention.forward)` explains each argument.",
        "**Returns** " + _section(MultiheadAttention.forward, "Returns"),
        "**Decoding.** Pass the same `DecodingCache` as `incremental_state` at each step, and one new position as query, key and value.",
        "**Compile and export.** [What works](pytorch.md#compile-export-half-precision)",
        "**Backends.** [Which backend computes what](performance.md#which-backend-computes-what)",
        "## `replace_attention(module, preset, …)`",
        _first_paragraph(replace_attention) + " `help(replace_attention)` explains its arguments.",
    )


def fairseq_page() -> str:
    """Return docs/fairseq.md with its table of the optional patches."""
    from fairseq_lowrank.plugin.patches import PATCHES
    from fairseq_lowrank.repairs.patches import PATCHES as REPAIRS

    found: dict[str, str] = {}
    for patch in (*REPAIRS, *PATCHES):
        if patch.group == "optional":
            found.setdefault(patch.name, patch.reason)
    parts = (ROOT / "docs/fairseq.md").read_text(encoding="utf-8").partition("\n## Optional\n")
    rows = [(f"`{name}`", _cell(reason)) for name, reason in found.items()]
    return "".join(parts[:2]) + _replace_table("docs/fairseq.md", parts[2], ("name", "without it"), rows)


def transformers_page() -> str:
    """Return docs/transformers.md with its table of the arguments of ``apply_attention``."""
    from fairseq_lowrank.huggingface import apply_attention
    from fairseq_lowrank.huggingface.choice import open_axes, usable_presets

    values = _arguments(apply_attention)
    values |= {"preset": "a method that keeps the projections: " + ", ".join(f"`{name}`" for name in usable_presets())}
    given = [
        name for name in inspect.signature(apply_attention).parameters if name in values.keys() - {"model", "axes"}
    ]
    rows = [(f"`{name}`", _cell(values[name]).removesuffix(".")) for name in given]
    rows.insert(1, (", ".join(f"`{axis}`" for axis in open_axes()), "override the method"))
    return _with_table("docs/transformers.md", ("argument", "values"), rows)


def leaving_page() -> str:
    """Return docs/leaving-fairseq.md with its table of methods and targets."""
    groups: dict[str, list[str]] = {how: [] for how in ("yes", *AS_PLAIN, "no")}
    for preset in PRESETS:
        groups[_folds(preset)].append(f"`{preset}`")
    return _with_table(
        "docs/leaving-fairseq.md",
        ("CTranslate2", "methods"),
        [(how, ", ".join(names)) for how, names in groups.items()],
    )


def _folds(preset: str) -> str:
    """Return whether a layer of a method is plain attention of the usual sizes in other words."""
    need = METHODS[preset].needs
    sizes = {} if need is None else {need.axis: METHODS[preset].examples[-1][need.axis]}
    layer = build_attention(preset, 8, 2, self_attention=True, max_positions=4, **sizes)
    if not layer.spec.choices:
        return "yes"
    try:
        plain = plain_attention(layer)
    except UserError:
        return "no"
    if plain.spec != AttentionSpec(head_dim=4, value_dim=4):
        return "no"
    always = METHODS[preset].kind in ("restricted", "equal")
    return AS_PLAIN[not always]


def _with_table(page: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return the text of a page in which these rows replace those of the table with this head."""
    return _replace_table(page, (ROOT / page).read_text(encoding="utf-8"), head, rows)


def _replace_table(page: str, text: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    table = _table(head, rows)
    old = re.escape("\n".join(table.splitlines()[:2])) + r"(\n\|.*)*"
    text, count = re.subn(old, lambda match: table, text)
    if count != 1:
        raise ValueError(f"{page}: expected one table with the head {', '.join(head)}, and found {count}")
    return text


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *(part for part in parts if part)]) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _cell(text: str) -> str:
    """Return text for a cell of a table: one line, code for roles of Sphinx, no bars."""
    text = re.sub(r":\w+:`~?\.?([^`]*)`", lambda match: f"`{match[1].rpartition('.')[2]}`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def _values(kind: type, details: dict) -> str:
    if kind is bool:
        return "switch"
    if "choices" in details:
        return ", ".join(f"`{value}`" for value in details["choices"])
    return {int: "integer", float: "number"}.get(kind, "list" if details.get("metavar") == "SITES" else "text")


def _without_values(text: str, details: dict) -> str:
    """Return the help of a flag without its values, which have a separate column."""
    values = ", ".join(details.get("choices", ()))
    return text.replace(f": {values}", "") if values else text


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    return "the identity" if callable(value) and not isinstance(value, type) else f"`{value!r}`"


def _first_paragraph(function: Callable) -> str:
    return _cell(inspect.getdoc(function).split("\n\n")[0])


def _lines(function: Callable, name: str) -> list[str]:
    """Return the lines of one section of a docstring, without their indent."""
    lines, found = inspect.getdoc(function).splitlines(), []
    if f"{name}:" not in lines:
        return []
    for line in lines[lines.index(f"{name}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        found.append(line.removeprefix("    "))
    return found


def _section(function: Callable, name: str) -> str:
    text = _cell(" ".join(_lines(function, name)))
    return f"**{name}** {text}" if text and name == "Raises" else text


def _arguments(function: Callable) -> dict[str, str]:
    """Return the text of each argument in a docstring."""
    found: dict[str, str] = {}
    for line in _lines(function, "Args"):
        if match := re.match(r"(\w+(?:, \w+)*): (.*)", line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif line.strip() and found:
            for name in names:
                found[name] += " " + line.strip()
    return found


def _evidence_page(name: str) -> str:
    from experiments.evidence.pages import filled  # needs scipy

    return filled(name)


PAGES: dict[str, Callable[[], str]] = {
    "docs/attention.md": attention_page,
    "docs/fairseq.md": fairseq_page,
    "docs/transformers.md": transformers_page,
    "docs/leaving-fairseq.md": leaving_page,
    **{
        f"docs/evidence/{path.stem}.md": partial(_evidence_page, path.stem)
        for path in (ROOT / "docs" / "evidence").glob("*.md")
    },
}
"""The documents with text from the code or numbers from `results/`, by their paths."""
