"""Calls that torch.compile leaves its graph for. Importing this loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="Transformer Engine's state, the rules and what was proved are looked at in each call"
)
def eagerly(call: Callable[..., Any], *arguments: Any) -> Any:
    """``call(*arguments)`` between two parts of compiled code, as if nothing were compiled."""
    return call(*arguments)
