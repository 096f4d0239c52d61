"""Say if the head size limits a model, which other bottlenecks it has, what to change, and what the change costs.

A checkpoint with data, or a model of transformers with --text, is measured first: which rank its heads use (see
`fairseq-lowrank measure`). Then comes the rule from theory, which is about the worst case: the length of sequences up to which heads
can produce every attention pattern. After that the command compares

  head size with sequence length           (Bhojanapalli et al. 2020; the worst case)
  embedding rank and vocabulary with width (Wies et al. 2021: deepen rather than widen if the width exceeds them)
  depth with log₃ of the width             (Wies et al. 2021, after Levine et al. 2020)
  heads · head size with width             (Wies et al. 2021: about 25 % of parameters redundant at 4, 45 % at 16)
  the size of all values of a position with width
  the cache of a token with that of grouped keys  (Ainslie et al. 2023)

Every sentence gives its numbers and its source. A remedy is listed only if it is enough by its rule, with its parameters, cache and,
if this project recorded it, time. This project's own measurements of such models follow, with their limits. Findings without a
problem are counted; --all shows them.

  fairseq-lowrank advise checkpoints/checkpoint_best.pt
  fairseq-lowrank advise --arch lowrank_transformer_iwslt_de_en --encoder-attention-heads 32 --data data-bin/iwslt14
  fairseq-lowrank advise --arch transformer_lm_wiki103 --vocab-size 267744 --length 512
  fairseq-lowrank advise --transformers FOLDER --length 512 [--text FILE]
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_lowrank.cli import _output
from fairseq_lowrank.files import first_folder
from fairseq_lowrank.messages import FlagError, UserError

if TYPE_CHECKING:
    from fairseq_lowrank.tools.measuring.subject import Subject

NAME = "advise"
HELP = "say if the head size limits a model, and list other bottlenecks, with remedies and their cost"
TAKES_FLAGS = True
MARKS = {"bottleneck": "BOTTLENECK"}
SEED, TOKENS = 1, 2048


def add_arguments(parser) -> None:
    _output.add_model_arguments(parser)
    parser.add_argument("--vocab-size", type=int, metavar="V", help="dictionary size (default: from the data)")
    parser.add_argument(
        "--data", type=first_folder, metavar="DIR", help="folder of fairseq-preprocess (default: the model's own)"
    )
    parser.add_argument(
        "--subset", default="train", help="part of the data whose lengths are read (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="sequence length, instead of the data's; needed with --transformers"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text on which a model of transformers is measured")
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="sequences of the subset valid on which a model is measured; 0 measures nothing (default: as many as have 2,048 "
        "tokens, at least 16)",
    )
    parser.add_argument("--all", action="store_true", help="show findings without a problem too")
    _output.add_output_arguments(parser, "advise.json, advise.csv, and loss against rank as advise.png and .pdf")


def run(args) -> None:
    if args.sequences is not None and (args.sequences < 0 or args.sequences == 1):
        raise FlagError("--sequences", args.sequences, "one half gives bases, one is held out", "Give 2 or more, or 0.")
    if args.text is not None and not args.text.is_file():
        raise FlagError("--text", args.text, "there is no such file", "Give a text.")
    if args.transformers:
        return run_transformers(args)
    _output.take_checkpoint(args)
    if args.text is not None:
        raise FlagError("--text", args.text, "works only with --transformers FOLDER", "Remove the flag.")
    import numpy

    from fairseq_lowrank.tools.advice import heads
    from fairseq_lowrank.tools.fairseq.advice import checks
    from fairseq_lowrank.tools.fairseq.advice.lengths import read_lengths
    from fairseq_lowrank.tools.fairseq.architecture import stacks

    model_args, data, (vocab_size, *others), break_mode, task = (
        from_checkpoint(args) if args.checkpoint else from_flags(args)
    )
    target_vocab_size = next((size for size in others if size != vocab_size), None)
    block = getattr(model_args, "tokens_per_sample", None)
    args.block_length = args.length if block else None
    pairs = len(list(stacks(model_args))) == 2
    if args.length is not None:
        if args.length < 1:
            raise FlagError("--length", args.length, "expected a number >= 1", "Give a length in tokens.")
        lengths = {name: numpy.array([args.length]) for name in (("source", "target") if pairs else ("text",))}
    elif data is None:
        raise UserError("sequence lengths are unknown. Add --data DIR or --length N.")
    else:
        lengths = read_lengths(data, args.subset)
        if "source" in lengths and not pairs:
            reason = f"contains pairs of sentences, and {model_args.arch} reads running text"
            raise FlagError("--data", data, reason, "Give a folder made with --only-source.")
        if "text" in lengths and task.startswith("translation"):
            reason = f"contains running text, and {args.checkpoint} was trained with --task {task}, on pairs"
            raise FlagError("--data", data, reason, "Give a folder with pairs of sentences.")
        if "text" in lengths and block and break_mode != "eos":
            # language models read blocks of the text, regardless of sentences
            lengths = {"text": numpy.full(max(1, int(lengths["text"].sum()) // block), block)}
    summary = checks.ModelSummary(model_args, vocab_size, lengths, target_vocab_size)
    findings = checks.advise_on(summary)
    if not findings:
        reason = "no check applies to it"
        raise FlagError("--arch", model_args.arch, reason, "Use a model with attention or word embeddings.")
    about = {
        "architecture": model_args.arch,
        "vocab_size": vocab_size,
        **({} if target_vocab_size is None else {"target_vocab_size": target_vocab_size}),
        "lengths": {
            name: {"given": args.length} if args.length else heads.describe_lengths(values)
            for name, values in lengths.items()
        },
        "parameters": summary.total,
        "kind": checks.kind_of(summary),
    }
    show(args, about, data, summary, findings, remedies_need(model_args, findings))


def run_transformers(args) -> None:
    """Measure and judge the head sizes of a model of transformers; the other checks are for models of fairseq."""
    _output.refuse_with_transformers(args, {"vocab_size": None, "data": None, "subset": "train"}, args.flags)
    if args.length is None:
        raise UserError("--transformers: the length of sequences is not known. Add --length N, such as --length 512.")
    if args.length < 1:
        raise FlagError("--length", args.length, "expected a number >= 1", "Give a length in tokens.")
    from fairseq_lowrank.tools.advice import measured
    from fairseq_lowrank.tools.transformers import pretrained

    model = pretrained.load(args.transformers, weights=False)
    summary, findings = pretrained.advise(model, args.length)
    kinds = {"decoder": measured.LANGUAGE_MODEL, "encoder": measured.ENCODER}
    about = {
        "architecture": type(model).__name__,
        "vocab_size": getattr(model.config.get_text_config(), "vocab_size", None),
        "lengths": {"text": {"given": args.length}},
        "parameters": model.num_parameters(),
        "kind": "encoder-decoder" if "cross" in summary.sites else kinds.get(kind := " and ".join(summary.sites), kind),
    }
    show(args, about, None, summary, findings)


def measure(args, data: Path | None) -> dict:
    """Return the measurement of a trained model on its data, or ``not_measured``, the reason why there is none."""
    if args.sequences == 0:
        return {"not_measured": "--sequences 0 was given"}
    about = {"target": None, "count": args.sequences, "seed": SEED, "tokens": TOKENS}
    subject: Subject
    try:
        if args.transformers:
            if args.text is None:
                return {"not_measured": "there is no text; add --text FILE"}
            from fairseq_lowrank.tools.transformers import subject as transformers_subject

            subject = transformers_subject.load(args.transformers, text=args.text, **about, length=args.length)
        elif args.checkpoint is None:
            return {"not_measured": "an architecture has no trained heads; give a checkpoint"}
        elif data is None or not data.is_dir():
            return {"not_measured": f"the data folder {data} does not exist; add --data DIR"}
        else:
            from fairseq_lowrank.tools.fairseq import subject as fairseq_subject

            about |= {"min_length": 2, "max_length": None, "length": args.block_length, "text": None}
            subject = fairseq_subject.load(args.checkpoint, data=data, subset="valid", **about)
        from fairseq_lowrank.tools.measuring import measurement

        return measurement.measure(subject, subject.name, seed=SEED, quick=True)
    except UserError as error:
        return {"not_measured": str(error).rstrip(".")}


def show(args, about: dict, data: Path | None, summary, findings: list, need: dict | None = None) -> None:
    """Measure the model, write the files, and print the advice."""
    from fairseq_lowrank.tools.advice import heads, measured
    from fairseq_lowrank.tools.measuring import figure

    measurement = measure(args, data)
    found = measured.measured_in(about["kind"]) if summary.sites_too_small else []
    result = about | {
        "measurement": measurement,
        "verdict": heads.verdict(summary),
        "findings": [finding.as_dict() for finding in findings],
        "measured": [one.as_dict() for one in found],
        "remedies_need": need,
    }
    rows = [{key: value for key, value in finding.numbers.items() if key != "lengths"} for finding in findings]
    drawn = args.output and "cuts" in measurement
    _output.write(args, NAME, result, rows, {NAME: figure.plot_cuts([measurement])} if drawn else {})
    _output.show(args, result, as_text(result, everything=args.all))


def remedies_need(model_args, findings) -> dict | None:
    """Return the architecture and plugin that the flags of the remedies need; None if all flags are fairseq's own."""
    from fairseq_lowrank.cli import user_dir
    from fairseq_lowrank.plugin.flags import FLAGS

    ours = {f"--{name.replace('_', '-')}" for name in FLAGS} | {"--embed-rank", "--embed-kernel"}
    if not any(ours & set(change.split()) for finding in findings for change, *_ in finding.changes):
        return None
    return {"architecture": model_args.arch, "user_dir": str(user_dir.folder())}


