"""Masks of attention as windows, which every backend takes: (left, right), -1 for no limit."""

from __future__ import annotations

from padded_sp.boundaries import integer

_MASKS = ("causal", "causal_bottom_right", "full")


def window_of(mask: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """The mask and the window of ``DotProductAttention`` as one window.

    Raises: ValueError: no such mask; no window; one that sees what the mask hides.
    """
    if mask not in _MASKS:
        raise ValueError(f"mask must be one of {', '.join(_MASKS)}; got {mask!r}")
    try:
        left, right = (integer(n) for n in ((-1, -1) if window is None else window))
    except (TypeError, ValueError):  # no two of them, or no integers
        left = right = -2
    if min(left, right) < -1:
        raise ValueError(
            f"window must be two integers (left, right), each -1 (no limit) or more, got {window!r}"
        )
    if mask == "full":
        return left, right
    if right not in (-1, 0):
        raise ValueError(
            f"window={window!r} would see keys behind the query, which mask={mask!r} hides: give "
            f'({left}, 0), or mask="full"'
        )
    return left, 0


def mask_name(left: int, right: int) -> str:
    """A window in words."""
    if left < 0 and right <= 0:
        return "full" if right else "causal"
    return f"window {left}" if right == 0 else f"window ({left}, {right})"
