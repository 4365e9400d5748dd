"""Promise 2 in one place: what pad rows hold never reaches anything else, in either direction.

Every layer is: check; ``x = inert_input(x, meta)``; ``y = op(x)``; ``inert_output(y, meta)``. The
op in the middle is a pure function, registered and differentiable; the writes to pad rows stay
out here. A layer may overwrite pad rows, never real ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import zero_padding_copy, zero_rows_, zeroed_copy

# Autograd nodes whose formula divides by their result, or takes the exponential of its distance to
# the input. Source: PyTorch tools/autograd/derivatives.yaml, the formulas with ``result``.
_DIVIDE_BY_RESULT = ("SqrtBackward", "ForeachSqrt", "HypotBackward", "LogsumexpBackward")

# Their results are thrown away and made again for backward, so that a write to them is lost.
# Source: megatron-core, megatron/core/tensor_parallel/random.py.
_MADE_AGAIN = ("CheckpointWithoutOutput",)


def inert_input(
    x: Tensor,
    meta: PaddedSeqMeta,
    *,
    first_row: int = 0,
    inplace: bool = True,
    zero_gradient: bool = False,
) -> Tensor:
    """``x`` with pad rows exactly zero.

    ``x`` [rows, ...] holds the rows from ``first_row`` on. Its pad rows are overwritten where that
    is safe and cheap (see :func:`may_overwrite`), else ``x`` is copied. The write does not bump
    the version counter: relu, softmax and exp save their output, and an ordinary in-place write
    would make their backward refuse it. What they get on these rows is a gradient of zero, and
    what they make of it is zero whatever they saved, unless they divide by that.

    ``zero_gradient``: the op may leave anything in the pad rows of the gradient of ``x``, and
    zeros go on to whatever made it.
    """
    if not _has_pads(x, meta, first_row):
        return x
    if torch.compiler.is_compiling():
        return zero_padding_copy(x, meta, first_row)
    if inplace and may_overwrite(x):
        zero_rows_(x, meta, first_row)
        if not (zero_gradient and x.requires_grad):
            return x
        return _Zeroed.apply(x, meta, first_row, inplace, False)
    return _Zeroed.apply(x, meta, first_row, inplace, True)


def inert_output(
    y: Tensor,
    meta: PaddedSeqMeta,
    *,
    first_row: int = 0,
    inplace: bool = True,
    is_zero: bool = False,
) -> Tensor:
    """``y``, fresh from an op, with pad rows zero; the gradient that comes back for it likewise.

    ``y`` is no view: the hook that zeroes its gradient must stay on the op when a caller goes on
    with an in-place operation. The gradient's pad rows are zeroed before the op's backward sees
    it: a dense gradient is overwritten (the caller and siblings that share its memory may see the
    zeros), an expanded one copied.
    ``is_zero``: the op is known to have left zeros in the pad rows.
    """
    if not _has_pads(y, meta, first_row):
        return y
    if torch.compiler.is_compiling():
        return zero_padding_copy(y, meta, first_row)
    if not is_zero:
        zero_rows_(y, meta, first_row)
    if y.requires_grad:

        def zero_gradient(grad: Tensor | None) -> Tensor | None:
            if grad is None:  # autograd's word for a gradient of zeros
                return None
            return inert_gradient(grad, meta, first_row=first_row, inplace=inplace)

        y.register_hook(zero_gradient)
    return y


class _Zeroed(torch.autograd.Function):
    """A tensor whose pad rows are zero, or a copy with such rows, and so its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, meta: PaddedSeqMeta, first_row: int, inplace: bool, copies: bool
    ) -> Tensor:
        ctx.where = meta, first_row, inplace
        return zeroed_copy(x, meta, first_row) if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        meta, first_row, inplace = ctx.where
        zeroed = inert_gradient(grad, meta, first_row=first_row, inplace=inplace)
        return zeroed, None, None, None, None


def inert_gradient(
    grad: Tensor, meta: PaddedSeqMeta, *, first_row: int = 0, inplace: bool = True
) -> Tensor:
    """An incoming gradient with pad rows zero: overwritten where dense, else copied."""
    if inplace and type(grad) is Tensor and not grad.requires_grad and _is_dense(grad):
        zero_rows_(grad, meta, first_row)
        return grad
    return zero_padding_copy(grad, meta, first_row)


def _has_pads(x: Tensor, meta: PaddedSeqMeta, first_row: int) -> bool:
    """Whether the rows of ``x`` hold pads, from host counts; with capacity they may always.

    Counting would tie a compiled graph to one pack's lengths: there they may always, too.
    """
    if not meta.has_padding or not x.numel():
        return False
    if meta.is_capacity or torch.compiler.is_compiling():
        return True
    return meta.num_pads_in(first_row, first_row + x.shape[0]) > 0


def may_overwrite(x: Tensor) -> bool:
    """Not what the caller holds as data or parameter, nor a view of it; and memory of its own.

    Nor the result of an operation that divides by it in backward: 0 / 0 there is NaN. Nor what
    Megatron makes again for backward, in the same memory, whatever was written there since.
    """
    source = x if x._base is None else x._base
    if x.is_leaf or source.is_leaf or type(x) is not Tensor or not _is_dense(x):
        return False
    made_by = source.grad_fn.name() if source.grad_fn is not None else ""
    return not made_by.startswith(_DIVIDE_BY_RESULT + _MADE_AGAIN)


def _is_dense(x: Tensor) -> bool:
    """Dense and non-overlapping: each element has memory of its own, without gaps."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda d: d[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
