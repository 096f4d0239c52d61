"""Checks of the flags for the embedding of a language model."""

import argparse

from fairseq_lowrank.messages import UserError


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_language_model(args: argparse.Namespace) -> None:
    """Refuse flags of a language model's embedding that do not work together.

    Raises:
        UserError: see the messages.
    """
    if getattr(args, "embed_rank", None) is not None:
        _check_embed_rank(args)
    if getattr(args, "embed_kernel", None) is not None:
        _check_embed_kernel(args)


def _check_embed_rank(args: argparse.Namespace) -> None:
    rank = args.embed_rank
    if not 1 <= rank <= args.decoder_embed_dim:
        raise UserError(f"--embed-rank {rank}: expected 1 to {args.decoder_embed_dim} (--decoder-embed-dim).")
    conflicts = {
        "--adaptive-input": (args.adaptive_input, "it gives each band of words a different rank"),
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
            raise UserError(f"--embed-rank {rank} does not work with {flag}: {reason}. Remove one of the two.")
    if args.decoder_output_dim < args.decoder_embed_dim:
        raise UserError(
            f"--embed-rank {rank} needs a full output matrix, but --decoder-output-dim {args.decoder_output_dim} "
            f"is below --decoder-embed-dim {args.decoder_embed_dim}. Remove --decoder-output-dim."
        )


def _check_embed_kernel(args: argparse.Namespace) -> None:
    kernel, longest = args.embed_kernel, getattr(args, "max_target_positions", None) or args.tokens_per_sample
    if not 2 <= kernel <= longest:
        raise UserError(f"--embed-kernel {kernel}: expected 2 to {longest}, the greatest length of a sequence.")
    for flag, given in {
        "--adaptive-input": args.adaptive_input,
        "--character-embeddings": args.character_embeddings,
    }.items():
        if given:
            raise UserError(
                f"--embed-kernel {kernel} does not work with {flag}: the convolution needs one embedding matrix. "
                "Remove one of the two."
            )


def embedding_flags(args: object) -> dict[str, int]:
    """Return the flags for the input embedding of a language model that are given, with their values."""
    values = {name: getattr(args, name, None) for name in ("embed_rank", "embed_kernel")}
    return {_flag(name): value for name, value in values.items() if value is not None}
