"""Attention on packs by our own kernels (``kernels/attention.py``), made for many short sequences.

They work on real tokens alone, whatever pad rows hold; pad rows of the result and of its gradients
are zero. Deterministic. Half precision, on a GPU.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (a launch is no call of the function that Triton's types describe)

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from padded_sp.backends import tiles
from padded_sp.backends.parts import attend_by_parts, part_of
from padded_sp.backends.tiles import Blocks, tiles_of, typical_length
from padded_sp.backends.torch_attention import zeros_like_output
from padded_sp.meta import PaddedSeqMeta

if find_spec("triton") is None:  # imported with the first launch
    raise ImportError("backend 'triton' needs Triton: python -m pip install triton")

NEEDS_PROOF = True
KEEPS_PADS_INERT = True
PROOF_PACKS = tiles.PROOF_PACKS
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
    inplace: bool = True,
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
    part = part_of(TritonPart, q, k, v, meta, kv_meta, window, softmax_scale)
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
    return meta.is_capacity or typical_length(meta) > fast_up_to(q, v)


def fast_up_to(q: Tensor, v: Tensor) -> int:
    """The tokens of a sequence up to which these kernels are faster than others."""
    width = max(q.shape[-1], v.shape[-1])
    return next((tokens for size, tokens in _FAST_UP_TO.items() if width <= size), 0)


# --- Sizes of tiles ------------------------------------------------------------------------------


class Config(NamedTuple):
    """Tiles, and (warps, stages) of each kernel."""

    blocks: Blocks
    forward: tuple[int, int]
    backward_queries: tuple[int, int]
    backward_keys: tuple[int, int]
    packed_forward: tuple[int, int] = (4, 1)
    packed_backward: tuple[int, int] = (4, 1)


# By the wider of the head sizes, up to: (typical_length up to which it is the fastest, config),
# measured on an H200. Small tiles are less empty in short sequences; large ones read less.
_ALL = math.inf
_CONFIGS: dict[int, tuple[tuple[float, Config], ...]] = {
    64: (
        (512, Config(Blocks(64, 64, 32, 64, 32), (4, 4), (4, 4), (4, 4))),
        (_ALL, Config(Blocks(64, 64, 64, 64, 64), (4, 3), (4, 3), (4, 3))),
    ),
    128: (
        (180, Config(Blocks(64, 64, 32, 64, 32), (4, 3), (4, 2), (4, 3))),
        (768, Config(Blocks(64, 128, 32, 64, 32), (4, 3), (4, 3), (4, 3))),
        (_ALL, Config(Blocks(64, 128, 64, 128, 64), (8, 3), (8, 3), (8, 3))),
    ),
    256: ((_ALL, Config(Blocks(32, 128, 32, 64, 32), (8, 2), (8, 2), (8, 2))),),
}
# Head size, up to -> the tokens of a sequence up to which these kernels are faster than others.
_FAST_UP_TO = {64: 1024, 128: 512, 256: 256}
_MOST_HEADS_TOGETHER = 8


class TritonPart:
    """The sequences up to ``longest`` tokens, by default all: a part as ``parts.py`` means it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: PaddedSeqMeta,
        kv_meta: PaddedSeqMeta,
        window: tuple[int, int],
        scale: float,
        longest: int | None = None,
    ) -> None:
        heads, kv_heads = q.shape[1], k.shape[1]
        group = heads // kv_heads
        self._together = min(_MOST_HEADS_TOGETHER, group & -group)  # a power of two that divides it
        k_width, v_width = q.shape[-1], v.shape[-1]
        config = _config_of(typical_length(meta, longest), max(k_width, v_width))
        lists = tiles_of(meta, kv_meta, window, self._in_tokens(config.blocks), longest)
        self.tiles = lists
        self._packed = lists.packed, lists.q_rows, lists.k_rows, lists.low, lists.high
        self._lse_shape = meta.num_tokens, heads
        self._window = window
        self._scales = scale, scale * math.log2(math.e)
        self._programs = {
            "queries": lists.queries.shape[0] * heads // self._together,
            "keys": lists.keys.shape[0] * kv_heads,
            "packed": lists.packed.shape[0] * heads,
            "packed keys": lists.packed.shape[0] * kv_heads,
        }
        self._launches = _Launches(
            {
                "GROUP": group,
                "K_WIDTH": k_width,
                "V_WIDTH": v_width,
                "BLOCK_K": _power_of_two(k_width),
                "BLOCK_V": _power_of_two(v_width),
                "TOGETHER": self._together,
                "HEADS": heads,
                "KV_HEADS": kv_heads,
            },
            config,
        )

    def near_pads(self) -> tuple[None, None]:
        """It reads real rows alone."""
        return None, None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Returns float32 [N, heads]: log2 of each real token's sum of exponentials."""
        programs, launch = self._programs, self._launches
        lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        numbers = self._scales[1], *_strides(q, k, v)
        if n := programs["queries"]:
            tensors = q, k, v, out, lse, self.tiles.queries
            launch("forward_tiles", n, tensors, (*self._window, *numbers))
        if n := programs["packed"]:
            launch("forward_packed", n, (q, k, v, out, lse, *self._packed), numbers)
        return lse

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
        """Of the queries first: that leaves for the keys what they need."""
        programs, launch = self._programs, self._launches
        lse, (dq, dk, dv) = saved, gradients
        delta = torch.empty_like(lse)
        numbers = *self._scales, *_strides(q, k, v), grad.stride(0)
        in_window = *self._window, *numbers
        if n := programs["queries"]:
            tensors = q, k, v, out, grad, dq, lse, delta, self.tiles.queries
            launch("backward_query_tiles", n, tensors, in_window)
        if n := programs["keys"]:
            tensors = q, k, v, grad, dk, dv, lse, delta, self.tiles.keys
            launch("backward_key_tiles", n, tensors, in_window)
        if n := programs["packed keys"]:
            tensors = q, k, v, out, grad, dq, dk, dv, lse, *self._packed
            launch("backward_packed", n, tensors, numbers)

    def _in_tokens(self, blocks: Blocks) -> Blocks:
        """A tile of queries holds ``together`` heads of each token."""
        return blocks._replace(
            queries=blocks.queries // self._together,
            queries_at_a_time=blocks.queries_at_a_time // self._together,
        )


