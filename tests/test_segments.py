"""FlashAttention's segments, on a stand-in for it that computes each segment in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padded_sp import PaddedSeqMeta
from padded_sp.attention import DotProductAttention
from padded_sp.backends import reference, torch_attention
from padded_sp.backends.segments import segment_lengths, segments_of


def meta_of(seq_lens, padded_lens):
    return PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=padded_lens)


# --- which segments ------------------------------------------------------------------------------


def test_short_pads_stay_with_a_causal_sequence():
    meta = meta_of([100, 0, 120], [112, 0, 248])
    segments = segments_of(meta, meta, causal=True)
    assert segments.q_boundaries is segments.k_boundaries
    assert segments.q_boundaries.tolist() == [0, 112, 360]
    assert (segments.longest_q, segments.longest_k) == (248, 248)


def test_layout_without_empty_sequences_needs_no_new_array():
    meta = meta_of([100, 120], [112, 248])
    assert segments_of(meta, meta, causal=True).q_boundaries is meta.cu_seqlens_padded


def test_long_pads_are_cut():
    meta = meta_of([100, 5], [100, 305])
    assert segments_of(meta, meta, causal=True).q_boundaries.tolist() == [
        0,
        100,
        105,
        233,
        361,
        405,
    ]


def test_pads_that_could_be_seen_are_segments_of_their_own():
    meta = meta_of([3, 2, 4], [4, 4, 4])
    assert segments_of(meta, meta, causal=False).k_boundaries.tolist() == [0, 3, 4, 6, 8, 12]


def test_the_side_with_fewer_pads_gets_segments_of_nothing():
    meta, kv_meta = meta_of([3, 2], [4, 2]), meta_of([5, 0], [5, 300])
    q_lens, k_lens = segment_lengths(meta, kv_meta, keep_short_pads=False)
    assert q_lens == [3, 1, 2, 0, 0, 0]
    assert k_lens == [5, 0, 0, 128, 128, 44]


def test_empty_entries_make_no_segment():
    meta = meta_of([40, 24] + [0] * 62, [40, 24] + [0] * 62)
    for causal in (False, True):
        assert segments_of(meta, meta, causal=causal).q_boundaries.tolist() == [0, 40, 64]


def test_segments_are_made_once_for_each_pair_of_metas():
    meta, kv_meta, other = (meta_of([3], [4]) for _ in range(3))
    first = segments_of(meta, kv_meta, causal=True)
    assert segments_of(meta, kv_meta, causal=True) is first
    assert segments_of(meta, other, causal=True) is not first


def test_with_capacity_segments_follow_the_arrays():
    meta = meta_of([3, 2], [4, 4]).with_capacity(num_sequences=3, num_rows=12, max_seq_len=8)
    assert segments_of(meta, meta, causal=True).q_boundaries is meta.cu_seqlens_padded
    full = segments_of(meta, meta, causal=False)
    assert full.q_boundaries.tolist() == [0, 3, 4, 6, 8, 8, 12]
    assert full.q_boundaries.dtype == torch.int32
    assert full.longest_q == 8
    meta.copy_(meta_of([5, 1], [8, 4]))
    assert segments_of(meta, meta, causal=False).q_boundaries.tolist() == [0, 5, 8, 9, 12, 12, 12]


# --- what comes out of them ----------------------------------------------------------------------


def flash_stand_in(
    q, k, v, q_boundaries, k_boundaries, max_q, max_k, dropout, is_causal, debug, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    """What ``aten._flash_attention_forward`` computes, and the rules that it has for its input."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q_boundaries.shape == k_boundaries.shape
    assert q_boundaries.dtype == k_boundaries.dtype == torch.int32
    assert max_q > 1
    for t in (q, k, v):
        assert t.stride(-1) == 1
        assert t.stride(0) % 8 == t.stride(1) % 8 == t.storage_offset() % 8 == 0
    q_ends, k_ends = q_boundaries.tolist(), k_boundaries.tolist()
    assert (q_ends[-1], k_ends[-1]) == (q.shape[0], k.shape[0])  # no row is left unwritten
    q_lens, k_lens = ([b - a for a, b in pairwise(ends)] for ends in (q_ends, k_ends))
    assert max(q_lens) <= max_q
    assert max(k_lens) <= max_k
    window = [-1 if w is None else w for w in (window_size_left, window_size_right)]
    out = reference.dot_product_attention(
        q, k, v, meta_of(q_lens, q_lens), meta_of(k_lens, k_lens),
        mask="causal" if is_causal else "full", window=window, softmax_scale=scale,
    )  # fmt: skip
    return out.unflatten(1, (q.shape[1], -1)), None, None, None, None


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    monkeypatch.setattr(torch_attention, "_flash_attention", flash_stand_in)
    monkeypatch.setattr(torch_attention, "uses_flash", lambda q, v: True)


