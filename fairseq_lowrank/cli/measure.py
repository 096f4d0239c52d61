"""Measure which directions the heads of a trained model use, and what a cut to fewer directions costs.

The command reads a model and sequences. One half of the sequences gives a basis for each head: the directions of queries and keys
in the order of their energy, the mean square of the logits that they make. On the other half the logits of all heads are cut to
the best rank r, for r from 1 to the head size. So are those of each site and of each layer, and the values of all heads. No
training is needed. The loss is:

  bits per token           of language models, translation (the right words before each word are given) and masked words
  bits per decision        of classifiers: the divergence of the outputs from those of the uncut model is the cost
  cosine of mean states    of encoders without a head

Without --sequences, as many are taken as have 6,144 tokens, at least 48 and at most 384. --quick takes a third, and tries fewer ranks.

Attention is worth what it saves against knowing nothing: the loss at rank 0, where all keys are alike, or that of the best constant
prediction if this is less, minus the loss of the uncut model. The need is the least rank that costs at most 0.2 % of this worth
(--tolerance), with a 95 % interval over sequences. It is that of the head that needs most, because all heads are cut together.
--heads cuts each head alone, and compares with what this head is worth. A need is an upper bound: another basis may do with fewer.
The need from below is that of cuts by a basis for each sequence alone.

There is no verdict if the model is hardly better than the best constant prediction, if attention is worth less than 1 % of the loss,
or if the basis has fewer than ten tokens for each direction of a head.

  fairseq-lowrank measure checkpoint_best.pt                                the data of its training, subset valid
  fairseq-lowrank measure checkpoint_best.pt --text FILE [--target FILE]    lines in the words of its dictionary
  fairseq-lowrank measure checkpoint_best.pt --heads --output pictures/     each head alone, with a picture of heads and layers
  fairseq-lowrank measure --transformers FOLDER --text FILE                 blocks of 128 tokens of a text
  fairseq-lowrank measure --transformers MODEL.gguf --text FILE             the same, with quantised weights made float32
  fairseq-lowrank measure --transformers FOLDER --text FILE --target FILE   a model that translates, a pair of lines a sequence
  fairseq-lowrank measure mha.pt --compare mixing.pt --output pictures/     two models in one figure

A cut shows what a model uses now. It cannot show what a model that was trained under a cap would do without it.
"""

from pathlib import Path

from fairseq_lowrank.cli import _data, _output
from fairseq_lowrank.messages import FlagError, UserError, flag_name
from fairseq_lowrank.tools.measuring.verdict import NONE, TOLERANCE, answer, sentence

NAME = "measure"
HELP = "which directions the heads of a trained model use, and what a cut to fewer costs"
LENGTH = 128
QUICK_TOKENS = 2048
CUT = {"scores": "scores of all heads", "own": "scores, by a basis for each sequence", "values": "values"}
SEQUENCES = _data.SEQUENCES | {"sequences": None}


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CKPT", help="a checkpoint of fairseq-train")
    _output.add_transformers_argument(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to measure on, in place of binarised data")
    parser.add_argument("--target", type=Path, metavar="FILE", help="translations of the lines of --text")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="X",
        help=f"share of what attention is worth that a cut may cost (default: {TOLERANCE:g})",
    )
    parser.add_argument(
        "--no-layers", action="store_true", help="do not cut single layers, which takes most of the time"
    )
    parser.add_argument(
        "--quick", action="store_true", help="only the needs of scores, on fewer sequences: minutes for 30 layers"
    )
    parser.add_argument("--heads", action="store_true", help="also cut each head alone, on eight sequences")
    parser.add_argument("--all", action="store_true", help="print all verdicts, and tables of cuts and directions")
    enough = "default: as many as have 6,144 tokens, at least 48 and at most 384"
    _data.add_data_arguments(parser, default_sequences=enough)
    parser.set_defaults(**SEQUENCES)
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER", help="another model of the same kind, on the same data"
    )
    _output.add_output_arguments(parser, "measure.json, measure.csv, loss against rank as measure.png and .pdf")


def run(args) -> None:
    check(args)
    from fairseq_lowrank.tools.measuring import measurement

    paths = [path for path in (args.checkpoint or args.transformers, args.compare) if path is not None]
    labels = _data.default_labels(paths) if args.compare else [paths[0].stem]
    results = []
    for label, path in zip(labels, paths, strict=True):
        chosen = {"tolerance": args.tolerance, "layers": not args.no_layers, "quick": args.quick, "heads": args.heads}
        results.append(measurement.measure(load(path, args), label, **chosen, seed=args.seed))
    _data.name_other_sequences(results, "sequences_held_out")
    table = [row for result in results for row in rows(result)]
    text = "\n\n".join("\n".join([*answer(result), *(details(result) if args.all else ())]) for result in results)

    def draw() -> dict:
        from fairseq_lowrank.tools.measuring import figure

        return {NAME: figure.plot_cuts(results)} | figure.plot_heads(results)

    _output.publish(args, _output.View(NAME, results, table, text, draw))


