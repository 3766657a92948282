"""Lists of names that fit in a one-line message."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 20) -> str:
    """`a, b, c and 5 more`: the first `most` names, and how many were left out."""
    shown = ", ".join(names[:most])
    left_out = len(names) - most
    return f"{shown} and {left_out} more" if left_out > 0 else shown
