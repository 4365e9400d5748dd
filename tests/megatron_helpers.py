"""The real megatron-core, imported over Transformer Engine or, without a GPU, over its double."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType


def import_megatron(name: str) -> ModuleType:
    """``megatron.core.<name>``, without the warnings of what it does without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Apex, absl and others
        return import_module(f"megatron.core.{name}")
