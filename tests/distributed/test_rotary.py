"""apply_rotary, full and on shards of rows, against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import device_of
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp import PaddedSeqMeta, seq_meta
from padded_sp.backends import reference
from padded_sp.collectives import group_rank, group_size
from padded_sp.rotary import apply_rotary

# 24 rows: any of 1 to 4 ranks can share them. Row 23 lies 13 places behind its start.
SEQ_LENS, PADDED_LENS = [5, 0, 1, 7], [6, 0, 4, 14]


def meta_of(device="cpu", tp_size=1):
    return PaddedSeqMeta.from_seq_lens(
        SEQ_LENS, padded_lens=PADDED_LENS, tp_size=tp_size, device=device
    )


def tables(positions, half, dtype=torch.float64, device="cpu", scale=1.0):
    frequencies = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return tuple((scale * t).to(dtype=dtype, device=device) for t in (angles.cos(), angles.sin()))


def values(*shape, dtype=torch.float64, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


# --- the numbers ---------------------------------------------------------------------------------


def matches_reference(group, half, interleaved, shape):
    device, size, rank = device_of(group), group_size(group), group_rank(group)
    meta = meta_of(device, tp_size=size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        table_dtype = torch.promote_types(dtype, torch.float32)
        cos, sin = tables(14, half, table_dtype, device, scale=1.3)  # YaRN's mscale
        x_full, grad_full = (values(24, *shape, dtype=dtype, device=device, seed=s) for s in (1, 2))
        x_ref = x_full.cpu().double().clone().requires_grad_()
        y_ref = reference.apply_rotary(
            x_ref, cos.cpu().double(), sin.cpu().double(), meta.to("cpu"), interleaved=interleaved
        )
        (grad_ref,) = torch.autograd.grad(y_ref, x_ref, grad_full.cpu().double())
        mine = slice(24 // size * rank, 24 // size * (rank + 1))
        for tp_group, rows in ((None, slice(None)), (group, mine)):
            x = x_full[rows].clone().requires_grad_()
            with CommDebugMode() as comms:
                y = apply_rotary(x, cos, sin, meta, interleaved, tp_group)
                y.backward(grad_full[rows].clone())
            assert comms.get_total_counts() == 0
            assert y.dtype == dtype
            # Computed in float32 at least: what is rounded is the result, by half a unit, and in
            # float32 itself the two products, each at most 1.3 * 4 here.
            close = {"rtol": torch.finfo(dtype).eps, "atol": 8 * torch.finfo(table_dtype).eps}
            for actual, right in ((y, y_ref), (x.grad, grad_ref)):
                torch.testing.assert_close(
                    actual.detach().cpu().double(), right[rows].detach(), **close
                )
                pads = meta.padding_mask[rows]
                assert not actual[pads].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("half", "shape"), [(4, (2, 8)), (2, (3, 8)), (4, (8,)), (3, (1, 2, 8))],
    ids=["all", "partial", "without heads", "partial, more dimensions"],
)  # fmt: skip
def test_output_and_gradient(ranks, half, interleaved, shape):
    ranks.run(matches_reference, half=half, interleaved=interleaved, shape=shape)


def test_positions_restart_at_padded_starts():
    """TE's documented pack: pads 3, 6, 7 and 12."""
    meta = PaddedSeqMeta.from_seq_lens([3, 2, 4], padded_lens=[4, 4, 5])
    cos, sin = tables(5, 1)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(13, 1, 2)
    turned = apply_rotary(x, cos, sin, meta).squeeze(1)
    places = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3], dtype=torch.float64)
    expected = torch.stack([places.cos(), places.sin()], 1)
    torch.testing.assert_close(turned[meta.real_rows], expected)
    assert not turned[meta.pad_rows].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("half", "features"), [(4, 8), (3, 8)])
