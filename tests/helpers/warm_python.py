"""Python processes that start quickly, as children of a process that has imported the libraries which fairseq needs.

Python takes three seconds to import torch and the other libraries. `WarmPython` imports them once. It imports neither
fairseq nor this package, so their imports, the order of these and `--user-dir` work in a child as in any process.

`WarmPython.folder` looks like the folder of the running Python. Its `python` and its commands are a small client. The
client sends its arguments, directory, environment and open files to the server. It forwards signals to the child, and
exits with the child's code. The real Python runs Triton's interpreter and other options of the interpreter.
"""

import array
import atexit
import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

LIBRARIES = (
    *("torch", "torch._inductor.runtime.triton_heuristics", "torch.distributed.nn", "torch.export"),
    *("torch.onnx.operators", "torch.utils.tensorboard", "tensorboardX", "bitarray.util", "sklearn.metrics"),
    *("scipy.stats", "sacrebleu", "omegaconf", "hydra", "hydra.core.override_parser.overrides_parser"),
    "hydra.experimental",
)
MODULES = ("fairseq_cli", "fairseq_lowrank", "experiments", "torch")  # packages whose modules run warm under -m

CLIENT = """#!{python} -ISB
import os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
real = os.path.join({folder!r}, name)
options = []
while words and (words[0] in ("-u", "-B") or words[0].startswith("-W")):
    if words[0][2:]:
        words[:1] = [words[0][:2], words[0][2:]]  # -Wignore, as processes start others
    count = 1 + (words[0] == "-W")
    options, words = options + words[:count], words[count:]
if name.startswith("python"):
    if words[:1] == ["-m"]:
        warm = len(words) > 1 and words[1].split(".")[0] in {modules!r}
    else:
        warm = words[:1] == ["-c"] or (words and not words[0].startswith("-"))
else:
    options, words, warm = [], [real, *sys.argv[1:]], True
if not warm or os.environ.get("TRITON_INTERPRET"):
    os.execv(real, [real, *sys.argv[1:]])
import array, json, signal, socket, struct
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
question = {{"words": words, "options": options, "folder": os.getcwd(), "environment": dict(os.environ), "mask": os.umask(0),
    "ignored": [n for n in (1, 2, 10, 15) if signal.getsignal(n) == signal.SIG_IGN], "group": os.getpgrp(),
    "parent": os.getppid()}}
os.umask(question["mask"])
question["files"] = files = [int(f) for f in os.listdir("/proc/self/fd") if int(f) != server.fileno() and os.path.exists("/proc/self/fd/" + f)]
data = json.dumps(question).encode()
server.sendmsg([struct.pack("!II", len(data), len(files))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(data)
for file in files:
    os.close(file)
child = struct.unpack("!i", server.recv(4))[0]
def forward(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
for number in (1, 2, 3, 10, 12, 15):
    if number not in question["ignored"]:
        signal.signal(number, forward)
code = struct.unpack("!i", server.recv(4) or struct.pack("!i", -9))[0]
if code < 0:
    if code != -9:
        signal.signal(-code, signal.SIG_DFL)
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def question_of(connection: socket.socket) -> tuple[dict, list[int]]:
    """Return what a client asks for, and its open files."""
    head, received, *_ = connection.recvmsg(8, socket.CMSG_SPACE(200 * 4))
    size, count = struct.unpack("!II", head)
    files = array.array("i")
    files.frombytes(received[0][2][: count * 4])
    data = b""
    while len(data) < size:
        data += connection.recv(1 << 20)
    return json.loads(data), list(files)


def keep(connection: socket.socket, child: int) -> None:
    """Tell the client which process is its child, and then how the child ended; end the child with the client."""
    try:
        connection.sendall(struct.pack("!i", child))
        ended = os.pidfd_open(child)
        ready, *_ = select.select([ended, connection], [], [])
        if ended not in ready:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
    except BrokenPipeError:
        os.kill(child, signal.SIGKILL)
    finally:
        os._exit(0)


def serve(listener: socket.socket) -> dict:
    """Fork a child for each client. Only a child returns, with what its client asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, *_ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # the tests have ended
            os._exit(0)
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            connection.close()
            continue
        listener.close()
        question, files = question_of(connection)
        if child := os.fork():
            for file in (*files, 0, 1, 2):
                os.close(file)
            keep(connection, child)
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in question["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        try:
            os.setpgid(0, question["group"])  # signals to the client's group reach the child too
        except PermissionError:  # of another session
            os.setsid()
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(question["files"], above, strict=True):
            os.dup2(file, number)
            os.close(file)
        return question


def show_parent(number: int) -> None:
    """Let this process see the parent of its client as its own. Processes that it forks see their real parents."""
    process, real = os.getpid(), os.getppid
    os.getppid = lambda: number if os.getpid() == process else real()


def run(question: dict) -> None:
    """Run a program in this process as Python would."""
    import torch

    words, options, environment = (question[name] for name in ("words", "options", "environment"))
    warm, real = os.path.dirname(sys.executable), f"{sys.prefix}/bin"
    where = environment.get("PATH", "").split(os.pathsep)
    environment["PATH"] = os.pathsep.join(warm if path == real else path for path in where)
    os.chdir(question["folder"])
    os.umask(question["mask"])
    show_parent(question["parent"])
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count()))
    for file, standard in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if file == 0 else "w"
        buffered = 1 if file == 2 or os.isatty(file) else -1
        errors = "backslashreplace" if file == 2 else "strict"
        setattr(sys, standard, open(file, mode, buffered, "utf-8", errors, closefd=False))  # noqa: SIM115
        setattr(sys, f"__{standard}__", getattr(sys, standard))
    if "-u" in options or environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.warnoptions[:] = [word for word in environment.get("PYTHONWARNINGS", "").split(",") if word]
    sys.warnoptions += [value for flag, value in itertools.pairwise(options) if flag == "-W"]
    warnings._processoptions(sys.warnoptions)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    safe = bool(environment.get("PYTHONSAFEPATH"))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:0] = paths if safe else [os.getcwd(), *paths]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:0] = paths if safe else ["", *paths]
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(program))
    else:
        sys.argv = words
        sys.path[:0] = paths if safe else [str(Path(words[0]).resolve().parent), *paths]
        runpy.run_path(words[0], run_name="__main__")


