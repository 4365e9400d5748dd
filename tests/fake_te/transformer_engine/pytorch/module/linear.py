"""``Linear``, and the autograd function behind it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine import MODERN
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, state
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, QuantizedTensorStorage

_INPUT, _WEIGHT, _GRAD_OUTPUT = 0, 1, 0


class Linear(TransformerEngineBaseModule):
    """y = x W^T + b. Column: W by its rows, x gathered. Row: W by its columns, y scattered."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cpu",
        name: str | None = None,
        save_original_input: bool = False,
    ) -> None:
        super().__init__(name)
        # What is kept for backward: here it is always what was quantised.
        self.save_original_input = save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.tp_size = tp_size
        if tp_group is not None:
            self.tp_size = distributed.get_distributed_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        assert parallel_mode in ("column", "row", None)
        assert max(in_features, out_features) % self.tp_size == 0
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        factory = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self._register_own(in_features, factory)
        sizes = _split(parameters_split, out_features)
        shares = {
            part: size // self.tp_size if parallel_mode == "column" else size
            for part, size in sizes.items()
        }
        weight = torch.empty(self.out_features, self.in_features, **factory)
        self.weight_names = [f"{part}weight" for part in sizes]
        self.bias_names = [f"{part}bias" for part in sizes]
        for key, rows in zip(self.weight_names, weight.split(list(shares.values())), strict=True):
            self.register_parameter(
                key,
                nn.Parameter(rows),
                init_fn=init_method or partial(nn.init.normal_, std=0.023),
                get_rng_state_tracker=get_rng_state_tracker,
                fp8_meta_index=_WEIGHT,
            )
        both = torch.empty(self.out_features, **factory) if bias else torch.empty(0, **factory)
        for key, rows in zip(self.bias_names, shares.values(), strict=True):
            if bias:
                start = sum(list(shares.values())[: self.bias_names.index(key)])
                part = nn.Parameter(both[start : start + rows])
                self.register_parameter(key, part, init_fn=nn.init.zeros_)
            else:
                setattr(self, key, both)
        if self.primary_weights_in_fp8:
            self.init_fp8_metadata()
        self.reset_parameters(defer_init=device == "meta")

    def _register_own(self, in_features: int, factory: dict[str, Any]) -> None:
        """Parameters that come before the weight."""

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        for name, param in () if defer_init else self.named_parameters(recurse=False):
            if name in self.weight_names or (
                name in self.bias_names and self.parallel_mode == "column"
            ):
                param.tensor_model_parallel, param.partition_stride = True, 1
                param.partition_dim = 1 if self.parallel_mode == "row" else 0
            elif self.parallel_mode == "row" or name not in self.bias_names:
                param.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        x = self.prepare_forward(inp)
        try:
            y, bias, normed = self._linear(x, is_first_microbatch)
        finally:
            self.end_forward()
        if self.gemm_bias_unfused_add:
            y = y + bias
        returned = (y, bias) if self.return_bias else (y,)
        returned = returned if normed is None else (*returned, normed)
        return returned if len(returned) > 1 else y

    def _linear(self, x: Tensor, is_first_microbatch: bool | None) -> Any:
        weights = [getattr(self, name) for name in self.weight_names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [getattr(self, name) for name in self.bias_names]
        bias = (biases[0] if len(biases) == 1 else torch.cat(biases)) if self.use_bias else None
        bias = bias if bias is None else bias.to(self.activation_dtype)
        normed = self._normed(x)
        fused = self.apply_bias and not self.gemm_bias_unfused_add
        y = _Linear.apply(
            weight,
            x if normed is None else normed,
            bias if fused else None,
            self,
            is_first_microbatch,
            torch.is_grad_enabled(),
        )
        return y, bias, normed if getattr(self, "return_layernorm_output", False) else None

    def _normed(self, x: Tensor) -> Tensor | None:
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        module: Linear,
        is_first_microbatch: bool | None,
        has_grad: bool,
    ) -> Tensor:
        ctx.group, ctx.fp8, ctx.tp_size = module.tp_group, module.fp8, module.tp_size
        ctx.mode, ctx.sp = module.parallel_mode, module.sequence_parallel
        ctx.dtype, ctx.quantizers = module.activation_dtype, module.quantizers
        ctx.shape, ctx.use_bias = x.shape, bias is not None
        ctx.weight = weight if module.fuse_wgrad_accumulation else None
        ctx.accumulate = not is_first_microbatch
        gathers, rows = ctx.sp and ctx.mode == "column", x.flatten(0, -2)
        if ctx.fp8:
            quantizer, weight_quantizer, _ = ctx.quantizers["scaling_fwd"]
            _check(rows, weight, quantizer if gathers else None)
            _reduce_over(quantizer, ctx.group if gathers else None)
            saved = quantizer(rows)
            x_full = gather_along_first_dim(saved, ctx.group, quantizer) if gathers else saved
            operand = module._fp8_workspaces.get("weight") if is_first_microbatch is False else None
            operand = weight_quantizer(weight) if operand is None else operand
            if is_first_microbatch is not None:
                module._fp8_workspaces["weight"] = operand
            kept = [*saved.tensors(), *operand.tensors()]
        else:
            saved, operand = rows.to(ctx.dtype), weight.to(ctx.dtype)
            x_full = gather_along_first_dim(saved, ctx.group) if gathers else saved
            kept = [saved, operand]
        y = _value(x_full, False) @ _value(operand, False).t()
        y = (y if bias is None else y + bias.float()).to(ctx.dtype)
        if ctx.mode == "row" and ctx.tp_size > 1:
            combine = (
                distributed.reduce_scatter_along_first_dim if ctx.sp else distributed.allreduce
            )
            y = combine(y, ctx.group)
        ctx.save_for_backward(*kept)
        needs = any(t is not None and t.requires_grad for t in (weight, x, bias))
        ctx.updates = ctx.fp8 and has_grad and needs and _is_first_fp8_module()
        if x.dim() > 2 or MODERN:  # newer versions always return a view
            y = y.view(-1, *x.shape[1:-1], y.shape[-1])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        gathers = ctx.sp and ctx.mode == "row"
        needs_weight, needs_x, *_ = ctx.needs_input_grad
        if ctx.fp8:
            dtype = ctx.dtype
            x, weight = (QuantizedTensorStorage.of(kept, dtype) for kept in _halves(ctx))
            quantizer = ctx.quantizers["scaling_bwd"][_GRAD_OUTPUT]
            _reduce_over(quantizer, ctx.group if gathers else None)
            if gathers:
                grad_full = gather_along_first_dim(grad_rows, ctx.group, quantizer, both=True)
            else:
                grad_full = quantizer(grad_rows)
        else:
            x, weight = ctx.saved_tensors
            grad_full = gather_along_first_dim(grad_rows, ctx.group) if gathers else grad_rows
        grad_x = grad_weight = None
        if needs_x:
            grad_x = (_value(grad_full, False) @ _value(weight, True)).to(ctx.dtype)
            if ctx.mode == "column" and ctx.tp_size > 1:
                grad_x = _summed(grad_x, ctx)
            grad_x = grad_x.view(ctx.shape)
        if needs_weight:
            if ctx.sp and ctx.mode == "column":
                forward = ctx.quantizers["scaling_fwd"]
                quantizer = forward[_INPUT] if ctx.fp8 else None
                x = gather_along_first_dim(x, ctx.group, quantizer, columns=True)
            grad_weight = _value(grad_full, True).t() @ _value(x, True)
            if ctx.fp8 and len(_value(x, True)) % 16:
                raise RuntimeError("cuBLAS Error: an unsupported value: wgrad needs T % 16 == 0")
            grad_weight = _accumulated(ctx, grad_weight)
        grad_bias = grad_rows.float().sum(0).to(ctx.dtype) if ctx.use_bias else None
        if ctx.updates:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad_weight, grad_x, grad_bias, None, None, None


