"""Attention of a pack by two: our kernels for its short sequences, FlashAttention-4 for the rest.

Each is several times as fast as the other on some packs, and most packs have sequences of both
kinds. Both write into the same tensors (``parts.py``): nothing is copied or added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padded_sp.backends import flash4_attention, tiles, triton_attention
from padded_sp.backends.flash4_attention import Flash4Part
from padded_sp.backends.parts import Part, attend_by_parts, part_of
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.backends.triton_attention import TritonPart, fast_up_to
from padded_sp.meta import PaddedSeqMeta

NEEDS_PROOF = True
KEEPS_PADS_INERT = True
PROOF_PACKS = tiles.PROOF_PACKS

# Where the short sequences hold less of the tokens, they are no reason for more kernels.
_LEAST_SHARE = 0.1


@torch.compiler.disable
def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    *,
    window: tuple[int, int],
    dropout: float,
    softmax_scale: float,
    inplace: bool = True,
) -> Tensor:
    """softmax(scale Q K^T) V of each sequence by itself.

        q    [T, heads, D]           k  [T_kv, kv_heads, D]    pad rows may hold anything
        out  [T, heads, D_v]         v  [T_kv, kv_heads, D_v]

    window = (left, right), -1 for no limit, aligned bottom-right as in ``torch_attention``. Pad
    rows of out and of the gradients are zero. ``inplace``: zeros may be written to those of q, k, v
    and of the incoming gradient. No communication.

    Raises: ValueError: what ``reason_against`` says.
    """
    if reason := reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout):
        raise ValueError(reason)
    if not (q.shape[0] and k.shape[0]):
        return zeros_like_output(q, k, v)
    parts = part_of(_parts, q, k, v, meta, kv_meta, window, softmax_scale)
    return attend_by_parts(parts, q, k, v, meta, kv_meta, inplace)


def reason_against(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    *,
    window: tuple[int, int],
    dropout: float,
) -> str:
    """Why one of the two does not take these; empty where both do. Reads no device."""
    how = {"window": window, "dropout": dropout}
    return triton_attention.reason_against(
        q, k, v, meta, kv_meta, **how
    ) or flash4_attention.reason_against(q, k, v, meta, kv_meta, **how)


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    scale: float,
) -> list[Part]:
    """Sequences of up to some tokens are ours, by queries and by keys."""
    longest = fast_up_to(q, v)
    lengths = list(zip(meta.seq_lens, kv_meta.seq_lens, strict=True))
    short = [n for n, m in lengths if max(n, m) <= longest]
    pack = meta, kv_meta, window, scale
    if len(short) == len(lengths):
        return [TritonPart(q, k, v, *pack)]
    if sum(short) < _LEAST_SHARE * sum(n for n, _ in lengths):
        return [Flash4Part(*pack)]
    return [Flash4Part(*pack, longer_than=longest), TritonPart(q, k, v, *pack, longest=longest)]
