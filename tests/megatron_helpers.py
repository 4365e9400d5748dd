"""The real megatron-core, imported beside the double of Transformer Engine."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def import_megatron(name: str) -> ModuleType:
    """``megatron.core.<name>``; Megatron must not take the double for Transformer Engine."""
    hidden: dict[str, ModuleType | None] = {}
    if not has_transformer_engine():
        for module in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            hidden[module] = sys.modules.pop(module)
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Apex, absl and others that it does without
            return import_module(f"megatron.core.{name}")
    finally:
        if sys.modules.get("transformer_engine", ...) is None:
            del sys.modules["transformer_engine"]
        sys.modules.update(hidden)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine itself is here, and not only its double."""
    found = find_spec("transformer_engine")
    return found is not None and "fake_te" not in (found.origin or "")
