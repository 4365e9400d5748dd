"""A small Llama of padded_sp's layers: what a user's own model would look like."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from padded_sp.attention import DotProductAttention
from padded_sp.linear import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    RowParallelLinear,
)
from padded_sp.meta import PaddedSeqMeta
from padded_sp.normalization import RMSNorm
from padded_sp.rotary import apply_rotary
from padded_sp.vocabulary import VocabParallelEmbedding

if TYPE_CHECKING:
    from padded_sp.collectives import ProcessGroup


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the whole model, of which each rank holds a part.

    Attributes:
        vocab_size, hidden_size, num_layers: as everywhere.
        num_heads, num_kv_heads, head_dim: of attention; queries share keys and values in groups.
        ffn_size: features between the two linears of a feed-forward block.
        eps: of RMSNorm.
        rope_base: wavelengths of the rotation go up to 2 pi times this.
        max_positions: the longest sequence, in tokens.
    """

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 384
    eps: float = 1e-6
    rope_base: float = 10_000.0
    max_positions: int = 512

    @property
    def qkv_features(self) -> dict[str, int]:
        """Features of the three parts of the fused projection."""
        kv = self.num_kv_heads * self.head_dim
        return {"query": self.num_heads * self.head_dim, "key": kv, "value": kv}

    def rotary_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [max_positions, head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        positions = torch.arange(self.max_positions, device=device)
        angles = torch.outer(positions.float(), self.rope_base**-exponents)
        return angles.cos(), angles.sin()


class Llama(nn.Module):
    """Token ids to logits; the same seed gives the same weights on any number of ranks.

    Args:
        tp_group: the ranks that share the model. None: one rank, no communication.
        device: of the parameters.
    """

    def __init__(
        self, config: LlamaConfig, tp_group: ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__()
        placed = {"tp_group": tp_group, "device": device}
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **placed)
        self.blocks = nn.ModuleList(Block(config, placed) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps, **placed)
        self.head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, **placed
        )
        cos, sin = config.rotary_tables(device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def load_whole(self, weights: dict[str, Tensor]) -> None:
        """Takes this rank's part of a whole model's ``state_dict()``, one rank's."""
        for name, part in self.state_dict().items():
            whole = weights[name]
            for dim, (rows, mine) in enumerate(zip(whole.shape, part.shape, strict=True)):
                if rows != mine:
                    whole = whole.chunk(self.embedding.tp_size, dim)[self.embedding.tp_rank]
            part.copy_(whole)

    def forward(self, ids: Tensor, meta: PaddedSeqMeta) -> Tensor:
        """ids [T], the same on each of R ranks -> logits [T, vocab_size / R]."""
        x = self.embedding(ids, meta)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, meta)
        return self.head(self.norm(x, meta), meta)


class Block(nn.Module):
    """Grouped-query attention and a gated feed-forward, each added to its input."""

    def __init__(self, config: LlamaConfig, placed: dict) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        attended = config.qkv_features["query"]
        normed_column = functools.partial(
            LayerNormColumnParallelLinear,
            normalization="RMSNorm",
            eps=config.eps,
            bias=False,
            **placed,
        )
        self.qkv = normed_column(
            hidden, sum(config.qkv_features.values()), parameters_split=config.qkv_features
        )
        self.attention = DotProductAttention(
            config.num_heads,
            config.head_dim,
            config.num_kv_heads,
            tp_group=placed["tp_group"],
        )
        self.projection = RowParallelLinear(attended, hidden, bias=False, **placed)
        self.gate_up = normed_column(hidden, 2 * config.ffn_size, parameters_split=("gate", "up"))
        self.down = RowParallelLinear(config.ffn_size, hidden, bias=False, **placed)
        self.parts = [n // self.qkv.tp_size for n in config.qkv_features.values()]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, meta: PaddedSeqMeta) -> Tensor:
        """x [T / R, hidden] -> the same."""
        q, k, v = (
            part.unflatten(1, (-1, self.head_dim))
            for part in self.qkv(x, meta).split(self.parts, dim=1)
        )
        q, k = apply_rotary(q, cos, sin, meta), apply_rotary(k, cos, sin, meta)
        x = x + self.projection(self.attention(q, k, v, meta), meta)
        gate, up = self.gate_up(x, meta).chunk(2, dim=1)
        return x + self.down(F.silu(gate) * up, meta)
