"""The pages of attention variants, from the declarations of methods, counts of built layers, and results."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import fairseq_lowrank
from experiments.pages import PAGES
from fairseq_lowrank.attention import METHODS, Method, MultiheadAttention, Paper, build_attention
from fairseq_lowrank.methods.standard import StandardProjection
from fairseq_lowrank.parts import AXES, CLASSES, Mixing, evaluate, parts_of
from fairseq_lowrank.records.results import read_results

PACKAGE = Path(fairseq_lowrank.__file__).parent
RESULTS = PACKAGE.parent / "results"
EMBED_DIM, HEADS, POSITIONS = 512, 8, 512
VOCABULARY, EMBED_RANK = 10_000, 64
CLASS_TESTS = {
    "equal": "test_every_plain_layer_is_one_of_an_equal_method",
    "restricted": "test_plain_weights_give_the_same_outputs",
    "OV": "test_outputs_of_class_ov_come_from_no_output_projection",
    "QK": "test_scores_exceed_the_head_size_only_in_class_qk",
    "patterns": "test_scores_of_tpa_are_not_bilinear",
}
"""The test in ``tests/attention/test_class.py`` that proves each class."""

LOW_RANK_EMBEDDINGS = Method(
    name="low-rank-embeddings",
    title="Low-rank input embeddings",
    formula="E = A C,   A: V × r, C: r × d (rank r at most; the output matrix stays full and untied)",
    parameters="V·r + r·d",
    papers=(
        Paper(
            "Which Transformer architecture fits my data? A vocabulary bottleneck in self-attention",
            "Noam Wies, Yoav Levine, Daniel Jannai, Amnon Shashua, ICML 2021",
            "https://proceedings.mlr.press/v139/wies21a.html",
        ),
    ),
    preset=False,
)
"""The one page that is not about attention, so it is not registered."""
THIN_KEYS = Method(
    name="thin-keys",
    title="Thin keys: small queries and keys, values as they were",
    formula="as `mha`, with W_Q,i, W_K,i: d × d_k for a small d_k, and values of size d/h (W_V,i: d × d/h; W_O,i: d/h × d)",
    parameters="2·d·h·d_k + 2·d²",
    cached="h·d_k + d",
    kind="restricted",
    papers=(Paper("Thin Keys, Full Values", "Yao and others 2026", "https://arxiv.org/abs/2603.04427"),),
    preset=False,
)
"""Two sizes of plain attention, so it is no value of ``--attention``."""


def variants() -> dict[str, Method]:
    """Return the variants by the names of their pages."""
    return METHODS | {one.name: one for one in (THIN_KEYS, LOW_RANK_EMBEDDINGS)}


@dataclass(frozen=True)
class ResultQuery:
    """A query for the results of a method in one table of this repository.

    Args:
        title: the setting and the measure, with an arrow to the better side.
        file: the file of results.
        table: the table in the file.
        row: the name of the row, with ``{name}`` for the variant.
        style: the format of a value.
        geometric: if True, the mean is geometric, for values of several orders of magnitude.
        split: the split whose loss in bits is used; ``None`` for a line's own value.
        task: the task of the lines, if they have one.
        base: the name of the rows of `mha` and of controls, by default as ``row``.
    """

    title: str
    file: str
    table: str
    row: str
    style: str = ".2f"
    geometric: bool = False
    split: str | None = None
    task: str | None = None
    base: str = ""

    def row_of(self, name: str) -> str:
        """Return the name of the row of `mha` or of a control."""
        return (self.base or self.row).format(name=name)

    def value(self, line: dict) -> float | None:
        """Return the value of a line of results, if it has one."""
        return line["value"] if self.split is None else line.get("losses", {}).get(self.split, {}).get("bits")

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean of values over seeds."""
        return (geometric_mean if self.geometric else fmean)(values)

    def format_values(self, values: Sequence[float]) -> str:
        """Return mean and standard deviation; for a geometric mean, the least and the greatest value."""
        mean = format(self.mean(values), self.style)
        if self.geometric:
            return f"{mean} ({min(values):{self.style}} to {max(values):{self.style}})"
        return f"{mean} ± {stdev(values):{self.style}}"


