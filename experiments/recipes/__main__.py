"""`python -m experiments.recipes --kind KIND --root FOLDER rows|cost|sizes|report|compare|spectra|folder|data|results …`, called by
`examples/common.sh`.

Rows are declared on standard input (see :func:`experiments.recipes.recipe.records`), settings in the environment.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.recipes.commands import CommandFailed
from experiments.recipes.engine import RecipeEngine, RunLocked
from experiments.recipes.recipe import SMOKE, Recipe, records
from experiments.recipes.settings import Settings
from fairseq_lowrank.messages import UserError


def main(argv: list[str] | None = None, environ: Mapping[str, str] = os.environ, declared=sys.stdin) -> int:
    parser = argparse.ArgumentParser(prog="runs", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=SMOKE, required=True)
    parser.add_argument("--root", type=Path, required=True, help="the repository")
    parser.add_argument(
        "command", choices=("rows", "cost", "sizes", "report", "compare", "spectra", "folder", "data", "results")
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        help="options of report and compare; NAME ROW… of spectra; ROW of folder and data",
    )
    args = parser.parse_args(argv)
    try:
        text = declared.read()
        recipe = Recipe.read(args.kind, args.root, records(text))
        settings = Settings.read(environ)
        if settings.bert:
            recipe.start_from(settings.bert, settings.work)
        engine = RecipeEngine(recipe, settings)
        if args.command == "rows" and settings.jobs > 1 and not settings.dry_run:
            return engine.run_at_once(text)
        elif args.command == "rows":
            engine.run_rows()
        elif args.command == "cost":
            engine.cost()
        elif args.command == "sizes":
            engine.sizes()
        elif args.command == "report":
            return engine.report(args.words)
        elif args.command == "compare":
            return engine.compare(args.words)
        elif args.command == "spectra":
            return engine.spectra(args.words[0], args.words[1:])
        elif args.command == "results":
            print(engine.results)
        else:
            run = recipe.run(recipe.rows[args.words[0]], settings)
            print(run.folder if args.command == "folder" else run.data)
    except CommandFailed as error:
        if str(error):
            print(error, file=sys.stderr)
        return 2 if error.code == 2 else 1
    except RunLocked as error:
        print(error, file=sys.stderr)
        return 1
    except (UserError, UnicodeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    # so that the command that runs now is ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
