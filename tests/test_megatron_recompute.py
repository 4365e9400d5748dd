"""What ``carry_meta_through_recompute`` does to the real megatron-core; its numbers are compared in
``distributed/test_megatron_checkpointing.py``."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from megatron_helpers import import_megatron, put_checkpoints_back

from padded_sp import ColumnParallelLinear, PaddedSeqMeta, seq_meta
from padded_sp.integrations.megatron import carry_meta_through_recompute

H, F, T = 8, 16, 12


@pytest.fixture
def megatron(monkeypatch):
    """``megatron.core.tensor_parallel.random``, as it was imported, on a machine without a GPU."""
    module = import_megatron("tensor_parallel.random")
    put_checkpoints_back(monkeypatch)
    return module


def test_it_is_carried_once(megatron):
    carry_meta_through_recompute()
    once = megatron.CheckpointFunction.forward, megatron.CheckpointWithoutOutput.checkpoint
    carry_meta_through_recompute()
    assert once == (
        megatron.CheckpointFunction.forward,
        megatron.CheckpointWithoutOutput.checkpoint,
    )


def test_without_a_meta_nothing_changes(megatron):
    carry_meta_through_recompute()
    seen = []

    def double(x):
        seen.append(x)
        return x * 2

    x = torch.randn(3, requires_grad=True)
    megatron.checkpoint(double, False, x).sum().backward()
    assert len(seen) == 2
    assert x.grad.tolist() == [2, 2, 2]


def test_what_is_made_again_for_backward_is_no_place_for_zeros(megatron):
    """CheckpointWithoutOutput fills the memory that a linear saved with pads as they were."""
    carry_meta_through_recompute()
    torch.manual_seed(0)
    meta = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[6, 6])
    up, x = ColumnParallelLinear(H, F), torch.randn(T, H)
    found = []
    for fill in (0.0, float("nan"), 1e4):
        filled = torch.where(meta.padding_mask[:, None], fill, x).requires_grad_()
        recompute = megatron.CheckpointWithoutOutput(fp8=None)
        up.weight.grad = None
        with seq_meta(meta):
            y = up(recompute.checkpoint(lambda x: 2 * x, filled))
            recompute.discard_output_and_register_recompute(y)
        y.square().sum().backward()
        found.append((y.detach(), up.weight.grad, filled.grad))
    for poisoned in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(poisoned, found[0], strict=True))


def test_transformer_engines_checkpoint(megatron, monkeypatch):
    """Where Megatron imported it: ``te_checkpoint`` takes it from its module at each call."""
    distributed = ModuleType("transformer_engine.pytorch.distributed")
    kept = []
    distributed.checkpoint = lambda function, *args, **kwargs: kept.append(function)
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    carry_meta_through_recompute()
    block, x = ColumnParallelLinear(H, F), torch.randn(T, H)
    meta = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[6, 6])
    distributed.checkpoint(block, x, tp_group=None)
    with seq_meta(meta):
        expected = block(x)
        distributed.checkpoint(block, x, tp_group=None)
    assert kept[0] is block
    assert torch.equal(kept[1](x), expected)


def test_a_megatron_that_it_does_not_know(megatron, monkeypatch):
    forward = megatron.CheckpointFunction.forward
    monkeypatch.delattr(megatron.CheckpointWithoutOutput, "checkpoint")
    with pytest.raises(ValueError, match=r"has no CheckpointWithoutOutput\.checkpoint"):
        carry_meta_through_recompute()
    assert megatron.CheckpointFunction.forward is forward  # all or nothing
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", None)
    with pytest.raises(ImportError, match="pip install 'megatron-core"):
        carry_meta_through_recompute()
