"""What computes an operation: one map from names to modules.

A backend gets tensors in the padded layout whose pad rows are zero, and the meta. It must get the
real rows of results and gradients right and may leave anything in the pad rows: the layer that
calls it keeps the promise of inert pads. A module is imported when a layer first asks for it by
name, so that importing ``padded_sp`` needs none of what backends need. There is no fallback: what
was asked for runs, or raises.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

ATTENTION = {
    "torch": "padded_sp.backends.torch_attention",
}


def load(backends: dict[str, str], name: str) -> ModuleType:
    """The module of the backend called ``name``.

    Raises: ValueError: no backend of that name.
    """
    if name not in backends:
        raise ValueError(f"there is no backend {name!r}; choose one of {sorted(backends)}")
    return import_module(backends[name])
