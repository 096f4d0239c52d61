"""Train with several workers: one process for each GPU, or several on the CPU, on one machine or on many.

    fairseq-lowrank launch --workers 8 -- fairseq-train DATA --arch lowrank_transformer …

It starts torchrun, which starts the workers. N workers make the same updates as one process with N times its --update-freq.
Without a GPU, or with --cpu after the dashes, the workers share the CPU and communicate by gloo. Except for --user-dir, which
the command adds if it is missing, this is the same as

    torchrun --standalone --nproc-per-node 8 -m fairseq_cli.train DATA --user-dir … --arch lowrank_transformer …

On several machines, run it once on each, with the name of the first machine and a free port:

    fairseq-lowrank launch --workers 8 --nodes 2 --rendezvous node1:29500 -- fairseq-train DATA …

Under Slurm, in a script for sbatch with --nodes 2 --ntasks-per-node 1 --gpus-per-node 8:

    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun fairseq-lowrank launch --workers 8 --nodes "$SLURM_NNODES" --rendezvous "$first:29500" -- fairseq-train DATA …
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from fairseq_lowrank.messages import FlagError, UserError

NAME = "launch"
HELP = "train with several workers, on GPUs, on the CPU or on several machines"

# Not fairseq-validate: with several workers it fails on the CPU, and if workers have different numbers of batches.
COMMAND, MODULE = "fairseq-train", "fairseq_cli.train"
TORCHRUN = "torch.distributed.run"


def add_arguments(parser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="workers on this machine (default: its GPUs)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="with --nodes: the first machine and a free port")
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument("fairseq_command", nargs=argparse.REMAINDER, metavar="-- fairseq-train …")


def run(args: argparse.Namespace) -> int:
    command = torchrun(args)
    print(shlex.join(command), flush=True)
    if args.dry_run:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers(args))))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(command[command.index(TORCHRUN) + 1 :]))
    except ChildFailedError as error:
        return report_failure(error.failures)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def report_failure(failures: dict) -> int:
    """Print why the first worker failed, and return its exit code.

    Args:
        failures: torchrun's ``ProcessFailure`` of each worker, by its rank. torchrun stops the others when one fails.
    """
    reported = {rank: failure for rank, failure in failures.items() if failure.error_file_data["message"] != "<NONE>"}
    rank, first = min((reported or failures).items(), key=lambda item: item[1].timestamp)
    message = first.message if reported or first.exitcode < 0 else f"ended with code {first.exitcode}, see above"
    print(f"fairseq-lowrank {NAME}: error: worker {rank}: {message}", file=sys.stderr)
    return max(first.exitcode, 1)


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
    if args.nodes < 1:
        raise FlagError("--nodes", args.nodes, "expected a number >= 1", "Give a number of machines.")
    if (args.nodes > 1) != bool(args.rendezvous):
        raise UserError("--nodes above 1 and --rendezvous HOST:PORT go together. Add the other, or remove both.")
    if args.rendezvous:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", args.rendezvous, "--rdzv-id", "fairseq-lowrank"]
    else:
        meeting = ["--standalone"]
    if not any(part.partition("=")[0] == "--user-dir" for part in rest):
        rest += ["--user-dir", str(Path(__file__).resolve().parent.parent)]
    return [
        *(sys.executable, "-m", TORCHRUN, "--nnodes", str(args.nodes)),
        *("--nproc-per-node", str(workers(args)), *meeting, "-m", MODULE, *rest),
    ]
