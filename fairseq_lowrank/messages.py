"""Errors that carry fields, and what a command prints of an exception: a line, and a traceback if it is unexpected."""

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any

# Packages that a command may need, by the extra that installs them; the same as in pyproject.toml.
EXTRAS = {
    "fairseq": ("fairseq", "fairseq_cli", "hydra", "omegaconf", "numpy"),
    "translation": ("sacrebleu", "sacremoses", "sentencepiece", "subword_nmt"),
    "analysis": ("matplotlib", "tqdm"),
    "bert": ("safetensors", "tokenizers"),
    "transformers": ("transformers",),
}

# The errors of a write that needs more space than there is.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Characters that a terminal obeys, except the ends of lines and tabs, and those that change the direction of text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    r"""Return text with control characters as \uXXXX, which JSON reads too. Ends of lines and tabs stay."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


IMPORT_PLUGIN = "If it is of a plugin, import the plugin first; commands take --user-dir DIR."
"""The remedy for a name that only a plugin may have registered."""


class UserError(ValueError):
    """A mistake of the user, which a command reports in one line with exit code 2."""


def did_you_mean(value: object, names: Iterable[object]) -> str:
    """Return a question with the name that is closest to a misspelled value, with a space before it, or nothing."""
    near = difflib.get_close_matches(str(value), map(str, names), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def flag_name(name: str) -> str:
    """Return the flag of an argument's name: --head-dim of head_dim."""
    return f"--{name.replace('_', '-')}"


class FlagError(UserError):
    """A flag with a value that cannot be used.

    Args:
        flag: the flag as typed.
        value: its value.
        reason: why the value cannot be used.
        remedy: a full sentence that says what to do.
    """

    def __init__(self, flag: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(flag, value, reason, remedy)
        self.flag, self.value, self.reason, self.remedy = flag, value, reason, remedy

    def __str__(self) -> str:
        return f"{self.flag} {self.value}: {self.reason}. {self.remedy}"


class InvalidCheckpoint(UserError):
    """A file that is not a checkpoint, is damaged, or contains what no checkpoint needs.

    Args:
        path: the file.
        reason: why it cannot be used.
        remedy: a full sentence that says what to do, if anything can be done.
    """

    def __init__(self, path: str | os.PathLike, reason: str, remedy: str = "") -> None:
        super().__init__(path, reason, remedy)
        self.path, self.reason, self.remedy = os.fspath(path), reason, remedy

    def __str__(self) -> str:
        return f"{self.path} cannot be read as a checkpoint: {self.reason}" + f". {self.remedy}" * bool(self.remedy)


class StateDictMismatch(UserError, RuntimeError):
    """A saved state that does not fit the module that loads it.

    torch raises a RuntimeError for such a state, and programs catch it to load what fits. So this class is one too.

    Args:
        name: the tensor or layer that differs.
        saved: the tensor's shape, or a dictionary of the layer's settings that differ; None if the state does not have it.
        current: the same in the module; None if the module does not have it.
        others: the number of other tensors that differ.
        path: the checkpoint, if it is known.
        remedy: a full sentence that says what to do.
    """

    def __init__(
        self,
        name: str,
        saved: Any,
        current: Any,
        others: int = 0,
        path: str | None = None,
        remedy: str = "Use the flags that the checkpoint was trained with.",
    ) -> None:
        super().__init__(name, saved, current, others, path, remedy)
        self.name, self.saved, self.current, self.others = name, saved, current, others
        self.path, self.remedy = path, remedy

    def __str__(self) -> str:
        if self.current is None:
            difference = f"only the checkpoint has {self.name}"
        elif self.saved is None:
            difference = f"only the model has {self.name}"
        elif isinstance(self.saved, dict):
            saved, current = (
                ", ".join(f"{name}={value}" for name, value in settings.items())
                for settings in (self.saved, self.current)
            )
            difference = f"{self.name} was saved with {saved} and is built with {current}"
        else:
            difference = f"{self.name} is {list(self.saved)} in the checkpoint and {list(self.current)} in the model"
        more = f" ({self.others} more differ)" if self.others else ""
        return f"{self.path or 'the checkpoint'} does not fit the model: {difference}{more}. {self.remedy}"


def user_error(error: BaseException | None) -> UserError | None:
    """Return the newest UserError among an exception and the exceptions that it was raised over."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def expected_message(error: BaseException) -> str | None:
    """Return the message of an exception that a command expects; None for any other exception.

    Expected are a mistake of the user, a file that cannot be opened, and a package of an extra that is not installed.
    """
    if (mistake := user_error(error)) is not None:
        return str(mistake)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return f"{os.strerror(error.errno)}. Free some space."
    if isinstance(error, UnicodeDecodeError):
        return f"a text is not in UTF-8: {error}"
    hint = missing_package_hint(error) if isinstance(error, ModuleNotFoundError) else str(error)
    return None if hint == str(error) else hint


def report(error: BaseException, program: str) -> int:
    """Print an exception as a command does, and return the exit code.

    An expected exception takes one line and code 2. Any other one takes its traceback, one last line and code 1.
    ``LOWRANK_TRACEBACK=1`` shows the traceback of an expected exception too.
    """
    message = expected_message(error)
    if message is None or os.environ.get("LOWRANK_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    line = " ".join((f"{type(error).__name__}: {error}" if message is None else message).split())
    line = escape_control(line)
    print(f"{program}: error: {line if len(line) <= 600 else f'{line[:600]} …'}", file=sys.stderr)
    return 1 if message is None else 2


def missing_package_hint(error: ModuleNotFoundError) -> str:
    """Return a line that names the package that is not installed, and the extra that installs it.

    This project is not on the package index, so the command does not name it there.
    """
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            how = (
                "--no-build-isolation " if extra == "fairseq" else ""
            )  # fairseq is compiled with the torch that is there
            return f"{package} is not installed. In a clone of fairseq_lowrank, run pip install {how}'.[{extra}]'"
    return str(error)
