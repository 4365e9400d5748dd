"""Which recipe is in force, and the scales and amax histories of delayed scaling."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from transformer_engine import MODERN
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)

_NO_BLACKWELL = "Device compute capability 10.0 or higher required for {} execution."


@dataclass(slots=True)
class FP8GlobalState:
    """Where newer versions keep it; older ones keep the same on the manager's class."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Any = None
    fp8_distributed_group: Any = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[Any]] = field(default_factory=list)
    autocast_arguments: dict[str, Any] = field(default_factory=dict)
    skip_fp8_weight_update_tensor: Any = None


_FLAGS = {f.name for f in fields(FP8GlobalState)[:9]}


def _old_name(name: str) -> str:
    return name.upper() if name in _FLAGS else name


class _OnTheClass:
    """The older layout by the names of the newer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(FP8GlobalStateManager, _old_name(name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(FP8GlobalStateManager, _old_name(name), value)


def state() -> Any:
    return FP8GlobalStateManager.quantization_state if MODERN else _OnTheClass()


class FP8GlobalStateManager:
    """Of the process."""

    quantization_state: Any  # only in newer versions

    @classmethod
    def reset(cls) -> None:
        if MODERN:
            cls.quantization_state = FP8GlobalState()
            return
        fresh = FP8GlobalState()
        for name in FP8GlobalState.__slots__:
            setattr(cls, _old_name(name), getattr(fresh, name))

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return True, ""

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        return True, ""

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return False, _NO_BLACKWELL.format("MXFP8")

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        return False, _NO_BLACKWELL.format("NVFP4")

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return state().fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return state().fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return state().fp8_parameters

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return state().fp8_graph_capturing

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return state().fp8_recipe or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return state().fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Only for the first caller in an autocast: its backward is the last."""
        first, state().is_first_fp8_module = state().is_first_fp8_module, False
        return first

    _AUTOCAST = (
        "fp8_enabled",
        "fp8_calibration",
        "fp8_recipe",
        "fp8_distributed_group",
        "is_first_fp8_module",
        "fp8_graph_capturing",
    )

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return tuple(getattr(state(), name) for name in cls._AUTOCAST)

    @classmethod
    def set_autocast_state(cls, values: tuple[Any, ...]) -> None:
        for name, value in zip(cls._AUTOCAST, values, strict=True):
            setattr(state(), name, value)

    @classmethod
    def get_unique_autocast_key(cls, recipe: Any = None, group: Any = None) -> str:
        return f"{recipe}:{hash(group)}"

    @classmethod
    def get_buffer_info(cls) -> str:
        return "buffer_index_and_autocast_key"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Once a module: its amax histories are static."""
        if cls.get_buffer_info() in fp8_meta or not fp8_meta["recipe"].delayed():
            return
        fp8_meta[cls.get_buffer_info()] = []
        key = cls.get_unique_autocast_key(fp8_meta["recipe"], fp8_meta["fp8_group"])
        for direction, meta_key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            scaling, name = fp8_meta[meta_key], f"{direction}_{key}"
            now = state()
            now.global_amax_buffer.setdefault(name, []).append(scaling.amax_history[0])
            now.global_amax_history_buffer.setdefault(name, []).append(scaling.amax_history)
            now.global_scale_buffer.setdefault(name, []).append(scaling.scale)
            fp8_meta[cls.get_buffer_info()] += [len(now.global_scale_buffer[name]) - 1, name]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """The maximum over the ranks, one all-reduce for all modules; then the scales."""
        for name, amaxes in state().global_amax_buffer.items():
            direction, _, key = name.partition("_")
            if (direction == "forward") != forward:
                continue
            recipe, group = state().autocast_arguments[key]
            together = torch.cat(amaxes)
            distributed = torch.distributed.is_initialized()
            if recipe.reduce_amax and distributed and torch.distributed.get_world_size(group) > 1:
                maximum = torch.distributed.ReduceOp.MAX
                torch.distributed.all_reduce(together, op=maximum, group=group)
            largest = recipe.fp8_format.value[0 if forward else 1] / 2**recipe.margin
            histories = state().global_amax_history_buffer[name]
            scales = state().global_scale_buffer[name]
            parts = together.split([amax.numel() for amax in amaxes])
            for part, history, scale in zip(parts, histories, scales, strict=True):
                history[0].copy_(part)
                amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
                if len(history) > 1:
                    history.copy_(history.roll(-1, 0))
                history[0].zero_()
                usable = amax.isfinite() & (amax > 0)
                scale.copy_(torch.where(usable, largest / amax, scale))

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        kept = state().fp8_tensors_recompute_buffer
        place = fp8_meta.setdefault("global_fp8_buffer_pos_fwd_recompute", len(kept))
        if place == len(kept):
            kept.append(deque())
        kept[place].append([x.clone() for x in fp8_meta["scaling_fwd"].buffers()])

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        buffers = fp8_meta["scaling_fwd"].buffers()
        fp8_meta["updated_fwd"] = [x.clone() for x in buffers]
        place = fp8_meta["global_fp8_buffer_pos_fwd_recompute"]
        for x, old in zip(
            buffers, state().fp8_tensors_recompute_buffer[place].popleft(), strict=True
        ):
            x.copy_(old)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        buffers = fp8_meta["scaling_fwd"].buffers()
        for x, updated in zip(buffers, fp8_meta.pop("updated_fwd"), strict=True):
            x.copy_(updated)


FP8GlobalStateManager.reset()


def is_fp8_available(return_reason: bool = False) -> Any:
    return FP8GlobalStateManager.is_fp8_available() if return_reason else True


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    return FP8GlobalStateManager.is_fp8_block_scaling_available() if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> Any:
    return FP8GlobalStateManager.is_mxfp8_available() if return_reason else False


def is_nvfp4_available(return_reason: bool = False) -> Any:
    return FP8GlobalStateManager.is_nvfp4_available() if return_reason else False


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """FP8 inside. Scales are updated where the outermost one ends, if gradients are on."""
    manager, recipe = FP8GlobalStateManager, recipe or DelayedScaling()
    if enabled and recipe.mxfp8():
        error = RuntimeError if MODERN else AssertionError
        raise error(manager.is_mxfp8_available()[1])
    assert not (enabled and recipe.nvfp4()), manager.is_nvfp4_available()[1]
    before = manager.get_autocast_state()
    key = manager.get_unique_autocast_key(recipe, amax_reduction_group)
    state().autocast_arguments[key] = (recipe, amax_reduction_group)
    is_first = state().is_first_fp8_module or state().autocast_depth == 0
    manager.set_autocast_state(
        (enabled, calibrating, recipe, amax_reduction_group, is_first, _graph)
    )
    state().autocast_depth += 1
    try:
        yield
    finally:
        manager.set_autocast_state(before)
        state().autocast_depth -= 1
        if enabled and state().autocast_depth == 0 and not _graph and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Any:
    warnings.warn("fp8_autocast is deprecated", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Modules built inside hold weights rounded to FP8 (here: as ordinary tensors)."""
    before = state().fp8_parameters, state().fp8_recipe
    state().fp8_parameters, state().fp8_recipe = enabled, recipe or DelayedScaling()
    try:
        yield
    finally:
        state().fp8_parameters, state().fp8_recipe = before


