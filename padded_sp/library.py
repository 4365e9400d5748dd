"""Registration of the differentiable operations under ``torch.ops.padded_sp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Kept for the life of the process: when a Library object dies, so do its operators.
_LIBRARY = torch.library.Library("padded_sp", "FRAGMENT")


def register(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the operator ``torch.ops.padded_sp.<name>``.

        @register("double(Tensor x) -> Tensor")
        def double(x):
            return _Double.apply(x)

    The function is composite: it is taken apart before autograd and before any dispatch mode, so
    ``CommDebugMode`` sees the collectives inside it, and ``torch.compile(fullgraph=True)``, which
    meets one opaque call, leaves its ``torch.autograd.Function`` to AOTAutograd. It may therefore
    differentiate itself, and must not return one of its inputs unless the schema says so.

    Args:
        schema: the operator's name, arguments and returns in PyTorch's schema language. Groups
            travel as a name and a size, ``str group_name, int group_size``.

    Returns:
        A decorator that returns the operator itself, to be called in the function's place.

    Raises:
        RuntimeError: the schema does not parse, or its name is already taken.
    """
    name = schema.partition("(")[0].strip()

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.padded_sp, name)

    return decorate
