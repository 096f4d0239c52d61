"""What a command says of an exception: one line, and the traceback where ``LOWRANK_TRACEBACK=1`` asks for it."""

import os
import traceback

# The messages of these say what is wrong; of others the class belongs to the message.
PLAIN = (ValueError, OSError, AssertionError, ModuleNotFoundError)

# What a command may miss, by the extra of this package that brings it; the same as in setup.py.
EXTRAS = {
    "fairseq": ("fairseq", "fairseq_cli", "hydra", "omegaconf", "numpy"),
    "translation": ("sacrebleu", "sacremoses", "sentencepiece", "subword_nmt"),
    "analysis": ("jinja2", "matplotlib", "scipy", "tqdm"),
    "bert": ("safetensors", "tokenizers"),
}


class UserError(ValueError):
    """What was asked for does not go together, or a checkpoint with it."""


def flag_name(name: str) -> str:
    """Return the flag of an argument's name: --head-dim of head_dim."""
    return f"--{name.replace('_', '-')}"


def show_traceback() -> None:
    """Print the traceback of the exception that is handled, where ``LOWRANK_TRACEBACK`` asks for it."""
    if os.environ.get("LOWRANK_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exc()


def explanation(error: BaseException) -> str:
    """What was wrong, in one line: of something :class:`UserError`, whatever was raised over it, or else the message.

    Of what is neither refused nor one of :data:`PLAIN` the line says the class and the place too.
    """
    link, over = error, []
    while link is not None and not isinstance(link, UserError):
        over.append(link)
        link = link.__cause__ or link.__context__
    if link is not None:
        # what was raised over it may have its words already
        return one(" ".join([*(str(each) for each in over if str(link) not in str(each)), str(link)]))
    message = text(error)
    if message and (isinstance(error, PLAIN) or type(error) is Exception):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{os.path.join(*frames[-1].filename.split(os.sep)[-2:])}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, AssertionError) and frames:
        message = frames[-1].line
    return f"{type(error).__name__}: {message} ({place}; LOWRANK_TRACEBACK=1 shows the traceback)"


def missing(error: ModuleNotFoundError) -> str:
    """Which package is not installed, and the extra that brings it."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"{package} is not installed: pip install 'fairseq-lowrank[{extra}]'"
    return str(error)


def text(error: BaseException) -> str:
    """An exception's message in one line: of a worker's that another process reports, the worker's own."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"a text is not in UTF-8: {error}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one(lines[-1] if "Traceback (most recent call last)" in str(error) else " ".join(lines))


def one(message: str) -> str:
    """A message without line breaks, and no longer than a terminal shows."""
    message = " ".join(message.split())
    return message if len(message) <= 600 else f"{message[:600]} …"
