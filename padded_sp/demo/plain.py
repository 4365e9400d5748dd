"""The demo's model once more in plain torch, for one rank: pads are rows like any others.

What this file does with pad rows is what the other arms of the demo are about. It takes the weights
of ``model.Llama`` by their names, and uses nothing of padded_sp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from padded_sp.demo.model import LlamaConfig

Spans = Sequence[tuple[int, int]]


def plain_logits(
    weights: dict[str, Tensor],
    config: LlamaConfig,
    ids: Tensor,
    *,
    attended: Spans,
    positions: Spans,
    unwritten: float,
) -> Tensor:
    """ids [T] -> logits [T, vocab_size], by the whole model's weights.

    Args:
        weights: ``Llama(config, None, device).state_dict()``.
        attended: first row and number of rows of each sequence, ascending, for attention.
        positions: the same for RoPE. A row in none of them has position 0.
        unwritten: what attention leaves in the rows that it takes for no sequence's.
    """
    cos, sin = _rows_of_tables(config, positions, ids)
    x = F.embedding(ids, weights["embedding.weight"])
    for i in range(config.num_layers):
        block = {k.removeprefix(f"blocks.{i}."): w for k, w in weights.items()}
        normed = _rms_norm(x, block["qkv.layer_norm_weight"], config)
        q, k, v = (
            F.linear(normed, block[f"qkv.{part}_weight"]).unflatten(1, (-1, config.head_dim))
            for part in config.qkv_features
        )
        mixed = _attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, attended, unwritten)
        x = x + F.linear(mixed, block["projection.weight"])
        normed = _rms_norm(x, block["gate_up.layer_norm_weight"], config)
        gate, up = (F.linear(normed, block[f"gate_up.{part}_weight"]) for part in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, block["down.weight"])
    return F.linear(_rms_norm(x, weights["norm.weight"], config), weights["head.weight"])


def _rms_norm(x: Tensor, weight: Tensor, config: LlamaConfig) -> Tensor:
    return F.rms_norm(x, (config.hidden_size,), weight, config.eps)


def _rows_of_tables(config: LlamaConfig, spans: Spans, ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every row, [T, 1, head_dim / 2]."""
    positions = torch.zeros(ids.shape[0], dtype=torch.int64)
    for start, rows in spans:
        positions[start : start + rows] = torch.arange(rows)
    positions = positions.to(ids.device)
    cos, sin = config.rotary_tables(ids.device)
    return cos[positions, None], sin[positions, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, unwritten: float) -> Tensor:
    """Causal attention of each span by itself, [T, heads, head_dim] -> [T, heads * head_dim]."""
    pieces, reached = [], 0
    for start, rows in spans:
        pieces.append(q.new_full((start - reached, *q.shape[1:]), unwritten))
        reached = start + rows
        qi, ki, vi = (t[start:reached].transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(qi, ki, vi, is_causal=True, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    pieces.append(q.new_full((q.shape[0] - reached, *q.shape[1:]), unwritten))
    return torch.cat(pieces).flatten(1)
