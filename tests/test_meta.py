"""PaddedSeqMeta against plain loops over its rows, and everything that it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Int32, Int64
from layouts import corner_cases, layouts, lengths, rows_of, starts_of
from torch import Tensor

from padded_sp import AlignPolicy, PaddedSeqMeta

CORNERS = list(corner_cases())
CORNER_IDS = [f"{len(real)}-sequences-{sum(padded)}-rows" for real, padded in CORNERS]


def packed(seq_lens: list[int], padded_lens: list[int], **kwargs: Any) -> PaddedSeqMeta:
    return PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=padded_lens, **kwargs)


def assert_is(meta: PaddedSeqMeta, seq_lens: list[int], padded_lens: list[int]) -> None:
    """Everything derived from the boundaries, against one loop over the rows."""
    rows = rows_of(seq_lens, padded_lens)
    B, T, N = len(seq_lens), sum(padded_lens), sum(seq_lens)
    assert (meta.num_sequences, meta.num_rows) == (B, T)

    assert isinstance(meta.cu_seqlens, Int32[Tensor, f"{B + 1}"])
    assert isinstance(meta.cu_seqlens_padded, Int32[Tensor, f"{B + 1}"])
    assert meta.cu_seqlens.tolist() == starts_of(seq_lens)
    assert meta.cu_seqlens_padded.tolist() == starts_of(padded_lens)

    assert isinstance(meta.sequence_ids, Int32[Tensor, f"{T}"])
    assert isinstance(meta.position_ids, Int64[Tensor, f"{T}"])
    assert isinstance(meta.padding_mask, Bool[Tensor, f"{T}"])
    assert isinstance(meta.loss_mask, Bool[Tensor, f"{T}"])
    assert meta.sequence_ids.tolist() == [row.sequence for row in rows]
    assert meta.position_ids.tolist() == [row.position for row in rows]
    assert meta.padding_mask.tolist() == [not row.is_real for row in rows]
    assert meta.loss_mask.tolist() == [row.has_next for row in rows]

    if not meta.is_capacity:
        assert meta.max_seq_len == max(padded_lens)
        assert isinstance(meta.real_rows, Int64[Tensor, f"{N}"])
        assert isinstance(meta.pad_rows, Int64[Tensor, f"{T - N}"])
        assert meta.num_tokens == N
        assert meta.seq_lens == tuple(seq_lens)
        assert meta.padded_lens == tuple(padded_lens)
        assert meta.has_padding == (seq_lens != padded_lens)
        assert meta.waste() == pytest.approx((T - N) / T if T else 0)
        assert meta.real_rows.tolist() == [i for i, row in enumerate(rows) if row.is_real]
        assert meta.pad_rows.tolist() == [i for i, row in enumerate(rows) if not row.is_real]


# ---- what it derives ----------------------------------------------------------------------------


@given(layouts())
def test_equals_plain_loops(layout):
    assert_is(packed(*layout), *layout)


@pytest.mark.parametrize("layout", CORNERS, ids=CORNER_IDS)
def test_equals_plain_loops_in_the_corners(layout):
    assert_is(packed(*layout), *layout)


@given(layouts(), st.data())
def test_pads_in_a_range_of_rows(layout, data):
    meta, rows = packed(*layout), rows_of(*layout)
    start = data.draw(st.integers(0, meta.num_rows))
    stop = data.draw(st.integers(start, meta.num_rows))
    pads = [i - start for i in range(start, stop) if not rows[i].is_real]
    assert meta.num_pads_in(start, stop) == len(pads)
    assert meta.pad_rows_in(start, stop).tolist() == pads
    assert isinstance(meta.pad_rows_in(start, stop), Int64[Tensor, f"{len(pads)}"])


@given(lengths(), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_without_a_policy_the_plan_is_the_bf16_one(seq_lens, tp_size, cp_size):
    planned = PaddedSeqMeta.from_seq_lens(seq_lens, tp_size=tp_size, cp_size=cp_size)
    plan = AlignPolicy(tp_size=tp_size, cp_size=cp_size).plan(seq_lens)
    assert_is(planned, list(plan.seq_lens), list(plan.padded_lens))
    assert (planned.tp_size, planned.cp_size) == (tp_size, cp_size)
    assert planned.rows_per_rank * tp_size == planned.num_rows


@given(layouts())
def test_both_ways_of_building_agree(layout):
    real, padded = (torch.tensor(starts_of(n), dtype=torch.int32) for n in layout)
    assert_is(PaddedSeqMeta.from_cu_seqlens(real, padded), *layout)
    assert_is(PaddedSeqMeta.from_cu_seqlens(real.numpy(), padded.numpy()), *layout)
    assert_is(PaddedSeqMeta.from_cu_seqlens(real.tolist(), padded.tolist()), *layout)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda n: np.array(n, "u2")])
def test_lengths_may_be_any_integers_on_the_host(make):
    meta = packed(make([3, 0, 2]), make([4, 1, 3]))
    assert_is(meta, [3, 0, 2], [4, 1, 3])


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.int32, torch.tensor])
def test_sizes_may_be_any_integers(integer):
    policy = AlignPolicy(
        tp_size=integer(2), cp_size=integer(2), bucket=np.int64(64), num_sequences=integer(4)
    )
    assert policy == AlignPolicy(tp_size=2, cp_size=2, bucket=64, num_sequences=4)
    meta = packed([3], [4], tp_size=integer(2), cp_size=integer(2), num_rows=integer(8))
    assert_is(meta, [3, 0], [4, 4])
    capacity = meta.with_capacity(integer(4), integer(200), integer(100))
    for size in (
        *(policy.tp_size, policy.cp_size, policy.bucket, policy.num_sequences),
        *(meta.tp_size, meta.cp_size, *meta.padded_lens),
        *(capacity.num_rows, capacity.max_seq_len),
    ):
        assert type(size) is int


@pytest.mark.parametrize("wrong", [2.0, True, "2", None])
def test_sizes_are_integers(wrong):
    with pytest.raises(ValueError, match="tp_size must be an integer of at least 1, got"):
        AlignPolicy(tp_size=wrong)
    with pytest.raises(ValueError, match="num_rows must be an integer of at least 0, got"):
        packed([3], [4]).with_capacity(2, wrong, 4)


def test_tensors_of_lengths_are_read_once(monkeypatch):
    reads, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: reads.append(t) or tolist(t))
    seq_lens, padded_lens = torch.tensor([3, 5]), torch.tensor([4, 8])
    PaddedSeqMeta.from_seq_lens(seq_lens, AlignPolicy(), padded_lens=padded_lens)
    assert [id(t) for t in reads] == [id(seq_lens), id(padded_lens)]
    reads.clear()
    PaddedSeqMeta.from_seq_lens(seq_lens, AlignPolicy("mxfp8"))
    assert [id(t) for t in reads] == [id(seq_lens)]


def test_a_pack_without_any_real_token_is_legal():
    meta = PaddedSeqMeta.from_seq_lens([0, 0], AlignPolicy("fp8_delayed", tp_size=2))
    assert meta.num_tokens == meta.num_rows == 0
    assert meta.waste() == 0.0
    assert packed([0], [16]).waste() == 1.0


def test_the_policy_gives_its_sizes():
    meta = PaddedSeqMeta.from_seq_lens([5], AlignPolicy("mxfp8", tp_size=2, cp_size=2))
    assert (meta.tp_size, meta.cp_size, meta.num_rows) == (2, 2, 128)


# ---- one object, frozen, cached -----------------------------------------------------------------


def test_boundaries_of_equal_value_are_one_object():
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    for meta in (
        packed([3, 5], [3, 5]),
        PaddedSeqMeta.from_seq_lens([3, 5]),
        PaddedSeqMeta.from_cu_seqlens(cu_seqlens),
        PaddedSeqMeta.from_cu_seqlens(cu_seqlens, cu_seqlens.clone()),
        packed([3, 5], [3, 5]).to("cpu"),
    ):
        assert meta.cu_seqlens is meta.cu_seqlens_padded
        assert not meta.has_padding
    assert packed([3, 5], [4, 5]).cu_seqlens is not packed([3, 5], [4, 5]).cu_seqlens_padded


def test_is_frozen():
    meta = packed([3], [4])
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.num_rows = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.cu_seqlens = meta.cu_seqlens_padded  # type: ignore[misc]


def test_does_not_share_memory_with_what_it_was_built_from():
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    meta = PaddedSeqMeta.from_cu_seqlens(cu_seqlens)
    cu_seqlens.zero_()
    assert meta.cu_seqlens.tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "name",
    ["sequence_ids", "position_ids", "padding_mask", "loss_mask", "real_rows", "pad_rows"],
)
def test_derived_tensors_are_made_once(name):
    meta = packed([3, 5], [4, 8])
    assert getattr(meta, name) is getattr(meta, name)


def test_derived_under_inference_mode_they_still_serve_training():
    meta = packed([3, 5], [4, 8])
    with torch.inference_mode():
        assert meta.real_rows.shape == (8,)
    x = torch.ones(12, 2, requires_grad=True)
    x.index_select(0, meta.real_rows).sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == 16


def test_the_arrays_start_at_multiples_of_sixteen_bytes():
    meta = packed([3, 5, 1], [4, 8, 1])
    assert meta.cu_seqlens.data_ptr() % 16 == meta.cu_seqlens_padded.data_ptr() % 16 == 0


def test_a_default_device_does_not_move_the_host_arrays():
    with torch.device("meta"):
        meta = packed([3], [4])
    assert_is(meta, [3], [4])


def test_repr_names_the_counts():
    assert repr(packed([3, 4], [4, 6], tp_size=2)) == (
        "PaddedSeqMeta(2 sequences, 7 tokens in 10 rows (30.0% pads), tp 2, cp 1, cpu)"
    )
    capacity = packed([3], [4]).with_capacity(2, 8, 4)
    assert repr(capacity) == "PaddedSeqMeta(2 sequences, capacity of 8 rows, tp 1, cp 1, cpu)"


# ---- rows and devices ---------------------------------------------------------------------------


@given(st.integers(1, 4).flatmap(lambda tp: st.tuples(st.just(tp), layouts(tp))))
def test_shards_are_views_that_make_up_the_whole(case):
    tp_size, layout = case
    meta = packed(*layout, tp_size=tp_size)
    x = torch.randn(meta.num_rows, 3)
    shards = [meta.shard(x, rank) for rank in range(tp_size)]
    assert all(shard.shape[0] == meta.rows_per_rank for shard in shards)
    assert torch.equal(torch.cat(shards), x)
    assert all(s.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for s in shards)


def test_shards_for_another_tp_size():
    meta = packed([5], [8], tp_size=2)
    assert meta.shard(torch.arange(8), 3, tp_size=4).tolist() == [6, 7]


def test_to_another_device_reads_nothing():
    moved = packed([3, 5], [4, 8], tp_size=2).to("meta")
    assert moved.device.type == "meta"
    assert moved.cu_seqlens.shape == moved.cu_seqlens_padded.shape == (3,)
    assert (moved.seq_lens, moved.padded_lens, moved.tp_size) == ((3, 5), (4, 8), 2)
    assert_is(moved.to("cpu"), [3, 5], [4, 8])


def test_to_the_same_device_is_itself():
    meta = packed([3], [4])
    assert meta.to("cpu") is meta
    assert meta.to(torch.device("cpu")) is meta


@pytest.mark.parametrize(("here", "current", "stays"), [(1, 0, False), (1, 1, True), (0, 0, True)])
def test_cuda_without_an_index_is_the_current_device(monkeypatch, here, current, stays):
    meta, built = packed([3], [4]), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(PaddedSeqMeta, "device", torch.device("cuda", here))
    monkeypatch.setattr(PaddedSeqMeta, "_build", lambda *args: built.append(args[-1]))
    assert (meta.to("cuda") is meta) == stays
    assert built == ([] if stays else ["cuda"])
    assert meta.to(torch.device("cuda", here)) is meta


def test_more_rows_append_an_empty_sequence():
    meta = packed([3, 5], [4, 8], num_rows=16)
    assert_is(meta, [3, 5, 0], [4, 8, 4])
    assert_is(packed([3, 5], [4, 8], num_rows=12), [3, 5], [4, 8])


# ---- capacity for CUDA graphs -------------------------------------------------------------------


def test_with_capacity_holds_the_same_boundaries():
    capacity = packed([3, 5], [4, 8]).with_capacity(num_sequences=5, num_rows=20, max_seq_len=8)
    assert capacity.is_capacity
    assert capacity.has_padding
    assert capacity.max_seq_len == 8
    assert_is(capacity, [3, 5, 0, 0, 0], [4, 8, 8, 0, 0])


@given(layouts(), layouts())
def test_copy_refills_the_same_addresses(first, second):
    largest = max(sum(first[1]), sum(second[1]))
    longest = max(1, *first[1], *second[1])
    capacity = packed(*first).with_capacity(40, largest, longest)
    arrays = [capacity.cu_seqlens, capacity.cu_seqlens_padded]
    addresses = [array.data_ptr() for array in arrays]
    for layout in (second, first):
        assert capacity.copy_(packed(*layout)) is capacity
        assert [capacity.cu_seqlens.data_ptr(), capacity.cu_seqlens_padded.data_ptr()] == addresses
        real = starts_of(layout[0])
        assert capacity.cu_seqlens.tolist() == real + real[-1:] * (41 - len(real))
        seen = capacity.cu_seqlens_padded.tolist()
        assert seen[: len(real)] == starts_of(layout[1])
        assert seen[-1] == capacity.num_rows
        assert max(b - a for a, b in itertools.pairwise(seen)) <= longest
        rows = [row.is_real for row in rows_of(*layout)]
        tail = [False] * (largest - len(rows))
        assert capacity.padding_mask.tolist() == [not is_real for is_real in rows + tail]


def test_an_unpadded_meta_gets_two_arrays_with_capacity():
    capacity = packed([4], [4]).with_capacity(1, 4, 4)
    assert capacity.cu_seqlens is not capacity.cu_seqlens_padded
    capacity.copy_(packed([3], [4]))
    assert_is(capacity, [3], [4])


@pytest.mark.parametrize("name", ["seq_lens", "padded_lens", "num_tokens", "real_rows", "pad_rows"])
def test_counts_that_a_replay_would_find_stale_raise(name):
    capacity = packed([3], [4]).with_capacity(2, 8, 4)
    with pytest.raises(ValueError, match=r"stale.*Use the arrays"):
        getattr(capacity, name)


def test_stale_counts_raise_in_methods_too():
    capacity = packed([3], [4]).with_capacity(2, 8, 4)
    for call in (
        capacity.waste,
        lambda: capacity.num_pads_in(0, 4),
        lambda: capacity.pad_rows_in(0, 4),
        lambda: capacity.to("meta"),
        lambda: capacity.with_capacity(2, 8, 4),
        lambda: capacity.copy_(capacity),
    ):
        with pytest.raises(ValueError, match="stale"):
            call()


def test_only_metas_with_capacity_are_refilled():
    with pytest.raises(ValueError, match="copy_ refills metas made by with_capacity"):
        packed([3], [4]).copy_(packed([2], [4]))


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ({"num_sequences": 1, "num_rows": 16, "max_seq_len": 8}, "capacity num_sequences=1"),
        ({"num_sequences": 4, "num_rows": 8, "max_seq_len": 8}, "12 padded rows .* num_rows=8"),
        ({"num_sequences": 4, "num_rows": 16, "max_seq_len": 6}, "8 exceeds .* max_seq_len=6"),
        ({"num_sequences": 4, "num_rows": 15, "max_seq_len": 8}, "15 rows do not divide over 2"),
        ({"num_sequences": 2, "num_rows": 16, "max_seq_len": 8}, "num_sequences=3 would hold"),
        ({"num_sequences": 0, "num_rows": 16, "max_seq_len": 8}, "num_sequences must be .* got 0"),
        ({"num_sequences": 4, "num_rows": 16, "max_seq_len": 0}, "max_seq_len must be .* got 0"),
    ],
)
def test_what_does_not_fit_raises(capacity, message):
    meta = packed([3, 5], [4, 8], tp_size=2)
    with pytest.raises(ValueError, match=message):
        meta.with_capacity(**capacity)


def test_a_meta_that_does_not_fit_leaves_the_capacity_as_it_was():
    capacity = packed([3], [4]).with_capacity(2, 8, 4)
    with pytest.raises(ValueError, match="12 padded rows exceed the capacity num_rows=8"):
        capacity.copy_(packed([3, 3, 3], [4, 4, 4]))
    assert_is(capacity, [3, 0], [4, 4])


# ---- what it refuses ----------------------------------------------------------------------------


def int32(*boundaries: int) -> Tensor:
    return torch.tensor(boundaries, dtype=torch.int32)


@pytest.mark.parametrize(
    ("real", "padded", "kwargs", "message"),
    [
        (int32(0, 5, 3), None, {}, "cu_seqlens decreases at sequence 1: from 5 to 3"),
        (int32(0, 3, 5), int32(0, 6, 5), {}, "cu_seqlens_padded decreases at sequence 1"),
        (int32(1, 5), None, {}, "cu_seqlens must start at 0, got 1"),
        (int32(0, 4), int32(1, 5), {}, "cu_seqlens_padded must start at 0, got 1"),
        (int32(0, 3, 5), int32(0, 8), {}, "cu_seqlens has 3 boundaries and cu_seqlens_padded 2"),
        (int32(0, 5), int32(0, 4), {}, "sequence 0 has 5 real tokens but only 4 padded rows"),
        (int32(0, 2, 7), int32(0, 4, 8), {}, "sequence 1 has 5 real tokens but only 4 padded"),
        (int32(0, 3).long(), None, {}, r"cu_seqlens must be int32.*convert it"),
        (int32(0, 3), int32(0, 4).long(), {}, "cu_seqlens_padded must be int32"),
        (np.array([0, 3]), None, {}, "cu_seqlens must be int32, got int64"),
        (int32(0), None, {}, "no sequence"),
        (int32(), None, {}, "no sequence"),
        (int32(0, 3).view(1, 2), None, {}, "cu_seqlens must have one dimension, got 2"),
        (int32(3).squeeze(), None, {}, "cu_seqlens must have one dimension, got 0"),
        (int32(0, 3), np.array([[0, 4]], "i4"), {}, "cu_seqlens_padded must have one dimension"),
        (int32(0, 3), int32(0, 4), {"num_rows": 3}, "num_rows=3 is below .* boundary 4"),
        (int32(0, 3), int32(0, 5), {"tp_size": 2}, r"5 rows do not divide over 2 .* num_rows=6"),
        (int32(0, 3), None, {"tp_size": 0}, "tp_size must be an integer of at least 1, got 0"),
        (int32(0, 3), None, {"cp_size": 0}, "cp_size must be an integer of at least 1, got 0"),
        (int32(0, 3), int32(0, 4).to("meta"), {}, "put both on one device"),
    ],
)
def test_illegal_boundaries_raise(real, padded, kwargs, message):
    with pytest.raises(ValueError, match=message):
        PaddedSeqMeta.from_cu_seqlens(real, padded, **kwargs)


@pytest.mark.parametrize(
    ("seq_lens", "kwargs", "message"),
    [
        ([], {}, "no sequence"),
        ([], {"padded_lens": []}, "no sequence"),
        ([3, -1], {}, "sequence 1 has a negative length"),
        ([3, -1], {"padded_lens": [4, 4]}, "sequence 1 has a negative length"),
        ([3, 1], {"padded_lens": [4, -4]}, r"sequence 1 has a negative length \(real 1, padded -4"),
        ([3, 5], {"padded_lens": [4, 4]}, "sequence 1 has 5 real tokens but only 4 padded rows"),
        ([3, 5], {"padded_lens": [8]}, "2 seq_lens but 1 padded_lens"),
        ([3.0], {}, "seq_lens must be a sequence of integers"),
        ([True], {}, "seq_lens must be a sequence of integers"),
        (5, {}, "seq_lens must be a sequence of integers"),
        (torch.tensor([3.0]), {}, "seq_lens must be integers, got torch.float32"),
        (torch.tensor([True]), {}, "seq_lens must be integers, got torch.bool"),
        ([3], {"tp_size": 0}, "tp_size must be an integer of at least 1, got 0"),
        ([3], {"tp_size": True}, "tp_size must be an integer of at least 1, got True"),
        ([3], {"padded_lens": [3], "tp_size": 2}, "3 rows do not divide over 2 ranks"),
        (
            [3],
            {"padded_lens": [4], "num_rows": 3},
            "num_rows=3 is below the last padded boundary 4",
        ),
        ([3], {"num_rows": 5, "tp_size": 2}, "5 rows do not divide over 2 ranks"),
        ([2**30, 2**30], {"padded_lens": [2**30, 2**30]}, "do not fit into int32"),
        ([3], {"policy": "fp8_delayed"}, "policy must be an AlignPolicy"),
        ([3], {"policy": AlignPolicy(tp_size=2), "tp_size": 4}, "tp_size=4 contradicts"),
        ([3], {"policy": AlignPolicy(cp_size=2), "cp_size": 1}, "cp_size=1 contradicts"),
        ([3], {"policy": AlignPolicy("mxfp8"), "padded_lens": [16]}, "no multiple of 32"),
    ],
)
def test_illegal_lengths_raise(seq_lens, kwargs, message):
    with pytest.raises(ValueError, match=message):
        PaddedSeqMeta.from_seq_lens(seq_lens, **kwargs)


def test_wrong_rows_raise():
    meta = packed([3, 5], [4, 8], tp_size=2)
    meta.check_rows(torch.empty(12, 3), "x")
    meta.check_rows(torch.empty(6, 3), "x", shards=2)
    with pytest.raises(ValueError, match=r"x has 16 rows, its meta has 12.*num_rows="):
        meta.check_rows(torch.empty(16, 3), "x")
    with pytest.raises(ValueError, match="x has 12 rows, its meta has 12 / 2 ranks = 6"):
        meta.check_rows(torch.empty(12, 3), "x", shards=2)
    with pytest.raises(ValueError, match="12 rows do not divide over 5 ranks"):
        meta.check_rows(torch.empty(2, 3), "x", shards=5)
    with pytest.raises(ValueError, match="x has no rows"):
        meta.check_rows(torch.tensor(1.0), "x")


def test_wrong_shards_raise():
    meta = packed([3, 5], [4, 8], tp_size=2)
    with pytest.raises(ValueError, match=r"tp_rank must be in 0\.\.1, got 2"):
        meta.shard(torch.empty(12), 2)
    with pytest.raises(ValueError, match="tp_rank must be in"):
        meta.shard(torch.empty(12), -1)
    with pytest.raises(ValueError, match="tensor has 6 rows, its meta has 12"):
        meta.shard(torch.empty(6), 0)
    with pytest.raises(ValueError, match="12 rows do not divide over 5 ranks"):
        meta.shard(torch.empty(12), 0, tp_size=5)


def test_an_unpickled_capacity_is_refilled_too():
    meta = PaddedSeqMeta.from_seq_lens([5, 3], padded_lens=[8, 8])
    capacity = pickle.loads(pickle.dumps(meta.with_capacity(4, 32, 32)))
    capacity.copy_(PaddedSeqMeta.from_seq_lens([7, 9], padded_lens=[8, 16]))
    assert capacity.cu_seqlens.tolist() == [0, 7, 16, 16, 16]
    assert capacity.cu_seqlens_padded.tolist() == [0, 8, 24, 32, 32]


def test_a_capacity_is_for_one_cp_size():
    capacity = PaddedSeqMeta.from_seq_lens([4], cp_size=2).with_capacity(4, 32, 32)
    with pytest.raises(ValueError, match="cp_size=1 does not fit a capacity for cp_size=2"):
        capacity.copy_(PaddedSeqMeta.from_seq_lens([4]))