def check(args) -> None:
    """Refuse flags that do not fit together, before anything is loaded."""
    _data.check_data_arguments(args)
    if args.sequences is not None and args.sequences < 2:
        raise FlagError("--sequences", args.sequences, "one half gives bases, one is held out", "Give 2 or more.")
    if not 0 < args.tolerance < 1:
        raise FlagError("--tolerance", args.tolerance, "expected a share", "Give a number between 0 and 1.")
    for name in ("text", "target"):
        if (file := getattr(args, name)) is not None and not file.is_file():
            raise FlagError(flag_name(name), file, "there is no such file", "Give a text.")
    if args.target is not None and args.text is None:
        raise FlagError("--target", args.target, "there is no text that it translates", "Add --text FILE.")
    if args.transformers is not None:
        of_fairseq = {name: SEQUENCES[name] for name in ("subset", "min_length", "max_length")}
        _output.refuse_with_transformers(args, of_fairseq | {"checkpoint": None, "data": None})
        if args.text is None:
            raise FlagError("--transformers", args.transformers, "there is no text to measure on", "Add --text FILE.")
    elif args.checkpoint is None:
        raise UserError("no model given. Add a checkpoint, or --transformers FOLDER --text FILE.")


def load(path: Path, args):
    """Return a model as the subject of a measurement.

    Args:
        path: a checkpoint, or with --transformers a folder.
    """
    about = {"text": args.text, "target": args.target, "count": args.sequences, "seed": args.seed}
    if args.quick:
        about["tokens"] = QUICK_TOKENS
    if args.transformers is not None:
        from fairseq_lowrank.tools.transformers import subject as transformers_subject

        return transformers_subject.load(path, **about, length=args.length or LENGTH)
    from fairseq_lowrank.tools.fairseq import subject as fairseq_subject

    about |= {"min_length": args.min_length, "max_length": args.max_length, "length": args.length}
    return fairseq_subject.load(path, data=args.data, subset=args.subset, **about)


def rows(result: dict) -> list[dict]:
    """Return a row for each rank of each cut, and for the need of each head alone."""
    found = []
    for kind, cuts in result["cuts"].items():
        curves = {"all": cuts["all"], **cuts.get("sites", {})}
        curves |= {f"{one['site']} {one['layer']}": one for one in cuts.get("layers", ())}
        for where, curve in curves.items():
            found += [{"label": result["label"], "kind": kind, "where": where, **entry} for entry in curve["ranks"]]
    for head in result["cuts"]["scores"].get("heads", ()):
        where = f"{head['site']} {head['layer']} head {head['head']}"
        found.append({"label": result["label"], "kind": "need", "where": where, "rank": head["need"]})
    return found


def details(result: dict) -> list[str]:
    """Return all verdicts, and tables of cuts and of directions."""
    needs = ", ".join(f"{rank} ({100 * share:g} %)" for share, rank in result["cuts"]["scores"]["all"]["needs"])
    lines = ["", *(sentence(verdict["text"]) for verdict in result["verdicts"][1:]), f"Need by tolerance: {needs}"]
    lines += [result["about"]] if result["about"] else []
    lines += [
        f"{layer['name']}: runs {layer['runs']} times for each sequence, with one basis"
        for layer in result["layers"]
        if layer["runs"] > 1
    ]
    for kind, cuts in result["cuts"].items():
        lines += ["", f"{CUT[kind]}, cut to a rank", cut_table(cuts["all"], result)]
    text = "directions with 90 % and 99 % of the energy, and the share of the last quarter (median of heads)"
    return [*lines, "", text, layer_table(result)]


def cut_table(curve: dict, result: dict) -> str:
    """Return the table of one curve, with a row for each rank."""
    second = [result["second_metric"]] if "second_metric" in result else []
    header = ["rank", result["metric"], *second, "cost", "% of loss", "% of worth"]
    body = [
        [
            row["rank"],
            *(f"{row[name]:.3f}" for name in ("value", "second_value") if name in row),
            f"{row['added']:.4f}",
            *(f"{100 * row[name]:,.2f}" for name in ("of_loss", "cost")),
        ]
        for row in curve["ranks"]
    ]
    return _output.table(header, body)


def layer_table(result: dict) -> str:
    """Return the table of directions, with a row for each layer."""
    header = ["layer", "heads", "one sequence", "one basis", "weights alone", "values", "need"]
    judged = result["verdicts"][0]["verdict"] != NONE
    layers = result["cuts"]["scores"].get("layers", ()) if judged else ()
    needs = {(one["site"], one["layer"]): one["need"] for one in layers}
    body = [
        [
            f"{layer['site']} {layer['layer']}",
            f"{layer['heads']} × {layer['head_size']}",
            *(spread(layer[name]) for name in ("one_sequence", "one_basis", "weights", "values")),
            needs.get((layer["site"], layer["layer"]), ""),
        ]
        for layer in result["layers"]
    ]
    return _output.table(header, body)


def spread(found: dict | None) -> str:
    """Return the medians over heads of the statistics of energies."""
    from statistics import median

    if found is None:
        return "–"
    counts = ", ".join(f"{median(found[name]):.3g}" for name in ("directions_90", "directions_99"))
    return f"{counts} ({100 * median(found['last_quarter']):.2g} %)"
