"""The public tools where each rank holds a shard of the rows."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import device_of

from padded_sp import ColumnParallelLinear, PaddedSeqMeta, RowParallelLinear
from padded_sp.testing import assert_padding_inert


def shard_body(group):
    device = device_of(group)
    meta = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[9, 15], tp_size=group.size()).to(device)
    x_shard = meta.shard(torch.randn(24, 12, device=device), group.rank())
    columns = ColumnParallelLinear(12, 12, tp_group=group, device=device)
    rows = RowParallelLinear(12, 12, tp_group=group, device=device)
    mlp = torch.nn.Sequential(columns, rows)
    for fn in (columns, mlp):
        assert_padding_inert(fn, x_shard, meta, tp_group=group)

    # The last row of the pack is a pad; its rank alone sees that it is not zero.
    def leaves_ones(x: torch.Tensor) -> torch.Tensor:
        return mlp(x) + 1

    with pytest.raises(AssertionError, match="padding is not inert") as caught:
        assert_padding_inert(leaves_ones, x_shard, meta, params=mlp, tp_group=group)
    return str(caught.value)


def test_shards(ranks):
    messages = ranks.run(shard_body)
    first_pads = {1: [5], 2: [5, 12], 3: [5, 8, 16], 4: [5, 6, 12, 18]}[ranks.world_size]
    for row, message in zip(first_pads, messages, strict=True):
        assert f"output, row {row} (pad, position {row if row < 9 else row - 9} of" in message
