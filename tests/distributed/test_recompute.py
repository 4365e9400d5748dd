"""Activation checkpointing of both kinds: recompute runs after the meta's ``with``."""

import pytest
import torch
from rank_helpers import device_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from padded_sp import PaddedSeqMeta, carry_meta, seq_meta
from padded_sp.linear import LayerNormColumnParallelLinear, RowParallelLinear

H, F, T = 12, 24, 24


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        arguments = {"tp_group": group, "device": device_of(group)}
        self.up = LayerNormColumnParallelLinear(H, F, normalization="RMSNorm", **arguments)
        self.down = RowParallelLinear(F, H, **arguments)

    def forward(self, x, meta=None):
        return x + self.down(torch.relu(self.up(x, meta)), meta)


def meta_of(group, *seq_lens):
    padded_lens = [*seq_lens[:-1], T - sum(seq_lens[:-1])]
    return PaddedSeqMeta.from_seq_lens(
        seq_lens, padded_lens=padded_lens, tp_size=group.size(), device=device_of(group)
    )


def drawn(group, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator).chunk(group.size())[group.rank()]
    return x.to(device_of(group), copy=True).requires_grad_()


def gradients(group, call):
    """Two packs of different metas in flight; all outputs and gradients."""
    torch.manual_seed(3)
    block = Block(group)
    metas = meta_of(group, 5, 0, 9), meta_of(group, 20, 1)
    inputs = [drawn(group, seed) for seed in range(2)]
    outputs = [call(block, x, meta) for x, meta in zip(inputs, metas, strict=True)]
    for y in outputs:
        y.square().sum().backward()
    return [*outputs, *(x.grad for x in inputs), *(p.grad for p in block.parameters())]


def plain(block, x, meta):
    return block(x, meta)


def carried(use_reentrant):
    def call(block, x, meta):
        with seq_meta(meta):
            return checkpoint(carry_meta(block), x, use_reentrant=use_reentrant)

    return call


def passed(use_reentrant):
    def call(block, x, meta):
        return checkpoint(block, x, meta, use_reentrant=use_reentrant)

    return call


def recompute_changes_nothing(group, call, use_reentrant):
    for actual, expected in zip(
        gradients(group, call(use_reentrant)), gradients(group, plain), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("call", [carried, passed])
def test_recompute_changes_nothing(ranks, call, use_reentrant):
    ranks.run(recompute_changes_nothing, call=call, use_reentrant=use_reentrant)


def stock_checkpoint_raises(group, use_reentrant, backward_inside):
    block, meta = Block(group), meta_of(group, 5, 0, 9)
    with seq_meta(meta):
        y = checkpoint(block, drawn(group, 0), use_reentrant=use_reentrant)
        if backward_inside:
            with pytest.raises(ValueError, match="carry_meta"):
                y.sum().backward()
    if not backward_inside:
        with pytest.raises(ValueError, match="carry_meta"):
            y.sum().backward()


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_stock_checkpoint_raises(ranks, use_reentrant, backward_inside):
    ranks.run(stock_checkpoint_raises, use_reentrant=use_reentrant, backward_inside=backward_inside)
