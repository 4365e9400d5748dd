"""Transformer Engine's global state, set aside while a check runs.

It lives in attributes of one class: in 2.12 each value is one of them, in 2.20 all are fields of an
object that is one. ``reset()`` of either binds new values and leaves the old ones alone, so that
keeping the attributes keeps everything: the autocast that is on and how deep, whether its first
module is still to come, and the buffers by which it updates the scales of the caller's modules.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from transformer_engine.pytorch import distributed

from padded_sp.backends.isolation import current_device, isolated
from padded_sp.backends.te import FP8GlobalStateManager

# Set inside te.checkpoint, in 2.20 the first two, in 2.12 the others: a module would look for the
# scales that were kept for its recomputation.
_RECOMPUTE_FLAGS = (
    "_IN_ACTIVATION_RECOMPUTE_REGION",
    "_ACTIVATION_RECOMPUTE_PHASE",
    "_FP8_ACTIVATION_RECOMPUTE_ENABLED",
    "_FP8_ACTIVATION_RECOMPUTE_PHASE",
)


@contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Transformer Engine and PyTorch as if nothing surrounded the call, and afterwards as before.

    Inside no autocast of either is on and no recomputation runs. Forward and backward of modules
    that were made inside update their own scales alone: nothing of the caller's is reduced,
    updated or counted. Communicates nothing, if recipes inside have ``reduce_amax=False``.
    See :func:`padded_sp.backends.isolation.isolated` for PyTorch's part.

    Args: device: whose random state comes back. None: the current GPU, or the CPU without one.
    """
    names = vars(distributed)
    flags = {name: names[name] for name in _RECOMPUTE_FLAGS if name in names}
    state = _state_of(FP8GlobalStateManager)
    with isolated(current_device() if device is None else device):
        FP8GlobalStateManager.reset()
        names.update(dict.fromkeys(flags, False))
        try:
            yield
        finally:
            for name, value in state.items():
                setattr(FP8GlobalStateManager, name, value)
            names.update(flags)


def _state_of(manager: type) -> dict[str, Any]:
    """Its attributes by name, without its methods."""
    methods = (classmethod, staticmethod, property, FunctionType)
    return {
        name: value
        for name, value in vars(manager).items()
        if not name.startswith("__") and not isinstance(value, methods)
    }
