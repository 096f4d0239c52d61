"""Test the representation theorem: which n×n attention matrices can a head of size d_k produce?

Random positive matrices whose rows sum to one are fitted by softmax(X W_q (X W_k)ᵀ/√d_k), for a range of head sizes:

  closed form   the theorem's construction, exact from d_k = n − 1 on
  gradient      Adam, for one head, for h heads mixed into one matrix, and for h heads mixed into h matrices

Mixing lifts h small heads far above their size when they work on one matrix. Where each of the h heads has an
unrelated matrix of its own to produce, a mixture has nothing to share and gains little. Below about 1e-3 the
gradient's error is a matter of its number of steps.

Source: Theorem 1 of Bhojanapalli et al. 2020 (ICML), on which the Mixhead paper builds. Takes under two minutes.

  fairseq-lowrank representation
  fairseq-lowrank representation --length 32 --heads 8 --output pictures/
"""

from fairseq_lowrank.cli import _output

NAME = "representation"
HELP = "fit attention matrices with heads of every size (the representation theorem)"


def add_arguments(parser) -> None:
    parser.add_argument("--length", type=int, default=16, metavar="N", help="sequence length n (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, metavar="H", help="heads to mix (default %(default)s)")
    parser.add_argument(
        "--matrices", type=int, default=4, metavar="R", help="problems to average over (default %(default)s)"
    )
    parser.add_argument(
        "--head-dims", type=int, nargs="+", metavar="D", help="head sizes (default: powers of two, and n − 2 to n + 1)"
    )
    parser.add_argument("--embed-dim", type=int, metavar="D", help="width of the hidden states X (default n)")
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="S", help="updates of a gradient fit (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default %(default)s)")
    _output.add_output_arguments(parser, "representation.png, .pdf, .csv and .json")


def run(args) -> None:
    import torch

    from fairseq_lowrank.analysis import representation

    torch.set_num_threads(1)  # matrices this small only lose by more
    fits = representation.experiment(
        args.length,
        args.heads,
        args.matrices,
        args.head_dims,
        embed_dim=args.embed_dim,
        steps=args.steps,
        seed=args.seed,
    )
    rows = representation.as_rows(fits)
    data = {
        "length": args.length,
        "heads": args.heads,
        "matrices": args.matrices,
        "embed_dim": args.embed_dim or args.length,
        "steps": args.steps,
        "seed": args.seed,
        "fits": rows,
    }
    _output.show(args, data, as_text(fits, args.length, args.heads))
    figures = {NAME: representation.draw(fits, args.length, args.heads)} if args.output else {}
    _output.write(args, NAME, data, rows, figures)


def as_text(fits, length: int, heads: int) -> str:
    methods = list(dict.fromkeys((fit.method, fit.series) for fit in fits))
    errors = {(fit.method, fit.series, fit.head_dim): fit.error for fit in fits}
    rows = [
        [head_dim, *(f"{errors[method, series, head_dim]:.1e}" for method, series in methods)]
        for head_dim in dict.fromkeys(fit.head_dim for fit in fits)
    ]
    header = ["head size", *(f"{method}: {series}" for method, series in methods)]
    title = f"relative error ‖P̂ − P‖ / ‖P‖ for random row-stochastic {length}×{length} matrices, h = {heads}"
    return f"{title}\n{_output.table(header, rows)}"
