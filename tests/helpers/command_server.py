"""Command lines, each run in a child of a process that has imported fairseq once.

It reads a JSON line ``{"command": "fairseq-train", "args": […], "folder": …, "environment": {…}}`` and answers with one,
``{"code": …, "output": …, "errors": …}``.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback

MODULES = {
    f"fairseq-{name}": f"fairseq_cli.{name.replace('-', '_')}"
    for name in ("train", "generate", "interactive", "eval-lm", "validate", "preprocess", "score", "hydra-train")
}
PROGRAMS = {"fairseq-lowrank": "fairseq_lowrank.cli", "experiments": "experiments.__main__"}
SECONDS = 120


def call(command: str, args: list[str]) -> int | str | None:
    """Run a command line in this process, as the installed command would, and return what it exits with."""
    sys.argv = [command, *args]
    if command in ("fairseq-lowrank", "experiments"):
        return importlib.import_module(PROGRAMS[command]).main(args)
    with importlib.import_module("fairseq_lowrank.repairs.commands").as_command():
        return importlib.import_module(MODULES[command]).cli_main()


def child(command: str, args: list[str], folder: str, environment: dict[str, str], output, errors) -> None:
    """The whole life of a child: it never returns."""
    code = 1
    try:
        signal.alarm(SECONDS)
        os.chdir(folder)
        os.environ.update(environment)
        with open(os.devnull) as nothing:
            for number, file in enumerate((nothing, output, errors)):
                os.dup2(file.fileno(), number)
        code = call(command, args)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def serve(questions, answers) -> None:
    """Answer one line after another."""
    for line in questions:
        question = json.loads(line)
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = os.fork()
            if not process:
                child(*(question[of] for of in ("command", "args", "folder", "environment")), output, errors)
            _, status = os.waitpid(process, 0)
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        answer = {"code": os.waitstatus_to_exitcode(status), "output": said[0], "errors": said[1]}
        print(json.dumps(answer), file=answers, flush=True)


def import_all() -> None:
    """Do once what each child would do by itself otherwise."""
    for module in MODULES.values():
        importlib.import_module(module)
    importlib.import_module("torch._inductor.runtime.triton_heuristics")  # torch does when a model is built
    cli = importlib.import_module("fairseq_lowrank.cli")
    cli.command_modules(cli)
    cli.command_modules(importlib.import_module("experiments.commands"))
    options = importlib.import_module("fairseq.options")
    words = ["nothing", "--path", "nothing"]
    args = options.parse_args_and_arch(options.get_generation_parser(), words)
    importlib.import_module("quick_hydra").quicken()
    importlib.import_module("fairseq.dataclass.utils").convert_namespace_to_omegaconf(args)  # the grammar of hydra
    gc.freeze()  # so that no child copies memory to collect what is kept


if __name__ == "__main__":
    import_all()
    serve(sys.stdin, os.fdopen(os.dup(1), "w"))
