"""Attention on the padded layout with what PyTorch has, on any device.

One rule, `uses_flash`, chooses between two ways:

*   FlashAttention, as PyTorch ships it, on a GPU in half precision. It runs on the padded layout as
    it is: nothing is unpacked or copied. Pads that real queries could see become segments of their
    own; those behind a causal sequence stay where they are, since no real query looks back at them.
*   `scaled_dot_product_attention` of one sequence after another, for everything else.

Both get pad rows of zeros in q, k, v and in the incoming gradient.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_sp import boundaries
from padded_sp.meta import PaddedSeqMeta

# Pads run through attention in pieces of at most one tile, so that their cost is linear.
_PAD_PIECE_ROWS = 128
_FLASH_MAX_HEAD_DIM = 256
_FLASH_HEAD_DIM_MULTIPLE = 8


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
) -> Tensor:
    """softmax(scale Q K^T) V of each sequence by itself.

        q    [T, heads, D]           k  [T_kv, kv_heads, D]    pad rows zero
        out  [T, heads, D_v]         v  [T_kv, kv_heads, D_v]

    window = (left, right), -1 for no limit: query i of n sees the keys from (i + m - n) - left to
    (i + m - n) + right of m. Real queries that see no key give zeros. No communication.

    Raises: ValueError: metas with capacity where host lengths are needed (see `uses_flash`).
    """
    if not (q.shape[0] and k.shape[0]):
        return _zeros_like_output(q, k, v)
    attend = _flash if uses_flash(q, v) else _per_sequence
    return attend(q, k, v, meta, kv_meta, window, dropout, softmax_scale)


def uses_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes them: fp16 or bf16, heads of at most 256, a GPU from Ampere on."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and max(q.shape[-1], v.shape[-1]) <= _FLASH_MAX_HEAD_DIM
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


# --- FlashAttention ------------------------------------------------------------------------------


class Segments(NamedTuple):
    """What FlashAttention takes for a pack: boundaries that tile all rows, pads included."""

    q_boundaries: Tensor  # int32 [S + 1]
    k_boundaries: Tensor  # int32 [S + 1]
    longest_q: int  # rows
    longest_k: int  # rows


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    dropout: float,
    scale: float,
) -> Tensor:
    left, right = window
    segments = segments_of(meta, kv_meta, causal=right == 0)
    v_head_dim = v.shape[-1]
    q, k, v = (_aligned(t) for t in _with_equal_heads(q, k, v, _FLASH_HEAD_DIM_MULTIPLE))
    out = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        segments.q_boundaries,
        segments.k_boundaries,
        # At 1 row it would take the pack for a decoding step, one query a segment.
        max(2, segments.longest_q),
        segments.longest_k,
        dropout,
        right == 0,
        False,
        scale=scale,
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
    )[0]
    return out[..., :v_head_dim]


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
            _pieces(n, n_padded, keep_short_pads), _pieces(m, m_padded, keep_short_pads), fillvalue=0
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


def _aligned(x: Tensor) -> Tensor:
    """x if FlashAttention can read its rows in 16-byte pieces, else a dense copy."""
    *strides, last = x.stride()
    offsets = (*strides, x.storage_offset())
    in_pieces = last == 1 and all(offset % _FLASH_HEAD_DIM_MULTIPLE == 0 for offset in offsets)
    return x if in_pieces else x.contiguous()


# --- one sequence after another ------------------------------------------------------------------


def _per_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    dropout: float,
    scale: float,
) -> Tensor:
    if meta.is_capacity or kv_meta.is_capacity:
        raise ValueError(
            f"attention in {q.dtype} on {q.device.type} with heads of {q.shape[-1]} and "
            f"{v.shape[-1]} goes by host lengths, which a meta with capacity does not have; take "
            "bf16 or fp16 on a GPU with heads of at most 256, or a meta without capacity"
        )
    v_head_dim = v.shape[-1]
    group = q.shape[1] // k.shape[1]
    q, k, v = _with_equal_heads(q, k, v, 1)
    # Splitting all rows at once makes the backward one concatenation, whatever the sequences.
    q_parts = _split(q, meta)
    k_parts = _split(_repeat_heads(k, group), kv_meta)
    v_parts = _split(_repeat_heads(v, group), kv_meta)

    right = window[1]
    out: list[Tensor] = []
    silent_rows = 0  # rows of zeros since the last result: pads, and queries that see no key
    attended = False
    zeros = q.new_zeros(meta.num_rows, *q.shape[1:])
    for i, (n, n_padded, m) in enumerate(
        zip(meta.seq_lens, meta.padded_lens, kv_meta.seq_lens, strict=True)
    ):
        # Bottom-right alignment: the first queries of a sequence with fewer keys see none of them.
        blind = 0 if right < 0 else max(0, n - m - right)
        if n <= blind or m == 0:
            silent_rows += n_padded
            continue
        if silent_rows + blind:
            out.append(zeros[: silent_rows + blind])
        out.append(
            _attend(q_parts[2 * i][blind:], k_parts[2 * i], v_parts[2 * i], window, dropout, scale)
        )
        silent_rows = n_padded - n
        attended = True
    if not attended:
        return _zeros_like_output(q, k, v)[..., :v_head_dim]
    if silent_rows:
        out.append(zeros[:silent_rows])
    return torch.cat(out)[..., :v_head_dim]


def _split(x: Tensor, meta: PaddedSeqMeta) -> tuple[Tensor, ...]:
    """Views of x [T, ...]: each sequence's real rows and pad rows by turns, 2 B of them."""
    sizes = [
        rows
        for real, padded in zip(meta.seq_lens, meta.padded_lens, strict=True)
        for rows in (real, padded - real)
    ]
    return torch.split(x, sizes)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], dropout: float, scale: float
) -> Tensor:
    """One sequence: q [n, heads, D], k and v [m, heads, D] -> [n, heads, D]; every query sees a key."""
    causal = window == (-1, 0) and q.shape[0] == k.shape[0]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    visible = None if causal or window == (-1, -1) else _visible(q.shape[2], k.shape[2], window, q)
    out = F.scaled_dot_product_attention(
        q, k, v, visible, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return out.squeeze(0).transpose(0, 1)


def _visible(n: int, m: int, window: tuple[int, int], like: Tensor) -> Tensor:
    """bool [n, m]: which keys the last n queries of a sequence of m keys see."""
    left, right = window
    ones = torch.ones(n, m, dtype=torch.bool, device=like.device)
    if right >= 0:
        ones = ones.tril(m - n + right)
    if left >= 0:
        ones = ones.triu(m - n - left)
    return ones


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """[T, kv_heads, D] -> [T, kv_heads * times, D], each head `times` in a row."""
    if times == 1:
        return x
    return x.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)


# --- both ----------------------------------------------------------------------------------------


def _with_equal_heads(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> tuple[Tensor, ...]:
    """q, k and v with heads of one size, a multiple of `multiple`: zero features change no score."""
    widest = max(q.shape[-1], v.shape[-1])
    widest += -widest % multiple
    return tuple(F.pad(t, (0, widest - t.shape[-1])) if t.shape[-1] < widest else t
                 for t in (q, k, v))  # fmt: skip


def _zeros_like_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros [T, heads, D_v] of which q, k and v get gradients of zeros, not None."""
    nothing = q.sum() + k.sum() + v.sum()
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    zeros = q.new_zeros(*q.shape[:2], v.shape[-1])
    return zeros + nothing.masked_fill(everywhere, 0)
