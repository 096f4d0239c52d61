"""Sizes that fairseq's models take without a word, or drown in a traceback: refused where a model has an attention flag."""

import argparse
import math

from fairseq.utils import eval_str_list

from fairseq_lowrank.messages import UserError


def _of_both_sides(*templates: str) -> tuple[str, ...]:
    return tuple(template.format(side) for template in templates for side in ("encoder", "decoder"))


_SIZES = (
    *_of_both_sides("{}_embed_dim", "{}_ffn_embed_dim", "{}_attention_heads", "{}_layers"),
    *("decoder_input_dim", "decoder_output_dim", "max_source_positions", "max_target_positions"),
)
_DROPOUTS = (
    *("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"),
    *_of_both_sides("{}_layerdrop"),
)


def check_sizes(args: object) -> None:
    """Refuse sizes and probabilities that fairseq's Transformer takes without a word, or drowns in a traceback.

    Raises:
        ValueError: a flag whose value is refused, named with what would be accepted.
    """
    for name in _SIZES:
        if isinstance(size := getattr(args, name, None), (int, float)) and size < 1:
            raise UserError(f"{_flag(name)} {size}: expected a number >= 1")
    for name in _DROPOUTS:
        if isinstance(rate := getattr(args, name, None), (int, float)) and not 0 <= rate < 1:
            raise UserError(f"{_flag(name)} {rate:g}: expected a number from 0 to below 1")
    for side in ("encoder", "decoder"):
        check_layers_to_keep(args, side)
    for part in ("softmax", "input"):
        check_cutoff(f"adaptive_{part}_cutoff", getattr(args, f"adaptive_{part}_cutoff", None))
        if (factor := getattr(args, f"adaptive_{part}_factor", None)) is not None and not 0 < factor < math.inf:
            raise UserError(f"--adaptive-{part}-factor {factor:g}: expected a number above 0")


def check_layers_to_keep(args: object, side: str) -> None:
    """Refuse ``--encoder-layers-to-keep`` and ``--decoder-layers-to-keep`` that name no layer of the model, or one twice."""
    if not (kept := getattr(args, f"{side}_layers_to_keep", None)):
        return
    layers = getattr(args, f"{side}_layers")
    numbers = [number.strip() for number in str(kept).split(",")]
    # a model that was loaded has been shortened to the layers that it kept
    there = set(numbers) <= set(map(str, range(layers))) or len(numbers) == layers
    if not there or len(set(numbers)) < len(numbers):
        raise UserError(f"--{side}-layers-to-keep {kept}: expected different layers from 0 to {layers - 1}, such as 0")


def check_cutoff(name: str, cutoff: object) -> None:
    """Refuse bands of an adaptive input or softmax that are no numbers, or do not rise."""
    if not cutoff:
        return
    try:
        numbers = eval_str_list(cutoff, type=int)
    except TypeError:
        numbers = [0]
    if any(low >= high for low, high in zip([0, *numbers], numbers, strict=False)):
        given = cutoff if isinstance(cutoff, str) else ",".join(map(str, cutoff))
        raise UserError(f"{_flag(name)} {given}: expected rising numbers of words, such as 20000,60000")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_language_model(args: argparse.Namespace) -> None:
    """Refuse what a language model's flags can't mean together.

    Raises:
        ValueError: see the messages.
    """
    if getattr(args, "embed_rank", None) is not None:
        _check_embed_rank(args)
    if getattr(args, "embed_kernel", None) is not None:
        _check_embed_kernel(args)
    _check_adaptive(args)
    _check_quantisation_noise(args)