def test_tables_with_each_angle_twice(half, features, interleaved):
    meta, x = meta_of(), values(24, 2, features)
    halves = tables(14, half)
    if interleaved:
        full = [t.repeat_interleave(2, dim=1) for t in halves]
    else:
        full = [torch.cat([t, t], dim=1) for t in halves]
    assert torch.equal(
        apply_rotary(x, *full, meta, interleaved), apply_rotary(x, *halves, meta, interleaved)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_by_full_tables(interleaved):
    # 4 of 16 features: tables [S, 4] alone would say 8, so rotary_dim tells.
    meta, x = meta_of(), values(24, 2, 16)
    cos, sin = tables(14, 2)
    expected = apply_rotary(x, cos, sin, meta, interleaved)
    twice = [t.repeat_interleave(2, 1) if interleaved else t.repeat(1, 2) for t in (cos, sin)]
    actual = apply_rotary(x, *twice, meta, interleaved, rotary_dim=4)
    assert torch.equal(actual, expected)
    assert not torch.equal(apply_rotary(x, *twice, meta, interleaved), expected)
    with pytest.raises(ValueError, match="width 4 do not turn 6 of 16"):
        apply_rotary(x, *twice, meta, interleaved, rotary_dim=6)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12),
    interleaved=st.booleans(),
)
def test_any_lengths(lengths, interleaved):
    real = [n for n, _ in lengths]
    meta = PaddedSeqMeta.from_seq_lens(real, padded_lens=[n + pads for n, pads in lengths])
    cos, sin = tables(max(real) or 1, 2)
    x = values(meta.num_rows, 2, 4).requires_grad_()
    y = apply_rotary(x, cos, sin, meta, interleaved)
    expected = reference.apply_rotary(x, cos, sin, meta, interleaved=interleaved)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    grad = values(meta.num_rows, 2, 4, seed=2)
    for actual, right in zip(
        torch.autograd.grad(y, x, grad.clone()), torch.autograd.grad(expected, x, grad), strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=1e-14, atol=1e-14)


def test_no_rows_at_all():
    meta = PaddedSeqMeta.from_seq_lens([0], padded_lens=[0])
    x = torch.zeros(0, 2, 4, requires_grad=True)
    apply_rotary(x, *tables(1, 2, torch.float32), meta).sum().backward()
    assert x.grad.shape == (0, 2, 4)


# --- pads are inert ------------------------------------------------------------------------------


def pads_are_inert(group):
    device, size, rank = device_of(group), group_size(group), group_rank(group)
    meta = meta_of(device, tp_size=size)
    pads = meta.shard(meta.padding_mask, rank)[:, None, None]
    cos, sin = tables(7, 4, torch.float32, device)  # they end where the longest sequence does
    clean, grad = (meta.shard(values(24, 2, 8, dtype=torch.float32, device=device, seed=s), rank)
                   for s in (1, 2))  # fmt: skip
    results = []
    for pad in (0.0, math.nan, 1e4):
        leaf = clean.masked_fill(pads, pad).requires_grad_()
        for x in (leaf, leaf * 1):
            y = apply_rotary(x, cos, sin, meta, tp_group=group)
            (x_grad,) = torch.autograd.grad(y, leaf, grad.masked_fill(pads, pad))
            results.append((y.detach(), x_grad))
    for result in results:
        for actual, first in zip(result, results[0], strict=True):
            assert torch.equal(actual, first)
            assert not actual.masked_fill(~pads, 0).any()
            assert actual.isfinite().all()


def test_poison(ranks):
    ranks.run(pads_are_inert)


# --- metas, compile ------------------------------------------------------------------------------


def test_meta_with_capacity_follows_its_arrays():
    first, second = meta_of(), PaddedSeqMeta.from_seq_lens([8, 3], padded_lens=[8, 12])
    filled = first.with_capacity(num_sequences=6, num_rows=32, max_seq_len=16)
    cos, sin = tables(16, 2)
    x = values(32, 2, 4)
    for meta in (first, second):
        filled.copy_(meta)
        y = apply_rotary(x, cos, sin, filled)
        expected = reference.apply_rotary(x[: meta.num_rows], cos, sin, meta)
        torch.testing.assert_close(y[: meta.num_rows], expected, rtol=1e-14, atol=1e-14)
        assert not y[meta.num_rows :].any()


