"""The oracle against what one rank computes on the real rows alone, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from padded_sp import PaddedSeqMeta
from padded_sp.backends import reference

SEQ_LENS, PADDED_LENS = [5, 0, 1, 7], [6, 0, 4, 14]
RANKS = [1, 2, 3, 4]
POISON = [math.nan, 1e4]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def meta():
    return PaddedSeqMeta.from_seq_lens(SEQ_LENS, padded_lens=PADDED_LENS)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def poisoned(x, meta, value):
    return x.detach().masked_fill(meta.padding_mask.view(-1, *[1] * (x.dim() - 1)), value)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", RANKS)
def test_gather_and_scatter_are_inverse(size):
    full = torch.arange(24.0).view(12, 2)
    shards = reference.scatter(full, size)
    assert [tuple(s.shape) for s in shards] == [(12 // size, 2)] * size
    assert torch.equal(reference.all_gather(shards), full)


def test_scatter_of_no_rows():
    assert [s.shape for s in reference.scatter(torch.zeros(0, 3), 2)] == [(0, 3)] * 2


def test_scatter_refuses_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="5 rows do not divide over 2 ranks"):
        reference.scatter(torch.zeros(5), 2)


def test_sums_run_in_rank_order():
    big = torch.tensor([1e30, 1e30])
    partials = [big, -big, torch.ones(2)]  # (big - big) + 1 is 1; big + (1 - big) would be 0
    assert torch.equal(reference.all_reduce(partials), torch.ones(2))
    two = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert [s.tolist() for s in reference.reduce_scatter(two)] == [[11.0], [22.0]]


def test_all_to_all_is_its_own_inverse():
    tensors = [torch.arange(6) + 10 * rank for rank in range(3)]
    exchanged = reference.all_to_all(tensors)
    assert exchanged[1].tolist() == [2, 3, 12, 13, 22, 23]
    for back, tensor in zip(reference.all_to_all(exchanged), tensors, strict=True):
        assert torch.equal(back, tensor)


# --- layers: real rows are those of one rank without pads, whatever the pads hold -----------------


@pytest.mark.parametrize("pad", POISON)
@pytest.mark.parametrize("size", RANKS)
def test_column_then_row_parallel_linear(meta, size, pad):
    x, up, bias = randn(24, 8), randn(12, 8), randn(12)
    down, out_bias, grad = randn(5, 12), randn(5), torch.randn(24, 5, dtype=torch.float64)
    x_poisoned = poisoned(x, meta, pad).requires_grad_()
    hidden = reference.column_parallel_linear(
        reference.scatter(x_poisoned, size), up.chunk(size), bias.chunk(size), meta
    )
    assert [tuple(h.shape) for h in hidden] == [(24, 12 // size)] * size
    y_shards = reference.row_parallel_linear(hidden, down.chunk(size, dim=1), out_bias, meta)
    y = reference.all_gather(y_shards)
    got = torch.autograd.grad(y, (x_poisoned, up, bias, down, out_bias), poisoned(grad, meta, pad))

    rows = meta.real_rows
    plain = F.linear(F.linear(x[rows], up, bias), down, out_bias)
    wanted = torch.autograd.grad(plain, (x, up, bias, down, out_bias), grad[rows])
    assert_close(y[rows], plain)
    assert not y[meta.pad_rows].any()
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


def test_linears_without_sequence_parallelism_take_all_rows(meta):
    x, up, down = randn(24, 1, 8), randn(12, 8), randn(5, 12)  # Megatron's [rows, 1, H]
    hidden = reference.column_parallel_linear([x], up.chunk(2), None, meta)
    y = torch.cat(reference.row_parallel_linear(hidden, down.chunk(2, dim=1), None, meta))
    assert_close(y[meta.real_rows], F.linear(F.linear(x, up), down)[meta.real_rows])


@pytest.mark.parametrize("pad", POISON)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_then_linear(meta, normalization, pad):
    x, gamma, beta, weight = randn(24, 8), randn(8), randn(8), randn(4, 8)
    x_poisoned = poisoned(x, meta, pad).requires_grad_()
    outputs = reference.layer_norm_column_parallel_linear(
        reference.scatter(x_poisoned, 2),
        gamma,
        beta,
        weight.chunk(2),
        None,
        meta,
        eps=1e-6,
        normalization=normalization,
    )
    y = torch.cat(outputs, dim=1)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, (x_poisoned, gamma, beta, weight), poisoned(grad, meta, pad))

    rows = meta.real_rows
    real = x[rows]
    if normalization == "LayerNorm":
        real = real - real.mean(-1, keepdim=True)
    normed = real / (real.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma + beta
    plain = normed @ weight.T
    assert_close(y[rows], plain)
    wanted = torch.autograd.grad(plain, (x, gamma, beta, weight), grad[rows])
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected)


def test_embedding_ignores_the_ids_of_pads(meta):
    weight = randn(12, 4)
    ids = torch.randint(12, (24,)).masked_fill(meta.padding_mask, -100)
    shards = reference.vocab_parallel_embedding(ids, weight.chunk(3), meta)
    y = reference.all_gather(shards)
    assert [tuple(s.shape) for s in shards] == [(8, 4)] * 3
    assert torch.equal(y[meta.real_rows], weight[ids[meta.real_rows]])
    assert not y[meta.pad_rows].any()


@pytest.mark.parametrize("pad", POISON)
def test_cross_entropy_is_the_mean_over_real_rows_with_a_label(meta, pad):
    logits = randn(24, 12)
    labels = torch.randint(12, (24,))
    labels[0] = -100
    shards = poisoned(logits, meta, pad).requires_grad_()
    loss = reference.vocab_parallel_cross_entropy(shards.chunk(2, dim=1), labels, meta)
    rows = meta.real_rows[1:]
    wanted = F.cross_entropy(logits[rows], labels[rows])
    assert_close(loss, wanted)
    assert_close(torch.autograd.grad(loss, shards)[0], torch.autograd.grad(wanted, logits)[0])


def test_cross_entropy_of_nothing_is_zero(meta):
    logits = randn(24, 12)
    loss = reference.vocab_parallel_cross_entropy([logits], torch.full((24,), -100), meta)
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


# --- attention and rotary ------------------------------------------------------------------------


def test_attention_is_that_of_each_sequence(meta):
    q, k, v = randn(24, 4, 6), randn(24, 2, 6), randn(24, 2, 3)
    out = reference.dot_product_attention(q, k, v, meta)
    assert out.shape == (24, 12)
    assert not out[meta.pad_rows].any()
    for start, n in ((0, 5), (6, 1), (10, 7)):
        q_n, k_n, v_n = (t[start : start + n].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        plain = F.scaled_dot_product_attention(q_n, k_n, v_n, is_causal=True, enable_gqa=True)
        assert_close(out[start : start + n], plain[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    ("mask", "window", "first_keys", "last_keys"),
    [
        ("causal", None, [0, 0, 0], [3, 4, 5]),
        ("full", None, [0, 0, 0], [5, 5, 5]),
        ("full", (1, 1), [1, 2, 3], [4, 5, 5]),
        ("causal", (1, 5), [1, 2, 3], [3, 4, 5]),
    ],
)
def test_what_a_query_sees(mask, window, first_keys, last_keys):
    """3 queries of 5 keys: queries stand at places 2, 3 and 4."""
    meta = PaddedSeqMeta.from_seq_lens([3])
    kv_meta = PaddedSeqMeta.from_seq_lens([5])
    # With scores of zero the weights are even, and identity values show them.
    q, k, v = torch.zeros(3, 1, 2), torch.zeros(5, 1, 2), torch.eye(5).unsqueeze(1)
    weights = reference.dot_product_attention(q, k, v, meta, kv_meta, mask=mask, window=window)
    for row, first, last in zip(weights, first_keys, last_keys, strict=True):
        assert row.nonzero().flatten().tolist() == list(range(first, last))


def test_queries_that_see_no_key_give_zero():
    meta, kv_meta = (PaddedSeqMeta.from_seq_lens(lens) for lens in ([4, 2], [1, 0]))
    q, k, v = randn(6, 2, 4), randn(1, 2, 4), randn(1, 2, 4)
    out = reference.dot_product_attention(q, k, v, meta, kv_meta)
    assert not out[[0, 1, 2, 4, 5]].any()
    assert_close(out[3], v[0].flatten())
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_product(meta, interleaved):
    x, angles = randn(24, 2, 6), torch.randn(14, 2, dtype=torch.float64)
    out = reference.apply_rotary(x, angles.cos(), angles.sin(), meta, interleaved=interleaved)
    pairs = x[..., :4].unflatten(-1, (2, 2))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turn = torch.polar(torch.ones_like(angles), angles)[meta.position_ids].unsqueeze(1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    expected = torch.cat([turned.flatten(-2), x[..., 4:]], -1)
    assert_close(out[meta.real_rows], expected[meta.real_rows])
    assert not out[meta.pad_rows].any()