def fp8_model_init(**kwargs: Any) -> Any:
    if MODERN:
        warnings.warn("fp8_model_init is deprecated", DeprecationWarning, stacklevel=2)
    return quantized_model_init(**kwargs)


class RecipeState:
    """The quantizers of one module and direction, and what they keep."""

    def __init__(self, recipe: Any, *, mode: str, num_quantizers: int, device: Any) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        is_e4m3 = mode == "forward" or recipe.fp8_format.name == "E4M3"
        self.dtype = torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2
        if recipe.delayed():
            self.scale = torch.ones(num_quantizers, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, device=device)

    def buffers(self) -> list[Tensor]:
        return [self.scale, self.amax_history]

    def make_quantizers(self) -> list[Quantizer]:
        return [self._quantizer(i) for i in range(self.num_quantizers)]

    def _quantizer(self, i: int) -> Quantizer:
        if self.recipe.delayed():
            return Float8Quantizer(self.scale[i], self.amax_history[0][i], self.dtype)
        if self.recipe.float8_current_scaling():
            return Float8CurrentScalingQuantizer(self.dtype)
        if self.recipe.float8_block_scaling():
            recipe = self.recipe
            x, w = recipe.x_block_scaling_dim, recipe.w_block_scaling_dim
            dims = (x, w, x) if self.mode == "forward" else (recipe.grad_block_scaling_dim,) * 2
            return Float8BlockQuantizer(self.dtype, dims[i])
        raise RuntimeError(f"{type(self.recipe).__name__} cannot run here")
