"""Attention by one backend, with inert pads whatever that backend does about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from padded_sp.inert import inert_input, inert_output
from padded_sp.meta import PaddedSeqMeta


def attend(
    compute: Callable[..., Tensor],
    keeps_pads_inert: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    *,
    inplace: bool = True,
    **options: Any,
) -> Tensor:
    """``compute``, a backend's ``dot_product_attention``, on any pads; pad rows of results zero.

        q    [T, heads, D]            k  [T_kv, kv_heads, D]
        out  [T, heads * D_v]         v  [T_kv, kv_heads, D_v]

    ``inplace``: zeros may be written to the pad rows of q, k and v. No communication.
    """
    # Rows that are pads by one of two metas may be real by the other.
    over = inplace and (kv_meta is meta or not _share_memory(q, k, v))
    if keeps_pads_inert:
        return compute(q, k, v, meta, kv_meta, inplace=over, **options).flatten(1)
    q = inert_input(q, meta, inplace=over, zero_gradient=True)
    k = inert_input(k, kv_meta, inplace=over, zero_gradient=True)
    v = inert_input(v, kv_meta, inplace=over, zero_gradient=True)
    out = compute(q, k, v, meta, kv_meta, **options)
    # A view at last: a backend that saved its result must notice what is written to it.
    return inert_output(out.contiguous(), meta, inplace=inplace).flatten(1)


def _share_memory(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch.compiler.is_compiling():  # nothing is written to then
        return False
    storage = q.untyped_storage().data_ptr()
    return storage in (k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr())
