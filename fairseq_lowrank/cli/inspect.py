"""Show the composition of a checkpoint's attention, its learned parts, and with --spectrum the rank of its attention on data.

First the choice on every axis, at each site, also of a stock checkpoint. Then, if the checkpoint has these:

Mixhead: for the mixing matrix M of each layer
  a heat map of M − I (row j, column i: the change of head j's weight in mixed head i)
  the distance from the identity, at which M is initialised
  the distance from orthogonal (the square root of the paper's regulariser R_orth, equation 16)
  the share of other heads in M
  the column sums, mean (smallest to largest): the sum of a mixed head's weights, 1 at first; below 1, attention is damped
With position-wise mixing, M depends on the query. Then the base B is shown or, with --data, the mean M_t over real queries. For a
plugin's rule the weight W is shown. The rule may compute a different M from it.

Talking heads: the same for L, which mixes the scores before the softmax.

MHE: the norm of each head's query, key and value embedding. Other learned parts: the norm.

  fairseq-lowrank inspect mixhead-a/checkpoint_best.pt --output pictures/
  fairseq-lowrank inspect mixhead-b/checkpoint_best.pt --data data-bin/multi30k --sequences 100
  fairseq-lowrank inspect --transformers FOLDER            what apply_attention added, and save_pretrained or save_attention wrote

--spectrum computes the singular values of every head's attention matrix instead, mixed and before dropout, on sequences of data. It
draws the normalised cumulative curves of each layer and on average (the Mixhead paper's figures 1 and 3): the closer to the upper
left corner, the lower the rank. It prints means over sequences, heads and layers of each site (encoder, decoder, cross):

  effective rank   exp of the entropy of the singular values' shares (Roy and Vetterli 2007)
  rank share       effective rank divided by the greatest possible rank
  area             area under the curve: 0.5 if all singular values are equal, near 1 at rank one
  mass in d_k      share of the first d_k singular values in the sum, for head size d_k

  fairseq-lowrank inspect --spectrum mha.pt mixhead.pt --labels mha mixhead-a --output pictures/
  fairseq-lowrank inspect --spectrum lm.pt --data data-bin/wikitext-103 --subset test --length 512 --sequences 8
  fairseq-lowrank inspect --spectrum --transformers FOLDER --text FILE      a line is a sequence; the folder's tokenizer cuts it

Sequences are drawn with a fixed seed, and each batch has one, so there is no padding. A Transformer-XL reads each sequence without
memory, so that matrices are square. Compare checkpoints on the same data: curves of different lengths are stretched to one
axis. The rank of causal matrices cannot be very low, because they are triangular and have a diagonal.
"""

from pathlib import Path

from fairseq_lowrank.cli import _composition, _data, _output, _spectra
from fairseq_lowrank.messages import FlagError, UserError, flag_name

NAME = "inspect"
HELP = "show a checkpoint's attention: its axes, learned parts, and the singular values of its matrices"
OF_SPECTRUM = ("text", "labels")


def add_arguments(parser) -> None:
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="*",
        metavar="CKPT",
        help="a checkpoint of fairseq-train; with --spectrum several",
    )
    _output.add_transformers_argument(parser)
    parser.add_argument("--spectrum", action="store_true", help="compute the singular values of attention on data")
    _data.add_data_arguments(parser, "default: show what needs no data; with --spectrum the model's own")
    group = parser.add_argument_group("with --spectrum")
    group.add_argument("--text", type=Path, metavar="FILE", help="text for --transformers, a sequence a line")
    group.add_argument("--labels", nargs="+", metavar="NAME", help="names of checkpoints (default: from their paths)")
    _output.add_output_arguments(parser, "inspect.json or spectrum.json, the same as .csv, pictures as .png and .pdf")


def run(args) -> None:
    check(args)
    _output.publish(args, _spectra.view(args) if args.spectrum else _composition.view(args))


def check(args) -> None:
    """Check the models, and that each flag goes with them.

    Raises:
        UserError: see the messages.
    """
    if not (args.checkpoints or args.transformers):
        raise UserError("no model given. Add a checkpoint, or --transformers FOLDER.")
    if not args.spectrum:
        if given := [flag_name(name) for name in OF_SPECTRUM if getattr(args, name)]:
            raise UserError(f"{given[0]} works only with --spectrum. Add it, or remove {given[0]}.")
        if len(args.checkpoints) > 1:
            raise UserError(f"{args.checkpoints[1]}: only --spectrum takes several checkpoints. Add it, or give one.")
    if args.transformers:
        check_transformers(args)
    elif args.text is not None:
        raise FlagError("--text", args.text, "works only with --transformers FOLDER", "Add it, or remove --text.")
    _data.check_data_arguments(args, without_data=args.spectrum)


def check_transformers(args) -> None:
    """Refuse what a model of transformers cannot have, and a spectrum without a text."""
    names = ("subset", "length") if args.spectrum else _data.SEQUENCES
    of_fairseq = {name: _data.SEQUENCES[name] for name in names}
    of_fairseq |= {"checkpoints": [], "data": None}
    _output.refuse_with_transformers(args, of_fairseq)
    if not args.spectrum:
        return
    if args.text is None:
        raise FlagError("--transformers", args.transformers, "there is no text to measure on", "Add --text FILE.")
    if not args.text.is_file():
        raise FlagError("--text", args.text, "there is no such file", "Give a text, a sequence a line.")
