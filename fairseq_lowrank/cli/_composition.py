"""The composition of attention and its learned parts: `fairseq-lowrank inspect`."""

from pathlib import Path

from fairseq_lowrank.cli import _data, _output
from fairseq_lowrank.messages import FlagError


def view(args) -> _output.View:
    """Return the layers of the model that the arguments name."""
    from fairseq_lowrank.parts import AXES
    from fairseq_lowrank.tools import inspection

    path = args.transformers or args.checkpoints[0]
    layers = read_transformers(path) if args.transformers else read_checkpoint(path, args)

    def draw() -> dict:
        figures = {}
        if any("matrix" in layer for layer in layers):
            figures["mixing"] = inspection.plot_mixing(layers)
        if scores := of_scores(layers):
            figures[AXES["score_mixing"].flag.replace("_", "-")] = inspection.plot_mixing(scores, "L")
        if any("query" in layer for layer in layers):
            figures["head-embeddings"] = inspection.plot_embeddings(layers)
        return figures

    data = {"checkpoint": str(path), "layers": layers}
    return _output.View("inspect", data, [flat(layer) for layer in layers], as_text(layers), draw)


def read_transformers(folder: Path) -> list[dict]:
    from fairseq_lowrank.tools.transformers import pretrained

    if (layers := pretrained.inspect_saved(folder)) is None:
        layers = pretrained.inspect(pretrained.load(folder))
    if not layers:
        reason = "nothing was added to this model's attention"
        remedy = (
            "Call apply_attention, train it, and give the folder that save_attention or save_pretrained writes then."
        )
        raise FlagError("--transformers", folder, reason, remedy)
    return layers


def read_checkpoint(path: Path, args) -> list[dict]:
    from fairseq_lowrank.tools import inspection
    from fairseq_lowrank.tools.fairseq import checkpoints, parameters

    state = checkpoints.load_state(path)
    layers = inspection.inspect(state["model"], mean_mixing(path, args) if args.data else None)
    return layers or parameters.composition(state)


def mean_mixing(path: Path, args) -> dict:
    """Return the mean M_t of each layer with position-wise mixing, over real sequences."""
    import torch

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(path, data=args.data, tokens_per_sample=args.length)
    with torch.no_grad(), checkpoints.mean_mixing(model) as means:
        for sample in tracked(_data.sequences(args, model, task), "mean M_t", "sequences"):
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
