#!/usr/bin/env python3
"""Show the result of a translation run: some translations, parameters of the model and of `mha`, commands, and BLEU."""

import argparse
import logging
from pathlib import Path

from experiments.recipes.scoring import bleu, read_hypotheses


def detokenize(text: str) -> str:
    """Return the text as one writes it, from tokens with spaces between them."""
    for mark in (",", ".", "?", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


def parameters(checkpoint: Path, data: Path) -> tuple[str, int, int]:
    """The checkpoint's kind of attention, its model's parameters, and those of the same model with plain `mha`."""
    from fairseq import checkpoint_utils, tasks

    import fairseq_lowrank.plugin  # noqa: F401 (registers the models)
    from fairseq_lowrank.tools.parameters import plain

    args = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["cfg"]["model"]
    args.data = str(data)
    task = tasks.setup_task(args)

    def count(args: argparse.Namespace) -> int:
        return sum(parameter.numel() for parameter in task.build_model(args).parameters())

    return args.attention, count(args), count(plain(args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the binarised corpus")
    parser.add_argument("--sources", type=Path, required=True, help="test sentences, one a line")
    parser.add_argument("--references", type=Path, required=True, help="their translations, one a line")
    parser.add_argument("--generated", type=Path, required=True, help="what fairseq-generate wrote")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--commands", type=Path, required=True, help="file with the commands of the run")
    parser.add_argument("--show", type=int, default=10, help="how many translations to print (default: %(default)s)")
    arguments = parser.parse_args()

    sources, references = (path.read_text("utf-8").splitlines() for path in (arguments.sources, arguments.references))
    outputs = read_hypotheses(arguments.generated)
    for number, lines in enumerate(list(zip(sources, references, outputs, strict=True))[: arguments.show], start=1):
        for name, line in zip(("source", "reference", "output"), lines, strict=True):
            print(f"{f'{number}.' if name == 'source' else '':<4}{name:<11}{detokenize(line)}")
        print()
    same = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    print(f"{same} of {len(references)} translations are the reference, word for word.\n")

    logging.getLogger("fairseq").setLevel(logging.WARNING)  # it would tell of the dictionaries between these lines
    attention, own, plain = parameters(arguments.checkpoint, arguments.data)
    print(f"parameters with --attention {'mha':<12}{plain:>12,}")
    if attention != "mha":
        difference = f"{own - plain:+,}, {(own - plain) / plain:+.2%}"
        print(f"parameters with --attention {attention:<12}{own:>12,}   ({difference})")
    print(f"\ncommands:\n{arguments.commands.read_text('utf-8')}")
    print(f"BLEU = {bleu(outputs, references)['value']:.1f}")


if __name__ == "__main__":
    main()
