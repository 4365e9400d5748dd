"""Plans against the rule table, read here a second time: legal, and no legal layout is smaller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import lengths

from padded_sp import AlignPolicy, PaddedSeqMeta
from padded_sp.alignment import RECIPES, Plan, check_features, travels_as_fp8

PLACEMENTS = ("tail", "own_entry", "each_sequence")


def is_legal(policy: AlignPolicy, padded_lens: Sequence[int]) -> bool:
    """The rules of Transformer Engine's linears on Hopper, without any arithmetic of the planner.

    Context parallelism splits the rows first; what is left is split over the tp ranks. GEMMs see
    ``inner_rows`` rows for each.
    """
    tp, cp, recipe = policy.tp_size, policy.cp_size, policy.recipe
    if cp > 1 and any(length % (2 * cp) for length in padded_lens):
        return False
    if any(length % policy.sequence_multiple for length in padded_lens):
        return False
    total = sum(padded_lens)
    if total % (cp * tp) or total % policy.total_multiple:
        return False
    gathered = total // cp * policy.inner_rows
    shard = gathered // tp
    if recipe == "bf16":
        return True
    if recipe == "mxfp8":
        return shard % 32 == 0
    if recipe == "fp8_blockwise" and policy.fp8_wire and tp > 1:
        return shard % 128 == 0
    return shard % 8 == 0 and gathered % 16 == 0


def smaller_layouts(seq_lens: Sequence[int], pads: int) -> Iterator[list[int]]:
    """Every way to pad the sequences with fewer pads in all."""
    for total in range(pads):
        for split in itertools.combinations_with_replacement(range(total + 1), len(seq_lens) - 1):
            cuts = [0, *split, total]
            extra = [b - a for a, b in itertools.pairwise(cuts)]
            yield [length + more for length, more in zip(seq_lens, extra, strict=True)]


policies = st.builds(
    AlignPolicy,
    recipe=st.sampled_from(sorted(RECIPES)),
    tp_size=st.sampled_from([1, 2, 3, 4, 8]),
    cp_size=st.sampled_from([1, 2, 3, 4]),
    fp8_wire=st.booleans(),
    sequence_multiple=st.sampled_from([1, 3, 16]),
    total_multiple=st.sampled_from([1, 10, 64]),
    placement=st.sampled_from(PLACEMENTS),
    inner_rows=st.sampled_from([1, 2, 3, 4, 20, 128]),
)


# ---- legal and least ----------------------------------------------------------------------------


@given(lengths(max_value=500), policies)
def test_a_plan_is_legal_and_passes_its_own_check(seq_lens, policy):
    plan = policy.plan(seq_lens)
    assert is_legal(policy, plan.padded_lens)
    assert plan.seq_lens[: len(seq_lens)] == tuple(seq_lens)
    assert all(real <= padded for real, padded in zip(plan.seq_lens, plan.padded_lens, strict=True))
    assert plan.waste() == policy.waste(seq_lens)
    meta = PaddedSeqMeta.from_seq_lens(seq_lens, policy)
    assert (meta.seq_lens, meta.padded_lens) == (plan.seq_lens, plan.padded_lens)
    policy.check(meta)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8_wire", [True, False])
def test_no_legal_layout_has_fewer_pads(recipe, fp8_wire):
    for tp_size, cp_size, inner_rows in itertools.product([1, 2, 3, 4], [1, 2], [1, 6]):
        policy = AlignPolicy(recipe, tp_size, cp_size, fp8_wire=fp8_wire, inner_rows=inner_rows)
        for seq_lens in ([0], [1], [37], [256], [5, 38], [0, 7], [3, 1, 0], [9, 16, 2]):
            pads = sum(policy.plan(seq_lens).padded_lens) - sum(seq_lens)
            if pads ** (len(seq_lens) - 1) > 2000:
                continue  # too many layouts to try; the shorter lists cover this multiple
            assert not any(is_legal(policy, padded) for padded in smaller_layouts(seq_lens, pads))


@given(lengths(max_value=6, max_size=3), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_multiples_of_the_user_are_met_with_the_fewest_pads(seq_lens, total, each):
    policy = AlignPolicy("bf16", 2, 1, sequence_multiple=each, total_multiple=total)
    pads = sum(policy.plan(seq_lens).padded_lens) - sum(seq_lens)
    assert not any(is_legal(policy, padded) for padded in smaller_layouts(seq_lens, pads))


@given(lengths(max_value=300), policies)
def test_check_allows_exactly_the_legal_layouts(seq_lens, policy):
    meta = PaddedSeqMeta.from_seq_lens(seq_lens, padded_lens=seq_lens)
    if is_legal(policy, seq_lens):
        policy.check(meta)
        assert policy.problem(meta) == ""
    else:
        with pytest.raises(ValueError, match=policy.recipe) as error:
            policy.check(meta)
        assert policy.problem(meta)
        assert str(error.value).startswith(policy.problem(meta))


@pytest.mark.parametrize(
    ("recipe", "tp_size", "fp8_wire", "seq_lens", "rows"),
    [
        ("fp8_delayed", 2, True, [11486], 11488),
        ("fp8_current", 2, True, [11486], 11488),
        ("fp8_blockwise", 2, True, [11486], 11520),
        ("fp8_blockwise", 2, False, [11486], 11488),
        ("bf16", 2, True, [11486], 11486),
        ("fp8_delayed", 2, True, [5000], 5008),
        ("fp8_current", 2, True, [5000], 5008),
        ("fp8_blockwise", 2, True, [4088], 4096),
        ("mxfp8", 4, True, [31936], 32000),
        ("fp8_blockwise", 2, True, [5, 38], 256),
        ("fp8_blockwise", 2, False, [5, 38], 48),
        ("fp8_blockwise", 1, True, [5, 38], 48),
        ("fp8_delayed", 1, True, [1], 16),
        ("fp8_delayed", 4, True, [1], 32),
        ("bf16", 3, True, [1], 3),
    ],
)
def test_right_values(recipe, tp_size, fp8_wire, seq_lens, rows):
    assert AlignPolicy(recipe, tp_size, fp8_wire=fp8_wire).plan(seq_lens).num_rows == rows


def test_a_plan_names_the_cheaper_one_without_fp8_on_the_wire():
    policy = AlignPolicy("fp8_blockwise", tp_size=2)
    assert policy.plan([5, 38]).note.startswith("48 rows would do with fp8_wire=False")
    assert policy.plan([256]).note == ""
    assert AlignPolicy("fp8_blockwise", tp_size=2, fp8_wire=False).plan([5, 38]).note == ""
    assert AlignPolicy("fp8_blockwise", tp_size=2, bucket=1024).plan([5, 38]).note == ""


# ---- where the padding goes ---------------------------------------------------------------------


def test_the_tail_lengthens_the_last_sequence():
    assert AlignPolicy("fp8_delayed", 2).plan([5, 3]) == Plan((5, 3), (5, 11))


def test_an_entry_of_its_own_holds_the_rest():
    own_entry = AlignPolicy("fp8_delayed", 2, placement="own_entry")
    assert own_entry.plan([5, 3]) == Plan((5, 3, 0), (5, 3, 8))
    assert own_entry.plan([10, 6]) == Plan((10, 6), (10, 6))


def test_each_sequence_is_aligned_by_itself():
    each = AlignPolicy("fp8_delayed", 2, placement="each_sequence")
    assert each.plan([5, 17, 0]) == Plan((5, 17, 0), (16, 32, 0))


def test_context_parallelism_pads_each_sequence_to_its_chunks():
    assert AlignPolicy(cp_size=2).plan([9, 8, 0, 5]).padded_lens == (12, 8, 0, 8)


def test_buckets_of_one_size():
    policy = AlignPolicy("fp8_delayed", 2, bucket=100)
    assert policy.plan([5]).num_rows == 400  # the least multiple of 100 and 16
    assert policy.plan([401]).num_rows == 800


def test_buckets_from_a_list():
    policy = AlignPolicy("fp8_delayed", 2, bucket=[1000, 64])
    assert policy.plan([5]).num_rows == 64
    assert policy.plan([65]).num_rows == 1008  # 1000 is no legal total
    assert hash(policy) == hash(AlignPolicy("fp8_delayed", 2, bucket=(64, 1000)))
    with pytest.raises(ValueError, match="1024 rows exceed the largest bucket, 1000"):
        policy.plan([1020])


def test_a_fixed_number_of_sequences():
    policy = AlignPolicy(num_sequences=4)
    assert policy.plan([5, 3]) == Plan((5, 3, 0, 0), (5, 3, 0, 0))
    with pytest.raises(ValueError, match="5 entries exceed num_sequences=4"):
        policy.plan([1] * 5)
    with pytest.raises(ValueError, match="2 entries exceed num_sequences=1"):
        AlignPolicy("mxfp8", num_sequences=1, placement="own_entry").plan([5])


@given(lengths(), st.sampled_from(PLACEMENTS), st.sampled_from([None, 64, (32, 2048)]))
def test_buckets_and_counts_are_kept_in_every_placement(seq_lens, placement, bucket):
    policy = AlignPolicy("mxfp8", placement=placement, bucket=bucket, num_sequences=13)
    plan = policy.plan(seq_lens)
    assert len(plan.seq_lens) == len(plan.padded_lens) == 13
    assert is_legal(policy, plan.padded_lens)
    if bucket == 64:
        assert plan.num_rows % 64 == 0
    policy.check(PaddedSeqMeta.from_seq_lens(seq_lens, policy))


def test_plans_from_tensors_and_thousands_of_sequences():
    policy = AlignPolicy("fp8_blockwise", tp_size=2)
    assert policy.plan(torch.tensor([5, 38])) == policy.plan([5, 38])
    assert policy.plan([1] * 1000).num_rows == 1024


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"recipe": "fp4"}, "unknown recipe 'fp4'; known: bf16, fp8_delayed"),
        ({"placement": "front"}, "unknown placement 'front'; known: tail, own_entry"),
        ({"tp_size": 0}, "tp_size must be an integer of at least 1, got 0"),
        ({"cp_size": -1}, "cp_size must be an integer of at least 1, got -1"),
        ({"tp_size": 2.0}, "tp_size must be an integer"),
        ({"sequence_multiple": 0}, "sequence_multiple must be"),
        ({"total_multiple": 0}, "total_multiple must be"),
        ({"num_sequences": 0}, "num_sequences must be"),
        ({"inner_rows": 0}, "inner_rows must be"),
        ({"bucket": 0}, "bucket must be"),
        ({"bucket": [64, 0]}, "bucket must be"),
        ({"bucket": []}, "bucket is an empty list"),
        ({"bucket": ["64"]}, "bucket must be a sequence of integers"),
    ],
)
def test_illegal_policies_raise(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AlignPolicy(**kwargs)


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [([], "no sequence"), ([4, -1], "sequence 1 has a negative length"), ([1.5], "integers")],
)
def test_illegal_lengths_raise(seq_lens, message):
    with pytest.raises(ValueError, match=message):
        AlignPolicy().plan(seq_lens)


@pytest.mark.parametrize(
    ("policy", "padded_lens", "message"),
    [
        (AlignPolicy(tp_size=2), [7], "^bf16 at tp 2, cp 1: 7 rows do not divide over tp 2 x cp 1"),
        (AlignPolicy("fp8_current", 2), [24], r"12 rows per rank \(of 24\) .* of 8: FP8 GEMMs"),
        (AlignPolicy("fp8_current"), [24], r"24 rows are no multiple of 16: .* T % 16"),
        (AlignPolicy("fp8_blockwise", 2), [272], r"136 rows per rank .* 256 rows \(16 .* fp8_wire"),
        (AlignPolicy(cp_size=2), [8, 6], r"sequence 1 has 6 padded rows, .* of 4: cp 2 cuts"),
        (AlignPolicy(sequence_multiple=4), [8, 2], r"sequence 1 .* sequence_multiple is 4"),
        (AlignPolicy(total_multiple=10), [8], "8 rows are no multiple of total_multiple 10"),
        (
            AlignPolicy("fp8_current", 2, inner_rows=3),
            [24],
            r"12 rows per rank \(of 24\) x 3 in each .* of 8: FP8 GEMMs .* total is 16 rows",
        ),
        (AlignPolicy("fp8_current", inner_rows=2), [12], r"12 rows x 2 in each are no multiple"),
    ],
)
def test_check_names_rule_rows_and_the_way_out(policy, padded_lens, message):
    meta = PaddedSeqMeta.from_seq_lens([1] * len(padded_lens), padded_lens=padded_lens)
    with pytest.raises(ValueError, match=message) as error:
        policy.check(meta)
    assert policy.recipe in str(error.value)
    assert "from_seq_lens(seq_lens, policy) plans it" in str(error.value)


def test_check_of_a_capacity_takes_the_rows_alone():
    meta = PaddedSeqMeta.from_seq_lens([8], tp_size=2).with_capacity(4, 48, 16)
    AlignPolicy("fp8_delayed", 2).check(meta)
    with pytest.raises(ValueError, match="24 rows per rank"):
        AlignPolicy("mxfp8", 2).check(meta)


# ---- what layers ask at every call --------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_check_looks_at_no_sequence_where_none_has_a_multiple(recipe, monkeypatch):
    policy = AlignPolicy(recipe, 2)
    meta = PaddedSeqMeta.from_seq_lens([7] * 256, policy)
    monkeypatch.delattr(PaddedSeqMeta.__mro__[1], "padded_lens")
    policy.check(meta)


@given(st.integers(0, 600), policies)
def test_the_total_alone_tells_layers_what_is_legal(rows, policy):
    policy = replace(policy, cp_size=1, sequence_multiple=1, total_multiple=1)
    meta = PaddedSeqMeta.from_seq_lens([rows], padded_lens=[rows])
    assert (rows % policy.total_alignment == 0) == (policy.problem(meta) == "")


@pytest.mark.parametrize(
    ("recipe", "features"),
    [("bf16", 1), ("fp8_delayed", 16), ("fp8_current", 16), ("fp8_blockwise", 16), ("mxfp8", 32)],
)
def test_gemms_take_features_by_recipe(recipe, features):
    check_features(recipe, features, 3 * features)
    if recipe == "bf16":
        return
    message = f"^{recipe} GEMMs need multiples of {features} features, got {{}} in and {{}} out on "
    for sizes in ((features // 2, 256), (256, features + 8)):
        with pytest.raises(ValueError, match=message.format(*sizes)):
            check_features(recipe, *sizes)


@pytest.mark.parametrize(
    ("recipe", "rows", "features", "tp_size", "travels"),
    [
        ("fp8_blockwise", 512, 256, 4, True),
        ("fp8_blockwise", 512, 192, 4, False),  # features: half a block
        ("fp8_blockwise", 320, 256, 4, False),  # 80 rows per rank
        ("fp8_blockwise", 512, 256, 3, False),  # no equal shards
        ("fp8_blockwise", 48, 16, 1, True),
        ("fp8_current", 48, 48, 2, True),
        ("fp8_delayed", 40, 48, 2, False),
        ("mxfp8", 64, 32, 2, True),
        ("mxfp8", 96, 32, 2, False),
        ("bf16", 512, 256, 2, False),
    ],
)
def test_what_travels_as_fp8(recipe, rows, features, tp_size, travels):
    assert travels_as_fp8(recipe, rows, features, tp_size) is travels
