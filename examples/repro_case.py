"""The sequences of the report, and what is exactly right for them, computed without any pads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from padded_sp import PaddedSeqMeta, unpad

REAL, PADDED = [100, 150, 120, 130], [112, 160, 128, 144]  # 500 tokens in 544 rows
HEADS, HEAD_DIM = 32, 48
HIDDEN = HEADS * HEAD_DIM
NAN = float("nan")


def rows(seed: int, meta: PaddedSeqMeta, pads: float = 0.0) -> Tensor:
    """[T, HIDDEN] in BF16: normal numbers, and ``pads`` in the pad rows; the same on each rank."""
    drawn = torch.randn(meta.num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return drawn.to(meta.device, torch.bfloat16).masked_fill(meta.padding_mask[:, None], pads)


def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of each sequence by itself: q, k, v [tokens, heads, head_dim], no pads."""
    attended = []
    for sequence in zip(*(x.split(REAL) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1) for x in sequence)
        attended.append(F.scaled_dot_product_attention(*heads_first, is_causal=True))
    return torch.cat([x.transpose(0, 1).flatten(1) for x in attended])


def distance(a: Tensor, b: Tensor) -> float:
    """Relative, in the 2-norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def from_float64(
    block: Any,
    found: dict[str, Tensor],
    meta: PaddedSeqMeta,
    group: dist.ProcessGroup,
    seeds: tuple[int, int],
) -> dict[str, float]:
    """Relative distances of what a step of linears and attention gave, from the same in float64
    without any pads.

    Args:
        block: has ``qkv`` and ``out``, this rank's part of them.
        found: what this rank has of "output", "input gradient" and "gradient of <parameter>".
        seeds: of the ``rows`` that went in, and of those that came back as gradient.
    """
    dims = {
        f"{layer}.{name}": getattr(block, layer).partition_dim(name)
        for layer in ("qkv", "out")
        for name, _ in getattr(block, layer).named_parameters(recurse=False)
    }
    weights = {
        name: whole(block.get_parameter(name).detach(), dim, group).double().requires_grad_()
        for name, dim in dims.items()
    }
    x, grad = (unpad(rows(seed, meta), meta).double() for seed in seeds)
    x.requires_grad_()
    q, k, v = (
        F.linear(x, weights[f"qkv.{part}_weight"], weights[f"qkv.{part}_bias"])
        for part in ("query", "key", "value")
    )
    attended = attend_exactly(*(t.unflatten(1, (HEADS, HEAD_DIM)) for t in (q, k, v)))
    y = F.linear(attended, weights["out.weight"], weights["out.bias"])
    y.backward(grad)
    exact = {"output": y.detach(), "input gradient": x.grad}
    near = {n: distance(unpad(whole(found[n], 0, group), meta), exact[n]) for n in exact}
    for name, dim in dims.items():
        if "key_bias" in name:  # exactly zero: softmax does not see it
            continue
        part = found[f"gradient of {name}"].detach().clone()
        if dim is None and group.size() > 1:  # a replicated one's gradient is a term of the sum
            dist.all_reduce(part, group=group)
        grad = whole(part, dim, group)
        near[f"gradient of {name}"] = distance(grad, weights[name].grad)
    return near


def whole(part: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    """Every rank's parts along ``dim``; None: each rank has all of it."""
    if dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)
