"""Train with several workers: one process for each GPU, or several on the CPU, on one machine or on many.

    fairseq-lowrank launch --workers 8 -- fairseq-train DATA --arch lowrank_transformer …

It starts torchrun, which starts the workers. N workers make the same updates as one process with N times its --update-freq.
(With --update-freq above 1, fairseq divides the last gradient of an epoch by too few tokens. LOWRANK_ENABLE=last-update counts
them all.) Without a GPU, or with --cpu after the dashes, the workers share the CPU and communicate by gloo. Except for
--user-dir, which the command adds if it is missing, this is the same as

    torchrun --standalone --nproc-per-node 8 -m fairseq_cli.train DATA --user-dir … --arch lowrank_transformer …

If a worker dies, the others end. With --max-restarts N, torchrun then starts all of them again, up to N times, from the newest
checkpoint. SIGTERM and SIGUSR1 let them finish the update and save it; the command ends with 143 and 0. A second signal ends at
once.

On several machines, run it once on each, with the name of the first machine and a free port:

    fairseq-lowrank launch --workers 8 --nodes 2 --rendezvous node1:29500 -- fairseq-train DATA …

docs/long-trainings.md has a script for Slurm.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_lowrank.messages import FlagError, UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NAME = "launch"
HELP = "train with several workers, on GPUs, on the CPU or on several machines"
SHOWS_TIME = False

# Not fairseq-validate: with several workers it fails on the CPU, and if workers have different numbers of batches.
COMMAND, MODULE = "fairseq-train", "fairseq_cli.train"
TORCHRUN = "torch.distributed.run"


def add_arguments(parser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="workers on this machine (default: its GPUs)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="with --nodes: the first machine and a free port")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts after a worker died (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument("fairseq_command", nargs=argparse.REMAINDER, metavar="-- fairseq-train …")


def run(args: argparse.Namespace) -> int:
    command = torchrun(args)
    print(shlex.join(command), flush=True)
    if args.dry_run:
        return 0
    with tempfile.TemporaryDirectory() as ended, environment(variables(args, ended)):
        return run_workers(command[command.index(TORCHRUN) + 1 :], Path(ended), workers(args))


def variables(args: argparse.Namespace, ended: str) -> dict[str, str]:
    """Return the environment variables of the workers. A variable of the user's that torchrun reads stays as it is."""
    own = {"LOWRANK_LAUNCHER": str(os.getpid()), "LOWRANK_LAUNCHED": str(time.time()), "LOWRANK_ENDED": ended}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers(args))),
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": "600",  # seconds to finish an update and save it
    }
    if args.max_restarts:  # the workers of an earlier start leave their addresses in a store that is shared
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return own | {name: value for name, value in defaults.items() if name not in os.environ}


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs: a later training of this process is not one of these workers."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_workers(words: list[str], ended: Path, count: int) -> int:
    """Run torchrun, and return the exit code.

    Args:
        words: the command line of torchrun.
        ended: a folder in which each worker that ends well makes a file.
        count: the number of workers on this machine.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(words))
    except ChildFailedError as error:
        return report_failure(*error.get_first_failure())
    except SignalException as error:
        if error.sigval == signal.SIGUSR1 and len(list(ended.iterdir())) == count:
            return 0
        return 128 + error.sigval
    return 0


def report_failure(rank: int, failure: "ProcessFailure") -> int:
    """Print why the first worker failed, and return its exit code."""
    reason = f"ended with code {failure.exitcode}, see above"
    if failure.error_file_data["message"] != "<NONE>":
        reason = failure.message
    elif failure.exitcode < 0:
        reason = f"ended by signal {-failure.exitcode}" + "; often: out of memory" * (
            failure.exitcode == -signal.SIGKILL
        )
    print(f"fairseq-lowrank {NAME}: error: worker {rank}: {reason}", file=sys.stderr)
    return max(failure.exitcode, 1)


def workers(args) -> int:
    """Return the number of workers to start on this machine: --workers, or one for each GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if args.workers is None:
        if gpus == 0:
            raise UserError("--workers: missing, and this machine has no GPU. Add it, such as --workers 2.")
        return gpus
    if args.workers < 1:
        raise FlagError("--workers", args.workers, "expected a number >= 1", "Give a number of processes.")
    if args.workers > gpus > 0 and "--cpu" not in args.fairseq_command:
        reason = f"this machine has {gpus} GPUs"
        raise FlagError("--workers", args.workers, reason, "Lower it, or add --cpu at the end to train without them.")
    return args.workers


def torchrun(args) -> list[str]:
    """Return the torchrun command for these arguments."""
    name, *rest = [part for part in args.fairseq_command if part != "--"] or [""]
    if Path(name).name != COMMAND:
        raise UserError(f"after -- comes {COMMAND} and its arguments, not {name or 'nothing'}. Add the command.")
    if (args.nodes > 1) != bool(args.rendezvous):
        raise UserError("--nodes above 1 and --rendezvous HOST:PORT go together. Add the other, or remove both.")
    if args.rendezvous:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", args.rendezvous, "--rdzv-id", "fairseq-lowrank"]
    else:
        meeting = ["--standalone"]
    restarts = ["--max-restarts", str(args.max_restarts)] if args.max_restarts else []
    if not any(part.partition("=")[0] == "--user-dir" for part in rest):
        rest += ["--user-dir", str(Path(__file__).resolve().parent.parent)]
    return [
        *(sys.executable, "-m", TORCHRUN, "--nnodes", str(args.nodes)),
        *("--nproc-per-node", str(workers(args)), *restarts, *meeting, "-m", MODULE, *rest),
    ]
