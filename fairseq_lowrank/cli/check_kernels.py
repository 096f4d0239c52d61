"""Compare the kernels of the triton backend with the reference in float64 on random problems: values and all gradients.

  fairseq-lowrank check-kernels                            1,000 cases on the GPU, in bfloat16
  fairseq-lowrank check-kernels --dtype float32 --cases 100
  TRITON_INTERPRET=1 fairseq-lowrank check-kernels --device cpu --cases 5     without a GPU, interpreted

The cases have all lengths, head sizes, groups, masks, mixing before and after the softmax, and activations. Kernels are
compiled for 24 of these compositions (--compositions), which takes a few minutes. The exit status is 1 if a case is wrong.
"""

NAME = "check-kernels"
HELP = "compare the GPU kernels with the reference on random problems"


def add_arguments(parser) -> None:
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="random problems (default: 1000)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--compositions", type=int, default=24, metavar="N", help="to be compiled (default: 24)")
    parser.add_argument(
        "--longest", type=int, metavar="N", help="queries and keys at most (default: 200; 20 on the CPU)"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args) -> int:
    import torch

    from fairseq_lowrank.ops.attention import triton

    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    longest = args.longest if args.longest is not None else 200 if device.type == "cuda" else 20
    for flag, number in (("--cases", args.cases), ("--compositions", args.compositions), ("--longest", longest)):
        if number < 1:
            raise ValueError(f"{flag} {number}: expected 1 or more")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {args.device}: there is no GPU; TRITON_INTERPRET=1 and --device cpu interpret the kernels"
        )
    if (reason := triton.unavailable(device, dtype)) is not None:
        raise ValueError(f"--device {args.device}, --dtype {args.dtype}: {reason}")
    from fairseq_lowrank.ops.attention import selfcheck

    wrong = 0
    calls = selfcheck.random_calls(args.cases, device, dtype, args.seed, longest, args.compositions)
    for index, call in enumerate(calls):
        if (reason := selfcheck.trial(call).wrong) is not None:
            wrong += 1
            print(f"case {index}, {selfcheck.describe(call)}: {reason}", flush=True)
    if wrong:
        print(f"{wrong} of {args.cases} random cases are wrong")
        return 1
    print(f"{args.cases} random cases: all right")
    return 0
