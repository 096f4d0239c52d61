"""Repair of sentencepiece's subwords: bytes become text."""

import functools
import re
from collections.abc import Callable

from fairseq_lowrank.files import LINE_BREAK
from fairseq_lowrank.repairs.patch import Patch

BYTES = re.compile(r"(?<!\S)<0x[0-9A-F]{2}>(?: <0x[0-9A-F]{2}>)*(?!\S)")
"""A run of subwords that are one byte each, as sentencepiece cuts unknown characters with ``byte_fallback``."""


def decode_bytes(pieces: str) -> str:
    """Return subwords of sentencepiece with each run of bytes replaced by its text in UTF-8.

    An invalid byte becomes U+FFFD, and a blank or a line break becomes the mark of a word's start.
    """

    def text(run: re.Match) -> str:
        decoded = bytes.fromhex(run[0].replace("<0x", "").replace(">", "")).decode("utf-8", "replace")
        return LINE_BREAK.sub("\u2581", decoded.replace(" ", "\u2581"))

    return BYTES.sub(text, pieces)


def join_with_bytes(post_process: Callable[[str, str], str]) -> Callable[[str, str], str]:
    """Wrap ``post_process``, which joins the subwords of ``--remove-bpe``."""

    @functools.wraps(post_process)
    def joined(sentence: str, symbol: str) -> str:
        return post_process(decode_bytes(sentence) if symbol == "sentencepiece" else sentence, symbol)

    return joined


def decode_with_bytes(decode: Callable) -> Callable:
    """Wrap ``SentencepieceBPE.decode``, which joins the subwords of ``--bpe sentencepiece``."""

    @functools.wraps(decode)
    def decoded(self, x: str) -> str:
        return decode(self, decode_bytes(x))

    return decoded


PATCHES = tuple(
    Patch(
        "byte-subwords",
        target,
        wrap,
        "Characters that sentencepiece cuts into bytes, such as <0xE2>, stay bytes when subwords are joined.",
        "fairseq decodes subwords of sentencepiece with sentencepiece",
        "fix",
    )
    for target, wrap in (
        ("fairseq.data.data_utils.post_process", join_with_bytes),
        ("fairseq.data.encoders.sentencepiece_bpe.SentencepieceBPE.decode", decode_with_bytes),
    )
)
