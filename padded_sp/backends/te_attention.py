"""Attention on the padded layout by ``te.DotProductAttention``: real boundaries mask, padded place.

Everything that Transformer Engine would guess is said: both boundary arrays, whether there are pads
between sequences (it compares object identities), integer ``max_seqlen`` (else it reads the
device), the mask and the window.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from padded_sp.backends.te import UNFUSED_DROPS_PADS, cudnn_version, fp8_recipe, te, without_fp8
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta

# From this cuDNN on, Hopper's gradients of short, heavily padded sequences are no NaN (TE #2186).
_CUDNN_WITH_SOUND_PADS = (9, 18, 0)


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
    rows of out and of the gradients of q, k and v may hold anything. No communication.

    Raises: ValueError: no backend of Transformer Engine takes these; a cuDNN whose gradients are
        known to be NaN between pads.
    """
    has_pads = meta.has_padding or kv_meta.has_padding
    _check(q, k, v, has_pads)
    if not (q.shape[0] and k.shape[0]):
        return zeros_like_output(q, k, v)
    causal = window[1] == 0
    mask = "padding" if not causal else "padding_causal"
    if causal and kv_meta is not meta:
        mask = "padding_causal_bottom_right"
    sizes = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    attention = _attention(*sizes, dropout, softmax_scale, q.device, _is_deterministic())
    # Attention has no FP8 here. In an FP8 autocast the module, which all layers of one shape share,
    # would keep scales for its recipe.
    in_bf16 = nullcontext() if fp8_recipe() is None else without_fp8()
    try:
        with in_bf16:
            out = attention(
                q,
                k,
                v,
                qkv_format="thd",
                cu_seqlens_q=meta.cu_seqlens,
                cu_seqlens_kv=kv_meta.cu_seqlens,
                cu_seqlens_q_padded=meta.cu_seqlens_padded,
                cu_seqlens_kv_padded=kv_meta.cu_seqlens_padded,
                max_seqlen_q=meta.max_seq_len,
                max_seqlen_kv=kv_meta.max_seq_len,
                attn_mask_type=mask,
                window_size=window,
                pad_between_seqs=has_pads,
            )
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise
        raise ValueError(_no_backend(q, k, v)) from error
    if out.shape[0] != q.shape[0]:
        raise ValueError(
            f"Transformer Engine returned {out.shape[0]} of {q.shape[0]} rows: its Unfused backend "
            f"drops pad rows. {_no_backend(q, k, v)}"
        )
    return out.unflatten(1, (q.shape[1], v.shape[-1]))


def _check(q: Tensor, k: Tensor, v: Tensor, has_pads: bool) -> None:
    """Raises ValueError for what must not reach Transformer Engine."""
    on_other_device = torch.cuda.is_available() and not q.is_cuda  # without CUDA there is no TE
    if on_other_device or q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(_no_backend(q, k, v))
    if UNFUSED_DROPS_PADS and has_pads and (max(q.shape[-1], v.shape[-1]) > 256 or q.shape[-1] % 8):
        raise ValueError(_no_backend(q, k, v))
    if has_pads and cudnn_version() < _CUDNN_WITH_SOUND_PADS and _is_hopper(q.device.index):
        raise ValueError(
            f"cuDNN {'.'.join(map(str, cudnn_version()))}, which Transformer Engine loaded, gives "
            "NaN gradients for short padded sequences on Hopper (TransformerEngine #2186); load "
            "9.18 or newer (CUDNN_HOME and LD_LIBRARY_PATH decide), or use backend='torch'"
        )


def _no_backend(q: Tensor, k: Tensor, v: Tensor) -> str:
    return (
        f"no attention backend of Transformer Engine takes {q.shape[1]} heads of {q.shape[-1]} "
        f"with {k.shape[1]} KV heads and values of {v.shape[-1]}, packed, in {q.dtype} on "
        f"{q.device}: packed sequences need float16 or bfloat16 on a GPU, head sizes that are "
        "multiples of 8 up to 256, and cuDNN's fused attention (not NVTE_FUSED_ATTN=0); use "
        "backend='torch'"
    )


@functools.cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def _is_deterministic() -> bool:
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
    return not allowed or torch.are_deterministic_algorithms_enabled()


@functools.lru_cache(maxsize=256)
def _attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dropout: float,
    softmax_scale: float,
    device: torch.device,
    deterministic: bool,
) -> Any:
    """Transformer Engine's module, which has no parameters; masks and windows come with calls.

    ``deterministic`` is what the module reads for itself when it is built, and keeps.
    """
    return te.DotProductAttention(
        heads,
        (head_dim, v_head_dim),
        num_gqa_groups=kv_heads,
        attention_dropout=dropout,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=softmax_scale,
    )
