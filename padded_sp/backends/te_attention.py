"""Attention on the padded layout by ``te.DotProductAttention``: real boundaries mask, padded place.

Everything that Transformer Engine would guess is said: both boundary arrays, whether there are pads
between sequences (it compares object identities), integer ``max_seqlen`` (else it reads the
device), the mask and the window.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from padded_sp.backends.cudnn import SOUND_PADS_ON_HOPPER, is_hopper
from padded_sp.backends.te import UNFUSED_DROPS_PADS, cudnn_version, fp8_recipe, te, without_fp8
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta

NEEDS_PROOF = True  # which cuDNN it loads, and what that computes, is up to the machine

_WAY_OUT = "use backend='torch', or 'auto'"
_MAX_HEAD_DIM = 256

# cuDNN's deterministic backward of packs on Hopper asks for 128 bytes and more of workspace for
# each of sequences * heads * longest queries * longest keys. From this many on, Transformer Engine
# 2.20 refuses training and 2.12 runs out of memory. Its modules are always in training mode here.
_MOST_DETERMINISTIC_SCORES = 2**30


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

    Raises: ValueError: what ``reason_against`` says; no backend of Transformer Engine takes these,
        with its own reasons.
    """
    if reason := reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout):
        raise ValueError(f"{reason}; {_WAY_OUT}")
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
                window_size=_two_sided(window, max(meta.max_seq_len, kv_meta.max_seq_len)),
                pad_between_seqs=meta.has_padding or kv_meta.has_padding,
            )
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise
        own = _own_reasons()
        why = f". Its own reasons: {own}" if own else ""
        raise ValueError(f"{_taken_by_none(*sizes, q.dtype, q.device)}; {_WAY_OUT}{why}") from error
    if out.shape[0] != q.shape[0]:
        raise ValueError(
            f"Transformer Engine returned {out.shape[0]} of {q.shape[0]} rows: its Unfused backend "
            f"drops pad rows. {_taken_by_none(*sizes, q.dtype, q.device)}; {_WAY_OUT}"
        )
    return out.unflatten(1, (q.shape[1], v.shape[-1]))


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
    """Why Transformer Engine must not get these, or takes none of them; empty where it does.

    Reads no device. What only kernels know, ``verify`` finds out.
    """
    has_pads = meta.has_padding or kv_meta.has_padding
    (rows, heads, head_dim), (k_rows, kv_heads, _) = q.shape, k.shape
    problem = _problem(heads, kv_heads, head_dim, v.shape[2], q.dtype, q.device, has_pads)
    if problem or not (rows and k_rows):
        return problem
    problem = _problem_of_cudnn(heads, meta, kv_meta, window, dropout, q.device)
    return "" if problem and _has_flash_attention(has_pads, dropout) else problem


@functools.lru_cache(maxsize=256)
def _problem(
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    has_pads: bool,
) -> str:
    """What no lengths change."""
    sizes = head_dim, v_head_dim
    on_other_device = torch.cuda.is_available() and device.type != "cuda"  # no CUDA: no TE
    if (
        on_other_device
        or dtype not in (torch.float16, torch.bfloat16)
        or max(sizes) > _MAX_HEAD_DIM
        or any(size % 8 for size in sizes)
    ):
        return _taken_by_none(heads, kv_heads, head_dim, v_head_dim, dtype, device)
    if has_pads and cudnn_version() < SOUND_PADS_ON_HOPPER and is_hopper(device):
        return (
            f"cuDNN {'.'.join(map(str, cudnn_version()))}, which Transformer Engine loaded, gives "
            "NaN gradients for short padded sequences on Hopper (TransformerEngine #2186); load "
            "9.18 or newer (CUDNN_HOME and LD_LIBRARY_PATH decide)"
        )
    return ""