def _check_embed_rank(args: argparse.Namespace) -> None:
    rank = args.embed_rank
    if not 1 <= rank <= args.decoder_embed_dim:
        raise UserError(f"--embed-rank {rank}: expected 1 to {args.decoder_embed_dim} (--decoder-embed-dim)")
    conflicts = {
        "--adaptive-input": (args.adaptive_input, "it gives every band of words a rank of its own"),
        "--adaptive-softmax-cutoff": (
            args.adaptive_softmax_cutoff,
            "it factors the output matrix, which stays full here",
        ),
        "--character-embeddings": (args.character_embeddings, "it has no embedding matrix to factor"),
        "--share-decoder-input-output-embed": (
            args.share_decoder_input_output_embed,
            "it would make the output matrix low-rank too",
        ),
    }
    for flag, (given, reason) in conflicts.items():
        if given:
            raise UserError(f"--embed-rank {rank} does not go with {flag}: {reason}")
    if args.decoder_output_dim < args.decoder_embed_dim:
        raise UserError(
            f"--embed-rank {rank} keeps the output matrix full, but --decoder-output-dim {args.decoder_output_dim} "
            f"is below --decoder-embed-dim {args.decoder_embed_dim}"
        )


def _check_embed_kernel(args: argparse.Namespace) -> None:
    kernel, longest = args.embed_kernel, getattr(args, "max_target_positions", None) or args.tokens_per_sample
    if not 2 <= kernel <= longest:
        raise UserError(f"--embed-kernel {kernel}: expected 2 to {longest}, the length of a sequence")
    for flag, given in {
        "--adaptive-input": args.adaptive_input,
        "--character-embeddings": args.character_embeddings,
    }.items():
        if given:
            raise UserError(f"--embed-kernel {kernel} does not go with {flag}: it reads one embedding matrix")
    if (noise := getattr(args, "quant_noise_scalar", 0)) > 0:
        raise UserError(
            f"--quant-noise-scalar {noise:g} does not go with --embed-kernel {kernel}: fairseq has no such noise for a convolution of "
            "embeddings; expected 0, or --quant-noise-pq"
        )


def _check_quantisation_noise(args: argparse.Namespace) -> None:
    """fairseq's noise of embeddings is a layer as wide as the model."""
    if getattr(args, "quant_noise_pq", 0) and not (args.adaptive_input or args.character_embeddings):
        width = getattr(args, "embed_rank", None) or args.decoder_input_dim
        if width != args.decoder_embed_dim:
            flag = "--embed-rank" if getattr(args, "embed_rank", None) else "--decoder-input-dim"
            raise UserError(
                f"--quant-noise-pq {args.quant_noise_pq:g} does not go with {flag} {width}: fairseq's noise takes embeddings as "
                f"wide as the model; expected {args.decoder_embed_dim} (--decoder-embed-dim)"
            )


def embedding_flags(args: object) -> dict[str, int]:
    """The flags for the input embedding of a language model that are given, with their values."""
    values = {name: getattr(args, name, None) for name in ("embed_rank", "embed_kernel")}
    return {_flag(name): value for name, value in values.items() if value is not None}


def _check_adaptive(args: argparse.Namespace) -> None:
    """Adaptive input needs a cutoff, and its weights can be tied only to an adaptive softmax of the same bands."""
    if args.adaptive_input and not args.adaptive_input_cutoff:
        raise UserError("--adaptive-input needs --adaptive-input-cutoff, such as 20000,60000")
    if not args.tie_adaptive_weights or not args.adaptive_softmax_cutoff:
        return
    if not args.adaptive_input:
        raise UserError("--tie-adaptive-weights needs --adaptive-input, whose weights are tied")
    for name, of_input, of_softmax in (
        ("factor", args.adaptive_input_factor, args.adaptive_softmax_factor),
        ("cutoff", args.adaptive_input_cutoff, args.adaptive_softmax_cutoff),
    ):
        if of_input != of_softmax:
            raise UserError(
                f"--tie-adaptive-weights needs the same --adaptive-input-{name} and --adaptive-softmax-{name}: "
                f"{of_input} and {of_softmax}"
            )
    if args.decoder_input_dim != args.decoder_output_dim:
        raise UserError(
            "--tie-adaptive-weights needs the same --decoder-input-dim and --decoder-output-dim: "
            f"{args.decoder_input_dim} and {args.decoder_output_dim}"
        )