def test_takes_the_surrounding_meta():
    meta, x, (cos, sin) = meta_of(), values(24, 2, 8), tables(14, 4)
    with seq_meta(meta):
        assert torch.equal(apply_rotary(x, cos, sin), apply_rotary(x, cos, sin, meta))


@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_saves_tables_and_positions_only(rotary_dim):
    meta, (cos, sin) = meta_of(), tables(14, 4)
    if rotary_dim:
        cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
    x, saved = values(24, 2, 8).requires_grad_() * 1, []  # no leaf, which would be copied
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rotary(x, cos, sin, meta, rotary_dim=rotary_dim)
    memory = {t.untyped_storage().data_ptr() for t in saved}
    known = {t.untyped_storage().data_ptr() for t in (cos, sin, meta.position_ids)}
    assert memory == known


def test_tables_get_no_gradient():
    cos, sin = (t.requires_grad_() for t in tables(14, 4))
    x = values(24, 2, 8).requires_grad_()
    apply_rotary(x, cos, sin, meta_of()).sum().backward()
    assert x.grad is not None
    assert cos.grad is None
    assert sin.grad is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles_without_graph_breaks(interleaved):
    torch._dynamo.reset()
    meta, (cos, sin), grad = meta_of(), tables(14, 3), values(24, 2, 8, seed=2)

    def rotate(x, meta):
        return apply_rotary(x, cos, sin, meta, interleaved)

    results = []
    for call in (rotate, torch.compile(rotate, backend="aot_eager", fullgraph=True)):
        x = values(24, 2, 8).requires_grad_()
        y = call(x, meta)
        results.append((y, *torch.autograd.grad(y, x, grad.clone())))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


# --- the caller's mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        ((22, 2, 8), (14, 4), (14, 4), "x has 22 rows, its meta has 24"),
        ((24,), (14, 4), (14, 4), r"x must be floating \[rows, \*, D\]"),
        ((24, 2, 8), (14, 4), (14, 3), r"got \(14, 4\) on cpu and \(14, 3\) on cpu"),
        ((24, 2, 8), (14, 1, 4), (14, 1, 4), r"must both be \[S, rot / 2\]"),
        ((24, 2, 8), (14, 9), (14, 9), "width 9 do not turn 9 of 8 features"),
        ((24, 2, 8), (14, 5), (14, 5), "width 5 do not turn 5 of 8 features"),
        ((24, 2, 8), (6, 4), (6, 4), "end at position 5, the longest sequence at 6"),
    ],
)
def test_refuses(x, cos, sin, message):
    with pytest.raises(ValueError, match=message):
        apply_rotary(torch.zeros(x), torch.zeros(cos), torch.zeros(sin), meta_of())


def test_with_capacity_tables_must_reach_its_longest():
    filled = meta_of().with_capacity(num_sequences=6, num_rows=32, max_seq_len=16)
    with pytest.raises(ValueError, match="at least 16 rows"):
        apply_rotary(torch.zeros(32, 2, 8), *tables(14, 4), filled)


def test_tables_on_another_device():
    with pytest.raises(ValueError, match="on meta and"):
        apply_rotary(torch.zeros(24, 2, 8), *(t.to("meta") for t in tables(14, 4)), meta_of())


def test_no_meta_at_all():
    with pytest.raises(ValueError, match="no meta"):
        apply_rotary(torch.zeros(24, 2, 8), *tables(14, 4))


def shard_of_other_rows(group):
    rows = 24 // group_size(group) + 1
    with pytest.raises(ValueError, match=f"x has {rows} rows"):
        apply_rotary(torch.zeros(rows, 2, 8), *tables(14, 4), meta_of(), tp_group=group)


def test_shard_of_other_rows(ranks):
    ranks.run(shard_of_other_rows)