def from_flags(args):
    """Return the model's arguments, data folder, sizes of the vocabularies, break mode, and task ("" if unknown)."""
    import argparse

    from fairseq_lowrank.tools.fairseq.advice.lengths import read_vocab_sizes
    from fairseq_lowrank.tools.fairseq.architecture import parse_architecture

    model_args = parse_architecture(args.arch, args.flags)
    if args.vocab_size is None and args.data is None:
        raise FlagError("--arch", args.arch, "the vocabulary's size is unknown", "Add --vocab-size N or --data DIR.")
    vocab_sizes = read_vocab_sizes(args.data) if args.vocab_size is None else (args.vocab_size,)
    of_the_task = argparse.ArgumentParser(add_help=False)
    of_the_task.add_argument("--sample-break-mode")
    return model_args, args.data, vocab_sizes, of_the_task.parse_known_args(args.flags)[0].sample_break_mode, ""


def from_checkpoint(args):
    """Return the same values as :func:`from_flags`, from a checkpoint."""
    from fairseq_lowrank.tools.fairseq import checkpoints
    from fairseq_lowrank.tools.fairseq.advice.lengths import read_vocab_sizes

    state = checkpoints.load_state(args.checkpoint)
    data = args.data or first_folder(str(checkpoints.configuration(state, "task", "data")))
    vocab_sizes = tuple(checkpoints.vocab_sizes(state).values())
    if not vocab_sizes:
        vocab_sizes = read_vocab_sizes(data) if args.vocab_size is None else (args.vocab_size,)
    if args.vocab_size not in (None, vocab_sizes[0]):
        reason = f"{args.checkpoint} has a vocabulary of {vocab_sizes[0]}"
        raise FlagError("--vocab-size", args.vocab_size, reason, "Remove the flag.")
    if args.data is None and args.length is None and not data.is_dir():
        raise UserError(f"the data folder {data} of {args.checkpoint} does not exist. Add --data or --length.")
    break_mode = checkpoints.configuration(state, "task", "sample_break_mode")
    task = checkpoints.configuration(state, "task", "_name") or checkpoints.configuration(state, "task", "task") or ""
    return checkpoints.model_arguments(state), data, vocab_sizes, str(getattr(break_mode, "value", break_mode)), task


