"""The singular values of attention matrices on data: `fairseq-lowrank inspect --spectrum`."""

import contextlib
from pathlib import Path
from typing import Any

from fairseq_lowrank.cli import _data, _output
from fairseq_lowrank.messages import FlagError, UserError

COLUMNS = {
    "effective_rank": "effective rank",
    "rank_share": "rank share",
    "area": "area",
    "mass_in_head_dim": "mass in d_k",
}

BOUND_COLUMNS = {
    "pattern_rank": "rank A",
    "others_rank": "rank B",
    "c": "c",
    "d": "d",
    "bound": "bound",
    "mixed_rank": "mixed rank",
}


def view(args) -> _output.View:
    """Return the spectra of the models that the arguments name."""
    from fairseq_lowrank.tools import spectrum

    paths = args.checkpoints or [args.transformers]
    labels = args.labels or _data.default_labels(paths)
    if len(labels) != len(paths):
        reason = f"{len(labels)} names for {len(paths)} checkpoints"
        raise FlagError("--labels", " ".join(labels), reason, "Give one for each.")
    read = of_transformers if args.transformers else of_fairseq
    results = [
        {"checkpoint": str(path), "label": name, "sequence_seed": args.seed} | found
        for path, label in zip(paths, labels, strict=True)
        for name, found in read(path, label, args).items()
    ]
    _data.name_other_sequences(results, "sequences")
    if args.random_mixing and len(results) == len(labels):
        raise UserError(
            "--random-mixing: no checkpoint has one M for all queries, as --attention mixhead-a has. Remove the flag."
        )

    def draw() -> dict:
        figures = {}
        for site in dict.fromkeys(site for result in results for site in result["sites"]):
            shown = [result for result in results if site in result["sites"]]
            figures[f"spectrum-{site}-layers"] = spectrum.plot_layers(shown, site)
            figures[f"spectrum-{site}"] = spectrum.plot_mean(shown, site)
        return figures

    return _output.View("spectrum", results, flat(results), as_text(results), draw)


def of_fairseq(path: Path, label: str, args) -> dict[str, dict]:
    """Return the spectra of a checkpoint by its label, and with `--random-mixing` those of its controls by theirs."""
    import torch

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.tools import spectrum
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(path, data=args.data, tokens_per_sample=args.length)
    state = checkpoints.load_state(path)
    spectra = {label: spectrum.Spectra()}
    generator, tokens, sources = torch.Generator().manual_seed(args.seed), 0, 0

    def receive(layer, weights) -> None:
        found = {label: weights}
        bound = None
        if args.rank_bound:
            patterns, matrix = unmixed.get(layer.name, (weights, None))
            if matrix is not None and matrix.dim() == 4:  # the batch has one sequence
                matrix = matrix[0]
            bound = spectrum.rank_bound(patterns[:, 0], matrix)
        if args.random_mixing and (matrix := checkpoints.static_mixing(layer.module)) is not None:
            others = spectrum.controls(weights, matrix, generator)
            found |= {f"{label}, {name}": other for name, other in others.items()}
        for name, heads in found.items():
            place = spectra.setdefault(name, spectrum.Spectra())
            place.add(layer.site, layer.layer, layer.module.head_dim, heads, bound if name == label else None)

    chosen = _data.sequences(args, model, task)
    before: Any = spectrum.before_mixing(model) if args.rank_bound else contextlib.nullcontext({})
    # the hooks of `before` run first, because they are registered first
    with torch.no_grad(), before as unmixed, checkpoints.attention_weights(model, receive):
        for sample in tracked(chosen, label, "sequences"):
            model(**sample["net_input"])
            tokens += sample["ntokens"]
            if "prev_output_tokens" in sample["net_input"]:  # an encoder reads other tokens than the decoder
                sources += int(sample["net_input"]["src_lengths"].sum())
    about = {
        "attention": checkpoints.attention_flags(state),
        "subset": args.subset,
        "sequences": len(chosen),
        "mean_length": tokens / len(chosen),
        "mean_source_length": sources / len(chosen) if sources else None,
        "training_seed": checkpoints.configuration(state, "common", "seed"),
    }
    return {name: about | {"sites": place.summary()} for name, place in spectra.items()}


def of_transformers(folder: Path, label: str, args) -> dict[str, dict]:
    """Return the spectra of a model of transformers on a text, by its label."""
    from fairseq_lowrank.tools.transformers import pretrained

    lengths = {"min_length": args.min_length, "max_length": args.max_length}
    model = pretrained.load(folder)
    chosen = pretrained.sequences(folder, args.text, count=args.sequences, seed=args.seed, **lengths)
    pretrained.check_length(model, chosen, "--text", args.text, "Leave long lines out with --max-length N.")
    found = {
        "attention": pretrained.attention_flags(model),
        "subset": str(args.text),
        "sequences": len(chosen),
        "mean_length": sum(tokens.size(1) for tokens in chosen) / len(chosen),
        "mean_source_length": None,
        "training_seed": None,
        "sites": pretrained.measure(model, chosen, label),
    }
    return {label: found}


def as_text(results: list[dict]) -> str:
    columns = COLUMNS | (
        BOUND_COLUMNS if any(has_bound(found) for each in results for found in each["sites"].values()) else {}
    )

    def cells(found: dict) -> list[str]:
        return [f"{found['mean'][name]:.3f}" if name in found["mean"] else "" for name in columns]

    rows = [
        [
            result["label"],
            site,
            ", ".join(dict.fromkeys(str(layer["head_dim"]) for layer in found["layers"])),
            *cells(found),
        ]
        for result in results
        for site, found in result["sites"].items()
    ]
    about = dict.fromkeys(
        f"{result['sequences']} sequences of {result['subset']!r}, {lengths(result)} tokens on average"
        for result in results
    )
    return f"{'; '.join(about)}\n{_output.table(['', 'site', 'd_k', *columns.values()], rows)}"


def lengths(result: dict) -> str:
    """Return the mean length of the sequences, for an encoder and a decoder that of each."""
    target, source = f"{result['mean_length']:.0f}", result["mean_source_length"]
    return target if source is None else f"{source:.0f} source and {target} target"


def has_bound(found: dict) -> bool:
    return "bound" in found["mean"]


def flat(results: list[dict]) -> list[dict]:
    """Return a row for each head, and one for each layer, whose head is empty."""
    rows = []
    for result in results:
        for site, found in result["sites"].items():
            columns = [*COLUMNS, *BOUND_COLUMNS, "tolerance"] if has_bound(found) else COLUMNS
            for layer in found["layers"]:
                about = {"label": result["label"], "site": site, "layer": layer["layer"], "head_dim": layer["head_dim"]}
                for head, values in [("", layer), *enumerate(layer["heads"])]:
                    rows.append({**about, "head": head, **{name: values[name] for name in columns}})
    return rows
