"""Gathers and scatters along rows, recomputation, RNG states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor

from transformer_engine import MODERN
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    QuantizedTensorStorage,
    Quantizer,
)


def get_distributed_world_size(group: Any = None) -> int:
    return torch.distributed.get_world_size(group=group) if group is not None else 1


def gather_along_first_dim(
    x: Tensor | QuantizedTensorStorage,
    group: Any,
    quantizer: Quantizer | None = None,
    *,
    columns: bool = False,
    both: bool = False,
) -> Any:
    """Every rank's rows; of a quantised tensor the bytes, with the scales of blocks.

    ``columns``: what wgrad needs of it, not what forward and dgrad do; ``both``: all of it.
    """
    if get_distributed_world_size(group) == 1:
        return quantizer(x) if quantizer is not None and isinstance(x, Tensor) else x
    if quantizer is None:
        return _gathered(x, group)
    if isinstance(quantizer, Float8BlockQuantizer):
        value = x if isinstance(x, Tensor) else x.rowwise[0]
        if not quantizer.is_quantizable(value) or quantizer.block_scaling_dim != 1:
            if MODERN:
                warnings.warn(
                    "Cannot quantize input tensor. Performing all-gather in high precision.",
                    stacklevel=2,
                )
            elif not isinstance(x, Tensor):
                raise TypeError("all_gather_into_tensor needs a tensor, got a quantized one")
            wide = x if isinstance(x, Tensor) else x.along(columns).to(x.dtype)
            return quantizer(_gathered(wide, group))
        sent = quantizer(x) if isinstance(x, Tensor) else x
        halves = [sent.rowwise, sent.columnwise]
        gathered = [
            tuple(_gathered(part, group) for part in half) if both or columns == bool(i) else half
            for i, half in enumerate(halves)
        ]
        return QuantizedTensorStorage(*gathered, sent.dtype)
    # Per-tensor scales are taken to be equal on all ranks.
    sent = quantizer(x) if isinstance(x, Tensor) else x
    gathered = (_gathered(sent.rowwise[0], group), sent.rowwise[1])
    return QuantizedTensorStorage(gathered, gathered, sent.dtype)


def reduce_scatter_along_first_dim(x: Tensor, group: Any) -> Tensor:
    size = get_distributed_world_size(group)
    if size == 1:
        return x
    if x.shape[0] % size:
        raise ValueError(
            f"First dimension of the tensor should be divisible by tensor parallel size, but got "
            f"dim_size[0]={x.shape[0]} and world_size={size}."
        )
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    with _without_deprecations():
        torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def allreduce(x: Tensor, group: Any) -> Tensor:
    if get_distributed_world_size(group) > 1:
        torch.distributed.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Any) -> Tensor:
    """By bytes where it is FP8."""
    size = get_distributed_world_size(group)
    sent = x.contiguous()
    sent = sent.view(torch.uint8) if sent.dtype.itemsize == 1 else sent
    out = sent.new_empty(size * sent.shape[0], *sent.shape[1:])
    with _without_deprecations():
        torch.distributed.all_gather_into_tensor(out, sent, group=group)
    return out.view(x.dtype)


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """PyTorch 2.13 has newer names for these collectives; the real one calls the old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# --- recomputation -------------------------------------------------------------------------------

_phase = {"enabled": False, "recompute": False}
_is_first_fp8_module: list[bool] = []


def is_fp8_activation_recompute_enabled() -> bool:
    return _phase["enabled"] and quantization.FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    return _phase["recompute"]


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Around what is computed twice: the first time, and in the recompute phase."""
    state = quantization.state()
    if activation_recompute and recompute_phase:
        state.is_first_fp8_module = _is_first_fp8_module.pop(0)
    elif activation_recompute:
        _is_first_fp8_module.append(state.is_first_fp8_module)
    _phase.update(enabled=activation_recompute, recompute=recompute_phase)
    try:
        yield
    finally:
        _phase.update(enabled=False, recompute=False)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    distribute_saved_activations: bool = False,
    **kwargs: Any,
) -> Any:
    """Forward again in backward, with the scales of the first time."""
    manager = quantization.FP8GlobalStateManager
    enabled, recipe = manager.is_fp8_enabled(), manager.get_fp8_recipe()
    calls: list[bool] = []

    def run(*tensors: Any) -> Any:
        calls.append(bool(calls))
        if not calls[-1]:
            with activation_recompute_forward(True):
                return function(*tensors, **kwargs)
        recompute = activation_recompute_forward(True, recompute_phase=True)
        with recompute, quantization.autocast(enabled=enabled, recipe=recipe):
            return function(*tensors, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant)


# --- random numbers ------------------------------------------------------------------------------


def get_all_rng_states() -> bool:
    """Of trackers that CUDA graphs know; there are none."""
    return False


class CudaRNGStatesTracker:
    """RNG states by name; of the CPU's generator here."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        with torch.random.fork_rng([]):
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
