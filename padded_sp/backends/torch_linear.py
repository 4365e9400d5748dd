"""The parallel linears as differentiable operations, by ``torch.nn.functional.linear`` and GEMMs.

Pad rows are the caller's business. Registered as composite operations, so
that dispatch modes and torch.compile see the collectives and the GEMMs inside. The backward of
what needs no gradient is skipped, with its communication. Letters: T rows of the pack, R ranks
(``group_size``), K ``in_features``, O ``out_features``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from padded_sp.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from padded_sp.library import register

_ARGUMENTS = (
    "(Tensor x, Tensor weight, Tensor? bias, str group_name, int group_size, "
    "bool sequence_parallel) -> Tensor"
)


@register("column_parallel_linear" + _ARGUMENTS)
def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    group_size: int,
    sequence_parallel: bool,
) -> Tensor:
    """y = x W^T + b with W divided by its rows: each rank computes its output features.

    Over R ranks:
        x        [T / R, *, K]   this rank's rows; [T, *, K], the same on each rank, without
                                 ``sequence_parallel``
        weight   [O / R, K]      bias [O / R] or None
        y        [T, *, O / R]
        forward    x_full = all_gather(x);  y = x_full W^T + b
        backward   grad_x = reduce_scatter(grad_y W), all_reduce without ``sequence_parallel``
                   grad_weight = grad_y^T x_full, gathered again;  grad_bias = sum of grad_y
    Communicates T * K elements forward, and in backward once for each of x and weight that needs
    a gradient; without ``sequence_parallel`` only grad_x, as an all-reduce. Saves x, not x_full.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    return _ColumnParallelLinear.apply(x, weight, bias, group_name, group_size, sequence_parallel)


@register("row_parallel_linear" + _ARGUMENTS)
def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    group_size: int,
    sequence_parallel: bool,
) -> Tensor:
    """y = x W^T + b with W divided by its columns: each rank computes a term of the sum.

    Over R ranks:
        x        [T, *, K / R]   this rank's features of every row
        weight   [O, K / R]      bias [O] or None, the same on each rank
        y        [T / R, *, O]   this rank's rows; [T, *, O] without ``sequence_parallel``
        forward    y = reduce_scatter(x W^T) + b, all_reduce without ``sequence_parallel``
        backward   grad_y_full = all_gather(grad_y), once for both GEMMs
                   grad_x = grad_y_full W;  grad_weight = grad_y_full^T x
                   grad_bias = sum of grad_y: of this rank's rows, a term of the whole gradient
    Communicates T * O elements each way; without ``sequence_parallel`` nothing in backward.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    return _RowParallelLinear.apply(x, weight, bias, group_name, group_size, sequence_parallel)


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_name: str,
        group_size: int,
        sequence_parallel: bool,
    ) -> Tensor:
        _save(ctx, x, weight)
        ctx.group, ctx.sequence_parallel = (group_name, group_size), sequence_parallel
        x_full = all_gather_rows(x, *ctx.group) if sequence_parallel else x
        return _unflatten(F.linear(_flatten(x_full), weight, bias), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        grad_rows = _flatten(grad_y)
        if ctx.needs_input_grad[0]:
            combine = reduce_scatter_rows if ctx.sequence_parallel else all_reduce
            grad_x = _unflatten(combine(grad_rows.mm(weight), *ctx.group), grad_y)
        if ctx.needs_input_grad[1]:
            x_full = all_gather_rows(x, *ctx.group) if ctx.sequence_parallel else x
            grad_weight = grad_rows.t().mm(_flatten(x_full))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_name: str,
        group_size: int,
        sequence_parallel: bool,
    ) -> Tensor:
        _save(ctx, x, weight)
        ctx.group, ctx.sequence_parallel = (group_name, group_size), sequence_parallel
        combine = reduce_scatter_rows if sequence_parallel else all_reduce
        y = combine(F.linear(_flatten(x), weight), *ctx.group)
        if bias is not None:
            y = y.add_(bias)
        return _unflatten(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        grad_rows = _flatten(grad_y)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_rows.sum(0)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            if ctx.sequence_parallel:
                grad_rows = all_gather_rows(grad_rows, *ctx.group)
            if ctx.needs_input_grad[0]:
                grad_x = _unflatten(grad_rows.mm(weight), grad_y)
            if ctx.needs_input_grad[1]:
                grad_weight = grad_rows.t().mm(_flatten(x))
        return grad_x, grad_weight, grad_bias, None, None, None


def _flatten(x: Tensor) -> Tensor:
    """[rows, *, features] -> [rows * ..., features]."""
    return x.flatten(0, -2)


def _unflatten(rows: Tensor, like: Tensor) -> Tensor:
    """[rows * ..., features], fresh -> [rows, *, features] with the middle of ``like``.

    Not as a view: a view's base would take an in-place operation's gradient past the hooks of
    the view, and keep the memory when a caller lets go of the view's own.
    """
    middle = like.shape[1:-1]
    if not middle:
        return rows
    shape = (rows.shape[0] // max(1, middle.numel()), *middle, rows.shape[1])
    return torch.ops.aten._unsafe_view(rows, shape)


def _save(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Keeps for backward only what a gradient will ask for."""
    x_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if weight_needs_grad else None, weight if x_needs_grad else None)
