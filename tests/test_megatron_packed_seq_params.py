"""``PackedSeqParams`` of the real megatron-core, to metas and back."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_helpers import import_megatron
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import AlignPolicy, DotProductAttention, PaddedSeqMeta
from padded_sp.integrations.megatron import (
    from_packed_seq_params,
    packed_seq_params,
    to_packed_seq_params,
)

REAL, PADDED = [0, 3, 5, 9], [0, 4, 8, 13]


@dataclass
class NewerParams:
    """The fields of megatron-core 0.19.2 and one that nobody knows yet."""

    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None
    total_tokens: Any = None
    seq_idx: Any = None
    tokens_per_sample: Any = None
    pad_between_seqs: Any = None
    cp_scatter_cache: Any = None
    of_the_future: Any = None


@pytest.fixture(scope="module")
def megatron_params():
    return import_megatron("packed_seq_params").PackedSeqParams


@pytest.fixture(params=["installed", "newer"])
def params_class(request):
    return (
        request.getfixturevalue("megatron_params") if request.param == "installed" else NewerParams
    )


def array(values):
    return torch.tensor(values, dtype=torch.int32)


def params_of(cls, real=REAL, padded=PADDED, **kwargs):
    real, padded = array(real), None if padded is None else array(padded)
    given = {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
    }
    return cls(**given | kwargs)


def boundaries(meta):
    return meta.cu_seqlens.tolist(), meta.cu_seqlens_padded.tolist()


# ---- from ---------------------------------------------------------------------------------------


def test_real_and_padded_boundaries_each_in_its_place(params_class):
    meta = from_packed_seq_params(params_of(params_class))
    assert boundaries(meta) == (REAL, PADDED)
    assert (meta.num_tokens, meta.num_rows, meta.tp_size, meta.cp_size) == (9, 13, 1, 1)


def test_without_padded_boundaries_nothing_is_padded(params_class):
    meta = from_packed_seq_params(params_of(params_class, padded=None))
    assert meta.cu_seqlens_padded is meta.cu_seqlens
    assert boundaries(meta) == (REAL, REAL)


def test_keys_without_boundaries_have_those_of_the_queries(params_class):
    params = params_of(params_class, cu_seqlens_kv=None, cu_seqlens_kv_padded=None)
    meta, kv_meta = from_packed_seq_params(params, return_kv=True)
    assert kv_meta is meta
    with pytest.raises(ValueError, match="cu_seqlens_kv_padded without cu_seqlens_kv"):
        from_packed_seq_params(params_of(params_class, cu_seqlens_kv=None))


def test_ranks_that_share_the_rows(params_class):
    params = params_of(params_class)
    with pytest.raises(ValueError, match=r"cu_seqlens_q_padded: 13 rows do not divide over 2"):
        from_packed_seq_params(params, tp_size=2)
    meta = from_packed_seq_params(params, tp_size=2, num_rows=16)
    assert (meta.rows_per_rank, meta.seq_lens, meta.padded_lens) == (8, (3, 2, 4, 0), (4, 4, 5, 3))
    assert from_packed_seq_params(params_of(params_class, local_cp_size=2)).cp_size == 2
    assert from_packed_seq_params(params, cp_size=4).cp_size == 4


def test_total_tokens_are_the_rows():
    params = params_of(NewerParams, total_tokens=16)
    assert from_packed_seq_params(params).num_rows == 16
    assert from_packed_seq_params(params, num_rows=20).num_rows == 20
    assert from_packed_seq_params(params, cp_size=2).num_rows == 13
    with pytest.raises(ValueError, match="num_rows=12 is below the last padded boundary 13"):
        from_packed_seq_params(params_of(NewerParams, total_tokens=12))


def test_equal_boundaries_of_keys_are_one_meta(params_class):
    """Whether they are the same arrays or copies, and whatever lies behind the last sequence."""
    for rows in (None, 16):
        params = params_of(
            params_class, cu_seqlens_kv=array(REAL), cu_seqlens_kv_padded=array(PADDED)
        )
        meta, kv_meta = from_packed_seq_params(params, return_kv=True, num_rows=rows)
        assert kv_meta is meta
        assert from_packed_seq_params(params, num_rows=rows) is meta


@pytest.mark.parametrize("rows", [None, 16])
def test_other_boundaries_of_keys(params_class, rows):
    params = params_of(
        params_class, cu_seqlens_kv=array([0, 6, 8, 9]), cu_seqlens_kv_padded=array([0, 6, 8, 10])
    )
    with pytest.raises(
        ValueError, match=r"sequence 0 has 6 tokens in 6 rows, not 3 in 4.*return_kv"
    ):
        from_packed_seq_params(params, num_rows=rows)
    meta, kv_meta = from_packed_seq_params(params, return_kv=True, num_rows=rows)
    assert meta.num_sequences == kv_meta.num_sequences
    assert (meta.num_rows, kv_meta.num_rows) == (rows or 13, 10)
    assert kv_meta.seq_lens[:3] == (6, 2, 1)
    q, k, v = torch.randn(meta.num_rows, 2, 8), *torch.randn(2, 10, 2, 8)
    attention = DotProductAttention(2, 8, mask="full")
    out = attention(q, k, v, meta, kv_meta)
    alone = torch.softmax(q[4:6, 0] @ k[6:8, 0].T / 8**0.5, -1) @ v[6:8, 0]
    torch.testing.assert_close(out[4:6, :8], alone)


def test_padded_queries_of_unpadded_keys_are_other_boundaries(params_class):
    with pytest.raises(ValueError, match="sequence 0 has 3 tokens in 3 rows, not 3 in 4"):
        from_packed_seq_params(params_of(params_class, cu_seqlens_kv_padded=None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"qkv_format": "sbhd"}, "qkv_format='sbhd' is no packed batch"),
        ({"qkv_format": None}, "qkv_format=None is no packed batch"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is None"),
        ({"cu_seqlens_q": array(REAL).long()}, "cu_seqlens_q_padded: .*must be int32"),
        ({"cu_seqlens_q": array([REAL])}, "cu_seqlens_q_padded: .*one dimension"),
        ({"cu_seqlens_q": array([0, 5, 9, 13])}, "sequence 0 has 5 real tokens but only 4 padded"),
        ({"cu_seqlens_q_padded": array([0, 4, 13])}, "has 4 boundaries and cu_seqlens_padded 3"),
        ({"cu_seqlens_q": array([1, 3, 5, 9])}, "must start at 0"),
        ({"cu_seqlens_kv": array([0, 4, 2, 9])}, "cu_seqlens_kv_padded: .*decreases at sequence 1"),
        (
            {"cu_seqlens_kv": array([0, 9]), "cu_seqlens_kv_padded": array([0, 13])},
            "3 sequences of queries .* and 1 of keys",
        ),
        ({"max_seqlen_q": 3}, "max_seqlen_q=3 is below the longest sequence of cu_seqlens_q, 4"),
        ({"max_seqlen_q": array(3)}, "max_seqlen_q=3 is below"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must be an integer of at least 0"),
    ],
    ids=str,
)
def test_boundaries_that_cannot_be(params_class, given, message):
    with pytest.raises(ValueError, match=message):
        from_packed_seq_params(params_of(params_class, **given), return_kv=True)


def test_what_is_no_packed_batch():
    for wrong in (None, "thd", PaddedSeqMeta.from_seq_lens([3])):
        with pytest.raises(ValueError, match="params must be Megatron's PackedSeqParams"):
            from_packed_seq_params(wrong)


def test_longest_lengths_that_agree(params_class):
    for bound in (4, 5, 4096, array(4)):  # real, padded, of the buffer
        from_packed_seq_params(params_of(params_class, max_seqlen_q=bound, max_seqlen_kv=bound))


def test_pads_that_are_denied():
    with pytest.raises(ValueError, match="1 pad rows lie before sequence 1"):
        from_packed_seq_params(params_of(NewerParams, pad_between_seqs=False))
    for padded in ([0, 3, 5, 13], REAL):  # none before a real row
        from_packed_seq_params(params_of(NewerParams, padded=padded, pad_between_seqs=False))
    tail = params_of(NewerParams, real=[0, 3, 5, 5], padded=[0, 3, 8, 12], pad_between_seqs=False)
    assert from_packed_seq_params(tail).num_tokens == 5


# ---- metas are kept -----------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts what PyTorch runs: a read of an array is at least one operation."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_batch_is_read_once(params_class):
    params = params_of(params_class)
    meta = from_packed_seq_params(params, num_rows=16)
    with Ops() as ops:
        assert from_packed_seq_params(params, num_rows=16) is meta
        assert from_packed_seq_params(params, 1, True, num_rows=16) == (meta, meta)
    assert ops.count == 0
    assert from_packed_seq_params(params, tp_size=2, num_rows=16).tp_size == 2
    assert from_packed_seq_params(params, num_rows=16) is meta


def test_a_batch_that_changes_is_read_again(params_class):
    params = params_of(params_class)
    meta = from_packed_seq_params(params)
    params.cu_seqlens_q[1] = 2  # written in place
    assert from_packed_seq_params(params).seq_lens == (2, 3, 4)
    params.cu_seqlens_q = params.cu_seqlens_kv = array([0, 1, 2, 3])
    assert from_packed_seq_params(params).seq_lens == (1, 1, 1)
    assert meta.seq_lens == (3, 2, 4)
    params.max_seqlen_q = 0
    with pytest.raises(ValueError, match="max_seqlen_q=0"):
        from_packed_seq_params(params)


def test_a_copy_is_a_batch_of_its_own(params_class):
    params = params_of(params_class)
    meta = from_packed_seq_params(params)
    twin = copy.deepcopy(params)
    assert boundaries(from_packed_seq_params(twin)) == boundaries(meta)
    twin.cu_seqlens_q.zero_()
    assert from_packed_seq_params(params) is meta


def test_nothing_outlives_its_batch(params_class):
    gc.collect()
    before = len(packed_seq_params._kept)
    params = [params_of(params_class) for _ in range(5)]
    for each in params:
        from_packed_seq_params(each)
    assert len(packed_seq_params._kept) == before + 5
    del params, each
    gc.collect()
    assert len(packed_seq_params._kept) == before


def test_arrays_that_count_no_writes_are_read_each_time(params_class):
    with torch.inference_mode():
        params = params_of(params_class)
        assert from_packed_seq_params(params).seq_lens == (3, 2, 4)
        params.cu_seqlens_q[1] = 2
        meta = from_packed_seq_params(params)
    assert meta.seq_lens == (2, 3, 4)
    assert not meta.cu_seqlens.is_inference()


# ---- to -----------------------------------------------------------------------------------------


def test_the_class_that_is_installed(megatron_params):
    meta = PaddedSeqMeta.from_cu_seqlens(array(REAL), array(PADDED))
    params = to_packed_seq_params(meta)
    assert type(params) is megatron_params
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q is params.cu_seqlens_kv is meta.cu_seqlens
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is meta.cu_seqlens_padded
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (5, 5)
    names = {field.name for field in fields(megatron_params)}
    if "pad_between_seqs" in names:
        assert params.pad_between_seqs is True
    if "total_tokens" in names:
        assert params.total_tokens == 13
        assert params.seq_idx.tolist() == [[0] * 4 + [1] * 4 + [2] * 5]


def test_without_pads_the_padded_arrays_are_none(params_class):
    meta = PaddedSeqMeta.from_seq_lens([3, 2])
    params = to_packed_seq_params(meta, like=params_class())
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    assert getattr(params, "pad_between_seqs", False) is False
    assert from_packed_seq_params(params).num_rows == 5


def test_keys_of_their_own(params_class):
    meta, kv_meta = (PaddedSeqMeta.from_seq_lens(lens) for lens in ([3, 2], [1, 6]))
    params = to_packed_seq_params(meta, kv_meta, like=params_class())
    assert params.cu_seqlens_kv is kv_meta.cu_seqlens
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (3, 6)
    assert [boundaries(m) for m in from_packed_seq_params(params, return_kv=True)] == [
        boundaries(meta),
        boundaries(kv_meta),
    ]
    # Where one side is padded, both sides say how they lie.
    padded = PaddedSeqMeta.from_seq_lens([3, 2], padded_lens=[4, 4])
    params = to_packed_seq_params(padded, kv_meta, like=params_class())
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_kv is kv_meta.cu_seqlens
    assert getattr(params, "pad_between_seqs", True) is True
    with pytest.raises(ValueError, match="2 sequences of queries and 1 of keys"):
        to_packed_seq_params(meta, PaddedSeqMeta.from_seq_lens([3]), like=params_class())


def test_fields_that_no_meta_knows_are_kept():
    group, ids = object(), torch.zeros(1, 13)
    like = params_of(
        NewerParams,
        cp_group=group,
        local_cp_size=1,
        tokens_per_sample=8,
        of_the_future=[1],
        seq_idx=ids,  # of other boundaries
        cp_scatter_cache={},
        total_tokens=99,
    )
    meta = PaddedSeqMeta.from_seq_lens([3, 2], padded_lens=[4, 4])
    params = to_packed_seq_params(meta, like=like)
    assert (params.cp_group, params.local_cp_size, params.tokens_per_sample) == (group, 1, 8)
    assert params.of_the_future is like.of_the_future
    assert (params.seq_idx, params.cp_scatter_cache, params.total_tokens) == (None, None, 8)
    assert like.total_tokens == 99
    assert like.seq_idx is ids


def test_a_capacity_for_graphs(params_class):
    meta = PaddedSeqMeta.from_seq_lens([3, 2]).with_capacity(4, 16, 8)
    params = to_packed_seq_params(meta, like=params_class())
    assert params.cu_seqlens_q.data_ptr() == meta.cu_seqlens.data_ptr()
    assert params.cu_seqlens_q_padded is meta.cu_seqlens_padded  # the next batch may be padded
    assert params.max_seqlen_q == 8


def test_what_cannot_become_params():
    @dataclass
    class OldParams:
        qkv_format: Any = None
        cu_seqlens_q: Any = None
        cu_seqlens_kv: Any = None

    meta = PaddedSeqMeta.from_seq_lens([3])
    with pytest.raises(ValueError, match=r"has no cu_seqlens_q_padded.*megatron-core 0.16.1"):
        to_packed_seq_params(meta, like=OldParams())
    with pytest.raises(ValueError, match="like must be a PackedSeqParams, got dict"):
        to_packed_seq_params(meta, like={})
    with pytest.raises(ValueError, match="meta must be a PaddedSeqMeta, got NoneType"):
        to_packed_seq_params(None)
    with pytest.raises(ValueError, match="kv_meta must be a PaddedSeqMeta, got list"):
        to_packed_seq_params(meta, [0, 3])


def test_without_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", None)
    meta = PaddedSeqMeta.from_seq_lens([3])
    with pytest.raises(ImportError, match=r"pip install 'megatron-core>=0.16.1'"):
        to_packed_seq_params(meta)
    assert to_packed_seq_params(meta, like=NewerParams()).total_tokens == 3


# ---- there and back -----------------------------------------------------------------------------

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)
recipes = st.sampled_from(["bf16", "fp8_current", "fp8_blockwise"])


@settings(deadline=None)
@given(lengths=lengths, recipe=recipes, tp_size=st.integers(1, 4), pack=st.booleans())
def test_there_and_back(megatron_params, lengths, recipe, tp_size, pack):
    meta = PaddedSeqMeta.from_seq_lens(
        lengths, AlignPolicy(recipe if pack else "bf16", tp_size=tp_size)
    )
    for like in (None, NewerParams()):
        params = to_packed_seq_params(meta, like=like)
        back = from_packed_seq_params(params, tp_size=tp_size)
        assert boundaries(back) == boundaries(meta)
        assert (back.max_seq_len, back.num_rows) == (meta.max_seq_len, meta.num_rows)
        again = to_packed_seq_params(back, like=params)
        for field in fields(params):
            one, two = getattr(params, field.name), getattr(again, field.name)
            same = torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
            assert same, field.name


def test_import_needs_neither_megatron_nor_transformer_engine():
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            "import sys, padded_sp.integrations.megatron\n"
            "print([n for n in ('megatron', 'transformer_engine') if n in sys.modules])",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stderr
