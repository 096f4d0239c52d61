"""Default values of the registered architectures."""

from __future__ import annotations

from argparse import Namespace

from fairseq.utils import safe_getattr


def set_defaults(args: Namespace, **values: object) -> None:
    """Set the values of an architecture in ``args`` that the user has not set."""
    for name, value in values.items():
        setattr(args, name, safe_getattr(args, name, value))
