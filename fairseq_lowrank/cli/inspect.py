"""Show what a checkpoint's attention learned beside its projections.

Mixhead: the mixing matrix M of each layer as a heat map (row j, column i: how much of head j enters mixed head i), how
far it went from its start, the identity, how far it is from orthogonal (the square root of the paper's regulariser
R_orth, equation 16), and the share of M that comes from other heads. With position-wise mixing M changes with every
query: the base B is shown, or, when data is given, the mean M_t over real queries.

MHE: the norm of each head's query, key and value embedding.

  fairseq-lowrank inspect mixhead-a/checkpoint_best.pt --output pictures/
  fairseq-lowrank inspect mixhead-b/checkpoint_best.pt --data data-bin/multi30k --sequences 100
"""

from pathlib import Path

from fairseq_lowrank.cli import _output, spectrum

NAME = "inspect"
HELP = "show the learned head mixing and head embeddings of a checkpoint"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint of fairseq-train")
    spectrum.add_data_arguments(parser, default_data="without it, what needs none is shown")
    _output.add_output_arguments(parser, "inspect.json and .csv, and the heat maps as .png and .pdf")


def run(args) -> None:
    from fairseq_lowrank.analysis import checkpoints, inspection

    spectrum.check_data_arguments(args)
    state = checkpoints.load_state(args.checkpoint)
    means = mean_mixing(args) if args.data else None
    layers = inspection.inspect(state["model"], means)
    if not layers:
        raise ValueError(f"{args.checkpoint} has neither head mixing nor head embeddings (mixhead-*, avghead, mhe-*)")
    data = {"checkpoint": str(args.checkpoint), "layers": layers}
    _output.show(args, data, as_text(layers))
    figures = {}
    if args.output and any("matrix" in layer for layer in layers):
        figures["mixing"] = inspection.draw_mixing(layers)
    if args.output and any("query" in layer for layer in layers):
        figures["head-embeddings"] = inspection.draw_embeddings(layers)
    _output.write(args, NAME, data, [flat(layer) for layer in layers], figures)


def mean_mixing(args) -> dict:
    """Mean M_t of each layer with position-wise mixing, over real sequences."""
    import torch
    from tqdm import tqdm

    from fairseq_lowrank.analysis import checkpoints

    model, task = checkpoints.load_model(args.checkpoint, data=args.data, tokens_per_sample=args.length)
    chosen = checkpoints.sequences(
        task,
        args.subset,
        count=args.sequences,
        seed=args.seed,
        min_length=args.min_length,
        max_length=args.max_length,
    )
    with torch.no_grad(), checkpoints.mean_mixing(model) as means:
        for sample in tqdm(chosen, desc="mean M_t"):
            model(**sample["net_input"])
    return means


def flat(layer: dict) -> dict:
    row = {key: value for key, value in layer.items() if not isinstance(value, list)}
    norms = {
        f"{part}_{head}": norm for part in ("query", "key", "value") for head, norm in enumerate(layer.get(part, []))
    }
    return row | norms


def as_text(layers: list[dict]) -> str:
    parts = []
    if mixed := [layer for layer in layers if "matrix" in layer]:
        header = ["layer", "shown", "‖M − I‖", "‖MᵀM − I‖", "from other heads", "‖W^M‖"]
        rows = [
            [
                f"{layer['site']} {layer['layer']}",
                layer["kind"],
                f"{layer['from_identity']:.3f}",
                f"{layer['from_orthogonal']:.3f}",
                f"{100 * layer['off_diagonal']:.1f} %",
                f"{layer['query_weight_norm']:.3f}" if "query_weight_norm" in layer else "",
            ]
            for layer in mixed
        ]
        parts.append("head mixing\n" + _output.table(header, rows))
    if embedded := [layer for layer in layers if "query" in layer]:
        rows = [
            [f"{layer['site']} {layer['layer']}", *(spread(layer[part]) for part in ("query", "key", "value"))]
            for layer in embedded
        ]
        header = ["layer", "query", "key", "value"]
        parts.append("norms of head embeddings: mean (smallest to largest head)\n" + _output.table(header, rows))
    return "\n\n".join(parts)


def spread(norms: list[float]) -> str:
    return f"{sum(norms) / len(norms):.3f} ({min(norms):.3f} to {max(norms):.3f})"
