"""Count the parameters of a checkpoint or of a fairseq text architecture, without memory for them.

Prints the total and its parts, attention at each site, and the extra parameters over `--attention mha`. Then it prints the
choices of each site, one row for each axis, and the class: what this attention can add to plain attention. With `--arch` you can
add any flag of fairseq-train: sizes, `--attention`, `--head-dim`, `--adaptive-input`, ….

  fairseq-lowrank params checkpoints/checkpoint_best.pt
  fairseq-lowrank params --arch lowrank_transformer_iwslt_de_en --vocab-size 10000 --attention mhe-mul
  fairseq-lowrank params --arch lowrank_transformer_lm_wiki103 --vocab-size 267744 --attention mixhead-b --json
  fairseq-lowrank params --arch transformer_wmt_en_de --vocab-size 32768
  fairseq-lowrank params --arch lowrank_transformer_wmt_en_de --vocab-size 32768 --sweep heads --methods sha mha mhe-mul --output pictures/
  fairseq-lowrank params --arch transformer_iwslt_de_en --vocab-size 10000 --fair-baseline mhe-mul
  fairseq-lowrank params --transformers FOLDER
  fairseq-lowrank params --list fairseq             architectures, and the sites where their attention can be chosen
  fairseq-lowrank params --list transformers BertModel

`total` = attention + feed-forward + embeddings + other. Embeddings are words, positions and the output matrix (or adaptive
softmax); shared parameters count once. Other parameters are those of layer norms, for example. `extra` is the difference from
the same model with `--attention mha` and the same head size (for fixedhead: with head size = width / heads). `attention without
biases` is the number that the MHE poster counts. The rank of the embedding, the depth and the heads are compared with the width.

`--sweep` draws attention parameters of some methods (`--methods`) against a size. The size is heads
(the width grows with them, as in the MHE poster), layers, or head-dim (the width stays, as in FixedHead).

`--fair-baseline METHOD` prints heads, feed-forward sizes and flags of `mha` with as many parameters, and with as large a cache.

`--transformers` counts a model of transformers: attention with its mixing, embeddings, the rest, and the heads of each site.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import fairseq_lowrank
from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import FlagError, UserError, did_you_mean, flag_name

NAME = "params"
HELP = "count the parameters of a model by part and method; list the models that take other attention"
TAKES_FLAGS = True
SITES = Path(fairseq_lowrank.__file__).with_name("tools") / "sites"
"""The folder of the lists, which `python -m experiments.sites` writes."""


def add_arguments(parser) -> None:
    _output.add_model_arguments(parser)
    parser.add_argument(
        "--vocab-size", type=int, metavar="V", help="dictionary size, fairseq's special symbols included"
    )
    parser.add_argument("--task", help="fairseq task (default: one that works with the model)")
    parser.add_argument("--sweep", choices=("heads", "layers", "head-dim"), help="compare methods over a size")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="methods of the sweep, or all (default: mha and that of --attention)",
    )
    parser.add_argument(
        "--fair-baseline", metavar="METHOD", help="also print the sizes of plain attention to compare METHOD with"
    )
    parser.add_argument(
        "--list",
        choices=("fairseq", "transformers"),
        help="list models, or those that are named: where their attention can be chosen, and why not at other sites",
    )
    _output.add_output_arguments(parser, "params.json, params.csv, and with --sweep the picture as .png and .pdf")


def run(args) -> None:
    if args.list:
        return run_list(args)
    if args.transformers:
        return run_transformers(args)
    _output.take_checkpoint(args)
    if args.methods and not args.sweep:
        raise FlagError("--methods", " ".join(args.methods), "works only with --sweep", "Add it, or remove --methods.")
    if args.checkpoint is not None:
        return run_checkpoint(args)
    if args.vocab_size is None:
        raise FlagError("--arch", args.arch, "its embeddings have no size", "Add --vocab-size N.")
    from fairseq_lowrank.tools.fairseq import parameters

    if args.sweep and args.output:
        plotting_needs()
    if args.fair_baseline:
        args.flags += ["--attention", args.fair_baseline]
    data = parameters.describe(args.arch, args.vocab_size, args.flags, task=args.task)
    text, rows, figures = as_text(data), [flat(data)], {}
    if args.fair_baseline:
        data["fair_baselines"] = parameters.fair_baselines(args.arch, args.vocab_size, args.flags, task=args.task)
        text += "\n\nplain attention with equal parameters, and with an equal cache if that differs\n"
        text += baselines_text(data["fair_baselines"])
    if args.sweep:
        methods = methods_of(args, data["attention_kind"])
        rows = parameters.sweep(args.arch, args.vocab_size, args.sweep, args.flags, methods=methods, task=args.task)
        data["sweep"] = {"over": args.sweep, "rows": rows}
        text += "\n\n" + sweep_text(rows, args.sweep)
        if args.output:
            heads, head_dim = parameters.head_sizes(
                parameters.parse_architecture(args.arch, args.flags, task=args.task)
            )
            figures = {f"params-{args.sweep}": parameters.plot_sweep(rows, args.sweep, args.arch, heads, head_dim)}
    _output.publish(args, _output.View(NAME, data, rows, text, lambda: figures))


def run_list(args) -> None:
    """Print a list of models without building them: name, sites, and why attention cannot be chosen at the others."""
    own = ("checkpoint", "arch", "transformers", "vocab_size", "task", "sweep", "fair_baseline", "methods", "output")
    if given := [flag_name(name) for name in own if getattr(args, name) is not None]:
        raise UserError(f"{given[0]}: does not work with --list. Remove one of the two.")
    with (SITES / f"{args.list}.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    known = [name for name, *_ in rows]
    for name in args.flags:
        if name not in known:
            reason = f"there is no {name} in the list of {header[0]}"
            raise FlagError("--list", args.list, reason, f"Give other names.{did_you_mean(name, known)}")
    rows = [row for row in rows if row[0] in (args.flags or known)]
    chosen = sum(bool(sites) for _, sites, _ in rows)
    table = [header, *([name, sites or "–", reason] for name, sites, reason in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines.append(f"{chosen} of {len(rows)} take other attention")
    models = [{"name": name, "sites": sites.split(), "reason": reason} for name, sites, reason in rows]
    _output.show(args, {"made_with": header[0], "models": models}, "\n".join(lines))


def plotting_needs() -> None:
    """Import what a picture needs, so that a missing package is named before models are built."""
    from fairseq_lowrank.tools import pictures  # noqa: F401


def run_checkpoint(args) -> None:
    if given := [
        flag_name(name) for name in ("vocab_size", "task", "sweep", "fair_baseline") if getattr(args, name) is not None
    ]:
        raise UserError(
            f"{' '.join(given)} works only with --arch. Remove it, or give --arch in place of the checkpoint."
        )
    from fairseq_lowrank.tools.fairseq import checkpoints, parameters

    data = {"checkpoint": str(args.checkpoint)} | parameters.describe_state(checkpoints.load_state(args.checkpoint))
    _output.publish(args, _output.View(NAME, data, [flat(data)], as_text(data)))


def methods_of(args, own: str) -> list[str]:
    """Return the methods of a sweep; `own` is that of the model."""
    from fairseq_lowrank.attention import PRESETS
    from fairseq_lowrank.parts import PLAIN

    if args.methods is None:
        return list(dict.fromkeys([PLAIN, own]))
    for name in args.methods if args.methods != ["all"] else ():
        if name not in PRESETS:
            remedy = f"Choose from {', '.join(PRESETS)}, or all.{did_you_mean(name, PRESETS)}"
            raise FlagError("--methods", name, "there is no such method", remedy)
    return list(PRESETS) if args.methods == ["all"] else list(dict.fromkeys(args.methods))


def run_transformers(args) -> None:
    _output.refuse_with_transformers(
        args, dict.fromkeys(("vocab_size", "task", "sweep", "fair_baseline", "methods")), args.flags
    )
    from fairseq_lowrank.tools.transformers import pretrained

    data = {"folder": str(args.transformers)} | pretrained.count(pretrained.load(args.transformers, weights=False))
    text = "\n".join([data["model"], parts_table(data), "", "attention", _output.axes_table(data["axes"])])
    _output.publish(args, _output.View(NAME, data, [flat(data)], text))


def flat(data: dict) -> dict:
    return {key: value for key, value in data.items() if not isinstance(value, (dict, list))}


def parts_table(data: dict, more: Sequence[list[str]] = ()) -> str:
    names = [name for name in ("attention", "feed_forward", "embeddings", "other") if name in data]
    rows = [["total", f"{data['total']:,}", "100.0 %"]]
    for name in names:
        rows.append([f"  {name.replace('_', '-')}", f"{data[name]:,}", f"{100 * data[name] / data['total']:.1f} %"])
        if name == "attention":
            rows += [[f"    {site}", f"{number:,}", ""] for site, number in data["sites"].items()]
    return _output.table(["", "parameters", "share"], [*rows, *more])


def as_text(data: dict) -> str:
    rows = [["", "", ""], ["attention without biases", f"{data['attention_without_biases']:,}", ""]]
    if data["unused"]:
        rows.append(["total without unused parameters", f"{data['total'] - data['unused']:,}", ""])
    extra = "plain attention does not work with these sizes" if data["extra"] is None else f"{data['extra']:+,}"
    rows.append(["extra over plain mha", extra, ""])
    title = f"{data['architecture']}, vocabulary {data['vocab_size']:,}"
    if data.get("target_vocab_size") not in (None, data["vocab_size"]):
        title += f" and {data['target_vocab_size']:,}"
    title = ", ".join([title, *([" ".join(data["flags"])] if data["flags"] else [])])
    sizes = [
        "{place}: {size} {value}, {against} {bound:g}".format(**row) + (row["note"] and f". {row['note']}")
        for row in data["sizes"]
    ]
    text = "\n".join([title, parts_table(data, rows), "", *sizes])
    if not data["axes"]:
        return text
    from fairseq_lowrank.parts import CLASSES

    classes = dict.fromkeys(axes["class"] for axes in data["axes"].values())
    meanings = [f"class {name}: {CLASSES[name]}" for name in classes if name in CLASSES]
    return "\n".join([text, "", "attention", _output.axes_table(data["axes"]), *meanings])


def baselines_text(rows: list[dict]) -> str:
    body = [
        [f"{row['heads']} × {row['head_dim']}", f"{row['total']:,}", f"{row['cached']:,}", row["flags"]] for row in rows
    ]
    return _output.table(["heads", "total", "cached a token", "flags"], body)


def sweep_text(rows: list[dict], quantity: str) -> str:
    values = list(dict.fromkeys(row[quantity] for row in rows))
    cells = {(row["attention_kind"], row[quantity]): f"{row['attention'] / 1e6:.2f}M" for row in rows}
    presets = dict.fromkeys(row["attention_kind"] for row in rows)
    body = [[preset, *(cells.get((preset, value), "refused") for value in values)] for preset in presets]
    return f"attention parameters by {quantity}\n" + _output.table(["", *map(str, values)], body)