_TRANSLATION = (
    ("Multi30k de-en, 4 heads of 32", "fast-start", "h4-{name}-2e-3"),
    ("Multi30k de-en, 32 heads of 4", "fast-start", "h32-{name}-2e-3"),
    ("Multi30k, four sentences concatenated, 4 heads of 32", "above-head-size", "h4-{name}"),
    ("Multi30k, four sentences concatenated, 32 heads of 4", "above-head-size", "h32-{name}"),
    ("Multi30k, ten sentences concatenated, 4 heads of 32", "joined-by-ten", "{name}-paper"),
)
_FASTER = tuple(
    ResultQuery(
        f"{title}, mixing at {factor} times the rate: test loss, bits ↓",
        "evidence.jsonl",
        table,
        base.replace("{name}", f"{{name}}-x{factor}"),
        ".3f",
        split="test",
        base=base,
    )
    for title, table, base in (
        ("Multi30k de-en, 4 heads of 32", "fast-start", "h4-{name}-2e-3"),
        ("Multi30k de-en, 32 heads of 4", "fast-start", "h32-{name}-2e-3"),
        ("Brown by bytes, 32 heads of 4", "language-model", "h32-{name}"),
        ("Brown by bytes on a GPU, 4 heads of 32", "head-maps", "h4-{name}"),
        ("Brown by bytes on a GPU, 32 heads of 4", "head-maps", "h32-{name}"),
    )
    for factor in (2, 4, 8, 32, 64)
)
RESULT_QUERIES = (
    *(ResultQuery(f"{title}: BLEU ↑", "evidence.jsonl", table, row) for title, table, row in _TRANSLATION),
    *(
        ResultQuery(f"{title}: test loss, bits ↓", "evidence.jsonl", table, row, ".3f", split="test")
        for title, table, row in _TRANSLATION
    ),
    *_FASTER,
    ResultQuery(
        "one known matrix, 16 heads: error ↓",
        "evidence-matrices.jsonl.gz",
        "matrices",
        "n16-shared-h16-{name}",
        ".2g",
        True,
    ),
    ResultQuery(
        "eight known matrices, 16 heads: error ↓",
        "evidence-matrices.jsonl.gz",
        "matrices",
        "n16-own-h16-{name}",
        ".2g",
        True,
    ),
    ResultQuery(
        "nearest point, 8 heads: squared error ↓", "evidence-nearest-point.jsonl", "nearest-point", "h8-{name}", ".3f"
    ),
    ResultQuery(
        "in-context regression, 4 heads of 2: squared error ↓",
        "evidence-regression.jsonl",
        "regression",
        "h4-{name}",
        ".3f",
    ),
    ResultQuery("recall, 8 heads of 8: error rate ↓", "evidence-recall.jsonl", "recall", "h8-{name}", ".3f"),
    *(
        ResultQuery(f"{text}, {heads}: test loss, bits ↓", "evidence.jsonl", table, row, ".3f", split="test")
        for text, table in (("Brown by bytes", "language-model"), ("Brown by bytes on a GPU", "head-maps"))
        for heads, row in (("4 heads of 32", "h4-{name}"), ("32 heads of 4", "h32-{name}"))
    ),
    ResultQuery(
        "small BERT, sentence polarity: accuracy ↑", "brown.jsonl", "fine-tuning", "{name}", task="sentence-polarity"
    ),
    ResultQuery(
        "published BERT, sentence polarity: accuracy ↑",
        "evidence.jsonl",
        "published-bert-all-MiniLM-L6-v2",
        "{name}",
        task="sentence-polarity",
    ),
    ResultQuery("Multi30k de-en, 4 heads of 64: BLEU ↑", "multi30k.jsonl", "compare", "{name}"),
    ResultQuery("Multi30k de-en, 32 heads of 8: BLEU ↑", "multi30k.jsonl", "compare", "{name}-h32"),
    ResultQuery("Brown, 4 heads: test perplexity ↓", "brown.jsonl", "compare", "{name}"),
    ResultQuery("Brown, 32 heads: test perplexity ↓", "brown.jsonl", "compare", "{name}-h32"),
)
LEFT_OUT = {
    ("brown.jsonl", "fine-tuning", "rte"): "no row learns the task",
    ("evidence.jsonl", "published-bert-all-MiniLM-L6-v2", "rte"): "no row learns the task",
    ("evidence-decoding.jsonl", "fast-start-decoding", None): "searches without mixing, no row of `mha`",
    **{
        ("evidence-documents.jsonl", table, None): "claims of the documents, which have their page"
        for table in ("documents", "matrices")
    },
    **{
        ("evidence-source-use.jsonl", f"{table}-source-use", None): "a measurement of trainings that are queried"
        for table in ("fast-start", "above-head-size", "joined-by-ten")
    },
}
"""The tables of results (file, table, task) that no query reads, with the reason."""

