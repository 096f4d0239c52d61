"""Compute the singular values of attention matrices on real data, to show if their rank is low.

The command takes one or more checkpoints (ours or stock fairseq's) and sequences of binarised data. It computes the singular
values of every head's attention matrix, mixed and before dropout. It draws the normalised cumulative curves of each layer and
on average (the Mixhead paper's figures 1 and 3): the closer to the upper left corner, the lower the rank. It prints means over
sequences, heads and layers of each site (encoder, decoder, cross):

  effective rank   exp of the entropy of the singular values' shares (Roy and Vetterli 2007)
  rank share       effective rank divided by the greatest possible rank
  area             area under the curve: 0.5 if all singular values are equal, near 1 at rank one
  mass in d_k      share of the first d_k singular values in the sum, for head size d_k

With --rank-bound it adds Marsaglia's bound (the Mixhead paper's theorem 2). A mixed head is A + B: A is its own pattern
times M[i, i], B is the part of the other heads. The columns are means too:

  rank A, rank B   numerical ranks: singular values above max(T, S)·ε·σ, with σ the greatest of the layer's matrices
  c, d             dimension of the intersection of the column spaces of A and B, and of their row spaces
  bound            rank A + rank B − c − d, a lower bound on the rank of the mixed head
  mixed rank       numerical rank of A + B

  fairseq-lowrank spectrum mha/checkpoint_best.pt mixhead/checkpoint_best.pt --labels mha mixhead-a --output pictures/
  fairseq-lowrank spectrum mixhead/checkpoint_best.pt --random-mixing        # is it M, or any matrix as far from I?
  fairseq-lowrank spectrum checkpoint_best.pt --data data-bin/wikitext-103 --subset test --length 512 --sequences 8
  fairseq-lowrank spectrum --transformers FOLDER --text FILE      a line is a sequence; the folder's tokenizer cuts it

Sequences are drawn with a fixed seed, and each batch has one, so there is no padding. A Transformer-XL reads each sequence without
memory, so that matrices are square. Compare checkpoints on the same data: curves of different lengths are stretched to one
axis. The rank of causal matrices cannot be very low, because they are triangular and have a diagonal.
"""

import contextlib
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from fairseq_lowrank.cli import _output
from fairseq_lowrank.files import first_folder, say
from fairseq_lowrank.messages import FlagError, UserError, flag_name

NAME = "spectrum"
# The default choice of sequences.
SEQUENCES = {"subset": "valid", "sequences": 32, "seed": 1, "min_length": 2, "max_length": None, "length": None}
HELP = "singular values of the attention matrices of checkpoints, on real data"


def add_arguments(parser) -> None:
    parser.add_argument("checkpoints", type=Path, nargs="*", metavar="CKPT", help="checkpoints of fairseq-train")
    _output.add_transformers_argument(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for --transformers, a sequence a line")
    parser.add_argument(
        "--labels", nargs="+", metavar="NAME", help="names for the checkpoints (default: from their paths)"
    )
    parser.add_argument(
        "--random-mixing",
        action="store_true",
        help="for each checkpoint with one M for all queries, add controls: the same patterns without mixing, and mixed by a "
        "random M at the same distance from I, by M with random entries of the same norm off its diagonal, and by M with "
        "the entries off its diagonal shuffled within each column",
    )
    parser.add_argument(
        "--rank-bound",
        action="store_true",
        help="add the bound on the rank of mixed heads, and the ranks from which it is computed",
    )
    add_data_arguments(parser)
    _output.add_output_arguments(parser, "spectrum.json and .csv, and for each site two pictures as .png and .pdf")


def add_data_arguments(
    parser, default_data: str = "default: the model's own", default_sequences: str = "default: %(default)s"
) -> None:
    """Add the arguments that choose data for a checkpoint; `inspect`, `convert` and `measure` have them too."""
    parser.add_argument(
        "--data", type=first_folder, metavar="DIR", help=f"folder of fairseq-preprocess ({default_data})"
    )
    parser.add_argument("--subset", help="part of the data: train, valid or test (default: %(default)s)")
    parser.add_argument("--sequences", type=int, metavar="N", help=f"number of sequences ({default_sequences})")
    parser.add_argument("--seed", type=int, help="seed for the choice of sequences (default: %(default)s)")
    parser.add_argument("--min-length", type=int, metavar="N", help="least length of a sequence (default: %(default)s)")
    parser.add_argument("--max-length", type=int, metavar="N", help="greatest length of a sequence (default: no limit)")
    parser.add_argument(
        "--length", type=int, metavar="N", help="block length of language models (default: the one of the training)"
    )
    parser.set_defaults(**SEQUENCES)


def given_for_data(args) -> list[str]:
    """Return the flags for the choice of sequences whose value is not the default."""
    changed = {name: getattr(args, name) for name, default in SEQUENCES.items() if getattr(args, name) != default}
    return [f"--{name.replace('_', '-')} {value}" for name, value in changed.items()]


def check_data_arguments(args) -> None:
    """Refuse numbers below 1."""
    for name in ("sequences", "min_length", "max_length", "length"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise FlagError(flag_name(name), value, "expected a number >= 1", "Give a positive number.")


def run(args) -> None:
    from fairseq_lowrank.tools import spectrum

    paths = check_models(args)
    labels = args.labels or default_labels(paths)
    if len(labels) != len(paths):
        reason = f"{len(labels)} names for {len(paths)} checkpoints"
        raise FlagError("--labels", " ".join(labels), reason, "Give one for each.")
    check_data_arguments(args)
    measure_one = measure_transformers if args.transformers else measure
    measured = (measure_one(path, label, args) for path, label in zip(paths, labels, strict=True))
    results = [result for results in measured for result in results]
    name_other_sequences(results, "sequences")
    if args.random_mixing and len(results) == len(labels):
        raise UserError(
            "--random-mixing: no checkpoint has one M for all queries, as --attention mixhead-a has. Remove the flag."
        )
    figures = {}
    if args.output:
        for site in dict.fromkeys(site for result in results for site in result["sites"]):
            shown = [result for result in results if site in result["sites"]]
            figures[f"spectrum-{site}-layers"] = spectrum.plot_layers(shown, site)
            figures[f"spectrum-{site}"] = spectrum.plot_mean(shown, site)
    _output.write(args, NAME, results, flat(results), figures)
    _output.show(args, results, as_text(results))


def name_other_sequences(results: list[dict], count: str) -> None:
    """Say so if models read different sequences; `count` is the field with their number."""
    if len({(result[count], result["mean_length"]) for result in results}) > 1:
        read = ", ".join(f"{one['label']} {one[count]} of {one['mean_length']:.4g} tokens" for one in results)
        say(f"the models read different sequences ({read}), so compare them with one --data DIR and one --sequences N")


def check_models(args) -> list[Path]:
    """Return the checkpoints, or the folder of transformers; refuse flags that do not go with them."""
    if args.transformers is None:
        if args.text is not None:
            raise FlagError("--text", args.text, "works only with --transformers FOLDER", "Add it, or remove --text.")
        if not args.checkpoints:
            raise UserError("no model given. Add checkpoints, or --transformers FOLDER --text FILE.")
        return args.checkpoints
    of_fairseq = {name: SEQUENCES[name] for name in ("subset", "length")}
    of_fairseq |= {"checkpoints": [], "data": None, "random_mixing": False, "rank_bound": False}
    _output.refuse_with_transformers(args, of_fairseq)
    if args.text is None:
        raise FlagError("--transformers", args.transformers, "there is no text to measure on", "Add --text FILE.")
    if not args.text.is_file():
        raise FlagError("--text", args.text, "there is no such file", "Give a text, a sequence a line.")
    return [args.transformers]


def default_labels(paths: list[Path]) -> list[str]:
    """Return the parts in which the paths differ, without common folders at the start and common names at the end."""
    parts = [path.absolute().with_suffix("").parts for path in paths]
    first = _count_equal(zip(*parts, strict=False))
    last = _count_equal(zip(*map(reversed, parts), strict=False))
    labels = ["/".join(names[first : len(names) - last]) for names in parts]
    if all(labels) and len(set(labels)) == len(paths):
        return labels
    return [paths[0].stem] if len(paths) == 1 else [str(path) for path in paths]


def _count_equal(places: Iterable[tuple[str, ...]]) -> int:
    """Count the places from the first on at which all names are equal."""
    return sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, places))


