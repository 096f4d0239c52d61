#!/usr/bin/env python3
"""Show the result of the quickstart: some translations, its commands, and a table of all rows."""

import argparse
import shlex
from pathlib import Path

from fairseq_lowrank.cli._output import table
from fairseq_lowrank.files import read_lines
from fairseq_lowrank.records.results import read_results
from fairseq_lowrank.records.scores import read_run


def detokenize(text: str) -> str:
    """Return the text as one writes it, from tokens with spaces between them."""
    for mark in (",", ".", "?", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


def comparison(lines: list[dict]) -> str:
    """Return a table of parameters, the best validation loss (base 2) and BLEU of two rows, and their differences.

    Args:
        lines: the line of results of a row, and that of its baseline if there is one.
    """
    measures = {line["row"]: (line["parameters"], validation_loss(line), line["value"]) for line in lines}
    rows = [[name, f"{size:,}", f"{loss:.3f}", f"{score:.2f}"] for name, (size, loss, score) in measures.items()]
    if len(lines) == 2:
        (size, loss, score), baseline = measures.values()
        more = f"{size - baseline[0]:+,} ({(size - baseline[0]) / baseline[0]:+.2%})"
        rows.append(["difference", more, f"{loss - baseline[1]:+.3f}", f"{score - baseline[2]:+.2f}"])
    return table(["--attention", "parameters", "validation loss", "BLEU"], rows)


def validation_loss(line: dict) -> float:
    """Return the loss of the best checkpoint on the validation set, the lowest of the learning curve."""
    return min(epoch["valid_loss"] for epoch in line["curve"] if epoch.get("valid_loss") is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="the row to show, and its baseline if there is one")
    parser.add_argument("--results", type=Path, required=True, help="lines of results")
    parser.add_argument("--sources", type=Path, required=True, help="test sentences, one per line")
    parser.add_argument("--references", type=Path, required=True, help="their translations, one per line")
    parser.add_argument("--generated", type=Path, required=True, help="output of fairseq-generate")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the model of the row to show")
    parser.add_argument("--commands", type=Path, required=True, help="file with the commands of the rows")
    parser.add_argument("--show", type=int, default=10, help="number of translations to print (default: %(default)s)")
    arguments = parser.parse_args()

    sources, references = (list(read_lines(path)) for path in (arguments.sources, arguments.references))
    outputs = read_run(arguments.generated).hypotheses
    for number, lines in enumerate(list(zip(sources, references, outputs, strict=True))[: arguments.show], start=1):
        for name, line in zip(("source", "reference", "output"), lines, strict=True):
            print(f"{f'{number}.' if name == 'source' else '':<4}{name:<11}{detokenize(line)}")
        print()
    same = sum(output == reference for output, reference in zip(outputs, references, strict=True))
    print(f"{same} of {len(references)} translations of {arguments.rows[0]} are the reference, word for word.\n")
    print(f"commands:\n{arguments.commands.read_text('utf-8')}")
    words = ["fairseq-lowrank", "translate", str(arguments.checkpoint)]
    print(f"your own sentences:\necho {shlex.quote(detokenize(sources[0]))} | {shlex.join(words)}\n")
    found = {line["row"]: line for line in read_results(arguments.results)}
    print(comparison([found[row] for row in arguments.rows]))
    if len(arguments.rows) == 2:
        print("\nEach row has one seed, and another seed can turn a small difference around.")


if __name__ == "__main__":
    main()
