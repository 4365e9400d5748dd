"""Attention of one pack by parts: each kernel computes some of its sequences, into one result.

A part reads and writes the real rows of its own sequences. It may also read pad rows near them,
which it lists, and which must hold finite numbers then. Pad rows of results become zero here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from padded_sp.inert import may_overwrite
from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import zero_rows_
from padded_sp.rows import contiguous_copy, zero_row_list_

_T = TypeVar("_T")

#: Pad rows, int64; all of a meta; none.
Pads = Tensor | PaddedSeqMeta | None


class Part(Protocol):
    """Shapes as in :func:`attend_by_parts`; features adjacent in q, k and v, all so in the rest."""

    def near_pads(self) -> tuple[Pads, Pads]:
        """Those of queries and of keys that it reads."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Writes its rows of ``out``. Returns what backward needs."""
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        saved: Tensor,
        grad: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Writes its rows of the gradients of q, k and v."""
        ...


def attend_by_parts(
    parts: Sequence[Part],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    inplace: bool,
) -> Tensor:
    """The parts' attention; pad rows of the result and of the gradients are zero.

        q    [T, heads, D]           k  [T_kv, kv_heads, D]    pad rows may hold anything
        out  [T, heads, D_v]         v  [T_kv, kv_heads, D_v]

    Each sequence belongs to one part. ``inplace``: zeros may be written to the pad rows of q, k, v
    and of the incoming gradient.
    """
    return _Attention.apply(q, k, v, meta, kv_meta, parts, inplace)


def part_of(make: Callable[..., _T], *arguments: Any) -> _T:
    """``make(*arguments)``: q, k, v, the two metas and numbers.

    Kept for the life of the first meta, since a part goes by shapes and lengths alone.
    """
    q, k, v, meta, kv_meta, *numbers = arguments
    # The key holds the other meta itself, not its id: ids are used again.
    other = None if kv_meta is meta else kv_meta
    key = make, q.shape[1:], k.shape[1:], v.shape[2], other, *numbers
    return meta.cached(key, lambda: make(*arguments))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: PaddedSeqMeta,
        kv_meta: PaddedSeqMeta,
        parts: Sequence[Part],
        inplace: bool,
    ) -> Tensor:
        ctx.how = meta, kv_meta, parts, inplace
        for part in parts:
            q_pads, k_pads = part.near_pads()
            q, k, v = (
                x if pads is None else _finite(x, pads, inplace and may_overwrite(x))
                for x, pads in ((q, q_pads), (k, k_pads), (v, k_pads))
            )
        q, k, v = map(_with_features_adjacent, (q, k, v))
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        with torch.cuda.device_of(q):
            saved = [part.forward(q, k, v, out) for part in parts]
            _zero_pads(out, meta)
        ctx.save_for_backward(q, k, v, out, *saved)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        meta, kv_meta, parts, inplace = ctx.how
        q, k, v, out, *saved = ctx.saved_tensors
        heads, width = grad.shape[1:]
        if grad.stride()[1:] != (width, 1) or grad.stride(0) < heads * width:
            grad, inplace = contiguous_copy(grad), True
        gradients = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        with torch.cuda.device_of(grad):
            for part, of_part in zip(parts, saved, strict=True):
                if (pads := part.near_pads()[0]) is not None:
                    grad = _finite(grad, pads, inplace)
                part.backward(q, k, v, out, of_part, grad, gradients)
            for x, rows in zip(gradients, (meta, kv_meta, kv_meta), strict=True):
                _zero_pads(x, rows)
        return *gradients, None, None, None, None


def _finite(x: Tensor, pads: Tensor | PaddedSeqMeta, inplace: bool) -> Tensor:
    """``x`` with zeros in these pad rows, unseen by autograd; a copy unless ``inplace``."""
    x = x.data if inplace else contiguous_copy(x)
    if isinstance(pads, PaddedSeqMeta):
        return zero_rows_(x, pads)
    zero_row_list_(x, pads)
    return x


def _zero_pads(x: Tensor, meta: PaddedSeqMeta) -> None:
    if meta.has_padding:
        zero_rows_(x, meta)


def _with_features_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
