"""Cross entropy over a vocabulary divided over ranks, as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padded_sp.collectives import all_reduce
from padded_sp.library import register


@register(
    "vocab_parallel_cross_entropy(Tensor logits, Tensor labels, Tensor counted, Tensor count, "
    "str group_name, int group_size, int group_rank) -> Tensor"
)
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    count: Tensor,
    group_name: str,
    group_size: int,
    group_rank: int,
) -> Tensor:
    """-log softmax(logits)[label], summed over the rows counted and divided by ``count``.

    Over R ranks (``group_size``):
        logits   [T, V / R]   this rank's columns, any floating dtype
        labels   [T]          int64 in [0, V) where counted, anything elsewhere
        counted  [T]          bool; the other rows add nothing and get a gradient of zero
        count    []           the divisor
        returns  []           float32, float64 for float64 logits; the same on each rank
    Communicates 3 * T numbers forward, as two all-reduces: the rows' maxima, then their sums of
    exponentials with the labels' logits. Nothing backward. Saves logits and two numbers a row.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    group = (group_name, group_size)
    return _CrossEntropy.apply(logits, labels, counted, count, group, group_rank)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        counted: Tensor,
        count: Tensor,
        group: tuple[str, int],
        rank: int,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        columns = logits.shape[1]
        column = labels - rank * columns
        elsewhere = (column < 0) | (column >= columns)
        column = column.masked_fill(elsewhere, 0)[:, None]

        row_max = all_reduce(logits.amax(1).to(dtype), *group, op="max")
        shifted = logits - row_max[:, None]
        target = shifted.gather(1, column).squeeze(1).masked_fill(elsewhere, 0)
        terms = torch.stack([shifted.exp_().sum(1), target])
        exp_sum, target = all_reduce(terms, *group).unbind()
        ctx.save_for_backward(logits, column, elsewhere, counted, count, row_max, exp_sum)
        return (exp_sum.log() - target).masked_fill(~counted, 0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, elsewhere, counted, count, row_max, exp_sum = ctx.saved_tensors
        scale = grad_loss / count
        grad = (logits - row_max[:, None]).exp_().mul_((scale / exp_sum)[:, None])
        at_label = grad.gather(1, column) - scale.masked_fill(elsewhere[:, None], 0)
        grad.scatter_(1, column, at_label).masked_fill_(~counted[:, None], 0)
        return grad.to(logits.dtype), None, None, None, None, None
