"""What computes an operation: one map from names to modules.

A backend gets tensors in the padded layout whose pad rows are zero, and the meta. It must get the
real rows of results and gradients right and may leave anything in the pad rows: the layer that
calls it keeps the promise of inert pads. A module is imported when a layer first asks for it by
name, so that importing ``padded_sp`` needs none of what backends need. There is no fallback: what
was asked for runs, or raises.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

# Names -> modules with ``dot_product_attention``.
ATTENTION = {
    "torch": "padded_sp.backends.torch_attention",
    "te": "padded_sp.backends.te_attention",
}

# Names -> what computes a linear; "te" has a module of its own inside the layer.
LINEAR = {
    "torch": "padded_sp.backends.torch_linear",
    "te": "padded_sp.backends.te_linear",
}


def surrounding_fp8_recipe() -> Any | None:
    """The recipe object of a Transformer Engine autocast that is on; None outside of one.

    Whoever is inside one has imported Transformer Engine, so that nothing is imported here for it.
    """
    if "transformer_engine.pytorch" not in sys.modules:
        return None
    return _module("padded_sp.backends.te").fp8_recipe()


def load(backends: dict[str, str], name: str) -> ModuleType:
    """The module of the backend called ``name``.

    Raises: ValueError: no backend of that name.
    """
    if name not in backends:
        raise ValueError(f"there is no backend {name!r}; choose one of {sorted(backends)}")
    return _module(backends[name])


def _module(path: str) -> ModuleType:
    return sys.modules.get(path) or import_module(path)
