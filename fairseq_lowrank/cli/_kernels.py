"""The check of `fairseq-lowrank env --kernels`: kernels against the reference in float64, values and all gradients.

Lengths, head sizes, groups, masks, mixing before and after the softmax, and activations are random. Kernels are compiled for
24 compositions (--compositions), which takes a few minutes. Kernels that do not fit into the shared memory of a GPU are counted;
there, --attention-backend auto takes other kernels or blocked. At the end, lines say what auto takes for common layers and why,
and if these kernels equal the reference. The exit status is 1 if a case or a common layer is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fairseq_lowrank.messages import FlagError, UserError

if TYPE_CHECKING:
    import torch

    from fairseq_lowrank.ops import AttentionCall


def add_arguments(parser) -> None:
    """Add the flags of the check to a group of `env`'s."""
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="random problems (default: 1000)")
    parser.add_argument("--device", default="cuda", help="device of the tensors (default: cuda)")
    parser.add_argument(
        "--backend", default="triton", choices=("triton", "tiled"), help="kernels to check (default: triton)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the tensors (default: bfloat16)",
    )
    parser.add_argument(
        "--compositions", type=int, default=24, metavar="N", help="number of compositions to compile (default: 24)"
    )
    parser.add_argument(
        "--longest", type=int, metavar="N", help="greatest number of queries and keys (default: 200; 20 on the CPU)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="seed of the problems (default: 0)")
    parser.add_argument("--random-only", action="store_true", help="check no common layers")


def run(args) -> int:
    import torch

    from fairseq_lowrank.ops.attention import tiled, triton

    backend = tiled if args.backend == "tiled" else triton
    if args.device.partition(":")[0] not in ("cuda", "cpu"):
        raise FlagError("--device", args.device, "expected a GPU or the CPU", "Give cuda, cuda:1 or cpu.")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    longest = args.longest if args.longest is not None else 200 if device.type == "cuda" else 20
    for flag, number in (("--cases", args.cases), ("--compositions", args.compositions), ("--longest", longest)):
        if number < 1:
            raise FlagError(flag, number, "expected a number >= 1", "Give a positive number.")
    if device.type == "cuda" and not torch.cuda.is_available():
        remedy = "Set TRITON_INTERPRET=1 and add --device cpu to interpret the kernels."
        raise FlagError("--device", args.device, "there is no GPU", remedy)
    if (reason := backend.device_unsupported_reason(device, dtype)) is not None:
        raise UserError(f"--device {args.device}, --dtype {args.dtype}: {reason}. Choose another device or dtype.")
    from fairseq_lowrank.ops.attention import selfcheck

    wrong = larger = 0
    calls = random_calls(args.cases, device, dtype, args.seed, longest, args.compositions, backend.unsupported_reason)
    for index, call in enumerate(calls):
        result = selfcheck.self_check(call, args.backend)
        larger += not result.fits
        if result.fits and result.error is not None:
            wrong += 1
            print(f"case {index}, {selfcheck.describe(call)}: {result.error}", flush=True)
    if larger:
        print(f"{larger} of {args.cases} random cases need more shared memory than this GPU has, and were not computed")
    computed = args.cases - larger
    print(f"{wrong} of {computed} random cases are wrong" if wrong else f"{computed} random cases: all right")
    if device.type == "cuda" and not args.random_only:
        for name, call in common_calls(device, dtype).items():
            choice, right = describe_choice(call)
            wrong += not right
            print(f"auto for {name}: {choice}")
    return int(wrong > 0)


def describe_choice(call: AttentionCall) -> tuple[str, bool]:
    """Return what ``auto`` takes for ``call``, why, and results of self-checks; and if the checked kernels are right.

    Backends with kernels of ours are checked from the fastest to the first that ``auto`` may take.
    """
    from fairseq_lowrank.ops.attention import auto, selfcheck

    said, right = [], True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a line says it
        for backend in auto.KERNELS:
            if auto.BACKENDS[backend].device_unsupported_reason(call.v.device, call.v.dtype) is not None:
                continue
            result = selfcheck.checked(call, backend)
            said.append(f"{backend} {result}")
            right = right and (result.error is None or not result.fits)
            if result.error is None:
                break
        return "; ".join([auto.explain(call), *said]), right


def random_calls(
    count: int,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
    longest: int,
    compositions: int,
    refused: Callable[[AttentionCall], str | None] = lambda call: None,
) -> Iterator[AttentionCall]:
    """Yield random calls with lengths up to ``longest``, which alternate between ``compositions`` random compositions.

    Where ``refused`` gives a reason, the call has heads of 16 or 32.
    """
    import torch

    from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
    from fairseq_lowrank.ops.activation import ACTIVATIONS
    from fairseq_lowrank.ops.attention.selfcheck import random_call

    generator = torch.Generator().manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    drawn = []
    for _ in range(min(count, compositions)):
        heads = one_of(2, 3, 4, 8, 12, 16, 32)
        groups = [divisor for divisor in range(1, heads + 1) if heads % divisor == 0]
        sizes = one_of(*groups), one_of(*groups), number(1, 128), number(1, 128)
        rules = one_of(None, StaticMixing), one_of(None, StaticMixing, PositionwiseMixing)
        masks = one_of(True, False), one_of(True, False), one_of("none", "none", "bool", "float")
        drawn.append((heads, sizes, rules, masks, one_of(*ACTIVATIONS)))
    for index in range(count):
        heads, (key_groups, value_groups, dim, value_dim), rules, (causal, padded, kind), activation = drawn[
            index % len(drawn)
        ]
        batch, queries, keys = number(1, 2), number(1, longest), number(1, longest)
        padding = torch.rand(batch, keys, generator=generator) < 0.3 if padded else None
        shape = one_of((queries, keys), (batch, 1, 1, keys), (batch, heads, queries, keys))
        drawn_mask = torch.randn(shape, generator=generator)
        hidden = drawn_mask < -1
        additive = {"none": None, "bool": hidden, "float": drawn_mask.masked_fill(hidden, float("-inf"))}[kind]
        shapes = key_groups, value_groups, queries, keys, dim, value_dim
        mask = AttentionMask(causal, padding, additive)
        call = random_call(generator, device, dtype, batch, heads, shapes, rules, mask, activation, None)
        if refused(call) is not None:
            small, small_value = (16 if size <= 16 else 32 for size in (dim, value_dim))
            shapes = *shapes[:4], small, small_value
            call = random_call(generator, device, dtype, batch, heads, shapes, rules, mask, activation, None)
        yield call


def common_calls(device: torch.device, dtype: torch.dtype | None = None) -> dict[str, AttentionCall]:
    """Return a call each of Mixhead A, Mixhead B, talking heads and sigsoftmax with 16 heads of 64, and of Mixhead A with 8.

    They are in ``dtype``, by default bfloat16.
    """
    import torch

    from fairseq_lowrank.ops import AttentionMask, PositionwiseMixing, StaticMixing
    from fairseq_lowrank.ops.activation import ACTIVATIONS
    from fairseq_lowrank.ops.attention.selfcheck import random_call

    kinds = {
        "static mixing": ((None, StaticMixing), "softmax", 16),
        "static mixing of 8 heads": ((None, StaticMixing), "softmax", 8),
        "mixing by query": ((None, PositionwiseMixing), "softmax", 16),
        "mixing before and after": ((StaticMixing, StaticMixing), "softmax", 16),
        **{name: ((None, None), name, 16) for name in ACTIVATIONS if name != "softmax"},
    }
    generator, dtype = torch.Generator().manual_seed(0), dtype or torch.bfloat16

    def call(rules, activation: str, heads: int) -> AttentionCall:
        sizes = (heads, heads, 40, 40, 64, 64)
        return random_call(generator, device, dtype, 1, heads, sizes, rules, AttentionMask(True), activation, None)

    return {name: call(*kind) for name, kind in kinds.items()}
