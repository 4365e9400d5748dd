"""The meta, taken along to where Megatron recomputes activations.

Recomputation runs during backward, after ``with seq_meta(meta):`` has ended, and on CUDA in a
thread of autograd's own. Megatron's blocks hand their callables to its checkpoint functions
themselves, so that no caller can wrap them in ``carry_meta``: the functions do it here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from padded_sp.context import carry_meta, surrounding_meta

# Where a function is called with the callable that it runs again: the owner of the function, its
# name, and the argument's position.
_SEAMS = (
    ("megatron.core.tensor_parallel.random", "CheckpointFunction.forward", 1),
    ("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput.checkpoint", 1),
    ("transformer_engine.pytorch.distributed", "checkpoint", 0),
)
# Megatron imports Transformer Engine where there is one.
_OPTIONAL = "transformer_engine"


def carry_meta_through_recompute() -> None:
    """Has Megatron's activation recomputation take the surrounding meta along. Once a process.

    For ``tensor_parallel.checkpoint``, ``CheckpointWithoutOutput`` and ``te_checkpoint``, which
    Megatron's blocks call: what they run again finds the meta of the forward pass that it
    belongs to, with any number of micro-batches in flight. Calls outside of ``with seq_meta(...)``
    are left as they are. PyTorch's own checkpoint takes ``carry_meta(block)`` by hand.

    It replaces functions of megatron-core and Transformer Engine in this process. Repeating it
    does nothing.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: a megatron-core without these functions.
    Source: megatron-core 0.16.1 and 0.19.2, megatron/core/tensor_parallel/random.py and
        ``te_checkpoint`` of megatron/core/extensions/transformer_engine.py.
    """
    try:
        import megatron.core.tensor_parallel  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "carry_meta_through_recompute works on megatron-core: python -m pip install "
            "'megatron-core>=0.16.1'"
        ) from error
    found = []
    for module, path, position in _SEAMS:
        if module.startswith(_OPTIONAL) and module not in sys.modules:
            continue
        owner: Any = sys.modules.get(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if not hasattr(owner, name):
            raise ValueError(
                f"{module} has no {path}, by which activations were recomputed in megatron-core "
                "0.16.1 to 0.19.2: wrap what is recomputed in padded_sp.carry_meta yourself"
            )
        found.append((owner, name, position))
    for owner, name, position in found:
        _carry(owner, name, position)


def _carry(owner: Any, name: str, position: int) -> None:
    original = vars(owner)[name]
    function: Callable[..., Any] = getattr(owner, name)
    if hasattr(function, "__carries_meta__"):
        return

    @functools.wraps(function)
    def carrying(*args: Any, **kwargs: Any) -> Any:
        if surrounding_meta() is not None and len(args) > position:
            args = (*args[:position], carry_meta(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    carrying.__carries_meta__ = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(carrying) if isinstance(original, staticmethod) else carrying)
