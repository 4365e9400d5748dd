"""A pack as FlashAttention takes it: segments that tile all rows, so that nothing is unpacked.

Real rows of a sequence make one segment. Its pads, which hold zeros, make segments of their own and
meet nothing else: their results and gradients are zeros too. Pads behind a causal sequence may even
stay in its segment, since no real query looks back at them.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from padded_sp import boundaries
from padded_sp.meta import PaddedSeqMeta

# Pads run through attention in pieces of at most one tile, so that their cost is linear.
_PAD_PIECE_ROWS = 128


class Segments(NamedTuple):
    """What FlashAttention takes for a pack: boundaries that tile all rows, pads included."""

    q_boundaries: Tensor  # int32 [S + 1]
    k_boundaries: Tensor  # int32 [S + 1]
    longest_q: int  # rows
    longest_k: int  # rows


def segments_of(meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta, *, causal: bool) -> Segments:
    """The segments of a pack: each sequence's real rows and, in segments of their own, its pads.

    Made from the host lengths and copied to the device once per meta. With capacity, and under
    torch.compile, they are made on the device, from the arrays alone: one pad segment a sequence.
    """
    pads_are_unseen = causal and kv_meta is meta
    if meta.is_capacity or kv_meta.is_capacity or torch.compiler.is_compiling():
        if pads_are_unseen:
            boundaries_q = boundaries_k = meta.cu_seqlens_padded
        else:
            boundaries_q, boundaries_k = _split_boundaries(meta), _split_boundaries(kv_meta)
        return Segments(boundaries_q, boundaries_k, meta.max_seq_len, kv_meta.max_seq_len)

    def make() -> Segments:
        q_lens, k_lens = segment_lengths(meta, kv_meta, keep_short_pads=pads_are_unseen)
        if tuple(q_lens) == meta.padded_lens and kv_meta is meta:
            q_boundaries = k_boundaries = meta.cu_seqlens_padded
        else:
            q_boundaries, k_boundaries = boundaries.to_device(
                tuple(q_lens), tuple(k_lens), meta.device
            )
        return Segments(q_boundaries, k_boundaries, max(q_lens), max(k_lens))

    # The key holds the other meta itself, not its id: ids are used again.
    other = None if kv_meta is meta else kv_meta
    return meta.cached(("attention segments", pads_are_unseen, other), make)


def segment_lengths(
    meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta, *, keep_short_pads: bool
) -> tuple[list[int], list[int]]:
    """Equally many segments of queries and of keys, in rows; each side adds up to all its rows.

    A sequence's real rows are one segment; its pads follow in pieces of at most 128 rows. With
    keep_short_pads, pads that fit into one piece stay with their sequence.
    """
    q_segments: list[int] = []
    k_segments: list[int] = []
    lengths = zip(
        meta.seq_lens, meta.padded_lens, kv_meta.seq_lens, kv_meta.padded_lens, strict=True
    )
    for n, n_padded, m, m_padded in lengths:
        for q_len, k_len in zip_longest(
            _pieces(n, n_padded, keep_short_pads),
            _pieces(m, m_padded, keep_short_pads),
            fillvalue=0,
        ):
            if q_len or k_len:  # segments of nothing would cost a tile's launch each
                q_segments.append(q_len)
                k_segments.append(k_len)
    return q_segments, k_segments


def _pieces(real: int, padded: int, keep_short_pads: bool) -> list[int]:
    pads = padded - real
    if keep_short_pads and pads <= _PAD_PIECE_ROWS:
        return [padded]
    whole, rest = divmod(pads, _PAD_PIECE_ROWS)
    return [real, *[_PAD_PIECE_ROWS] * whole, rest]


def _split_boundaries(meta: PaddedSeqMeta) -> Tensor:
    """int32 [2 B + 1]: where each sequence starts and its pads start, and the end of all rows."""
    starts = meta.cu_seqlens_padded[:-1]
    pads_start = starts + meta.cu_seqlens.diff()
    return torch.cat([torch.stack([starts, pads_start], 1).flatten(), meta.cu_seqlens_padded[-1:]])