def _summed(partial_rows: Tensor, ctx: Any) -> Tensor:
    scatter = distributed.reduce_scatter_along_first_dim
    return (scatter if ctx.sp else distributed.allreduce)(partial_rows, ctx.group)


def _value(x: Any, columns: bool) -> Tensor:
    return x.float() if isinstance(x, Tensor) else x.along(columns)


def _halves(ctx: Any) -> Any:
    kept = ctx.saved_tensors
    return kept[:4], kept[4:]


def _accumulated(ctx: Any, grad_weight: Tensor) -> Tensor | None:
    """The gradient, or none where it went into ``main_grad``."""
    if ctx.weight is None:
        return grad_weight.to(ctx.dtype)
    total = ctx.weight.main_grad
    total.copy_(total + grad_weight if ctx.accumulate else grad_weight)
    if hasattr(ctx.weight, "grad_added_to_main_grad"):
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(ctx.weight)
    return None


def _check(rows: Tensor, weight: Tensor, gathered_by: Any) -> None:
    for tensor in (rows, weight):
        if tensor.shape[0] % 8 or tensor.shape[1] % 16:
            raise (ValueError if MODERN else AssertionError)(
                "FP8 execution requires the product of all dimensions except the last to be "
                f"divisible by 8 and the last dimension to be divisible by 16, but got tensor with "
                f"dims={list(tensor.shape)}"
            )
    assert MODERN or gathered_by is None or gathered_by.is_quantizable(rows), (
        f"All-gather requires quantizable tensor for quantizer {type(gathered_by).__name__}"
    )


def _reduce_over(quantizer: Any, group: Any) -> None:
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        quantizer.with_amax_reduction = group is not None
        quantizer.amax_reduction_group = group


def _is_first_fp8_module() -> bool:
    before = state().is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    if distributed.in_fp8_activation_recompute_phase():
        state().is_first_fp8_module = before
    return first


def _split(parameters_split: Any, out_features: int) -> dict[str, int]:
    """Prefix of each part's parameters -> its features, before they are divided over ranks."""
    if parameters_split is None:
        return {"": out_features}
    if not isinstance(parameters_split, dict):
        size = out_features // len(parameters_split)
        parameters_split = dict.fromkeys(parameters_split, size)
    return {f"{name.rstrip('_')}_": size for name, size in parameters_split.items()}
