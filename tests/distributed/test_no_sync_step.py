"""A whole step, from lengths to gradients, asks the device for nothing."""

from __future__ import annotations

import pytest
import torch
from rank_helpers import EveryLayer, device_of, forbid_host_reads, needs_own_gpu

from padded_sp import AlignPolicy, PaddedSeqMeta, pad, reduce_replicated_gradients, unpad

PACKS = {"fp8_delayed": [7, 0, 12, 1, 16], "bf16": [12, 24]}  # the second has no pads


def step_body(group, recipe, seq_lens, dtype):
    device = device_of(group)
    policy = AlignPolicy(recipe, tp_size=group.size())
    model = EveryLayer(group, device).to(dtype)

    def step(lengths: list[int]) -> tuple[PaddedSeqMeta, torch.Tensor]:
        meta = PaddedSeqMeta.from_seq_lens(lengths, policy, device=device)
        tokens = (torch.arange(sum(lengths), device=device) * 7) % 24
        ids = pad(tokens, meta)
        loss = model(ids, meta)
        loss.backward()
        reduce_replicated_gradients(model, group)
        unpad(ids, meta)
        return meta, loss

    step([3, 4])  # libraries are loaded and communicators made at their first use
    with forbid_host_reads(device):
        meta, loss = step(seq_lens)
    assert loss.isfinite()
    assert meta.has_padding == (recipe != "bf16")
    return all(p.grad.isfinite().all().item() for p in model.parameters())


@needs_own_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", PACKS)
def test_a_step_reads_nothing(ranks, recipe, dtype):
    assert all(ranks.run(step_body, recipe=recipe, seq_lens=PACKS[recipe], dtype=dtype))
