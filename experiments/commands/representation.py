"""Test what heads of a given size can represent: the representation theorem, or an entire layer with --theorem 2.

Theorem 1 (default). Random positive matrices whose rows sum to one are fitted by softmax(X W_q (X W_k)ᵀ/√d_k), for a range
of head sizes:

  closed form   the theorem's construction, exact from d_k = n − 1 on
  gradient      Adam, for one head, for h heads mixed into one matrix, and for h heads mixed into h matrices

If h small heads are mixed into one matrix, they fit it far better than their size allows. If each of the h heads must produce
an unrelated matrix, mixing leads by little. Below about 1e-3 the gradient's error depends on its number of steps. The theorem
needs X of full row rank, which text does not have: with --input-rank R below the length no head size is enough.

Theorem 2. Layers of h heads, of size d/h and larger, are fitted to a layer of h heads of size d_p. By the theorem, no layer with
heads of size d/h can equal it. Inputs are from spaces of several dimensions; if the dimension is d/h or less, it can. We do not
have the paper's proof, which is in an appendix; experiments/fixed_heads.py has another.

Source: Theorems 1 and 2 of Bhojanapalli et al. 2020 (ICML), on which the Mixhead paper builds. The command takes under two
minutes.

  python -m experiments representation
  python -m experiments representation --length 32 --heads 8 --output fits/
  python -m experiments representation --input-rank 8
  python -m experiments representation --theorem 2 --embed-dim 16 --heads 8 --head-dims 8 --input-rank 16 4 2
"""

from fairseq_lowrank.cli import _output
from fairseq_lowrank.messages import UserError

NAME = "representation"
HELP = "fit attention matrices, or layers, with heads of every size (theorems 1 and 2 of the FixedHead paper)"


def add_arguments(parser) -> None:
    parser.add_argument("--theorem", type=int, choices=(1, 2), default=1, help="theorem to test (default: %(default)s)")
    parser.add_argument("--length", type=int, metavar="N", help="sequence length n (default 16; theorem 2: 8)")
    parser.add_argument(
        "--heads", type=int, metavar="H", help="number of heads; theorem 1 mixes them (default 4; theorem 2: 8)"
    )
    parser.add_argument("--matrices", type=int, metavar="R", help="theorem 1: number of problems (default 4)")
    parser.add_argument(
        "--head-dims",
        type=int,
        nargs="+",
        metavar="D",
        help="head sizes (default: powers of two, and n − 2 to n + 1); theorem 2: the size of the fixed heads (default 8)",
    )
    parser.add_argument(
        "--embed-dim", type=int, metavar="D", help="width of the hidden states X (default n; theorem 2: 16)"
    )
    parser.add_argument(
        "--input-rank",
        type=int,
        nargs="+",
        metavar="R",
        help="rank of X (default n); theorem 2: one or more ranks (default: d, d/2, … d/h)",
    )
    parser.add_argument(
        "--steps", type=int, metavar="S", help="number of updates of a fit (default 1000; theorem 2: 500)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default %(default)s)")
    _output.add_output_arguments(parser, "representation.csv and .json")


def run(args) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads are slower for such small matrices
    try:
        (run_theorem_1 if args.theorem == 1 else run_theorem_2)(args)
    finally:
        torch.set_num_threads(before)


def run_theorem_1(args) -> None:
    from experiments import representation

    length, heads, matrices, steps = (
        default if given is None else given
        for given, default in ((args.length, 16), (args.heads, 4), (args.matrices, 4), (args.steps, 1000))
    )
    rank = only_one(args, "input_rank", "--theorem 1 needs one rank of X. Give one number.")
    fits = representation.experiment(
        length,
        heads,
        matrices,
        args.head_dims,
        embed_dim=args.embed_dim,
        input_rank=rank,
        steps=steps,
        seed=args.seed,
    )
    rows = representation.as_rows(fits)
    data = {
        "length": length,
        "heads": heads,
        "matrices": matrices,
        "embed_dim": args.embed_dim or length,
        "input_rank": rank or length,
        "steps": steps,
        "seed": args.seed,
        "fits": rows,
    }
    _output.show(args, data, as_text(fits, length, heads, rank))
    _output.write(args, NAME, data, rows, {})


def run_theorem_2(args) -> None:
    from experiments import fixed_heads

    if args.matrices is not None:
        raise UserError(f"--matrices {args.matrices}: works only with --theorem 1. Remove it.")
    sizes = {"n": args.length, "embed_dim": args.embed_dim, "heads": args.heads, "steps": args.steps}
    sizes["head_dim"] = only_one(args, "head_dims", "--theorem 2 needs one size of the fixed heads. Give one number.")
    given = {name: value for name, value in sizes.items() if value is not None}
    fits = fixed_heads.experiment(input_ranks=args.input_rank, seed=args.seed, **given)
    rows = fixed_heads.as_rows(fits)
    data = {"theorem": 2, **given, "seed": args.seed, "fits": rows}
    _output.show(args, data, layers_as_text(fits))
    _output.write(args, f"{NAME}-layers", data, rows, {})


def only_one(args, name: str, expected: str) -> int | None:
    """Return the single value of an option that may have several; None if it is not given."""
    values = getattr(args, name)
    if values is not None and len(values) > 1:
        raise UserError(f"--{name.replace('_', '-')} {' '.join(map(str, values))}: {expected}")
    return values and values[0]


def as_text(fits, length: int, heads: int, input_rank: int | None = None) -> str:
    methods = list(dict.fromkeys((fit.method, fit.series) for fit in fits))
    errors = {(fit.method, fit.series, fit.head_dim): fit.error for fit in fits}
    rows = [
        [head_dim, *(f"{errors[method, series, head_dim]:.1e}" for method, series in methods)]
        for head_dim in dict.fromkeys(fit.head_dim for fit in fits)
    ]
    header = ["head size", *(f"{method}: {series}" for method, series in methods)]
    title = f"relative error ‖P̂ − P‖ / ‖P‖ for random row-stochastic {length}×{length} matrices, h = {heads}"
    if input_rank is not None:
        title += f", X of rank {input_rank}"
    return f"{title}\n{_output.table(header, rows)}"


def layers_as_text(fits) -> str:
    ranks = list(dict.fromkeys(fit.input_rank for fit in fits))
    sizes = sorted({fit.head_dim for fit in fits})
    errors = {(fit.head_dim, fit.input_rank): fit.error for fit in fits}
    rows = [[size, *(f"{errors[size, rank]:.1e}" for rank in ranks)] for size in sizes]
    title = (
        f"error ‖f(X) − g(X)‖ / ‖g(X)‖ of layers of {fits[0].heads} heads fitted to one with heads of size {sizes[-1]}; "
        f"head size {sizes[0]} is the standard d/h"
    )
    return f"{title}\n{_output.table(['head size', *(f'inputs of rank {rank}' for rank in ranks)], rows)}"