def sequences(args, model, task) -> list[dict]:
    """Return the samples that the arguments of :func:`add_data_arguments` choose, for a model that can read them."""
    from fairseq_lowrank.tools.fairseq import checkpoints

    lengths = {"min_length": args.min_length, "max_length": args.max_length}
    samples = checkpoints.sequences(task, args.subset, count=args.sequences, seed=args.seed, **lengths)
    checkpoints.check_inputs(model, samples[0])
    return samples


def measure(path: Path, label: str, args) -> list[dict]:
    """Return the spectra of a checkpoint, and with `--random-mixing` also those of its controls."""
    import torch

    from fairseq_lowrank.progress import tracked
    from fairseq_lowrank.tools import spectrum
    from fairseq_lowrank.tools.fairseq import checkpoints

    model, task = checkpoints.load_model(path, data=args.data, tokens_per_sample=args.length)
    state = checkpoints.load_state(path)
    training_seed = checkpoints.configuration(state, "common", "seed")
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

    chosen = sequences(args, model, task)
    before: Any = spectrum.before_mixing(model) if args.rank_bound else contextlib.nullcontext({})
    # the hooks of `before` run first, because they are registered first
    with torch.no_grad(), before as unmixed, checkpoints.attention_weights(model, receive):
        for sample in tracked(chosen, label, "sequences"):
            model(**sample["net_input"])
            tokens += sample["ntokens"]
            if "prev_output_tokens" in sample["net_input"]:  # an encoder reads other tokens than the decoder
                sources += int(sample["net_input"]["src_lengths"].sum())
    return [
        {
            "checkpoint": str(path),
            "label": name,
            "attention": checkpoints.attention_flags(state),
            "subset": args.subset,
            "sequences": len(chosen),
            "mean_length": tokens / len(chosen),
            "mean_source_length": sources / len(chosen) if sources else None,
            "sequence_seed": args.seed,
            "training_seed": training_seed,
            "sites": place.summary(),
        }
        for name, place in spectra.items()
    ]


def measure_transformers(folder: Path, label: str, args) -> list[dict]:
    """Return the spectra of a model of transformers on a text."""
    from fairseq_lowrank.tools.transformers import pretrained

    lengths = {"min_length": args.min_length, "max_length": args.max_length}
    model = pretrained.load(folder)
    chosen = pretrained.sequences(folder, args.text, count=args.sequences, seed=args.seed, **lengths)
    pretrained.check_length(model, chosen, "--text", args.text, "Leave long lines out with --max-length N.")
    return [
        {
            "checkpoint": str(folder),
            "label": label,
            "attention": pretrained.attention_flags(model),
            "subset": str(args.text),
            "sequences": len(chosen),
            "mean_length": sum(tokens.size(1) for tokens in chosen) / len(chosen),
            "mean_source_length": None,
            "sequence_seed": args.seed,
            "training_seed": None,
            "sites": pretrained.measure(model, chosen, label),
        }
    ]


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
