"""Plain attention with a head size that is chosen."""

from formula import Plain


class Formula(Plain):
    """Plain attention."""