CONTROLS = {
    "gain": "`gain`",
    **{f"gain-x{times}": f"`gain`, {times} times the rate" for times in (4, 8, 32, 64)},
    "score-gain-x32": "`score-gain`, 32 times the rate",
    **{f"mha-values-x{times}": f"`mha`, values at {times} times the rate" for times in (4, 32)},
    "common-mode": "common mode",
    "column-sums": "column sums",
    "small-start": "half-scale start",
}
"""The rows that are controls of every method, with their labels."""


def build_layer(variant: Method, embed_dim: int = EMBED_DIM, heads: int = HEADS, **sizes: int) -> MultiheadAttention:
    """Build a layer of the variant, without biases and on the meta device."""
    axes = {**(variant.axes if not variant.preset else {}), **_page_sizes(variant), **sizes}
    layer = build_attention(
        variant.name if variant.preset else "mha",
        embed_dim,
        heads,
        max_positions=POSITIONS,
        self_attention=True,
        bias=False,
        device="meta",
        **axes,
    )
    return layer.eval()


def _page_sizes(variant: Method) -> Mapping[str, int | str]:
    return PAGES[variant.name].sizes if variant.name in PAGES else {}


def sizes_of(layer: MultiheadAttention) -> dict[str, int]:
    """Return the sizes of a layer by the letters of the formulas."""
    sizes = layer.config
    parts = (layer.projection, layer.score, *parts_of(layer).values())
    options = {option.letter: getattr(part, option.name) for part in parts for option in part.options}
    return options | {
        "d": sizes.embed_dim,
        "h": sizes.num_heads,
        "d_k": sizes.head_dim,
        "g": sizes.key_value_heads,
        "n": POSITIONS,
    }


def count(layer: MultiheadAttention) -> int:
    """Count the parameters of a layer."""
    return sum(parameter.numel() for parameter in layer.parameters())


def flags(variant: Method) -> str:
    """Return the flags that choose the variant, and the axes that its preset sets."""
    if variant is LOW_RANK_EMBEDDINGS:
        return "`--embed-rank R`, `--embed-kernel K`, or both"
    own, of_parts = (
        "".join(
            f" --{AXES[axis].flag.replace('_', '-')} {'N' if AXES[axis].type in (int, float) else value}"
            for axis, value in axes.items()
        )
        for axes in (_page_sizes(variant), variant.axes)
    )
    if not variant.preset:
        return f"`{(of_parts or own).strip()}`, with any `--attention`"
    text = f"`--attention {variant.name}{own}`"
    return f"{text}, which is `--attention mha{of_parts}{own}`" if of_parts else text


def further_flags(variant: Method) -> str:
    """Return the row of the flags that only the variant's parts read and `flags` leaves out, or nothing."""
    options = (option.name for part in variant.parts.values() for option in getattr(part, "options", ()))
    names = [AXES[name].flag.replace("_", "-") for name in dict.fromkeys(options) if name not in _page_sizes(variant)]
    return f"| Further flags | {', '.join(f'`--{name}`' for name in names)} |\n" if names else ""


def code(variant: Method) -> list[Path]:
    """Return the files of the variant's special parts, relative to the package."""
    if variant is LOW_RANK_EMBEDDINGS:
        return [Path("plugin/attention.py")]
    parts = [part for axis, part in variant.parts.items() if part.name != AXES[axis].default] or [StandardProjection]
    parts += [part.rule for part in parts if issubclass(part, Mixing)]
    return list(dict.fromkeys(Path(inspect.getfile(part)).relative_to(PACKAGE) for part in parts))


def read_lines(file: Path) -> list[dict]:
    """Return the lines of a results file: trainings and measurements."""
    return read_results(file, measurements=True)


