"""Show the composition of a checkpoint's attention, and its learned parts except the projections.

First the choice on every axis, at each site, also of a stock checkpoint. Then, if the checkpoint has these:

Mixhead: for the mixing matrix M of each layer
  a heat map of M − I (row j, column i: the change of head j's weight in mixed head i)
  the distance from the identity, at which M is initialised
  the distance from orthogonal (the square root of the paper's regulariser R_orth, equation 16)
  the share of other heads in M
  the column sums, mean (smallest to largest): the sum of a mixed head's weights, 1 at first; below 1, attention is damped
With position-wise mixing, M depends on the query. Then the base B is shown or, with --data, the mean M_t over real queries. For a
plugin's rule the weight W is shown. The rule may compute a different M from it.

Talking heads: the same for L, which mixes the scores before the softmax.

MHE: the norm of each head's query, key and value embedding. Other learned parts: the norm.

  fairseq-lowrank inspect mixhead-a/checkpoint_best.pt --output pictures/
  fairseq-lowrank inspect mixhead-b/checkpoint_best.pt --data data-bin/multi30k --sequences 100
  fairseq-lowrank inspect --transformers FOLDER            what apply_attention added, and save_pretrained or save_attention wrote
"""

from pathlib import Path

from fairseq_lowrank.cli import _output, spectrum
from fairseq_lowrank.messages import FlagError, UserError

NAME = "inspect"
HELP = "show a checkpoint's attention: its axes, learned head mixing and head embeddings"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CKPT", help="a checkpoint of fairseq-train")
    _output.add_transformers_argument(parser)
    spectrum.add_data_arguments(parser, default_data="default: show only what needs no data")
    _output.add_output_arguments(parser, "inspect.json and .csv, and the heat maps as .png and .pdf")


def run(args) -> None:
    from fairseq_lowrank.parts import AXES
    from fairseq_lowrank.tools import inspection

    path, layers = read_transformers(args) if args.transformers else read_checkpoint(args)
    data = {"checkpoint": str(path), "layers": layers}
    figures = {}
    if args.output and any("matrix" in layer for layer in layers):
        figures["mixing"] = inspection.plot_mixing(layers)
    if args.output and (scores := of_scores(layers)):
        figures[AXES["score_mixing"].flag.replace("_", "-")] = inspection.plot_mixing(scores, "L")
    if args.output and any("query" in layer for layer in layers):
        figures["head-embeddings"] = inspection.plot_embeddings(layers)
    _output.write(args, NAME, data, [flat(layer) for layer in layers], figures)
    _output.show(args, data, as_text(layers))


def read_transformers(args) -> tuple[Path, list[dict]]:
    _output.refuse_with_transformers(args, {"checkpoint": None, "data": None} | spectrum.SEQUENCES)
    from fairseq_lowrank.tools.transformers import pretrained

    if (layers := pretrained.inspect_saved(args.transformers)) is None:
        layers = pretrained.inspect(pretrained.load(args.transformers))
    if not layers:
        reason = "nothing was added to this model's attention"
        remedy = (
            "Call apply_attention, train it, and give the folder that save_attention or save_pretrained writes then."
        )
        raise FlagError("--transformers", args.transformers, reason, remedy)
    return args.transformers, layers


def read_checkpoint(args) -> tuple[Path, list[dict]]:
    if args.checkpoint is None:
        raise UserError("no model given. Add a checkpoint, or --transformers FOLDER.")
    spectrum.check_data_arguments(args)
    if not args.data and (given := spectrum.given_for_data(args)):
        raise UserError(f"{' '.join(given)} works only with --data DIR. Add it, or remove these flags.")
    from fairseq_lowrank.tools import inspection
    from fairseq_lowrank.tools.fairseq import checkpoints, parameters

    state = checkpoints.load_state(args.checkpoint)
    layers = inspection.inspect(state["model"], mean_mixing(args) if args.data else None)
    return args.checkpoint, layers or parameters.composition(state)


