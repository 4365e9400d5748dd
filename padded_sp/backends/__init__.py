"""What computes an operation: one map from names to modules.

A backend gets tensors in the padded layout whose pad rows are zero, and the meta. It must get the
real rows of results and gradients right and may leave anything in the pad rows: the layer that
calls it keeps the promise of inert pads, unless a backend of attention does. A module is imported
when a layer first asks for it by name, so that importing ``padded_sp`` needs none of what backends
need. There is no fallback: what was asked for runs, or raises.

A backend of attention has these names:

*   ``dot_product_attention(q, k, v, meta, kv_meta, *, window, dropout, softmax_scale)``, which
    raises ValueError for what it does not take.
*   ``reason_against(q, k, v, meta, kv_meta, *, window, dropout)``, why it does not take them, empty
    where it does: from shapes, dtypes, the device, the environment and host lengths, cheaply, with
    no device read, so that ``attention_choice`` may ask at every call. What only a run can tell is
    found by ``verify``.
*   ``PROOF_PACKS``, real and padded lengths of packs that take every way through it, if there is
    more than one.
*   ``NEEDS_PROOF``, whether layers run ``verify`` before they trust it. One that needs none is
    plain PyTorch, which ``torch.compile`` traces.
*   ``KEEPS_PADS_INERT = True``, if it takes any pads and leaves zeros in those of its results. It
    is told by ``inplace`` whether it may write zeros into those of q, k, v and of gradients.
*   ``is_slow_for(q, v, meta)``, if there are packs for which "auto" prefers others.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# Names -> modules of attention, as described above.
ATTENTION = {
    "torch": "padded_sp.backends.torch_attention",
    "te": "padded_sp.backends.te_attention",
    "flash4": "padded_sp.backends.flash4_attention",
    "triton": "padded_sp.backends.triton_attention",
    "mixed": "padded_sp.backends.mixed_attention",
}

#: What ``DotProductAttention(backend="auto")`` allows, where it is installed, by preference.
AUTO = ("mixed", "triton", "flash4", "te", "torch")

# Names -> what computes a linear; "te" has a module of its own inside the layer.
LINEAR = {
    "torch": "padded_sp.backends.torch_linear",
    "te": "padded_sp.backends.te_linear",
}


def surrounding_fp8_recipe() -> Any | None:
    """The recipe object of a Transformer Engine autocast that is on; None outside of one.

    Whoever is inside one has imported Transformer Engine, so that nothing is imported here for it.
    ``torch.compile`` traces the reads, and looks again at each call.
    """
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is None:
        return None
    # An object, since torch.compile up to 2.11 never looks again at what it read from a class.
    manager = quantization.FP8GlobalStateManager()
    state = getattr(manager, "quantization_state", None)
    if state is None:  # older versions have the same on the class
        return manager.FP8_RECIPE if manager.FP8_ENABLED else None
    return state.fp8_recipe if state.fp8_enabled else None


def load(backends: dict[str, str], name: str) -> ModuleType:
    """The module of the backend called ``name``.

    Raises: ValueError: no backend of that name.
    """
    if name not in backends:
        raise ValueError(f"there is no backend {name!r}; choose one of {sorted(backends)}")
    return _module(backends[name])


# What each needs besides PyTorch. FlashAttention-2 has the name of the outer one, too.
_PACKAGES = {
    "te": ("transformer_engine",),
    "flash4": ("flash_attn.cute",),
    "triton": ("triton",),
    "mixed": ("triton", "flash_attn.cute"),
}


def is_installed(name: str) -> bool:
    """Whether the packages of a backend are there, working or not."""
    return all(map(_is_there, _PACKAGES.get(name, ())))


def _is_there(package: str) -> bool:
    """Without importing it, nor what it lies in."""
    if package in sys.modules:
        return sys.modules[package] is not None
    outer, *inner = package.split(".")
    spec = find_spec(outer)
    if spec is None or not inner:
        return spec is not None
    places = spec.submodule_search_locations or ()
    return any(Path(place, *inner).is_dir() for place in places)


@functools.cache
def import_error(path: str) -> Exception | None:
    """What importing the backend module at ``path`` raises here; None where it can be imported."""
    try:
        _module(path)
    except Exception as error:  # loaders of CUDA libraries raise all sorts
        return error.with_traceback(None)
    return None


def _module(path: str) -> ModuleType:
    return sys.modules.get(path) or import_module(path)
