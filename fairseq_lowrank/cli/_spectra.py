"""The singular values of attention matrices on data: `fairseq-lowrank inspect --spectrum`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_lowrank.cli import _data, _output
from fairseq_lowrank.messages import FlagError

COLUMNS = {
    "effective_rank": "effective rank",
    "rank_share": "rank share",
    "area": "area",
    "mass_in_head_dim": "mass in d_k",
}


def view(args, read: Callable[[Path, str, Any], dict[str, dict]] | None = None) -> _output.View:
    """Return the spectra of the models that the arguments name.

    Args:
        read: returns the spectra of a model by their labels; by default :func:`of_fairseq` or :func:`of_transformers`.
    """
    from fairseq_lowrank.tools import spectrum

    paths = args.checkpoints or [args.transformers]
    labels = args.labels or _data.default_labels(paths)
    if len(labels) != len(paths):
        reason = f"{len(labels)} names for {len(paths)} checkpoints"
        raise FlagError("--labels", " ".join(labels), reason, "Give one for each.")
    read = read or (of_transformers if args.transformers else of_fairseq)
    results = [
        {"checkpoint": str(path), "label": name, "sequence_seed": args.seed} | found
        for path, label in zip(paths, labels, strict=True)
        for name, found in read(path, label, args).items()
    ]
    _data.name_other_sequences(results, "sequences")

    def draw() -> dict:
        figures = {}
        for site in dict.fromkeys(site for result in results for site in result["sites"]):
            shown = [result for result in results if site in result["sites"]]
            figures[f"spectrum-{site}-layers"] = spectrum.plot_layers(shown, site)
            figures[f"spectrum-{site}"] = spectrum.plot_mean(shown, site)
        return figures

    return _output.View("spectrum", results, flat(results), as_text(results), draw)


def no_others(layer: Any, weights: Any) -> dict[str, Any]:
    return {}


def of_fairseq(
    path: Path, label: str, args, others: Callable[[Any, Any], dict[str, Any]] = no_others
) -> dict[str, dict]:
    """Return the spectra of a checkpoint by its label.

    Args:
        others: returns further matrices of a layer, by the names that follow the label.
    """
    import torch

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.tools import spectrum
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(path, data=args.data, tokens_per_sample=args.length)
    state = checkpoints.load_state(path)
    spectra = {label: spectrum.Spectra()}
    tokens, sources = 0, 0

    def receive(layer, weights) -> None:
        found = {label: weights} | {f"{label}, {name}": other for name, other in others(layer, weights).items()}
        for name, heads in found.items():
            place = spectra.setdefault(name, spectrum.Spectra())
            place.add(layer.site, layer.layer, layer.module.head_dim, heads)

    chosen = _data.sequences(args, model, task)
    with torch.no_grad(), checkpoints.attention_weights(model, receive):
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
    rows = [
        [
            result["label"],
            site,
            ", ".join(dict.fromkeys(str(layer["head_dim"]) for layer in found["layers"])),
            *(f"{found['mean'][name]:.3f}" for name in COLUMNS),
        ]
        for result in results
        for site, found in result["sites"].items()
    ]
    about = dict.fromkeys(
        f"{result['sequences']} sequences of {result['subset']!r}, {lengths(result)} tokens on average"
        for result in results
    )
    return f"{'; '.join(about)}\n{_output.table(['', 'site', 'd_k', *COLUMNS.values()], rows)}"


def lengths(result: dict) -> str:
    """Return the mean length of the sequences, for an encoder and a decoder that of each."""
    target, source = f"{result['mean_length']:.0f}", result["mean_source_length"]
    return target if source is None else f"{source:.0f} source and {target} target"


def flat(results: list[dict]) -> list[dict]:
    """Return a row for each head, and one for each layer, whose head is empty."""
    rows = []
    for result in results:
        for site, found in result["sites"].items():
            for layer in found["layers"]:
                about = {"label": result["label"], "site": site, "layer": layer["layer"], "head_dim": layer["head_dim"]}
                for head, values in [("", layer), *enumerate(layer["heads"])]:
                    rows.append({**about, "head": head, **{name: values[name] for name in COLUMNS}})
    return rows
