"""Command lines, each run in a child of a process that has imported fairseq once.

It reads a JSON line ``{"command": "fairseq-train", "args": […], "folder": …, "input": …}`` and answers with one,
``{"code": …, "output": …, "errors": …}``.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback

MODULES = {
    f"fairseq-{name}": f"fairseq_cli.{name.replace('-', '_')}"
    for name in ("train", "generate", "interactive", "eval-lm", "validate", "preprocess", "score")
}
SECONDS = 120


def call(command: str, args: list[str]) -> int | str | None:
    """Run a command line in this process, as the installed command would, and return what it exits with."""
    sys.argv = [command, *args]
    if command == "fairseq-lowrank":
        from fairseq_lowrank import cli

        return cli.main(args)
    return importlib.import_module(MODULES[command]).cli_main()


def child(command: str, args: list[str], folder: str, text: str, output, errors) -> None:
    """The whole life of a child: it never returns."""
    code = 1
    try:
        signal.alarm(SECONDS)
        os.chdir(folder)
        with tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            for number, file in enumerate((given, output, errors)):
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
                child(question["command"], question["args"], question["folder"], question["input"], output, errors)
            _, status = os.waitpid(process, 0)
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        answer = {"code": os.waitstatus_to_exitcode(status), "output": said[0], "errors": said[1]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    for module in MODULES.values():
        importlib.import_module(module)
    importlib.import_module("fairseq_lowrank.plugin.commands").end_commands_in_one_line()
    serve(sys.stdin, os.fdopen(os.dup(1), "w"))
