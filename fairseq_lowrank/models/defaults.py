"""What an architecture sets."""

from __future__ import annotations

from argparse import Namespace

from fairseq.utils import safe_getattr


def set_defaults(args: Namespace, **values: object) -> None:
    """Give ``args`` the values of an architecture where the user gave none."""
    for name, value in values.items():
        setattr(args, name, safe_getattr(args, name, value))
