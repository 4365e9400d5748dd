"""Our attention kernels: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    ARGUMENTS,
    DEVICE,
    HAS_GPU,
    HEADS,
    PACKS,
    SMALL,
    WINDOWS,
    assert_close,
    drawn,
    exact,
    forget_the_copy,
    interpret,
    metas_of,
    run,
    with_blocks,
)

from padded_sp import PaddedSeqMeta
from padded_sp.backends import triton_attention
from padded_sp.backends.tiles import Blocks, tile_lists


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def afterwards():
    yield
    forget_the_copy()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_equals_the_reference_whatever_pads_hold(pack, window, monkeypatch):
    with_blocks(monkeypatch, SMALL[(WINDOWS.index(window) + list(PACKS).index(pack)) % len(SMALL)])
    metas = metas_of(*PACKS[pack])
    heads = HEADS["mha"] if window[0] >= 0 else HEADS["gqa"]
    actual = run(*drawn(*metas, heads, poison=float("nan")), *metas, window)
    assert_close(actual, exact(*drawn(*metas, heads), *metas, window), 2e-3)
    meta, kv_meta = metas
    for x, rows in zip(actual, (meta, meta, kv_meta, kv_meta), strict=True):
        assert not x[rows.padding_mask].any()


@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads, monkeypatch):
    with_blocks(monkeypatch, SMALL[1])
    metas = metas_of(*PACKS["one long with a tail"])
    tensors = drawn(*metas, HEADS[heads])
    assert_close(run(*tensors, *metas, (-1, 0)), exact(*tensors, *metas, (-1, 0)), 2e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
def test_pads_move_no_bit(poison, monkeypatch):
    with_blocks(monkeypatch, SMALL[1])
    metas = metas_of(*PACKS["one long with a tail"])
    clean, poisoned = (
        run(*drawn(*metas, HEADS["gqa"], poison=value), *metas, (-1, 0)) for value in (0.0, poison)
    )
    for name, a, b in zip(ARGUMENTS, clean, poisoned, strict=True):
        assert torch.equal(a, b), name


def test_slices_of_one_tensor_and_an_expanded_gradient(monkeypatch):
    with_blocks(monkeypatch, SMALL[0])
    metas = metas_of(*PACKS["short ones"])
    meta, _ = metas
    qkv = torch.randn(meta.num_rows, 8, 16, generator=torch.Generator().manual_seed(1))
    q, k, v = qkv.to(DEVICE, torch.float16).split([4, 2, 2], 1)
    grad = torch.ones((), dtype=torch.float16, device=DEVICE).expand(meta.num_rows, 4, 16)
    actual = run(q, k, v, grad, *metas, (-1, 0))
    dense = [x.contiguous() for x in (q, k, v, grad)]
    for a, b in zip(actual, run(*dense, *metas, (-1, 0)), strict=True):
        assert torch.equal(a, b)
    # Features apart from each other are brought together.
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(apart, k, v, grad, *metas, (-1, 0))[0], actual[0])


def test_no_rows():
    meta = PaddedSeqMeta.from_seq_lens([0, 0], device=DEVICE)
    q = torch.randn(0, 2, 16, device=DEVICE, dtype=torch.float16)
    assert [x.shape[0] for x in run(q, q, q, q, meta, meta, (-1, 0))] == [0] * 4


# --- Tile lists ----------------------------------------------------------------------------------

packs = st.lists(
    st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(0, 9)] * 2), min_size=1, max_size=7
)
limits = st.integers(-1, 12)
sizes = st.sampled_from([1, 4, 8, 16])


@settings(max_examples=150, deadline=None)
@given(packs, limits, limits, st.sampled_from([0, 8, 16]), sizes, sizes, sizes, sizes)
def test_tiles_hold_each_pair_that_may_meet_once(pack, left, right, packed, q, kq, k, qk):
    """And no pair of what a tile says is seen by all would be hidden."""
    real, k_real, pads, k_pads = zip(*pack, strict=True)
    meta, kv_meta = (
        PaddedSeqMeta.from_seq_lens(
            lengths, padded_lens=[n + more for n, more in zip(lengths, extra, strict=True)]
        )
        for lengths, extra in ((real, pads), (k_real, k_pads))
    )
    q_rows, k_rows = (m.real_rows.tolist() for m in (meta, kv_meta))
    q_starts, k_starts = ([*itertools.accumulate(n, initial=0)] for n in (real, k_real))
    seen = set()
    for i, (n, m) in enumerate(zip(real, k_real, strict=True)):
        for a, b in itertools.product(range(n), range(m)):
            distance = b - (a + m - n)
            if (left < 0 or distance >= -left) and (right < 0 or distance <= right):
                seen.add((q_starts[i] + a, k_starts[i] + b))
    blocks = Blocks(packed, q, kq, k, qk)
    several, queries, keys = (
        tiles.tolist() for tiles in tile_lists(meta, kv_meta, (left, right), blocks)
    )
    together = {
        pair
        for first, count, k_first, k_count in several
        for pair in itertools.product(
            range(first, first + count), range(k_first, k_first + k_count)
        )
    }
    by_queries, by_keys = [], []
    for first, count, begin, full_end, end, q_shift, k_shift, _ in queries:
        tokens = range(first, first + count)
        by_queries += itertools.product(tokens, range(begin, end))
        assert (full_end - begin) % kq == 0
        assert begin <= full_end <= max(begin, end)
        assert seen.issuperset(itertools.product(tokens, range(begin, full_end)))
        assert all(q_rows[token] == token + q_shift for token in tokens)
        assert all(k_rows[key] == key + k_shift for key in range(begin, end))
    for first, count, begin, masked_end, end, q_shift, k_shift, _ in keys:
        tokens = range(first, first + count)
        by_keys += itertools.product(range(begin, end), tokens)
        assert begin <= masked_end <= max(begin, end)
        assert seen.issuperset(itertools.product(range(masked_end, end), tokens))
        assert all(k_rows[key] == key + k_shift for key in tokens)
        assert all(q_rows[token] == token + q_shift for token in range(begin, end))
    for pairs in (by_queries, by_keys):
        assert len(pairs) == len(set(pairs))
        assert together.isdisjoint(pairs)
        assert seen <= together.union(pairs)
    # Every token is in one tile, and pads are in none.
    assert sum(tile[1] for tile in (*several, *queries)) == sum(real)
    assert sum(tile[3] for tile in several) + sum(tile[1] for tile in keys) == sum(k_real)
    assert all(max(tile[1], tile[3]) <= packed for tile in several)


# --- The real tiles, on a GPU --------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="interpreted, the real tiles take minutes")


@needs_gpu
@pytest.mark.parametrize("lengths", ["short", "long"])
@pytest.mark.parametrize(
    "heads",
    [
        (4, 4, 32, 32), (8, 2, 48, 48), (8, 8, 64, 64), (6, 2, 80, 80), (8, 1, 96, 96),
        (8, 2, 128, 128), (4, 4, 192, 128), (4, 2, 192, 192), (4, 1, 256, 256), (32, 1, 128, 128),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (100, 0)], ids=str)
def test_real_tiles(heads, window, lengths):
    real = [20, 199, 1, 77, 130, 64, 65, 3] if lengths == "short" else [1300, 700, 5, 20]
    metas = metas_of(real, [12, 1, 15, 0, 6, 0, 63, 5][: len(real)], None, None)
    poisoned = drawn(*metas, heads, torch.bfloat16, float("nan"))
    actual = run(*poisoned, *metas, window, heads[2] ** -0.5)
    expected = exact(*drawn(*metas, heads, torch.bfloat16), *metas, window, heads[2] ** -0.5)
    assert_close(actual, expected, 8e-3)
    for a, b in zip(actual, run(*poisoned, *metas, window, heads[2] ** -0.5), strict=True):
        assert torch.equal(a, b)  # deterministic


@needs_gpu
def test_a_launch_is_not_repeated_for_other_arguments():
    """Alignment, strides and dtype may change from call to call with one meta."""
    meta, _ = metas = metas_of([20, 199, 1, 77], [12, 1, 15, 0], None, None)
    heads = (8, 2, 128, 128)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        q, k, v, grad = drawn(*metas, heads, dtype)
        expected = run(q, k, v, grad, *metas, (-1, 0), 0.1)
        askew = torch.empty(q.numel() + 1, dtype=dtype, device=DEVICE)[1:].view_as(q).copy_(q)
        wide = torch.empty(meta.num_rows, 9, 128, dtype=dtype, device=DEVICE)[:, :8].copy_(q)
        assert askew.data_ptr() % 16
        for other in (askew, wide, q):
            for a, b in zip(run(other, k, v, grad, *metas, (-1, 0), 0.1), expected, strict=True):
                assert torch.equal(a, b)


@needs_gpu
def test_reasons():
    meta = PaddedSeqMeta.from_seq_lens([5, 3], device=DEVICE)
    half = torch.randn(8, 2, 64, device=DEVICE, dtype=torch.float16)
    wide = torch.randn(8, 2, 264, device=DEVICE, dtype=torch.float16)
    capacity = meta.with_capacity(2, 8, 8)
    options = {"window": (-1, 0), "dropout": 0.0, "softmax_scale": 1.0}
    attend = triton_attention.dot_product_attention
    for x, rows, dropout, reason in (
        (half.float(), meta, 0.0, "float16 and bfloat16"),
        (wide, meta, 0.0, "heads of at most 256"),
        (half, meta, 0.1, "no dropout"),
        (half, capacity, 0.0, "capacity"),
    ):
        with pytest.raises(ValueError, match=reason):
            attend(x, x, x, rows, rows, **options | {"dropout": dropout})
