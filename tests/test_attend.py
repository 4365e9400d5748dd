"""Attention by a backend that leaves pads as they come, saves its result, and says nothing."""

from __future__ import annotations

import pytest
import torch

from padded_sp import PaddedSeqMeta
from padded_sp.backends import torch_attention
from padded_sp.backends.attend import attend

META = PaddedSeqMeta.from_seq_lens([3, 2], padded_lens=[5, 4])
OPTIONS = {"window": (-1, 0), "dropout": 0.0, "softmax_scale": 0.5}


class _Square(torch.autograd.Function):
    """q ** 2, by its result in backward, as attention goes by O: dq = 2 sqrt(out) * grad."""

    @staticmethod
    def forward(ctx, q):
        out = q * q
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0].sqrt() * grad


def saves_its_result(q, k, v, meta, kv_meta, **options):
    return _Square.apply(q)


def plain(q, k, v, meta, kv_meta, **options):
    return torch_attention.dot_product_attention(q, k, v, meta, kv_meta, **options)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(9, 2, 4, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("meta", [META, PaddedSeqMeta.from_seq_lens([5, 4])])
def test_notices_what_is_written_to_a_result_that_backward_needs(meta):
    q, k, v = inputs()
    out = attend(saves_its_result, False, q, k, v, meta, meta, **OPTIONS)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("meta", [META, PaddedSeqMeta.from_seq_lens([5, 4])])
def test_a_result_that_nobody_saved_may_be_written_to(meta):
    grads = []
    for add in (torch.Tensor.add, torch.Tensor.add_):
        leaves = inputs()
        out = add(attend(plain, False, *leaves, meta, meta, **OPTIONS), 1)
        poison = torch.ones_like(out)
        poison[meta.padding_mask] = float("nan")
        grads.append(torch.autograd.grad(out, leaves, poison))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def test_saved_results_do_without_writes():
    q, k, v = inputs()
    out = attend(saves_its_result, False, q, k, v, META, META, **OPTIONS)
    assert not out[META.padding_mask].any()
    grad = torch.full_like(out, float("nan"))
    grad[META.real_rows] = 1.0
    (grad_q,) = torch.autograd.grad(out, [q], grad)
    expected = (2 * q.detach()).masked_fill(META.padding_mask[:, None, None], 0)
    torch.testing.assert_close(grad_q, expected)
