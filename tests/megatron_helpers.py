"""The real megatron-core, imported beside the double of Transformer Engine."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType


def import_megatron(name: str) -> ModuleType:
    """``megatron.core.<name>``; Megatron must not take the double for Transformer Engine."""
    te = [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]
    is_double = "fake_te" in (getattr(sys.modules.get("transformer_engine"), "__file__", "") or "")
    hidden = {n: sys.modules.pop(n) for n in te} if is_double or not te else {}
    if not te or is_double:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Apex, absl and others that it does without
            return import_module(f"megatron.core.{name}")
    finally:
        if sys.modules.get("transformer_engine", ...) is None:
            del sys.modules["transformer_engine"]
        sys.modules.update(hidden)
