"""Attention on the padded layout by FlashAttention-4: padded boundaries place, real lengths mask.

Its pad rows hold anything, and so may its numbers at some head sizes: layers prove it first.
"""

# Not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta

try:
    from flash_attn.cute.interface import flash_attn_varlen_func
except ImportError as error:
    raise ImportError(
        f"backend 'flash4' needs FlashAttention-4 ({error}): "
        "python -m pip install --pre 'padded_sp[flash4]'"
    ) from error

NEEDS_PROOF = True


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
) -> Tensor:
    """softmax(scale Q K^T) V of each sequence by itself.

        q    [T, heads, D]           k  [T_kv, kv_heads, D]    pad rows zero
        out  [T, heads, D_v]         v  [T_kv, kv_heads, D_v]

    window = (left, right), -1 for no limit, aligned bottom-right as in ``torch_attention``. Pad
    rows of out and of the gradients may hold anything. No communication.

    Raises: ValueError: what ``reason_against`` says.
    """
    if reason := reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout):
        raise ValueError(reason)
    if not (q.shape[0] and k.shape[0]):
        return zeros_like_output(q, k, v)
    left, right = (None if limit < 0 else limit for limit in window)
    causal = window == (-1, 0)
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=meta.cu_seqlens_padded,
        cu_seqlens_k=kv_meta.cu_seqlens_padded,
        seqused_q=_real_lengths(meta),
        seqused_k=_real_lengths(kv_meta),
        max_seqlen_q=meta.max_seq_len,
        max_seqlen_k=kv_meta.max_seq_len,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(None, None) if causal else (left, right),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out


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


def _real_lengths(meta: PaddedSeqMeta) -> Tensor | None:
    """int32 [B]; None where nothing is padded."""
    if not meta.has_padding:
        return None
    return meta.cached("real lengths", lambda: meta.cu_seqlens.diff())