def mean_mixing(args) -> dict:
    """Return the mean M_t of each layer with position-wise mixing, over real sequences."""
    import torch

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(args.checkpoint, data=args.data, tokens_per_sample=args.length)
    with torch.no_grad(), checkpoints.mean_mixing(model) as means:
        for sample in tracked(spectrum.sequences(args, model, task), "mean M_t", "sequences"):
            model(**sample["net_input"])
    return means


def of_scores(layers: list[dict]) -> list[dict]:
    """Return the layers that mix scores, with the measures of L in place of those of M."""
    place = ("name", "site", "layer")
    return [{key: layer[key] for key in place} | layer["score_mixing"] for layer in layers if "score_mixing" in layer]


def flat(layer: dict) -> dict:
    row = {key: value for key, value in layer.items() if not isinstance(value, (list, dict))}
    norms = {
        f"{part}_{head}": norm for part in ("query", "key", "value") for head, norm in enumerate(layer.get(part, []))
    }
    scores = layer.get("score_mixing", {})
    measured = {f"score_mixing_{key}": value for key, value in scores.items() if isinstance(value, float)}
    return row | layer["axes"] | measured | norms | layer.get("norms", {})


def as_text(layers: list[dict]) -> str:
    from fairseq_lowrank.tools import inspection

    parts = []
    if axes := by_axes(layers):
        parts.append("composition\n" + _output.axes_table(axes))
    for title, letter, mixed in (("head mixing", "M", layers), ("score mixing", "L", of_scores(layers))):
        if mixed := [layer for layer in mixed if "matrix" in layer]:
            found = f"{title}\n{mixing_table(mixed, letter)}"
            nothing = inspection.is_identity(mixed)
            parts.append(f"{found}\n{inspection.NOTHING_LEARNED}: every {letter} is the identity" if nothing else found)
    if embedded := [layer for layer in layers if "query" in layer]:
        rows = [[where(layer), *(spread(layer[part]) for part in ("query", "key", "value"))] for layer in embedded]
        header = ["layer", "query", "key", "value"]
        parts.append("norms of head embeddings: mean (smallest to largest head)\n" + _output.table(header, rows))
    if rows := [
        [where(layer), name, f"{norm:.3f}"] for layer in layers for name, norm in layer.get("norms", {}).items()
    ]:
        parts.append("norms of other learned parts\n" + _output.table(["layer", "parameter", "norm"], rows))
    return "\n\n".join(parts)


def where(layer: dict) -> str:
    return f"{layer['site']} {layer['layer']}"


def by_axes(layers: list[dict]) -> dict[str, dict]:
    """Return the axes of each group of layers with equal axes at a site, by a name such as ``decoder 0 to 5``."""
    groups: dict[tuple, list[dict]] = {}
    for layer in layers:
        if layer["axes"]:
            groups.setdefault((layer["site"], *layer["axes"].items()), []).append(layer)
    names = (where(group[0]) + (f" to {group[-1]['layer']}" if len(group) > 1 else "") for group in groups.values())
    return {name: group[0]["axes"] for name, group in zip(names, groups.values(), strict=True)}


def mixing_table(layers: list[dict], letter: str) -> str:
    header = ["layer", "shown", f"‖{letter} − I‖", f"‖{letter}ᵀ{letter} − I‖", "from other heads"]
    rows = [
        [
            where(layer),
            layer["kind"],
            f"{layer['from_identity']:.3f}",
            f"{layer['from_orthogonal']:.3f}",
            f"{100 * layer['off_diagonal']:.1f} %",
        ]
        for layer in layers
    ]
    if letter == "M":
        header.append("column sums")
        for row, layer in zip(rows, layers, strict=True):
            row.append(spread(layer["column_sums"]))
    if any("query_weight_norm" in layer for layer in layers):
        header.append("‖W^M‖")
        for row, layer in zip(rows, layers, strict=True):
            row.append(f"{layer['query_weight_norm']:.3f}" if "query_weight_norm" in layer else "")
    return _output.table(header, rows)


def spread(norms: list[float]) -> str:
    return f"{sum(norms) / len(norms):z.3f} ({min(norms):z.3f} to {max(norms):z.3f})"
