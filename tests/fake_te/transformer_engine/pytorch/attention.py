"""``DotProductAttention`` on packed input: every row against every row, under a mask."""

from __future__ import annotations

import logging
import math
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine import VERSION
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

# What pad rows of O, dQ, dK and dV hold: 0 by cuDNN, anything by FlashAttention. Tests set it.
PAD_ROWS = 0.0

_NO_BACKEND = (
    "No dot product attention backend is available for the provided inputs. Please run with "
    "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends."
)


def get_attention_backend(params: dict[str, Any]) -> str:
    """Which takes these: "fused", "unfused", or "", with reasons at the level of ``attn_log``."""
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(attn_log._log_level)
    logger.debug("Running with config=%s", params)
    usable = {}
    for kind in ("fused", "unfused"):
        variable = f"NVTE_{kind.upper()}_ATTN"
        usable[kind] = os.environ.get(variable, "1") != "0"
        if not usable[kind]:
            logger.debug("Disabling %s attention due to %s=0", kind, variable)
    in_half = params["dtype"] in (torch.float16, torch.bfloat16)
    if not in_half or params["fp8"] or any(size % 8 or size > 256 for size in params["sizes"]):
        logger.debug("Disabling fused attention as no backend supports the provided input.")
        usable["fused"] = False
    if params["fp8"]:
        logger.debug("Disabling unfused attention for FP8")
        usable["unfused"] = False
    if params["pads"] and VERSION >= (2, 16, 0):
        logger.debug("Disabling unfused attention for pad_between_seqs = True")
        usable["unfused"] = False
    return next((kind for kind, is_usable in usable.items() if is_usable), "")


# By these names the real module finds what chooses among its backends.
attn_log = SimpleNamespace(_log_level=logging.WARNING)
dpa_utils = SimpleNamespace(
    get_attention_backend=get_attention_backend,
    FlashAttentionUtils=SimpleNamespace(is_installed=False, v3_is_installed=False),
)
_attention_backends: dict[str, Any] = {"attention_params": None}


class DotProductAttention(TransformerEngineBaseModule):
    """O = softmax(Q K^T scale) V, of each sequence by itself."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(name)
        sizes = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = sizes
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % groups == 0
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(sizes[0])

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        pad_between_seqs: bool | None = None,
        **others: Any,
    ) -> Tensor:
        mask_type = attn_mask_type or self.attn_mask_type
        assert (qkv_format or self.qkv_format) == "thd", "the double knows packed input only"
        assert mask_type.startswith("padding"), (
            "With qkv_format=thd, attn_mask_type must be padding or padding_causal!"
        )
        left, right = window_size or self.window_size or (-1, -1)
        if "causal" in mask_type:
            assert right <= 0, "window_size should be (-1, 0) or (>=0, 0) for causal masks"
        else:
            assert (left < 0) == (right < 0), (
                "window_size should be (-1, -1) or (>=0, >=0) for attn_mask_type=padding"
            )
        padded_q, padded_kv = cu_seqlens_q_padded, cu_seqlens_kv_padded
        if pad_between_seqs is None:
            pad_between_seqs = _seems_padded(cu_seqlens_q, padded_q)
            pad_between_seqs |= _seems_padded(cu_seqlens_kv, padded_kv)
        if not pad_between_seqs:  # the real boundaries are then taken for the layout
            padded_q, padded_kv = cu_seqlens_q, cu_seqlens_kv
        q = _Rows(query_layer, cu_seqlens_q, padded_q)
        kv = _Rows(key_layer, cu_seqlens_kv, padded_kv)
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        _attention_backends["attention_params"] = {
            "dtype": query_layer.dtype,
            "sizes": (query_layer.shape[-1], value_layer.shape[-1]),
            "pads": pad_between_seqs,
            "fp8": FP8GlobalStateManager.is_fp8_enabled() and (recipe.fp8_dpa or recipe.fp8_mha),
        }
        backend = dpa_utils.get_attention_backend(_attention_backends["attention_params"])
        if not backend:
            raise ValueError(_NO_BACKEND)
        out = self._attend(
            *_LeavePads.apply(query_layer, key_layer, value_layer, q.is_real, kv.is_real),
            q,
            kv,
            window_size or self.window_size or (-1, -1),
            mask_type,
        )
        if backend == "unfused" and pad_between_seqs:  # older versions drop the pad rows then
            return out[q.is_real].flatten(1)
        out = out.masked_fill(~q.is_real[:, None, None], PAD_ROWS)
        return out.view(len(out), -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows_q: Any, rows_kv: Any, window: Any,
                mask_type: str) -> Tensor:  # fmt: skip
        """[rows, heads, size], in float32 inside; dense, so that no length is read."""
        dtype, q = q.dtype, q.float().masked_fill(~rows_q.is_real[:, None, None], 0)
        k, v = (t.float().masked_fill(~rows_kv.is_real[:, None, None], 0) for t in (k, v))
        repeats = self.num_attention_heads // self.num_gqa_groups
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        distance = rows_kv.position[None] - rows_q.position[:, None]
        if "bottom_right" in mask_type:
            distance = distance - (rows_kv.length[None] - rows_q.length[:, None])
        allowed = rows_q.is_real[:, None] & rows_kv.is_real[None]
        allowed = allowed & (rows_q.sequence[:, None] == rows_kv.sequence[None])
        left, right = window
        right = 0 if "causal" in mask_type else right
        if left >= 0:
            allowed = allowed & (distance >= -left)
        if right >= 0:
            allowed = allowed & (distance <= right)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.softmax_scale
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        return torch.einsum("hqk,khd->qhd", weights, v).to(dtype)


def _seems_padded(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None) -> bool:
    """What is taken for granted where nobody says it; older versions miss pads at the end."""
    if cu_seqlens_padded is None or VERSION >= (2, 18, 0):
        return cu_seqlens_padded is not None and cu_seqlens_padded is not cu_seqlens
    return not torch.equal(cu_seqlens_padded[:-1], cu_seqlens[:-1])


class _Rows:
    """Of each row: its sequence, its position there, whether it is real, the sequence's length."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> None:
        row = torch.arange(len(x), device=x.device)
        sequence = torch.searchsorted(cu_seqlens_padded, row, right=True) - 1
        self.sequence = sequence.clamp(0, len(cu_seqlens) - 2)
        self.position = row - cu_seqlens_padded[self.sequence]
        self.length = (cu_seqlens[1:] - cu_seqlens[:-1])[self.sequence]
        self.is_real = self.position < self.length


class _LeavePads(torch.autograd.Function):
    """Puts into the pad rows of gradients what a kernel might leave there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor, real_kv: Tensor) -> Any:
        ctx.real = real_q, real_kv, real_kv
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        filled = (
            grad.masked_fill(~real[:, None, None], PAD_ROWS)
            for grad, real in zip(grads, ctx.real, strict=True)
        )
        return *filled, None, None
