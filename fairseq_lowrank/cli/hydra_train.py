"""Run fairseq-hydra-train with this package as its plugin, on Python 3.14 too.

    fairseq-lowrank hydra-train task=translation task.data=DATA \\
        +model._name=lowrank_transformer_iwslt_de_en +model.attention=mixhead-b …

Hydra reads the command line before it imports plugins, so put a + before our options. Put -- before Hydra's own options:

    fairseq-lowrank hydra-train -- --config-dir CONFIGS --config-name NAME task.data=DATA …

The command adds common.user_dir if you give none. On Python 3.14, fairseq-hydra-train stops before it reads anything:
fairseq does not recognise the types of optional settings, and Hydra 1.3 gives argparse a help text that is not a string.
This command repairs both.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from fairseq_lowrank.cli import user_dir

NAME = "hydra-train"
HELP = "train from a configuration of Hydra, on Python 3.14 too"
SHOWS_TIME = False


def add_arguments(parser) -> None:
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help="settings in Hydra's notation")


def run(args) -> None:
    from fairseq_cli import hydra_train

    before, sys.argv = sys.argv, ["fairseq-hydra-train", *with_user_dir(args.overrides)]
    try:
        with help_as_text():
            hydra_train.cli_main()
    finally:
        sys.argv = before


def with_user_dir(words: list[str]) -> list[str]:
    """Return the words for Hydra: without the first ``--``, and with the folder of this package as the plugin."""
    words = words[1:] if words[:1] == ["--"] else words
    if any(word.lstrip("+").startswith("common.user_dir=") for word in words):
        return words
    folder = str(user_dir.folder()).replace("'", r"\'")
    # the parser of Hydra takes settings in one place alone, before or after its options
    settings = [place for place, word in enumerate(words) if "=" in word and not word.startswith("-")]
    end = settings[-1] + 1 if settings else len(words)
    return [*words[:end], f"++common.user_dir='{folder}'", *words[end:]]


# hydra-core<=1.3.8 passes an object with a __repr__ as help, and argparse of Python 3.14 looks for "%" in it. Remove when hydra
# passes text.
@contextlib.contextmanager
def help_as_text() -> Iterator[None]:
    """Convert the help of each argument to text while open."""
    add_argument = argparse.ArgumentParser.add_argument

    def add_argument_with_text(self: argparse.ArgumentParser, *names: Any, **options: Any) -> argparse.Action:
        if options.get("help") is not None:
            options["help"] = str(options["help"])
        return add_argument(self, *names, **options)

    argparse.ArgumentParser.add_argument = add_argument_with_text  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.add_argument = add_argument  # type: ignore[method-assign]
