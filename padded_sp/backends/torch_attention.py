"""Attention on the padded layout with what PyTorch has, on any device.

One rule, ``uses_flash``, chooses between two ways:

*   FlashAttention, as PyTorch ships it, on a GPU in half precision. It runs on the padded layout as
    it is: nothing is unpacked or copied, and ``segments`` says where pads go.
*   ``scaled_dot_product_attention`` of one sequence after another, for everything else.

Both get pad rows of zeros in q, k, v and in the incoming gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_sp.backends.segments import segments_of
from padded_sp.meta import PaddedSeqMeta

Span = tuple[int, int]  # the first row, and the row after the last

_flash_attention = torch.ops.aten._flash_attention_forward
_FLASH_MAX_HEAD_DIM = 256
_FLASH_HEAD_DIM_MULTIPLE = 8

NEEDS_PROOF = False  # it comes with PyTorch, kernels included


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

    Raises: ValueError: metas with capacity where host lengths are needed, see ``reason_against``.
    """
    if not (q.shape[0] and k.shape[0]):
        return zeros_like_output(q, k, v)
    attend = _flash if uses_flash(q, v) else _per_sequence
    return attend(q, k, v, meta, kv_meta, window, dropout, softmax_scale)


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
    """Why ``dot_product_attention`` does not take these; empty where it does. Reads no device."""
    has_lengths = not (meta.is_capacity or kv_meta.is_capacity)
    if has_lengths or uses_flash(q, v) or not (q.shape[0] and k.shape[0]):
        return ""
    return (
        f"attention in {q.dtype} on {q.device.type} with heads of {q.shape[-1]} and "
        f"{v.shape[-1]} goes by host lengths, which a meta with capacity does not have; take "
        "bf16 or fp16 on a GPU with heads of at most 256, or a meta without capacity"
    )


def uses_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes them: half precision, heads up to 256, a GPU from Ampere on."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and max(q.shape[-1], v.shape[-1]) <= _FLASH_MAX_HEAD_DIM
        and _is_ampere_or_newer(q.device.index)
    )


@torch.compiler.assume_constant_result  # Dynamo cannot trace the query, and a GPU stays what it is
def _is_ampere_or_newer(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0)


# --- FlashAttention ------------------------------------------------------------------------------


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
    out = _flash_attention(
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
    return out if out.shape[-1] == v_head_dim else out[..., :v_head_dim]


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
    if reason := reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout):
        raise ValueError(reason)
    v_head_dim = v.shape[-1]
    group = q.shape[1] // k.shape[1]
    q, k, v = _with_equal_heads(q, k, v, 1)
    q_spans, k_spans = spans_of(meta, kv_meta, right=window[1])
    if not q_spans:
        return zeros_like_output(q, k, v)[..., :v_head_dim]

    zeros = q.new_zeros(1, 1, 1, 1).expand(1, *q.shape)
    out, row = [], 0
    for (start, stop), q_i, k_i, v_i in zip(
        q_spans,
        _take(q, q_spans),
        _take(_repeat_heads(k, group), k_spans),
        _take(_repeat_heads(v, group), k_spans),
        strict=True,
    ):
        out += [zeros[:, row:start], _attend(q_i, k_i, v_i, window, dropout, scale)]
        row = stop
    out.append(zeros[:, row:])
    return torch.cat(out, dim=1).squeeze(0)[..., :v_head_dim]


def spans_of(
    meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta, *, right: int
) -> tuple[list[Span], list[Span]]:
    """The rows of queries and of keys, for each sequence that has queries that see a key.

    Bottom-right alignment: where keys are fewer, the first queries of a sequence see none of them.
    """

    def make() -> tuple[list[Span], list[Span]]:
        q_spans, k_spans = [], []
        q_end = k_end = 0
        lengths = zip(
            meta.seq_lens, meta.padded_lens, kv_meta.seq_lens, kv_meta.padded_lens, strict=True
        )
        for n, n_padded, m, m_padded in lengths:
            blind = 0 if right < 0 else max(0, n - m - right)
            if n > blind and m:
                q_spans.append((q_end + blind, q_end + n))
                k_spans.append((k_end, k_end + m))
            q_end += n_padded
            k_end += m_padded
        return q_spans, k_spans

    # The key holds the other meta itself, not its id: ids are used again.
    other = None if kv_meta is meta else kv_meta
    return meta.cached(("attention spans", right, other), make)


def _take(x: Tensor, spans: list[Span]) -> tuple[Tensor, ...]:
    """Views [1, rows, heads, D] of x [T, heads, D]; the backward is one concatenation for all."""
    sizes, row = [], 0
    for start, stop in spans:
        sizes += [start - row, stop - start]
        row = stop
    return torch.split(x.unsqueeze(0), [*sizes, x.shape[0] - row], dim=1)[1::2]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], dropout: float, scale: float
) -> Tensor:
    """One sequence whose queries all see a key.

    q [1, n, heads, D], k and v [1, m, heads, D] -> [1, n, heads, D].
    """
    n, m = q.shape[1], k.shape[1]
    is_causal, visible = False, None
    if window == (-1, 0) and n == m:  # a branch, so that torch.compile decides it
        is_causal = True
    elif window != (-1, -1):
        visible = _visible(n, m, window, q)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        visible,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
    )
    return out.transpose(1, 2)


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
    """[T, kv_heads, D] -> [T, kv_heads * times, D], each head ``times`` in a row."""
    if times == 1:
        return x
    return x.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)


# --- both ----------------------------------------------------------------------------------------


def _with_equal_heads(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> tuple[Tensor, ...]:
    """q, k and v with heads of one size, a multiple of ``multiple``. Zeros change no score."""
    widest = max(q.shape[-1], v.shape[-1])
    widest += -widest % multiple
    return tuple(F.pad(t, (0, widest - t.shape[-1])) if t.shape[-1] < widest else t
                 for t in (q, k, v))  # fmt: skip


def zeros_like_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros [T, heads, D_v] of which q, k and v get gradients of zeros, not None."""
    nothing = q.sum() + k.sum() + v.sum()
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    zeros = q.new_zeros(*q.shape[:2], v.shape[-1])
    return zeros + nothing.masked_fill(everywhere, 0)
