"""What every module has: FP8 state, checkpoints of it, deferred initialisation."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine import MODERN
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

_UNSAFE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@dataclass
class _ParameterInitMeta:
    init_fn: Callable[[Tensor], Any]
    get_rng_state_tracker: Callable[[], Any] | None = None
    fp8_meta_index: int | None = None


class TransformerEngineBaseModule(nn.Module):
    """Base of all modules."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group: Any = None
        self.tp_group_initialized = False
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, _ParameterInitMeta] = {}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self._fp8_workspaces: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group, self.tp_group_initialized = tp_group, True

    # ---- parameters -----------------------------------------------------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None, **init: Any) -> None:
        super().register_parameter(name, param)
        if name not in self.param_init_meta:
            self.param_init_meta[name] = _ParameterInitMeta(**init)

    def reset_parameters(self, defer_init: bool = False) -> None:
        for name, param in () if defer_init else list(self.named_parameters(recurse=False)):
            value = param.detach()
            if value.is_meta:
                value = torch.empty_like(value, device="cpu")
            init = self.param_init_meta[name]
            tracker, fork = init.get_rng_state_tracker, ()
            if getattr(self, "rng_tracker_name", None):
                fork = (self.rng_tracker_name,)
            with tracker().fork(*fork) if tracker else torch.no_grad(), torch.no_grad():
                init.init_fn(value)
            if self.primary_weights_in_fp8 and init.fp8_meta_index is not None:
                rounded = self.quantizers["scaling_fwd"][init.fp8_meta_index](value)
                value = rounded.along(columns=False).to(value.dtype)
            setattr(self, name, nn.Parameter(value))

    # ---- FP8 state ------------------------------------------------------------------------------

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        device = next(self.parameters()).device
        for mode, key, each in (("forward", "scaling_fwd", 3), ("backward", "scaling_bwd", 2)):
            held = self.fp8_meta.get(key)
            if self.fp8_meta_tensors_initialized and type(held.recipe) is type(recipe):
                continue
            count = each * self.fp8_meta["num_gemms"]
            self.fp8_meta[key] = RecipeState(recipe, mode=mode, num_quantizers=count, device=device)
            self.quantizers[key] = self.fp8_meta[key].make_quantizers()
        self.fp8_meta_tensors_initialized = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        manager, meta = FP8GlobalStateManager, self.fp8_meta
        self.fp8, self.fp8_calibration = manager.is_fp8_enabled(), manager.is_fp8_calibration()
        meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if not (self.fp8 or self.fp8_calibration or manager.with_fp8_parameters()):
            self.fp8_initialized = False
            return
        before, recipe = meta.get("recipe"), manager.get_fp8_recipe()
        if self.fp8_initialized and before == recipe:
            return
        meta["recipe"], meta["num_gemms"] = recipe, num_gemms
        self.init_fp8_meta_tensors(recipe)
        if self.fp8:
            meta["fp8_group"] = manager.get_fp8_group()
            meta["fp8_max_fwd"], meta["fp8_max_bwd"] = recipe.fp8_format.value
            self.fp8_initialized = True
        if before is not None and type(before) is not type(recipe):
            warnings.warn(
                f"Recipe type changed from {type(before).__name__} to {type(recipe).__name__}. "
                "This may affect model behavior.",
                stacklevel=2,
            )
            self._fp8_workspaces.clear()

    def get_extra_state(self) -> Tensor:
        nothing = torch.empty(0, dtype=torch.uint8)
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8 or self.fp8_calibration):
            return nothing
        recipe = self.fp8_meta["recipe"]
        if not recipe.delayed():
            return nothing
        held = {"recipe": recipe}
        for key in ("fwd", "bwd"):
            scaling = self.fp8_meta[f"scaling_{key}"]
            held[f"scale_{key}"] = scaling.scale.cpu()
            held[f"amax_history_{key}"] = scaling.amax_history.cpu()
        held["extra_fp8_variables"] = {
            name: value
            for name, value in self.fp8_meta.items()
            if name != FP8GlobalStateManager.get_buffer_info()
            and isinstance(value, bool | int | float | str | tuple | list)
        }
        return torch.frombuffer(bytearray(pickle.dumps(held)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is None or state.numel() == 0:
            return
        if MODERN and os.environ.get(_UNSAFE) != "1":
            raise RuntimeError(
                f"Refusing to load pickled Transformer Engine extra state for "
                f"{type(self).__name__}. To load it anyway, set {_UNSAFE}=1."
            )
        held = pickle.loads(state.cpu().numpy().tobytes())
        self.fp8_meta.update(held["extra_fp8_variables"])
        self.fp8_meta["recipe"] = held["recipe"]
        self.fp8_meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
        self.init_fp8_meta_tensors(held["recipe"])
        for key in ("fwd", "bwd"):
            scaling = self.fp8_meta[f"scaling_{key}"]
            scaling.scale.copy_(held[f"scale_{key}"])
            scaling.amax_history.copy_(held[f"amax_history_{key}"])

    # ---- calls ----------------------------------------------------------------------------------

    def set_activation_dtype(self, x: Tensor) -> None:
        if torch.is_autocast_enabled(x.device.type):
            self.activation_dtype = torch.get_autocast_dtype(x.device.type)
            return
        for name, param in self.named_parameters():
            if x.dtype != param.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {x.dtype} and {name!r} dtype: {param.dtype}"
                )
        self.activation_dtype = x.dtype

    def prepare_forward(self, x: Tensor) -> Tensor:
        manager = FP8GlobalStateManager
        if self.fp8 and distributed.in_fp8_activation_recompute_phase():
            if self.fp8_meta["recipe"].delayed():
                manager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
            return x.contiguous()
        if self.tp_size > 1 and not self.tp_group_initialized:
            raise RuntimeError("Tensor parallel group not initialized.")
        self.set_activation_dtype(x)
        self.init_fp8_metadata()
        if self.fp8 and self.fp8_meta["recipe"].delayed():
            assert not self.sequence_parallel or self.fp8_meta["recipe"].reduce_amax, (
                "Amax reduction across tensor parallel group is necessary when using sequence "
                "parallelism with FP8."
            )
            manager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if distributed.is_fp8_activation_recompute_enabled():
                manager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        return x.contiguous()

    def end_forward(self) -> None:
        recompute = self.fp8 and distributed.in_fp8_activation_recompute_phase()
        if recompute and self.fp8_meta["recipe"].delayed():
            FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)
