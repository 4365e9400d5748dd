"""torch.compile: one compiled block is right for every pack, and is compiled a few times only."""

import copy

import pytest
import torch
from rank_helpers import device_of, drawn, part
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from padded_sp import LayerNormColumnParallelLinear, PaddedSeqMeta, RowParallelLinear

H, F = 12, 24
# 24, 36, ... 132 rows, which every group of 1 to 4 divides, with different numbers of pads.
PACKS = [
    ([5, 0, 1, 7], [6, 2, 4, 12]),
    ([30], [36]),
    ([40, 8], [40, 8]),
    ([0, 0], [30, 30]),
    ([1, 70], [1, 71]),
    ([3] * 20, [4] * 19 + [8]),
    ([93], [96]),
    ([100, 3], [104, 4]),
    ([110, 0, 6], [111, 3, 6]),
    ([64] * 2, [66] * 2),
]


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        arguments = {"tp_group": group, "device": device_of(group)}
        self.up = LayerNormColumnParallelLinear(H, F, normalization="RMSNorm", **arguments)
        self.down = RowParallelLinear(F, H, **arguments)

    def forward(self, x, meta):
        return self.down(torch.relu(self.up(x, meta)), meta)


def results(call, block, group, meta, poison):
    """Output and all gradients of this rank, with ``poison`` in every pad row, both ways."""
    pads = meta.padding_mask[:, None]
    x, grad = (
        part(drawn(group, meta.num_rows, H, seed=seed).masked_fill(pads, poison), group).clone()
        for seed in (1, 2)
    )
    x.requires_grad_()
    block.zero_grad()
    y = call(x, meta)
    y.backward(grad)
    return [y, x.grad, *(p.grad for p in block.parameters())]


def serves_every_pack(group):
    torch._dynamo.reset()
    block = Block(group)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend=counter)
    for seq_lens, padded_lens in PACKS:
        meta = PaddedSeqMeta.from_seq_lens(
            seq_lens, padded_lens=padded_lens, tp_size=group.size(), device=device_of(group)
        )
        expected = results(block, block, group, meta, 0.0)
        for poison in (float("nan"), 1e4):
            actual = results(compiled, compiled, group, meta, poison)
            for mine, theirs in zip(actual, expected, strict=True):
                assert torch.equal(mine, theirs)
    return counter.frame_count


def test_one_block_serves_every_pack(ranks):
    if ranks.world_size > 2:
        pytest.skip("more ranks compile the same graph, for minutes on 2 cores")
    # For the first T, for every T, without pads, and once for the number of sequences.
    assert max(ranks.run(serves_every_pack)) <= 4