def _problem_of_cudnn(
    heads: int,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta,
    window: tuple[int, int],
    dropout: float,
    device: torch.device,
) -> str:
    """What cuDNN's attention does not take, by Transformer Engine's rules.

    Without pads its Unfused backend would be left. That one is not asked for here: it reads lengths
    on the host and holds every score, and small packs, by which ``verify`` judges, never see it.
    """
    longest, longest_k = meta.max_seq_len, kv_meta.max_seq_len
    if (window[0] >= 0 or window[1] > 0) and (dropout or longest > longest_k):
        return (
            "cuDNN's attention, by Transformer Engine, takes a window neither with dropout nor "
            f"where the longest queries exceed the longest keys: window {window}, dropout "
            f"{dropout}, up to {longest} padded rows of queries and {longest_k} of keys"
        )
    sequences = meta.num_sequences
    scores = sequences * heads * longest * longest_k
    if scores >= _MOST_DETERMINISTIC_SCORES and _is_deterministic() and is_hopper(device):
        return (
            "under deterministic algorithms cuDNN's attention on Hopper, by Transformer Engine, "
            "trains packs of fewer than 2 ** 30 sequences * heads * longest queries * longest keys "
            f"in padded rows, and these have {sequences} * {heads} * {longest} * {longest_k} = "
            f"{scores}; give shorter packs, or allow others (NVTE_ALLOW_NONDETERMINISTIC_ALGO=1)"
        )
    return ""


def _two_sided(window: tuple[int, int], longest: int) -> tuple[int, int]:
    """Transformer Engine asserts that both sides of a window are limited, or neither, but for
    causal masks. A side of the longest sequence limits nothing."""
    left, right = window
    if (left < 0) == (right < 0) or right == 0:
        return window
    return (longest, right) if left < 0 else (left, longest)


def _has_flash_attention(has_pads: bool, dropout: float) -> bool:
    """Whether Transformer Engine has a FlashAttention, which may take what cuDNN does not.

    With pads those are version 3 and later, from Transformer Engine 2.16 on; with dropout version 2
    alone (2.20.2, ``get_attention_backend`` of ``dot_product_attention/utils.py``).
    """
    if os.environ.get("NVTE_FLASH_ATTN", "1") == "0" or (has_pads and UNFUSED_DROPS_PADS):
        return False
    utils = getattr(_te_internals(), "dpa_utils", None)
    found = getattr(utils, "FlashAttentionUtils", None)
    names = ["v3_is_installed", "v4_is_installed"] * (not dropout)
    names += ["is_installed"] * (not has_pads)
    return any(getattr(found, name, False) for name in names)


def _taken_by_none(
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    return (
        f"no attention backend of Transformer Engine takes {heads} heads of {head_dim} with "
        f"{kv_heads} KV heads and values of {v_head_dim}, packed, in {dtype} on {device}: packed "
        "sequences need float16 or bfloat16 on a GPU, head sizes that are multiples of 8 up to "
        f"{_MAX_HEAD_DIM}, and cuDNN's fused attention (not NVTE_FUSED_ATTN=0)"
    )


def _own_reasons() -> str:
    """Why Transformer Engine found no backend in its last call; empty if it cannot be told.

    It says so at a logging level that it sets anew each time it chooses, from the environment of
    its import. So the choice is made again at another level, and heard in place of being printed.
    """
    heard: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        heard.append(record.getMessage())
        return False

    try:
        chooser, logger = _te_internals(), logging.getLogger("DotProductAttention")
        level = chooser.attn_log._log_level
        chooser.attn_log._log_level = logging.DEBUG
        logger.addFilter(hear)
        try:
            params = chooser._attention_backends["attention_params"]
            chooser.dpa_utils.get_attention_backend(params)
        finally:
            logger.removeFilter(hear)
            chooser.attn_log._log_level = level
            logger.setLevel(level)
    except Exception:  # other internals than those of 2.12 and 2.20
        return ""
    reasons = dict.fromkeys(line.strip(" .") for line in heard if line.startswith("Disabling"))
    return "; ".join(reasons)


def _te_internals() -> Any:
    """The module that chooses among Transformer Engine's backends."""
    return sys.modules[te.DotProductAttention.__module__]


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