def as_text(result: dict, *, everything: bool = False) -> str:
    """Return the measurement, the worst case, the findings, and this project's measurements of such models."""
    import textwrap

    from fairseq_lowrank.tools.advice.measured import LIMITS, PUBLISHED

    def wrapped(text: str, indent: str = "  ") -> list[str]:
        return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)

    measurement, lines = result["measurement"], []
    if reason := measurement.get("not_measured"):
        lines.append(f"Not measured: {reason}.")
    else:
        lines += [f"Measured: {verdict['text']}" for verdict in measurement["verdicts"]]
        lines += [measurement["limit"], *wrapped(PUBLISHED, "")]
    vocabulary = "" if result["vocab_size"] is None else f", vocabulary {result['vocab_size']:,}"
    if "target_vocab_size" in result:
        vocabulary += f" and {result['target_vocab_size']:,}"
    lines += [*result["verdict"]["lines"], "", f"{result['architecture']}{vocabulary}"]
    for name, stats in result["lengths"].items():
        if "given" in stats:
            lines.append(f"{name} length: {stats['given']} (--length)")
            continue
        lines.append(
            f"{name} length: mean {stats['mean']:g}, median {stats['median']:g}, 95th percentile {stats['p95']:g}, "
            f"longest {stats['longest']} ({stats['sequences']:,} sequences)"
        )
    folded = [finding for finding in result["findings"] if finding["verdict"] == "fine" and not everything]
    for finding in result["findings"]:
        if finding in folded:
            continue
        lines += ["", f"{MARKS.get(finding['verdict'], finding['verdict'])}: {finding['topic']}"]
        lines += wrapped(finding["text"])
        lines += [f"  → {change['change']}{price(change, result)}" for change in finding["changes"]]
        lines.append(f"  Source: {finding['source']}.")
    if result["measured"]:
        lines += ["", f"this project's measurements for a model of this kind ({result['kind']})", *wrapped(LIMITS)]
        for one in result["measured"]:
            missing = f" Not measured in: {', '.join(one['not_measured_in'])}." if one["not_measured_in"] else ""
            place = "" if one["applies"] == result["kind"] else f" ({one['applies']})"
            lines += wrapped(f"{one['change']}{place}: {one['text']}. Limits: {one['limits']}.{missing}", "  - ")
    if folded:
        topics = ", ".join(dict.fromkeys(finding["topic"] for finding in folded))
        lines += ["", f"fine: {topics} ({len(folded)} findings; --all shows them)"]
    if need := result["remedies_need"]:
        lines += ["", f"These flags need --user-dir {need['user_dir']} --arch {need['architecture']}"]
    return "\n".join(lines)


def price(change: dict, result: dict) -> str:
    """Return the parameters, cache and time of a change, with a note if the model more than doubles."""
    if change["parameters"] is None:
        return ""
    share = 100 * change["parameters"] / result["parameters"]
    text = f": {change['parameters']:+,} parameters" + (f" ({share:+.0f} %)" if abs(share) >= 1 else "")
    if change["cached"]:
        text += f", {change['cached']:+,} numbers of each token in the cache"
    if change["time"] is not None:
        text += f", {change['time']:g} times the time of an update (recorded with 32 heads of 4)"
    return f"{text}, more than twice the model" if share > 100 else text