class _Launches:
    """Launches of the kernels with what is fixed for a part.

    Triton takes some 40 us to find which compilation the arguments of a launch ask for. They ask
    for the same as last time if numbers, dtype and alignment are the same, so that it is kept.
    """

    def __init__(self, sizes: dict[str, int], config: Config) -> None:
        blocks = config.blocks
        rows = {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys_at_a_time}
        columns = {"BLOCK_M": blocks.queries_at_a_time, "BLOCK_N": blocks.keys}
        packed = {"BLOCK": blocks.packed}
        self._options = {
            "forward_tiles": sizes | rows | _launch(config.forward),
            "forward_packed": sizes | packed | _launch(config.packed_forward),
            "backward_query_tiles": sizes | rows | _launch(config.backward_queries),
            "backward_key_tiles": sizes | columns | _launch(config.backward_keys),
            "backward_packed": sizes | packed | _launch(config.packed_backward),
        }
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[int, ...]]] = {}

    def __call__(
        self, name: str, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> None:
        key = name, tensors[0].dtype, numbers
        is_aligned = all(x.data_ptr() % 16 == 0 for x in tensors)
        if is_aligned and (found := self._compiled.get(key)) is not None:
            compiled, constants = found
            compiled[(programs, 1, 1)](*tensors, *numbers, *constants)
            return

        from padded_sp.kernels import attention as kernels

        kernel, options = getattr(kernels, name), self._options[name]
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        constants = tuple(options[name] for name in names)
        launch = {k: v for k, v in options.items() if k in names or k.startswith("num_")}
        compiled = kernel[(programs,)](*tensors, *numbers, **launch)
        if is_aligned and compiled is not None:  # the interpreter compiles nothing
            self._compiled[key] = compiled, constants


def _config_of(typical: float, width: int) -> Config:
    configs = next(configs for limit, configs in _CONFIGS.items() if width <= limit)
    return next(config for limit, config in configs if typical <= limit)


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _launch(kernel: tuple[int, int]) -> dict[str, int]:
    warps, stages = kernel
    return {"num_warps": warps, "num_stages": stages}


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return tuple(x.stride(dim) for x in (q, k, v) for dim in (0, 1))
