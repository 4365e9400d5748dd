"""Activations recomputed by the real megatron-core: each micro-batch finds its own meta."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
import torch
from megatron_helpers import import_megatron
from torch import nn

from padded_sp import ColumnParallelLinear, PaddedSeqMeta, RMSNorm, RowParallelLinear, seq_meta
from padded_sp.integrations.megatron import carry_meta_through_recompute

H, F, T = 8, 16, 12


@pytest.fixture
def megatron(monkeypatch):
    """``megatron.core.tensor_parallel.random``, as it was imported, on a machine without a GPU."""
    module = import_megatron("tensor_parallel.random")
    monkeypatch.setattr(module, "_get_cuda_rng_state", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    for owner, name in (
        (module.CheckpointFunction, "forward"),
        (module.CheckpointWithoutOutput, "checkpoint"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back afterwards
    # The double, which Megatron did not import.
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch.distributed", raising=False)
    return module


class Block(nn.Module):
    """As Megatron calls it: with one argument."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            RMSNorm(H),
            ColumnParallelLinear(H, F),
            RowParallelLinear(F, H),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def metas():
    lens = [(5, 3), (2, 9), (12,), (1, 1)]
    return [PaddedSeqMeta.from_seq_lens(n, num_rows=T, padded_lens=n) for n in lens]


def by_megatron(megatron, block, x):
    return megatron.checkpoint(block, False, x)


def nested(megatron, block, x):
    return megatron.checkpoint(lambda x: 2 * megatron.checkpoint(block, False, x), False, x)


def without_output(megatron, block, x):
    """As a layer of Megatron's recomputes its norm."""
    recompute = megatron.CheckpointWithoutOutput(fp8=None)
    normed = recompute.checkpoint(block.norm, x)
    y = block.up(normed)
    recompute.discard_output_and_register_recompute(y)
    return block.down(torch.relu(y))


def plain_without_output(megatron, block, x):
    return block.down(torch.relu(block.up(block.norm(x))))


def gradients(call, megatron, in_thread=False):
    """One forward, one backward: two micro-batches in flight, each with its own pack."""
    torch.manual_seed(0)
    block = Block()
    inputs = [torch.randn(T, H, requires_grad=True) for _ in metas()]
    outputs, waiting = [], []

    def backward():
        y = waiting.pop(0)
        if not in_thread:
            return y.square().sum().backward()
        thread = threading.Thread(target=lambda: y.square().sum().backward())
        thread.start()
        return thread.join()

    for x, meta in zip(inputs, metas(), strict=True):
        with seq_meta(meta):
            y = call(megatron, block, x)
            outputs.append(y.detach().clone())
            waiting.append(y)
            if len(waiting) > 1:  # while the meta of another micro-batch surrounds it
                backward()
    while waiting:
        backward()
    return [*outputs, *(x.grad for x in inputs), *(p.grad for p in block.parameters())]


@pytest.mark.parametrize(
    ("call", "plain"),
    [
        (by_megatron, lambda megatron, block, x: block(x)),
        (nested, lambda megatron, block, x: 2 * block(x)),
        (without_output, plain_without_output),
    ],
    ids=["checkpoint", "nested", "without output"],
)
def test_each_micro_batch_has_its_own_meta(megatron, call, plain):
    expected = gradients(plain, megatron)
    with pytest.raises(ValueError, match="recomputed during backward without its meta"):
        gradients(call, megatron)
    for _ in range(2):  # which the second does nothing to
        carry_meta_through_recompute()
    for in_thread in (False, True):
        found = gradients(call, megatron, in_thread)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
    block, x = Block(), torch.randn(T, H)
    meta = metas()[0]
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