def measured(name: str, results: Path = RESULTS, read: Callable[[Path], list[dict]] = read_lines) -> list[dict]:
    """Return a variant's rows of two seeds or more in our results, with those of ``mha`` for the same seeds.

    ``read`` reads a file. Each row has ``setting``, ``value``, ``mha`` (empty for `mha`, or without a common seed),
    ``control`` (the best control that has these seeds) and ``seeds``.
    """
    rows = []
    for query in RESULT_QUERIES:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for line in sorted(read(results / query.file), key=lambda line: line["seed"]):
            if (line["table"], line.get("task"), line["smoke"]) == (query.table, query.task, False):
                value = query.value(line)
                if value is not None:
                    found[line["row"]][line["seed"]] = value
        row_of_own = query.row.format(name=name)
        own, plain = found.get(row_of_own, {}), found.get(query.row_of("mha"), {})
        seeds = [seed for seed in own if seed in plain] or list(own)
        if len(seeds) < 2:
            continue
        others = {
            label: [of[seed] for seed in seeds]
            for row, label in {"mha": "mha", **CONTROLS, **PAGES[name].controls}.items()
            if query.row_of(row) != row_of_own and set(seeds) <= (of := found.get(query.row_of(row), {})).keys()
        }
        mha = others.pop("mha", None)
        best = (max if "↑" in query.title else min)(others, key=lambda label: query.mean(others[label]), default=None)
        rows.append(
            {
                "setting": query.title,
                "value": query.format_values([own[seed] for seed in seeds]),
                "mha": query.format_values(mha) if mha else "",
                "control": f"{query.format_values(others[best])}: {best}" if best else "",
                "seeds": len(seeds),
            }
        )
    return rows