def assert_matches_reference(meta, kv_meta, mask, window, head_dim=12, v_head_dim=20):
    torch.manual_seed(0)
    kv_rows = (kv_meta or meta).num_rows
    q, k, v = (
        torch.randn(rows, heads, size, dtype=torch.float64, requires_grad=True)
        for rows, heads, size in (
            (meta.num_rows, 4, head_dim), (kv_rows, 2, head_dim), (kv_rows, 2, v_head_dim)
        )
    )  # fmt: skip
    attention = DotProductAttention(4, head_dim, 2, v_head_dim, mask=mask, window=window)
    out = attention(q, k, v, meta, kv_meta)
    grad = torch.randn_like(out)
    expected = reference.dot_product_attention(q, k, v, meta, kv_meta, mask=mask, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(out, (q, k, v), grad.clone())
    for actual, wanted in zip(got, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


sequence = st.tuples(*[st.integers(0, 9), st.integers(0, 5)] * 2)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(sequence, min_size=1, max_size=6),
    cross=st.booleans(),
    mask=st.sampled_from(["causal", "full"]),
    window=st.sampled_from([None, (2, 1), (-1, 3), (4, -1)]),
)
def test_any_lengths(lengths, cross, mask, window):
    meta = meta_of([n for n, *_ in lengths], [n + pads for n, pads, *_ in lengths])
    kv_meta = meta_of([m for *_, m, _ in lengths], [m + pads for *_, m, pads in lengths])
    if mask == "causal" and window is not None:
        window = (window[0], 0)
    assert_matches_reference(meta, kv_meta if cross else None, mask, window)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("capacity", [False, True])
def test_the_seeds_pack(mask, capacity):
    meta = meta_of([50, 75, 0, 65], [56, 80, 150, 72])
    filled = meta.with_capacity(6, 360, 150) if capacity else meta
    torch.manual_seed(0)
    q, k, v = (torch.randn(filled.num_rows, 2, 48, dtype=torch.float64) for _ in range(3))
    out = DotProductAttention(2, 48, mask=mask)(q, k, v, filled)
    rows = slice(0, meta.num_rows)
    expected = reference.dot_product_attention(q[rows], k[rows], v[rows], meta, mask=mask)
    torch.testing.assert_close(out[rows], expected, rtol=1e-12, atol=1e-12)
    assert not out[meta.num_rows :].any()


def test_slices_of_a_fused_projection_are_read_as_they_are_or_copied():
    meta = meta_of([3, 4], [4, 4])
    fused = torch.randn(8, 3, 2, 16, dtype=torch.float64)
    odd = torch.randn(8, 3, 2, 9, dtype=torch.float64)[..., 1:]
    for q, k, v in (fused.unbind(1), odd.unbind(1)):
        out = DotProductAttention(2, q.shape[-1], inplace=False)(q, k, v, meta)
        expected = reference.dot_product_attention(q, k, v, meta)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_one_token_sequences_are_no_decoding_step():
    meta = meta_of([1, 1, 0, 1], [1, 1, 0, 1])
    assert_matches_reference(meta, None, "causal", None)
