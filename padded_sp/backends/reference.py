"""The oracle: every rank in one process, lists of shards, plain torch and its autograd.

No process group, any floating dtype (float64 on CPU is the yardstick of the tests). Index r of a
list is what rank r holds. GEMMs have the shapes that the real layers give them, and sums over ranks
run in rank order, so on one device a result can be compared bit for bit.

Each layer zeroes the pad rows of its inputs and of its outputs with ``zero_pads``. ``torch.where``
does both directions at once: whatever the pad rows of a value or of its gradient hold is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_sp.meta import PaddedSeqMeta

Shards = Sequence[Tensor]


# --- collectives ---------------------------------------------------------------------------------


def all_gather(shards: Shards) -> Tensor:
    """Shard(0) -> Replicate: R shards [T / R, ...] -> the [T, ...] that every rank has then."""
    return torch.cat(list(shards))


def scatter(full: Tensor, size: int) -> list[Tensor]:
    """Replicate -> Shard(0): rows [T, ...] -> R = size shards [T / R, ...], in rank order."""
    if full.shape[0] % size:
        raise ValueError(f"{full.shape[0]} rows do not divide over {size} ranks: pad them")
    return list(full.chunk(size)) if full.shape[0] else [full] * size


def all_reduce(partials: Shards) -> Tensor:
    """Partial -> Replicate: the sum of every rank's [T, ...], added in rank order."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


def reduce_scatter(partials: Shards) -> list[Tensor]:
    """Partial -> Shard(0): R partial sums [T, ...] -> R shards [T / R, ...] of their sum."""
    return scatter(all_reduce(partials), len(partials))


def all_to_all(shards: Shards) -> list[Tensor]:
    """Chunk j of rank i becomes chunk i of rank j: R tensors [n, ...], n divisible by R, each."""
    size = len(shards)
    chunks = [scatter(shard, size) for shard in shards]
    return [torch.cat([chunks[sender][receiver] for sender in range(size)])
            for receiver in range(size)]  # fmt: skip


# --- pads ----------------------------------------------------------------------------------------


