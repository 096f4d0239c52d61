"""The arguments that choose sequences of data, and the names of models, for commands that measure."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from fairseq_lowrank.files import first_folder, say
from fairseq_lowrank.messages import FlagError, UserError, flag_name

SEQUENCES = {"subset": "valid", "sequences": 32, "seed": 1, "min_length": 2, "max_length": None, "length": None}
"""The default choice of sequences."""


def add_data_arguments(
    parser, default_data: str = "default: the model's own", default_sequences: str = "default: %(default)s"
) -> None:
    """Add the arguments that choose sequences of data for a checkpoint."""
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


def check_data_arguments(args, *, without_data: bool = True) -> None:
    """Check the arguments that choose sequences.

    Args:
        without_data: False if the command reads no data without --data.

    Raises:
        UserError: a number below 1, or a choice of sequences without data.
    """
    for name in ("sequences", "min_length", "max_length", "length"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise FlagError(flag_name(name), value, "expected a number >= 1", "Give a positive number.")
    if without_data or args.data:
        return
    changed = {name: getattr(args, name) for name, default in SEQUENCES.items() if getattr(args, name) != default}
    if changed:
        given = " ".join(f"{flag_name(name)} {value}" for name, value in changed.items())
        raise UserError(f"{given} works only with --data DIR. Add it, or remove these flags.")


def sequences(args, model, task) -> list[dict]:
    """Return the samples that the arguments of :func:`add_data_arguments` choose, for a model that can read them."""
    from fairseq_lowrank.tools.fairseq import checkpoints

    lengths = {"min_length": args.min_length, "max_length": args.max_length}
    samples = checkpoints.sequences(task, args.subset, count=args.sequences, seed=args.seed, **lengths)
    checkpoints.check_inputs(model, samples[0])
    return samples


def name_other_sequences(results: list[dict], count: str) -> None:
    """Say so if models read different sequences; `count` is the field with their number."""
    if len({(result[count], result["mean_length"]) for result in results}) > 1:
        read = ", ".join(f"{one['label']} {one[count]} of {one['mean_length']:.4g} tokens" for one in results)
        say(f"the models read different sequences ({read}), so compare them with one --data DIR and one --sequences N")


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
