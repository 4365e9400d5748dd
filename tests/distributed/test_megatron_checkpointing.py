"""Activations recomputed by the real megatron-core: each micro-batch finds its own meta.

On GPUs recomputation runs in a thread of autograd's, and Transformer Engine is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron_helpers import import_megatron, put_checkpoints_back
from rank_helpers import device_of, drawn, part
from te_helpers import on_te
from torch import nn

from padded_sp import (
    ColumnParallelLinear,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RMSNorm,
    RowParallelLinear,
    seq_meta,
)
from padded_sp.integrations.megatron import carry_meta_through_recompute

H, F, T = 32, 64, 48
BACKENDS = ("torch", "te")


class Block(nn.Module):
    """As Megatron calls it: with one argument. Nothing is used in two places, whose gradients
    recomputation adds up in another order."""

    def __init__(self, group, backend):
        super().__init__()
        common = {
            "tp_group": group,
            "device": device_of(group),
            "params_dtype": dtype_of(backend),
        }
        options = {**common, "backend": backend}
        self.norm = RMSNorm(H, **common)
        self.up = ColumnParallelLinear(H, F, **options)
        self.first_down = RowParallelLinear(F, H, **options)
        self.normed_up = LayerNormColumnParallelLinear(H, F, normalization="RMSNorm", **options)
        self.down = RowParallelLinear(F, H, **options)

    def forward(self, x):
        return self.rest(self.up(self.norm(x)))

    def rest(self, x):
        return self.down(torch.relu(self.normed_up(self.first_down(torch.relu(x)))))


def dtype_of(backend):
    return torch.bfloat16 if backend == "te" else torch.float32


def metas(group):
    seq_lens = [(20, 12), (8, 36), (45,), (1, 1)]
    padded_lens = [(24, 24), (8, 40), (48,), (4, 44)]
    return [
        PaddedSeqMeta.from_seq_lens(
            lens, padded_lens=padded, tp_size=group.size(), device=device_of(group)
        )
        for lens, padded in zip(seq_lens, padded_lens, strict=True)
    ]


@contextmanager
def megatron() -> Iterator[object]:
    """``megatron.core.tensor_parallel.random`` as it was imported, usable without a GPU."""
    module = import_megatron("tensor_parallel.random")
    with pytest.MonkeyPatch.context() as patch:
        put_checkpoints_back(patch)
        yield module


def plain(megatron, block, x):
    return block(x)


def by_megatron(megatron, block, x):
    return megatron.checkpoint(block, False, x)


def nested(megatron, block, x):
    return megatron.checkpoint(lambda x: megatron.checkpoint(block, False, x), False, x)


def norm_again(megatron, block, x):
    """As a layer of Megatron's recomputes its norm."""
    again = megatron.CheckpointWithoutOutput(fp8=None)
    normed = again.checkpoint(block.norm, x)
    y = block.up(normed)
    again.discard_output_and_register_recompute(y)
    return block.rest(y)


def by_transformer_engine(megatron, block, x):
    te_checkpoint = import_megatron("extensions.transformer_engine").te_checkpoint
    tracker, group = megatron.get_cuda_rng_tracker, block.down.tp_group
    return te_checkpoint(block, False, tracker, group, x)


def step(megatron, group, call, backend, fill=0.0, thread=False):
    """One forward, one backward: two micro-batches in flight, each with its own pack."""
    torch.manual_seed(0)
    block, packs = Block(group, backend), metas(group)
    inputs = []
    for i, meta in enumerate(packs):
        x = drawn(group, T, H, seed=i, dtype=dtype_of(backend))
        x = x.masked_fill(meta.padding_mask[:, None], fill)
        inputs.append(part(x, group).detach().clone().requires_grad_())
    outputs, waiting = [], []

    def backward():
        y, meta = waiting.pop(0)
        dy = 2 * y.detach().float().to(y.dtype)
        dy = dy.masked_fill(meta.padding_mask.chunk(group.size())[group.rank()][:, None], fill)
        if not thread:
            return y.backward(dy)
        running = threading.Thread(target=y.backward, args=(dy,))
        running.start()
        return running.join()

    for x, meta in zip(inputs, packs, strict=True):
        with seq_meta(meta):
            y = call(megatron, block, x)
            real = ~meta.padding_mask.chunk(group.size())[group.rank()]
            outputs.append(y.detach()[real])
            waiting.append((y, meta))
            if len(waiting) > 1:  # while the meta of another micro-batch surrounds it
                backward()
    while waiting:
        backward()
    real = [~m.padding_mask.chunk(group.size())[group.rank()] for m in packs]
    grads = [x.grad[r] for x, r in zip(inputs, real, strict=True)]
    return [*outputs, *grads, *(p.grad for p in block.parameters())]


@on_te
def each_micro_batch_has_its_own_meta(group, call, backend):
    with megatron() as module:
        expected = step(module, group, plain, backend)
        again = step(module, group, plain, backend)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
        with pytest.raises(ValueError, match="recomputed during backward without its meta"):
            step(module, group, call, backend)
        carry_meta_through_recompute()
        for fill in (0.0, float("nan"), 1e4):
            for thread in (False, True):
                found = step(module, group, call, backend, fill, thread)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", [by_megatron, nested, norm_again])
@pytest.mark.max_ranks(2)
def test_each_micro_batch_has_its_own_meta(ranks, call, backend):
    ranks.run(each_micro_batch_has_its_own_meta, call=call, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.max_ranks(2)
def test_transformer_engines_checkpoint(ranks, backend):
    ranks.run(each_micro_batch_has_its_own_meta, call=by_transformer_engine, backend=backend)
