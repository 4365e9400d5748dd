"""Transformer Engine as the other ``te_*`` modules see it: its names, versions and recipes.

Every difference between versions is here, with its reason, but for those of its global state:
``te_state``, and ``surrounding_fp8_recipe``, which layers of every backend ask. Imported when a
layer first asks for backend "te", never with ``padded_sp`` itself.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import transformer_engine
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import quantization
except ImportError as error:
    raise ImportError(
        f"backend 'te' needs Transformer Engine with its PyTorch extension ({error}): "
        "python -m pip install 'padded_sp[te]'"
    ) from error

from padded_sp.backends import surrounding_fp8_recipe as fp8_recipe
from padded_sp.backends.cudnn import Version, version_of

__all__ = ["FP8GlobalStateManager", "fp8_recipe", "recipes", "te", "tex"]

FP8GlobalStateManager: Any = quantization.FP8GlobalStateManager


def _parsed(version: str) -> Version:
    major, minor, patch = [*map(int, re.findall(r"\d+", version)), 0, 0][:3]
    return major, minor, patch


#: Of Transformer Engine, e.g. (2, 20, 2).
VERSION: Version = _parsed(transformer_engine.__version__)

# A gather of blockwise FP8 asserts before 2.14 where rows or features are no multiple of 128, and
# fails where blocks are 128 x 128; from then on Transformer Engine gathers in high precision.
GATHERS_UNALIGNED_BLOCKS = VERSION >= (2, 14, 0)

# The Unfused attention backend returns packed output without its pad rows up to 2.15.
UNFUSED_DROPS_PADS = VERSION < (2, 16, 0)


@functools.cache
def cudnn_version() -> Version:
    """Of the cuDNN that Transformer Engine really loaded, which may not be PyTorch's."""
    return version_of(tex.get_cudnn_version())


# --- recipes -------------------------------------------------------------------------------------

# Our names -> their classes. NVFP4 and custom recipes have no rules here.
_CLASSES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def fp8_group() -> Any | None:
    """The ranks over which that autocast reduces amax; None: all ranks."""
    return FP8GlobalStateManager.get_fp8_group()


def recipe_name(recipe: Any | None) -> str:
    """The key of ``alignment.RECIPES`` that a recipe goes by; "bf16" for None.

    Raises: ValueError: a recipe that has none.
    """
    return "bf16" if recipe is None else _name_of(type(recipe))


@functools.cache
def _name_of(kind: type) -> str:
    for name, of_name in _CLASSES.items():
        if issubclass(kind, getattr(recipes, of_name)):
            return name
    raise ValueError(
        f"padded_sp has no rules for the recipe {kind.__name__}; use one of "
        f"{', '.join(_CLASSES.values())}"
    )


def gathers_square_blocks(recipe: Any, parallel_mode: str) -> bool:
    """Whether a linear gathers what the recipe scales by blocks of 128 x 128, which never travel as
    FP8: the input of a column-parallel linear, the output's gradient of a row-parallel one.

    Source: TransformerEngine ``pytorch/distributed.py`` (_start_all_gather_fp8_blockwise).
    """
    dim = "x_block_scaling_dim" if parallel_mode == "column" else "grad_block_scaling_dim"
    return getattr(recipe, dim, 1) == 2


def make_recipe(name: str, **options: Any) -> Any | None:
    """Transformer Engine's recipe object for a key of ``alignment.RECIPES``; None for "bf16"."""
    if name == "bf16":
        return None
    if name not in _CLASSES:
        raise ValueError(f"unknown recipe {name!r}; known: bf16, {', '.join(_CLASSES)}")
    return getattr(recipes, _CLASSES[name])(**options)


def unavailable(name: str) -> str:
    """Why this GPU cannot run the recipe of that name; empty where it can."""
    manager = FP8GlobalStateManager
    checks = {
        "fp8_delayed": manager.is_fp8_available,
        "fp8_current": manager.is_fp8_available,
        "fp8_blockwise": manager.is_fp8_block_scaling_available,
        "mxfp8": manager.is_mxfp8_available,
    }
    if name not in checks:
        return ""
    available, reason = checks[name]()
    return "" if available else reason or f"{name} is not available on this GPU"


def autocast(recipe: Any | None, group: Any | None = None) -> Any:
    """Transformer Engine's autocast for a recipe object; with None, one that disables FP8.

    Both supported ends have ``te.autocast``; ``te.fp8_autocast`` is the same state by an older name
    that warns.
    """
    return te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


@contextmanager
def without_fp8() -> Iterator[None]:
    """``autocast(None)`` inside of another, without the recipe and the key that it makes each time.

    The switch is an attribute of the manager in 2.12, in 2.20 of the object that holds its state.
    """
    state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    name = "fp8_enabled" if hasattr(state, "fp8_enabled") else "FP8_ENABLED"
    before = getattr(state, name)
    setattr(state, name, False)
    try:
        yield
    finally:
        setattr(state, name, before)
