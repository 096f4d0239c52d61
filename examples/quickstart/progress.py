#!/usr/bin/env python3
"""Follow fairseq-train (with `--log-format json`) or fairseq-generate on standard input, in a line every few seconds.

Everything read goes to the file named first, unchanged.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path


def training_line(text: str, epochs: int) -> str | None:
    """What a line of fairseq-train's log says, for the reader; None if nothing."""
    match = re.search(r"\| (train_inner|valid) \| (\{.*\})", text)
    if not match:
        return None
    state = json.loads(match[2])
    if match[1] == "valid":
        return f"epoch {state['epoch']}/{epochs} done: validation perplexity {state['valid_ppl']}"
    done = min(1.0, state["update"] / epochs)
    return (
        f"{done:4.0%}  epoch {state['epoch']}/{epochs}  perplexity {state['ppl']}  {float(state['wps']):,.0f} words/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log", type=Path, help="where to keep what is read")
    parser.add_argument("--epochs", type=int, default=1, help="how many epochs the training has")
    parser.add_argument("--sentences", type=int, default=1, help="how many sentences are translated")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between lines (default: %(default)s)")
    arguments = parser.parse_args()
    start, shown, translated = time.monotonic(), float("-inf"), 0
    with open(arguments.log, "a", encoding="utf-8") as log:
        for text in sys.stdin:
            log.write(text)
            log.flush()
            line = training_line(text, arguments.epochs)
            if text.startswith("H-"):
                translated += 1
                line = f"{translated / arguments.sentences:4.0%}  {translated} of {arguments.sentences} sentences translated"
            now = time.monotonic()
            if line and (now - shown >= arguments.every or "done:" in line or translated == arguments.sentences):
                minutes, seconds = divmod(int(now - start), 60)
                print(f"  [{minutes}:{seconds:02}] {line}", file=sys.stderr, flush=True)
                shown = now


if __name__ == "__main__":
    main()
