"""Attention on a GPU, by our own kernels and beside them, as layers choose it."""

from __future__ import annotations

import logging

import pytest
import torch
from rank_helpers import device_of, drawn, forbid_host_reads

from padded_sp import DotProductAttention, PaddedSeqMeta, attention_choice, backends
from padded_sp.backends import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")

SHORT = ([100, 0, 150, 33, 1, 64], [112, 16, 160, 48, 16, 64])
LONG = ([3000, 20], [3008, 32])
SHAPES = {"gqa": (8, 2, 128, 128), "mla": (4, 4, 192, 128), "reported": (4, 4, 48, 48)}


def metas(group, lengths):
    real, padded = lengths
    return PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device_of(group))


def layer_of(group, shape, **arguments):
    heads, kv_heads, head_dim, v_head_dim = SHAPES[shape]
    size = group.size()
    return DotProductAttention(
        heads * size, head_dim, kv_heads * size, v_head_dim, tp_group=group, **arguments
    )


def inputs_of(group, shape, meta, poison):
    heads, kv_heads, head_dim, v_head_dim = SHAPES[shape]
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads * v_head_dim,)
    tensors = []
    for seed, size in enumerate(sizes):
        x = drawn(group, meta.num_rows, *size, seed=seed, dtype=torch.bfloat16)
        x[meta.padding_mask] = poison
        tensors.append(x)
    return tensors[:3], tensors[3]


def step(layer, inputs, grad, meta):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = layer(*(x * 1 for x in leaves), meta)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.clone())]


def is_exact_and_inert(group, shape):
    meta = metas(group, SHORT)
    layer = layer_of(group, shape, backend="triton")
    inputs, grad = inputs_of(group, shape, meta, 0.0)
    clean = step(layer, inputs, grad, meta)
    leaves = [x.double().requires_grad_() for x in inputs]
    out = reference.dot_product_attention(*leaves, meta=meta)
    exact = [out, *torch.autograd.grad(out, leaves, grad.double())]
    for a, b in zip(clean, exact, strict=True):
        assert (a.double() - b).norm() <= 8e-3 * b.norm()
        assert not a[meta.padding_mask].any()
    for poison in (float("nan"), float("inf"), 1e4):
        poisoned = step(layer, *inputs_of(group, shape, meta, poison), meta)
        for a, b in zip(clean, poisoned, strict=True):
            assert torch.equal(a, b), poison


@pytest.mark.parametrize("shape", SHAPES)
def test_is_exact_and_inert(ranks, shape):
    ranks.run(is_exact_and_inert, shape=shape)


def is_chosen_for_short_packs(group, caplog_level):
    logger, records = logging.getLogger("padded_sp"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(caplog_level)
    attention_choice._logged.clear()
    try:
        layer = layer_of(group, "gqa", backend="auto")
        for lengths in (SHORT, LONG):
            meta = metas(group, lengths)
            step(layer, *inputs_of(group, "gqa", meta, 0.0), meta)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    chosen = [r.getMessage() for r in records if r.levelno == logging.DEBUG]
    assert "backend 'triton'" in chosen[0]
    assert any("backend 'te'" in line or "backend 'flash4'" in line for line in chosen[1:])


def test_is_chosen_for_short_packs(ranks):
    ranks.run(is_chosen_for_short_packs, caplog_level=logging.DEBUG)


# The same rows in other lengths, and both short and long sequences, as "mixed" takes them.
IN_TURN = [([300, 0, 1500, 33, 1, 64], [304, 16, 1552, 48, 16, 64]),
           ([1980, 1], [1984, 16]),
           ([64] * 31, [64] * 30 + [80])]  # fmt: skip


def reads_nothing(group, backend):
    device, layer = device_of(group), layer_of(group, "gqa", backend=backend)
    inputs, grad = inputs_of(group, "gqa", metas(group, IN_TURN[0]), 0.0)
    for lengths in IN_TURN:  # kernels are compiled for what they meet
        step(layer, inputs, grad, metas(group, lengths))
    outs = []
    with forbid_host_reads(device):
        for real, padded in IN_TURN:
            meta = metas(group, ([max(n - 1, 0) for n in real], padded))
            outs += step(layer, inputs, grad, meta)
    assert all(out.isfinite().all() for out in outs)


@pytest.mark.parametrize("backend", ["auto", *backends.ATTENTION])
def test_reads_nothing(ranks, backend):
    if backend != "auto" and not backends.is_installed(backend):
        pytest.skip(f"what {backend} needs is not installed")
    ranks.run(reads_nothing, backend=backend)