def end(code: int | str | None) -> None:
    """End this process with a code, as Python would but for the deletion of every module, which takes half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def python_of_shells() -> dict[str, str]:
    """Return the variable by which a shell takes this `sys.executable`, although a script prefers that of its clone."""
    return {"BASH_FUNC_python%%": f'() {{ {sys.executable} "$@"; }}'}


class WarmPython:
    """A process with the libraries, and a folder with the programs that start its children."""

    def __init__(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "bin"
        self.folder.mkdir()
        address, real = f"{self.temporary.name}/server", Path(sys.executable).parent
        client = CLIENT.format(python=sys.executable, folder=str(real), modules=MODULES, address=address)
        for program in real.iterdir():
            if program.name.startswith("fairseq-") or program.name in ("python", "python3"):
                (self.folder / program.name).write_text(client)
                (self.folder / program.name).chmod(0o755)
            else:
                (self.folder / program.name).symlink_to(program)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        words = [sys.executable, __file__, address, self.folder / "python"]
        self.server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/")
        self.server.stdout.readline()

    def close(self) -> None:
        # Its input does not end by closing it: workers of a data loader that were forked from here hold it too.
        self.server.kill()
        self.server.wait()
        self.server.stdin.close()
        self.server.stdout.close()
        self.temporary.cleanup()


if __name__ == "__main__":
    import gc
    import importlib

    for library in LIBRARIES:
        importlib.import_module(library)
    del sys.path[0]  # the folder of this file
    sys.executable = sys.argv[2]
    multiprocessing.set_executable(sys.executable)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen(64)
    gc.freeze()
    print("ready", flush=True)
    question = serve(listening)
    code = 0
    try:
        run(question)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code)
