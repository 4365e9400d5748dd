"""Attention on packs by our own kernels (``kernels/attention.py``), made for many short sequences.

They work on real tokens alone, whatever pad rows hold; pad rows of the result and of its gradients
are zero. Deterministic. Half precision, on a GPU.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (a launch is no call of the function that Triton's types describe)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padded_sp.backends.tiles import Blocks, Tiles, tiles_of, typical_length
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta
from padded_sp.padding import zero_rows_

NEEDS_PROOF = True
KEEPS_PADS_INERT = True
_MAX_HEAD_DIM = 256


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

        q    [T, heads, D]           k  [T_kv, kv_heads, D]
        out  [T, heads, D_v]         v  [T_kv, kv_heads, D_v]

    window = (left, right), -1 for no limit, aligned bottom-right as in ``torch_attention``. Pad
    rows of q, k, v and of the incoming gradient are never read; those of out and of the gradients
    are zero. Queries that see no key give zeros. No communication.

    Raises: ValueError: what ``reason_against`` says.
    """
    if reason := reason_against(q, k, v, meta, kv_meta, window=window, dropout=dropout):
        raise ValueError(reason)
    if not (q.shape[0] and k.shape[0]):
        return zeros_like_output(q, k, v)
    return _Attention.apply(q, k, v, meta, kv_meta, window, softmax_scale)


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
    """Why the kernels do not take such a call, from what the host knows; empty where they do."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return f"our kernels take float16 and bfloat16 on a GPU, not {q.dtype} on {q.device}"
    if max(q.shape[-1], v.shape[-1]) > _MAX_HEAD_DIM:
        sizes = f"{q.shape[-1]}/{v.shape[-1]}"
        return f"our kernels take heads of at most {_MAX_HEAD_DIM}, not {sizes}"
    if dropout:
        return f"our kernels have no dropout, and this call has {dropout}"
    if meta.is_capacity or kv_meta.is_capacity:
        return "our kernels go by host lengths, which a meta with capacity does not have"
    return ""


def is_slow_for(q: Tensor, v: Tensor, meta: PaddedSeqMeta) -> bool:
    """Whether others are faster: where most tokens lie in long sequences. Measured on an H200."""
    if meta.is_capacity:
        return True
    width = max(q.shape[-1], v.shape[-1])
    limit = next((tokens for size, tokens in _FAST_UP_TO.items() if width <= size), 0)
    return typical_length(meta) > limit


# --- Sizes of tiles ------------------------------------------------------------------------------


class Config(NamedTuple):
    """Tiles, and (warps, stages) of each kernel."""

    blocks: Blocks
    forward: tuple[int, int]
    backward_queries: tuple[int, int]
    backward_keys: tuple[int, int]
    packed_forward: tuple[int, int] = (4, 1)
    packed_backward: tuple[int, int] = (4, 1)


# By the wider of the head sizes, up to. For packs whose tokens mostly lie in short sequences, where
# small tiles are emptier by less, and for the others. The fastest of some, on an H200.
_CONFIGS = {
    64: (
        Config(Blocks(64, 64, 32, 64, 32), (4, 4), (4, 4), (4, 4)),
        Config(Blocks(64, 64, 64, 64, 64), (4, 3), (4, 3), (4, 3)),
    ),
    128: (
        Config(Blocks(64, 64, 32, 64, 32), (4, 3), (4, 3), (4, 3)),
        Config(Blocks(64, 128, 64, 128, 64), (8, 3), (8, 3), (8, 3)),
    ),
    256: (Config(Blocks(32, 128, 32, 64, 32), (8, 2), (8, 2), (8, 2)),) * 2,
}
_SHORT = 512  # typical_length up to which the former are faster
# Head size, up to -> the typical_length up to which these kernels are faster than others.
_FAST_UP_TO = {64: 1024, 128: 512, 256: 256}
_MOST_HEADS_TOGETHER = 8


class _Call:
    """What forward and backward of one call share: tiles and the kernels' arguments."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: PaddedSeqMeta,
        kv_meta: PaddedSeqMeta,
        window: tuple[int, int],
        scale: float,
    ) -> None:
        self.meta, self.kv_meta = meta, kv_meta
        self.heads, self.kv_heads = q.shape[1], k.shape[1]
        group = self.heads // self.kv_heads
        self.together = min(_MOST_HEADS_TOGETHER, group & -group)  # a power of two that divides it
        k_width, v_width = q.shape[-1], v.shape[-1]
        self.config = _config_of(meta, max(k_width, v_width))
        self.tiles = tiles_of(meta, kv_meta, window, self._in_tokens(self.config.blocks))
        self.scales = scale, scale * math.log2(math.e)
        self.window = window
        self.strides = tuple(x.stride(dim) for x in (q, k, v) for dim in (0, 1))
        self.sizes = {
            "GROUP": group,
            "K_WIDTH": k_width,
            "V_WIDTH": v_width,
            "BLOCK_K": _power_of_two(k_width),
            "BLOCK_V": _power_of_two(v_width),
        }

    def _in_tokens(self, blocks: Blocks) -> Blocks:
        """A tile of queries holds ``together`` heads of each token."""
        return blocks._replace(
            queries=blocks.queries // self.together,
            queries_at_a_time=blocks.queries_at_a_time // self.together,
        )

    def of_queries(self, kernel: tuple[int, int]) -> dict[str, int]:
        blocks = self.config.blocks
        rows = {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys_at_a_time}
        together = {"HEADS": self.heads, "TOGETHER": self.together}
        return self.sizes | together | rows | _launch(kernel)

    def of_keys(self, kernel: tuple[int, int]) -> dict[str, int]:
        blocks = self.config.blocks
        rows = {"BLOCK_M": blocks.queries_at_a_time, "BLOCK_N": blocks.keys}
        together = {"KV_HEADS": self.kv_heads, "TOGETHER": self.together}
        return self.sizes | together | rows | _launch(kernel)

    def of_packed(self, kernel: tuple[int, int]) -> dict[str, int]:
        return self.sizes | {"BLOCK": self.config.blocks.packed} | _launch(kernel)


