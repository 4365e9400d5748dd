"""Once a meta is built, nothing asks the device; and the guard that says so can fail."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import EveryLayer, HostRead, forbid_host_reads

from padded_sp import PaddedSeqMeta, pad, roll, seq_meta, unpad, zero_padding, zero_padding_

CPU = torch.device("cpu")


@pytest.mark.parametrize("seq_lens", [[7, 0, 12, 1, 16], [36]])
def test_a_step_on_one_rank_without_a_group(seq_lens):
    model = EveryLayer(None, CPU)
    with forbid_host_reads(CPU):
        meta = PaddedSeqMeta.from_seq_lens(seq_lens, num_rows=40)
        with seq_meta(meta):
            loss = model(torch.arange(40) % 24, meta)
        loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("capacity", [False, True])
def test_padding_and_derived_tensors(capacity):
    with forbid_host_reads(CPU):
        host = meta = PaddedSeqMeta.from_seq_lens([3, 0, 5], padded_lens=[4, 2, 6], tp_size=2)
        if capacity:
            meta = host.with_capacity(5, 20, 8).copy_(host)
        x = pad(torch.ones(8, 2), host)
        unpad(x, host)
        x = torch.ones(meta.num_rows, 2)
        zero_padding_(roll(zero_padding(x, meta), meta), meta)
        meta.shard(meta.position_ids, 1)
        assert meta.loss_mask.shape == meta.padding_mask.shape == (meta.num_rows,)
        host.to("meta")


def test_host_counts_are_counted_on_the_host():
    meta = PaddedSeqMeta.from_seq_lens([3, 5], padded_lens=[4, 8])
    with forbid_host_reads(CPU):
        assert meta.num_pads_in(2, 10) == 2
        assert (meta.num_tokens, meta.max_seq_len, meta.has_padding) == (8, 8, True)
        assert meta.pad_rows_in(3, 12).shape == (4,)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: bool(x.any()),
        lambda x: float(x.sum()),
        lambda x: torch.equal(x, x),
        lambda x: x.__setitem__(x > 0, torch.zeros(3)),
    ],
)
def test_the_guard_refuses_reads(read):
    with forbid_host_reads(CPU), pytest.raises(HostRead):
        read(torch.ones(3))
    read(torch.ones(3))
