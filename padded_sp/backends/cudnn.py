"""Versions of cuDNN, as its libraries and Transformer Engine tell them, and where they matter."""

from __future__ import annotations

import functools

import torch

Version = tuple[int, int, int]

#: From this one on, Hopper's gradients of short, heavily padded sequences are no NaN (TE #2186).
SOUND_PADS_ON_HOPPER: Version = (9, 18, 0)


def version_of(number: int) -> Version:
    """91900 -> (9, 19, 0). Before cuDNN 9 the major number stood one place lower: 8907."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return major, rest // 100, rest % 100


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
