"""Versions of cuDNN, as its libraries and Transformer Engine tell them."""

from __future__ import annotations

Version = tuple[int, int, int]


def version_of(number: int) -> Version:
    """91900 -> (9, 19, 0). Before cuDNN 9 the major number stood one place lower: 8907."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return major, rest // 100, rest % 100
