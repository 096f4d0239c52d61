"""Sizes of a language model's embedding that do not work with our flags for it."""

import argparse

from fairseq_lowrank.messages import UserError


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