def _config_of(meta: PaddedSeqMeta, width: int) -> Config:
    short, long = next(configs for limit, configs in _CONFIGS.items() if width <= limit)
    return short if typical_length(meta) <= _SHORT else long


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _launch(kernel: tuple[int, int]) -> dict[str, int]:
    warps, stages = kernel
    return {"num_warps": warps, "num_stages": stages}


# --- Launches ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        q, k, v = map(_with_features_adjacent, (q, k, v))
        ctx.call = _Call(q, k, v, *how)
        with torch.cuda.device_of(q):
            out, lse = _forward(ctx.call, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if grad.stride()[1:] != (grad.shape[2], 1):
            grad = grad.contiguous()
        with torch.cuda.device_of(grad):
            return *_backward(ctx.call, *ctx.saved_tensors, grad), None, None, None, None


def _with_features_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and float32 [N, heads]: log2 of each real token's sum of exponentials."""
    from padded_sp.kernels import attention as kernels

    tiles, config = call.tiles, call.config
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(call.meta.num_tokens, call.heads, dtype=torch.float32)
    if n := tiles.queries.shape[0]:
        kernels.forward_tiles[(n * call.heads // call.together,)](
            q, k, v, out, lse, tiles.queries, *call.window, call.scales[1], *call.strides,
            **call.of_queries(config.forward),
        )  # fmt: skip
    if n := tiles.packed.shape[0]:
        kernels.forward_packed[(n * call.heads,)](
            q, k, v, out, lse, *_of_packed(tiles), call.scales[1], *call.strides,
            HEADS=call.heads, **call.of_packed(config.packed_forward),
        )  # fmt: skip
    return zero_rows_(out, call.meta), lse


def _backward(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from padded_sp.kernels import attention as kernels

    tiles, config = call.tiles, call.config
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    numbers = *call.scales, *call.strides, grad.stride(0)
    if n := tiles.queries.shape[0]:  # first: it leaves delta for the keys
        kernels.backward_query_tiles[(n * call.heads // call.together,)](
            q, k, v, out, grad, dq, lse, delta, tiles.queries, *call.window, *numbers,
            **call.of_queries(config.backward_queries),
        )  # fmt: skip
    if n := tiles.keys.shape[0]:
        kernels.backward_key_tiles[(n * call.kv_heads,)](
            q, k, v, grad, dk, dv, lse, delta, tiles.keys, *call.window, *numbers,
            **call.of_keys(config.backward_keys),
        )  # fmt: skip
    if n := tiles.packed.shape[0]:
        kernels.backward_packed[(n * call.kv_heads,)](
            q, k, v, out, grad, dq, dk, dv, lse, *_of_packed(tiles), *numbers,
            KV_HEADS=call.kv_heads, **call.of_packed(config.packed_backward),
        )  # fmt: skip
    return zero_rows_(dq, call.meta), zero_rows_(dk, call.kv_meta), zero_rows_(dv, call.kv_meta)


def _of_packed(tiles: Tiles) -> tuple[Tensor, ...]:
    return tiles.packed, tiles.q_rows, tiles.k_rows, tiles.low, tiles.high