def results_table(name: str, rows: list[dict]) -> str:
    """Return the Markdown table of :func:`measured`."""
    columns = ["", f"`{name}`", *(["`mha`"] if name != "mha" else []), "best control", "seeds"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append(
            [row["setting"], row["value"], *([row["mha"]] if name != "mha" else []), row["control"], str(row["seeds"])]
        )
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"[How to read it](README.md#measurements)\n\n{table}"


def citations(variant: Method) -> str:
    """Return links to the papers of a variant, or "this project"."""
    return "; ".join(f"[{title}]({url}) ({authors})" for title, authors, url in variant.papers) or "this project"


def costs(variant: Method) -> dict[str, str]:
    """Return parameters and cache, as formulas with the numbers of a built layer."""
    if variant is LOW_RANK_EMBEDDINGS:
        sizes = {"V": VOCABULARY, "r": EMBED_RANK, "d": EMBED_DIM}
        number = evaluate(variant.parameters, sizes)
        full = evaluate("V·d", sizes)
        return {
            "parameters": variant.parameters,
            "counted": f"{number:,} with V {VOCABULARY:,}, r {EMBED_RANK}, d {EMBED_DIM} (full: {full:,})",
            "cached": "nothing: no attention",
        }
    layer, plain = build_layer(variant), build_layer(METHODS["mha"])
    more = count(layer) - count(plain)
    return {
        "parameters": variant.parameters,
        "counted": f"{count(layer):,}" + (f" ({more:+,} to `mha`)".replace("-", "−") if more else ""),
        "cached": f"{variant.cached} = {layer.cached_numbers:,}",
    }


def fair_baseline(variant: Method) -> str:
    """Return the row of the sizes of `mha` with as many parameters, and with as large a cache; nothing for `mha` itself.

    They follow :func:`fairseq_lowrank.tools.fairseq.parameters.fair_baselines`, for a layer with a feed-forward size of 4·d.
    """
    if variant.name == "mha" or variant is LOW_RANK_EMBEDDINGS:
        return ""
    layer, plain, found = build_layer(variant), build_layer(METHODS["mha"]), []
    size, ours = plain.head_dim, count(layer)
    for one in dict.fromkeys((min(size, size * ours // count(plain)), max(1, layer.cached_numbers // HEADS // 2))):
        wide = 4 * EMBED_DIM + round((ours - 4 * EMBED_DIM * HEADS * one) / 2 / EMBED_DIM)
        words = [f"--head-dim {one}"] * (one != size) + [f"--decoder-ffn-embed-dim {wide:}"] * (wide != 4 * EMBED_DIM)
        found.append(f"{HEADS} × {one}: `{' '.join(['--attention mha', *words])}`")
    return f"| Fair baseline | {', with an equal cache '.join(found)} |\n"


def class_of(variant: Method) -> str:
    """Return the class of a variant."""
    if variant.kind is None:
        return "not classified"
    limit = f" {PAGES[variant.name].kind_limit}".rstrip()
    return f"{variant.kind}{limit}"


def page(name: str, results: Path = RESULTS, read: Callable[[Path], list[dict]] = read_lines) -> str:
    """Return the page of a variant, in Markdown, with the variants that have no page."""
    names = [name, *(other for other, text in PAGES.items() if text.on == name)]
    return "\n".join(_described(each, results, read) for each in names)


def _described(name: str, results: Path, read: Callable[[Path], list[dict]]) -> str:
    variant = variants()[name]
    cost = costs(variant)
    files = ", ".join(f"[{file}](../../fairseq_lowrank/{file})" for file in code(variant))
    counted = "Counted" if variant is LOW_RANK_EMBEDDINGS else f"Counted: d {EMBED_DIM}, h {HEADS}, no biases"
    rows = measured(name, results, read)
    missing = "None yet.\n" if Path(results).exists() else f"No results here: {results} does not exist.\n"
    table = results_table(name, rows) if rows else missing
    formula = "".join(f"    {line}\n" for line in variant.formula.splitlines())
    return (
        f"# {variant.title} (`{name}`)\n\n{formula}\n"
        "| | |\n| --- | --- |\n"
        f"| Parameters | {cost['parameters']} |\n"
        f"| {counted} | {cost['counted']} |\n"
        f"| Numbers cached per token | {cost['cached']} |\n"
        f"{fair_baseline(variant)}| Class | {class_of(variant)} |\n"
        f"| Flags | {flags(variant)} |\n{further_flags(variant)}"
        f"| Code | {files} |\n"
        f"| Paper | {citations(variant)} |\n\n"
        f"{PAGES[name].advice} {PAGES[name].notes.strip()}\n\n## Measured here\n\n{table}"
    )


def index() -> str:
    """Return the table of all variants, in Markdown."""
    rows = "".join(
        f"| [{name}]({PAGES[name].on or name}.md) | {class_of(variant)} | {cost['parameters']} | {cost['counted'].replace(' to `mha`)', ')')} | {cost['cached']} |\n"
        for name, variant in variants().items()
        for cost in (costs(variant),)
    )
    classes = "".join(f"- **{name}**: {meaning} (`{CLASS_TESTS[name]}`).\n" for name, meaning in CLASSES.items())
    return (
        "# Methods\n\n"
        "Each method has a page with its formula, costs, flags, code, paper and our measurements. "
        "`python -m experiments variants --output docs/variants` writes the pages.\n"
        f"The numbers are counted on a layer of d {EMBED_DIM} and h {HEADS} without biases, after it has decoded one token.\n\n"
        "The *fair baseline* is plain attention with as many parameters, in a layer with a feed-forward size of 2,048. "
        "`fairseq-lowrank params --fair-baseline METHOD` prints it for your sizes.\n\n"
        "Letters:\n\n- d is the embedding size, h the number of heads, d_k the head size.\n"
        "- g is the number of heads of keys and values.\n"
        f"- n is the greatest length, counted with {POSITIONS}.\n"
        "- r is a rank or the size of a latent, r_q the rank of queries.\n"
        "- D is the size of queries and keys that heads share.\n- b is the number of ranges of distances, counted with 32.\n- e is the number of rotary features of `mla`, counted with 0.\n- m is the number of second layers of the dense Synthesizer: h, or `--synthesizer-heads`.\n\n"
        "## Measurements\n\n"
        "A page has mean ± standard deviation over seeds; for errors of known matrices, the geometric mean and its range. "
        "The best control has the best mean of all [controls](../evidence/method.md#terms) that were run with these seeds. "
        "Rows of one seed are left out: two runs of one function differ by up to 0.99 BLEU. [Evidence](../evidence.md) puts the measurements in context.\n\n"
        "## What a method can add\n\n"
        "Compared with plain attention of the same heads and head size, each method belongs to one class.\n"
        "A test in [tests/attention/test_class.py](../../tests/attention/test_class.py) proves it.\n\n"
        f"{classes}\n"
        "Two cells need an explanation. `mla` is restricted only without its norm, because the norm depends on the input. "
        "`diff` is OV because its factor depends on the query. With a constant factor it equals plain attention of twice the heads "
        "(`test_difference_with_a_constant_factor_is_plain_attention_of_twice_the_heads`).\n\n"
        "| method | class | parameters | counted (difference to `mha`) | cached per token |\n| --- | --- | --- | --- | --- |\n"
        f"{rows}"
    )


def pages(results: Path = RESULTS, names: Sequence[str] = ()) -> dict[str, str]:
    """Return the pages of variants by file name; without names every page and the index."""
    read = functools.cache(read_lines)  # every page takes rows from all files
    start = {} if names else {"README.md": index()}
    names = dict.fromkeys(PAGES[name].on or name for name in names or variants())
    return start | {f"{name}.md": page(name, results, read) for name in names}