def zero_pads(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
    """x [T, ...] with its pad rows zero, and zero gradient through them whatever it holds."""
    pads = meta.padding_mask.view(-1, *[1] * (x.dim() - 1))
    return torch.where(pads, torch.zeros((), dtype=x.dtype, device=x.device), x)


def zero_pads_of_shards(shards: Shards, meta: PaddedSeqMeta) -> list[Tensor]:
    """``zero_pads`` of R row shards [T / R, ...], each by itself."""
    masks = scatter(meta.padding_mask, len(shards))
    return [
        torch.where(
            pads.view(-1, *[1] * (x.dim() - 1)), torch.zeros((), dtype=x.dtype, device=x.device), x
        )
        for x, pads in zip(shards, masks, strict=True)
    ]


# --- layers --------------------------------------------------------------------------------------


def column_parallel_linear(
    x_shards: Shards,
    weight_shards: Shards,
    bias_shards: Shards | None,
    meta: PaddedSeqMeta,
) -> list[Tensor]:
    """R x [T / R, *, K] with R x [O / R, K] and R x [O / R] -> R x [T, *, O / R].

    Without sequence parallelism every rank has all rows: give x_shards = [x_full].
    """
    x_full = all_gather(zero_pads_of_shards(x_shards, meta))
    outputs = []
    # Autograd runs the newest operation first: the last rank comes first here, so that the gradient
    # of x_full is summed from rank 0 upwards.
    for rank in reversed(range(len(weight_shards))):
        bias = None if bias_shards is None else bias_shards[rank]
        outputs.append(zero_pads(F.linear(x_full, weight_shards[rank], bias), meta))
    return outputs[::-1]


def row_parallel_linear(
    x_shards: Shards,
    weight_shards: Shards,
    bias: Tensor | None,
    meta: PaddedSeqMeta,
) -> list[Tensor]:
    """R x [T, *, K / R] with R x [O, K / R] and one [O] -> R x [T / R, *, O].

    Without sequence parallelism every rank has the concatenation of the result.
    """
    partials = [
        F.linear(zero_pads(x, meta), weight)
        for x, weight in zip(x_shards, weight_shards, strict=True)
    ]
    y_shards = reduce_scatter(partials)
    if bias is not None:
        y_shards = [y + bias for y in y_shards]
    return zero_pads_of_shards(y_shards, meta)


def rms_norm(
    x_shards: Shards, weight: Tensor, bias: Tensor | None, eps: float, meta: PaddedSeqMeta
) -> list[Tensor]:
    """R x [T / R, *, H] and one [H] -> R x [T / R, *, H]. weight gets the gradient of all rows."""
    normed = [F.rms_norm(x, weight.shape, weight, eps) for x in zero_pads_of_shards(x_shards, meta)]
    if bias is not None:
        normed = [x + bias for x in normed]
    return zero_pads_of_shards(normed, meta)


def layer_norm(
    x_shards: Shards, weight: Tensor, bias: Tensor | None, eps: float, meta: PaddedSeqMeta
) -> list[Tensor]:
    """R x [T / R, *, H], one [H] and one [H] -> the same shapes; gradients as in ``rms_norm``."""
    x_shards = zero_pads_of_shards(x_shards, meta)
    normed = [F.layer_norm(x, weight.shape, weight, bias, eps) for x in x_shards]
    return zero_pads_of_shards(normed, meta)


def layer_norm_column_parallel_linear(
    x_shards: Shards,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight_shards: Shards,
    bias_shards: Shards | None,
    meta: PaddedSeqMeta,
    *,
    eps: float = 1e-5,
    normalization: str = "LayerNorm",
) -> list[Tensor]:
    """``layer_norm``, or ``rms_norm`` for "RMSNorm", then ``column_parallel_linear``."""
    norm = {"LayerNorm": layer_norm, "RMSNorm": rms_norm}[normalization]
    normed = norm(x_shards, norm_weight, norm_bias, eps, meta)
    return column_parallel_linear(normed, weight_shards, bias_shards, meta)


def vocab_parallel_embedding(
    ids: Tensor, weight_shards: Shards, meta: PaddedSeqMeta
) -> list[Tensor]:
    """ids [T], R x [V / R, H] -> R x [T / R, H]; ids in pad rows may be anything."""
    ids = torch.where(meta.padding_mask, torch.zeros_like(ids), ids)
    rows = F.embedding(ids, torch.cat(list(weight_shards)))
    return scatter(zero_pads(rows, meta), len(weight_shards))


def vocab_parallel_cross_entropy(
    logits_shards: Shards, labels: Tensor, meta: PaddedSeqMeta, ignore_index: int = -100
) -> Tensor:
    """R x [T, V / R], labels [T] -> mean over the real rows whose label is not ignore_index.

    0 where there is none of them. Computed in float32, or float64 for float64 logits.
    """
    logits = torch.cat([zero_pads(shard, meta) for shard in logits_shards], dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.masked_fill(meta.padding_mask, ignore_index)
    counted = (labels != ignore_index).sum().clamp(min=1)
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum") / counted


# --- attention and rotary ------------------------------------------------------------------------


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: PaddedSeqMeta,
    kv_meta: PaddedSeqMeta | None = None,
    *,
    mask: str = "causal",
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """softmax(Q K^T) V of every sequence by itself, with its mask written out.

    q [T, H, D], k [T_kv, H_kv, D], v [T_kv, H_kv, D_v] -> [T, H * D_v]. Query i of n and key j of m
    stand at distance d = (i + m - n) - j (bottom-right aligned); a window (left, right) shows the
    keys with -right <= d <= left, where -1 is no limit, and causal is right = 0. A query that sees
    no key gives zero. Heads are independent, so any rank's heads can be given.
    """
    kv_meta = meta if kv_meta is None else kv_meta
    left, right = (-1, -1) if window is None else window
    right = 0 if mask.startswith("causal") else right
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    q, k, v = zero_pads(q, meta), zero_pads(k, kv_meta), zero_pads(v, kv_meta)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    outputs = []
    starts = accumulate(meta.padded_lens, initial=0)
    kv_starts = accumulate(kv_meta.padded_lens, initial=0)
    lengths = zip(meta.seq_lens, meta.padded_lens, kv_meta.seq_lens, strict=True)
    for start, kv_start, (n, padded, m) in zip(starts, kv_starts, lengths, strict=False):
        distance = torch.arange(n, device=q.device)[:, None] + m - n
        distance = distance - torch.arange(m, device=q.device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= distance >= -right
        q_n = q[start : start + n].transpose(0, 1)
        k_m, v_m = (t[kv_start : kv_start + m].transpose(0, 1) for t in (k, v))
        scores = (scale * q_n @ k_m.transpose(1, 2)).masked_fill(~visible, -math.inf)
        outputs.append((_softmax(scores) @ v_m).transpose(0, 1))
        outputs.append(q.new_zeros(padded - n, *outputs[-1].shape[1:]))
    return zero_pads(torch.cat(outputs).flatten(1), meta)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of -inf alone (or without any column) gives zeros."""
    if scores.shape[-1] == 0:
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(scores - torch.where(largest.isinf(), 0, largest))
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / torch.where(total == 0, 1, total)


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, meta: PaddedSeqMeta, *, interleaved: bool = False
) -> Tensor:
    """x [T, *, D] rotated by tables [S, rot / 2] at each row's place in its own sequence.

    Pair i of the first rot features is (i, i + rot / 2), or (2 i, 2 i + 1) if interleaved.
    """
    half = cos.shape[-1]
    x = zero_pads(x, meta)
    places = torch.cat([torch.arange(n) for n in meta.padded_lens]).clamp(max=cos.shape[0] - 1)
    between = [1] * (x.dim() - 2)
    cos, sin = (t[places.to(t.device)].view(-1, *between, half) for t in (cos, sin))
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    pairs = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return zero_pads(torch.cat([turned.to(x.dtype), rest], -1), meta)
