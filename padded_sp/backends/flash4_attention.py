"""Attention on the padded layout by FlashAttention-4: padded boundaries place, real lengths mask.

It reads what follows a sequence up to the end of a tile, so that pad rows there must be finite, and
leaves anything in the pad rows of results. Its numbers may be wrong at some head sizes: layers
prove it first.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from padded_sp.backends.parts import Pads, attend_by_parts, part_of
from padded_sp.backends.tiles import on_device, sequences
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta

try:
    with warnings.catch_warnings():  # libraries under it that use what they deprecate
        warnings.simplefilter("ignore", DeprecationWarning)
        # Its own autograd function takes no memory to write to, which attention by parts needs.
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
except ImportError as error:
    raise ImportError(
        f"backend 'flash4' needs FlashAttention-4 ({error}): "
        "python -m pip install --pre 'padded_sp[flash4]'"
    ) from error

# It says so of each kernel that it compiles, and means an argument that we do not use.
warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted")

NEEDS_PROOF = True
KEEPS_PADS_INERT = True

# No tile of it, of queries or of keys, has more rows.
_LARGEST_TILE = 256


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
    part = part_of(_all_of_it, q, k, v, meta, kv_meta, window, softmax_scale)
    return attend_by_parts([part], q, k, v, meta, kv_meta, inplace)


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
    """Why FlashAttention-4 does not take these; empty where it does. Reads no device."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention-4 takes float16 and bfloat16 on a GPU, not {q.dtype} on {q.device}"
    sizes = q.shape[-1], v.shape[-1]
    if min(sizes) < 8 or max(sizes) > 256 or any(size % 8 for size in sizes):
        return f"FlashAttention-4 takes heads of 8 to 256 in steps of 8, not {sizes[0]}/{sizes[1]}"
    if dropout:
        return f"FlashAttention-4 has no dropout, and this call has {dropout}"
    return ""


# --- as a part of a pack -------------------------------------------------------------------------


class Flash4Part:
    """The sequences with more than ``longer_than`` tokens: a part as ``parts.py`` means it.

    Where a sequence starts and how many rows of it are used is all that FlashAttention-4 goes by:
    whatever lies between the listed sequences, pads or others, is as pads to it.
    """

    def __init__(
        self,
        meta: PaddedSeqMeta,
        kv_meta: PaddedSeqMeta,
        window: tuple[int, int],
        scale: float,
        longer_than: int = -1,
    ) -> None:
        left, right = (None if limit < 0 else limit for limit in window)
        causal = window == (-1, 0)
        self._how: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": None if causal else left,
            "window_size_right": None if causal else right,
        }
        self._pads: tuple[Pads, Pads]
        if longer_than < 0 and not (meta.has_padding or kv_meta.has_padding):
            self._pads, lengths = (None, None), (None, None)
            starts = meta.cu_seqlens, kv_meta.cu_seqlens
        elif meta.is_capacity or kv_meta.is_capacity:
            self._pads = meta, kv_meta
            starts = meta.cu_seqlens_padded, kv_meta.cu_seqlens_padded
            lengths = meta.cu_seqlens.diff(), kv_meta.cu_seqlens.diff()
        else:
            starts, lengths, self._pads = _listed(meta, kv_meta, longer_than)
        self._how |= {
            "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
            "seqused_q": lengths[0],
            "seqused_k": lengths[1],
            "max_seqlen_q": meta.max_seq_len,
            "max_seqlen_k": kv_meta.max_seq_len,
        }

    def near_pads(self) -> tuple[Pads, Pads]:
        return self._pads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Returns float32 [heads, T]: the logarithm of each row's sum of exponentials."""
        return _flash_attn_fwd(q, k, v, out=out, return_lse=True, **self._how)[1]

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
        dq, dk, dv = gradients
        deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_bwd(
            q, k, v, out, grad, saved, deterministic=deterministic, dq=dq, dk=dk, dv=dv, **self._how
        )


def _all_of_it(q: Tensor, k: Tensor, v: Tensor, *pack: Any) -> Flash4Part:
    return Flash4Part(*pack)


def _listed(
    meta: PaddedSeqMeta, kv_meta: PaddedSeqMeta, longer_than: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Pads, Pads]]:
    """Of the sequences with more tokens: int32 [B' + 1] where they start, in queries and in keys;
    int32 [B'] their real lengths; and the pad rows that tiles of them may reach."""
    q_starts, k_starts, q_lengths, k_lengths = [], [], [], []
    for sequence in sequences(meta, kv_meta):
        if sequence.longest > longer_than:
            q_starts.append(sequence.q_row)
            k_starts.append(sequence.k_row)
            q_lengths.append(sequence.q_count)
            k_lengths.append(sequence.k_count)
    device = meta.device
    fields = [[*q_starts, meta.num_rows], [*k_starts, kv_meta.num_rows], q_lengths, k_lengths]
    q_at, k_at, q_used, k_used = (on_device(values, device) for values in fields)
    q_pads = _near(meta, q_starts, q_lengths)
    k_pads = q_pads if kv_meta is meta else _near(kv_meta, k_starts, k_lengths)
    return (q_at, k_at), (q_used, k_used), (q_pads, k_pads)


def _near(meta: PaddedSeqMeta, starts: list[int], lengths: list[int]) -> Tensor | None:
    """int64: the pad rows less than a tile behind one of these sequences' last real row."""
    reached = [(a + n, a + n + _LARGEST_TILE) for a, n in zip(starts, lengths, strict=True)]
    firsts, counts, reach, i, row = [], [], 0, 0, 0
    for real, padded in zip(meta.seq_lens, meta.padded_lens, strict=True):
        first, row = row + real, row + padded
        while i < len(reached) and reached[i][0] <= first:
            reach, i = max(reach, reached[i][1]), i + 1
        if (count := min(row, reach) - first) > 0:
            firsts.append(first)
            counts.append(count)
    if not counts:
        return None
    device, total = meta.device, sum(counts)
    # The n-th row listed is n + what its range starts at beyond the rows listed before.
    before = itertools.accumulate(counts, initial=0)
    shifts = [first - n for first, n in zip(firsts, before, strict=False)]
    shift, count = on_device([shifts, counts], device)
    rows = torch.arange(total, device=device)
    return rows + torch.repeat_interleave(shift, count, output_size=total)
