"""DotProductAttention, heads split over the ranks, against the float64 reference."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_helpers import device_of
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import PaddedSeqMeta, seq_meta
from padded_sp.attention import DotProductAttention
from padded_sp.backends import reference
from padded_sp.collectives import group_rank, group_size


class Case(NamedTuple):
    seq_lens: list[int]
    padded_lens: list[int]
    kv_lens: tuple[list[int], list[int]] | None = None  # real and padded, if keys have their own
    heads: tuple[int, int] = (12, 12)
    head_dims: tuple[int, int] = (16, 16)
    mask: str = "causal"
    window: tuple[int, int] | None = None
    softmax_scale: float | None = None

    def metas(self, device="cpu"):
        meta = PaddedSeqMeta.from_seq_lens(
            self.seq_lens, padded_lens=self.padded_lens, device=device
        )
        if self.kv_lens is None:
            return meta, meta
        real, padded = self.kv_lens
        return meta, PaddedSeqMeta.from_seq_lens(real, padded_lens=padded, device=device)

    def layer(self, **kwargs):
        heads, kv_heads = self.heads
        head_dim, v_head_dim = self.head_dims
        return DotProductAttention(
            heads, head_dim, kv_heads, v_head_dim, mask=self.mask, window=self.window,
            softmax_scale=self.softmax_scale, **kwargs,
        )  # fmt: skip

    def expected(self, q, k, v):
        """The reference on the CPU in float64."""
        q, k, v = (t.detach().cpu().double().requires_grad_() for t in (q, k, v))
        out = reference.dot_product_attention(
            q, k, v, *self.metas(), mask=self.mask, window=self.window,
            softmax_scale=self.softmax_scale,
        )  # fmt: skip
        return (q, k, v), out

    def tensors(self, dtype, device="cpu", tp_size=1, tp_rank=0):
        """q, k, v and the gradient of the output: this rank's heads of those of all ranks."""
        meta, kv_meta = self.metas()
        generator = torch.Generator().manual_seed(1)
        shapes = (
            (meta.num_rows, self.heads[0], self.head_dims[0]),
            (kv_meta.num_rows, self.heads[1], self.head_dims[0]),
            (kv_meta.num_rows, self.heads[1], self.head_dims[1]),
            (meta.num_rows, self.heads[0], self.head_dims[1]),
        )
        tensors = []
        for shape in shapes:
            whole = torch.randn(shape, dtype=torch.float64, generator=generator)
            part = whole.chunk(tp_size, dim=1)[tp_rank]
            tensors.append(part.to(device=device, dtype=dtype).contiguous())
        q, k, v, grad = tensors
        return q, k, v, grad.flatten(1)


CASES = {
    "te-2892": Case([100, 150, 120, 130], [112, 160, 128, 144], head_dims=(48, 48)),
    "te-docs-thd": Case([3, 2, 4], [4, 4, 5]),
    "te-docs-thd full": Case([3, 2, 4], [4, 4, 5], mask="full"),
    "te-3331": Case([698], [704]),
    "te-2186": Case([9, 8, 8, 12, 8, 12], [12, 8, 8, 12, 8, 12]),
    "te-2599": Case([40, 24] + [0] * 62, [40, 24] + [0] * 62),
    "nothing padded": Case([5, 9], [5, 9]),
    "long pads": Case([5, 0, 9], [140, 300, 9]),
    "GQA": Case([5, 1, 30], [8, 8, 32], heads=(24, 12)),
    "GQA full": Case([5, 1, 30], [8, 8, 32], heads=(24, 12), mask="full"),
    "MLA": Case([33, 0, 60], [40, 8, 64], head_dims=(192, 128)),
    "values wider than keys": Case([33, 60], [40, 64], head_dims=(20, 36), mask="full"),
    "window": Case([33, 4, 60], [40, 8, 64], window=(7, 0)),
    "window both ways": Case([33, 4, 60], [40, 8, 64], mask="full", window=(7, 3)),
    "window of itself": Case([33, 4, 60], [40, 8, 64], mask="full", window=(0, 0)),
    "scale": Case([33, 4], [40, 8], softmax_scale=0.5),
    "keys of their own": Case([5, 0, 8, 9], [8, 8, 8, 9], ([9, 4, 3, 0], [12, 4, 4, 5])),
    "keys of their own, full": Case(
        [5, 0, 8, 9], [8, 8, 8, 9], ([9, 4, 3, 0], [12, 4, 4, 5]), mask="full"
    ),
    "keys of their own, window": Case(
        [5, 0, 8, 9], [8, 8, 8, 9], ([9, 4, 3, 1], [12, 4, 4, 5]), mask="full", window=(2, 1)
    ),
    "heads too wide for FlashAttention": Case([5, 9], [8, 9], head_dims=(264, 8)),
}


def relative_error(actual, expected):
    """The largest error, against the largest right value or, if more, 1, the scale of operands."""
    error = (actual.detach().cpu().double() - expected.detach()).abs().max()
    return (error / expected.detach().abs().max().clamp(min=1)).item()


def tolerance(dtype):
    """Operands, weights, their gradients and results are rounded once each: four roundings of half
    a unit in the last place, and twice that for the sums in between. float64 has softmax's exp."""
    return {torch.float64: 1e-13, torch.float32: 1e-4}.get(dtype, 4 * torch.finfo(dtype).eps)


def all_dtypes(device):
    return (torch.bfloat16, torch.float16, torch.float32) if device.type == "cuda" else (
        torch.float64, torch.float32, torch.bfloat16,
    )  # fmt: skip


# --- the numbers ---------------------------------------------------------------------------------


def matches_reference(group, name):
    case, device = CASES[name], device_of(group)
    meta, kv_meta = case.metas(device)
    layer = case.layer(tp_group=group)
    for dtype in all_dtypes(device):
        *qkv, grad = case.tensors(dtype, device, group_size(group), group_rank(group))
        leaves = [t.requires_grad_() for t in qkv]
        with CommDebugMode() as comms, no_host_reads(device):
            out = layer(*leaves, meta, None if kv_meta is meta else kv_meta)
            out.backward(grad.clone())
        grads = [t.grad for t in leaves]
        assert comms.get_total_counts() == 0
        assert out.dtype == dtype
        assert out.shape == grad.shape
        assert not out[meta.pad_rows].any(), "pad rows of the output"
        for x_name, x_grad, x_meta in zip("qkv", grads, (meta, kv_meta, kv_meta), strict=True):
            assert not x_grad[x_meta.pad_rows].any(), f"pad rows of the gradient of {x_name}"

        wanted_leaves, wanted = case.expected(*leaves)
        wanted_grads = torch.autograd.grad(wanted, wanted_leaves, grad.cpu().double())
        for actual, right in zip((out, *grads), (wanted, *wanted_grads), strict=True):
            assert relative_error(actual, right) <= tolerance(dtype), (name, dtype)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(ranks, name):
    ranks.run(matches_reference, name=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": "full"},
        {"window": (100, 0)},
        {"softmax_scale": 0.2},
        {"seq_lens": [100, 150, 119, 130]},
    ],
)
def test_the_tolerance_can_fail(wrong, dtype):
    case = CASES["te-2892"]
    q, k, v, _ = case.tensors(dtype)
    out = case._replace(**wrong).layer()(q, k, v, case._replace(**wrong).metas()[0])
    assert relative_error(out, case.expected(q, k, v)[1]) > tolerance(dtype)


sequence = st.tuples(
    *[st.one_of(st.just(0), st.just(1), st.integers(0, 20)), st.integers(0, 5)] * 2
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(sequence, min_size=1, max_size=12),
    cross=st.booleans(),
    sees=st.sampled_from(
        [("causal", window) for window in (None, (2, 0), (4, -1))]
        + [("full", window) for window in (None, (2, 1), (-1, 3), (4, -1))]
    ),
)
def test_any_lengths(lengths, cross, sees):
    n, n_pads, m, m_pads = ([row[i] for row in lengths] for i in range(4))
    kv_lens = (m, [a + b for a, b in zip(m, m_pads, strict=True)]) if cross else None
    padded = [a + b for a, b in zip(n, n_pads, strict=True)]
    case = Case(n, padded, kv_lens, (4, 2), (8, 8), *sees)
    q, k, v, grad = case.tensors(torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = case.layer()(*leaves, *case.metas())
    wanted_leaves, wanted = case.expected(*leaves)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out, leaves, grad.clone())
    for actual, right in zip(grads, torch.autograd.grad(wanted, wanted_leaves, grad), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("seq_lens", "padded_lens"), [([0], [0]), ([0, 0], [4, 2])])
def test_no_real_token_at_all(seq_lens, padded_lens, dtype):
    case = Case(seq_lens, padded_lens)
    q, k, v, _ = (t.requires_grad_() for t in case.tensors(dtype))
    out = case.layer()(q, k, v, case.metas()[0])
    out.sum().backward()
    assert out.shape == (sum(padded_lens), 12 * 16)
    for t in (out, q.grad, k.grad, v.grad):  # zeros, and not None: the ranks sum gradients
        assert not t.any()


# --- pads are inert ------------------------------------------------------------------------------


def pads_are_inert(group, name):
    case, device = CASES[name], device_of(group)
    meta, kv_meta = case.metas(device)
    layer = case.layer(tp_group=group)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clean = case.tensors(dtype, device, group_size(group), group_rank(group))
    x_metas = (meta, kv_meta, kv_meta, meta)
    results = []
    for pad in (0.0, math.nan, 1e4):
        *leaves, grad = (
            x.index_fill(0, x_meta.pad_rows, pad).requires_grad_(i < 3)
            for i, (x, x_meta) in enumerate(zip(clean, x_metas, strict=True))
        )
        # As leaves, whose pads must stay as they are, and as activations, which are written to.
        for inputs in (leaves, [t * 1 for t in leaves]):
            kept = [t.detach().clone() for t in leaves]
            with deterministic(device):
                out = layer(*inputs, meta, kv_meta)
                grads = torch.autograd.grad(out, leaves, grad.clone())
            results.append([out.detach(), *grads])
            for t, before in zip(leaves, kept, strict=True):
                assert torch.equal(t.nan_to_num(), before.nan_to_num()), "a leaf was written to"
    for result in results[1:]:
        for actual, first in zip(result, results[0], strict=True):
            assert torch.equal(actual, first)
    for t, x_meta in zip(results[0], (meta, meta, kv_meta, kv_meta), strict=True):
        assert not t[x_meta.pad_rows].any()
        assert t.isfinite().all()


@pytest.mark.parametrize(
    "name", ["te-2892", "te-docs-thd full", "te-2186", "long pads", "MLA", "keys of their own"]
)
def test_poison(ranks, name):
    ranks.run(pads_are_inert, name=name)


def test_poison_of_sglang_15757():
    case = Case([21], [24])
    q, k, v, grad = case.tensors(torch.float32)
    alone = Case([21], [21])
    wanted_leaves = [t[:21].clone().requires_grad_() for t in (q, k, v)]
    wanted = alone.layer()(*wanted_leaves, alone.metas()[0])
    wanted_grads = torch.autograd.grad(wanted, wanted_leaves, grad[:21])
    for t in (q, k, v, grad):
        t[21:] = math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = case.layer()(*leaves, case.metas()[0])
    assert torch.equal(out[:21], wanted)
    for actual, right in zip(torch.autograd.grad(out, leaves, grad), wanted_grads, strict=True):
        assert torch.equal(actual[:21], right)
        assert not actual[21:].any()


# --- dropout -------------------------------------------------------------------------------------


class RankTracker:
    """Megatron's kind of tracker: a state of its own for each rank, kept between forks."""

    def __init__(self, seed, device):
        self.devices = [device.index] if device.type == "cuda" else []
        self.seed, self.forks = seed, 0

    @contextlib.contextmanager
    def fork(self):
        with torch.random.fork_rng(self.devices):
            torch.manual_seed(self.seed)
            self.forks += 1
            yield


def dropout_draws(group):
    device, rank = device_of(group), group_rank(group)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case([60, 1, 0, 130], [64, 8, 8, 136], mask="full")
    meta, _ = case.metas(device)
    size = group_size(group)
    q, k, v, _ = (torch.ones_like(t) for t in case.tensors(dtype, device, size, 0))
    tracker = RankTracker(100 + rank, device)

    def drawn(seed=0, pad=0.0, training=True, **kwargs):
        torch.manual_seed(seed)
        layer = case.layer(tp_group=group, dropout=0.25, **kwargs).train(training)
        qkv = (t.index_fill(0, meta.pad_rows, pad) for t in (q, k, v))
        return layer(*qkv, meta).float().cpu()

    plain = drawn()
    assert torch.equal(drawn(), plain), "the same seed draws the same"
    assert not torch.equal(drawn(seed=1), plain)
    assert torch.equal(drawn(pad=math.nan), plain), "pads change no draw"
    # Values of one: an output is the sum of the weights that were kept, 1 on average.
    real = plain[meta.real_rows.cpu()]
    assert real.std() > 0.01
    assert abs(real[:60].mean() - 1) < 0.05
    assert abs(real[61:].mean() - 1) < 0.05
    assert torch.allclose(drawn(training=False)[meta.real_rows.cpu()], torch.ones(()), atol=1e-2)

    tracked = drawn(get_rng_state_tracker=lambda: tracker)
    assert tracker.forks == 1
    assert torch.equal(drawn(get_rng_state_tracker=lambda: tracker, seed=7), tracked)
    after = torch.rand(1, device=device)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1, device=device)), "the default generator was drawn from"
    drawn(get_rng_state_tracker=lambda: tracker, training=False)
    assert tracker.forks == 2, "nothing to fork for without dropout"
    return plain, tracked


def test_dropout_differs_over_the_ranks_under_a_tracker_only(ranks):
    plain, tracked = zip(*ranks.run(dropout_draws), strict=True)
    for rank in range(1, ranks.world_size):
        assert torch.equal(plain[rank], plain[0])
        assert not torch.equal(tracked[rank], tracked[0])


def test_gradients_of_dropout_are_those_of_what_was_drawn():
    case = Case([6, 3], [8, 4], heads=(1, 1), head_dims=(4, 4))
    layer, (meta, _) = case.layer(dropout=0.5), case.metas()
    q, k, v, _ = (t.requires_grad_() for t in case.tensors(torch.float64))

    def seeded(q, k, v):
        torch.manual_seed(3)
        return layer(q, k, v, meta)[meta.real_rows]

    assert torch.autograd.gradcheck(seeded, (q, k, v), nondet_tol=0.0)


# --- what it costs, and where it runs ------------------------------------------------------------


@contextlib.contextmanager
def no_host_reads(device):
    """On GPUs any synchronisation raises; on CPU what would be one there does."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with Operations() as operations:
        yield
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero"} & set(operations.names)


@contextlib.contextmanager
def deterministic(device):
    """FlashAttention's backward sums dQ in any order unless it is told not to."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Operations(TorchDispatchMode):
    """Keeps the names of all that is dispatched."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["te-2599", "keys of their own"])
def test_empty_entries_cost_nothing(name):
    case = CASES[name]
    counts = []
    for empty in (0, 1000):
        more = case._replace(
            seq_lens=case.seq_lens + [0] * empty,
            padded_lens=case.padded_lens + [0] * empty,
            kv_lens=case.kv_lens and tuple(lens + [0] * empty for lens in case.kv_lens),
        )
        meta, kv_meta = more.metas()
        q, k, v, _ = (t.requires_grad_() for t in more.tensors(torch.float32))
        with Operations() as operations:
            more.layer()(q, k, v, meta, kv_meta).sum().backward()
        counts.append(len(operations.names))
    assert counts[0] == counts[1]


def with_capacity(group):
    device = device_of(group)
    case = CASES["te-2892"]
    meta, _ = case.metas(device)
    filled = meta.with_capacity(num_sequences=8, num_rows=600, max_seq_len=160)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, _ = case.tensors(dtype, device, group_size(group), group_rank(group))
    wide = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 600 - meta.num_rows), value=7.0)
            for t in (q, k, v)]  # fmt: skip
    for mask in ("causal", "full"):
        layer = case._replace(mask=mask).layer(tp_group=group)
        if device.type == "cpu":
            with pytest.raises(ValueError, match="meta without capacity"):
                layer(*wide, filled)
            continue
        out = layer(*wide, filled)
        expected = case._replace(mask=mask).expected(q, k, v)[1]
        assert relative_error(out[: meta.num_rows], expected) <= tolerance(dtype)
        assert not out[meta.num_rows :].any()


def test_metas_with_capacity(ranks):
    ranks.run(with_capacity)


@pytest.mark.parametrize("name", ["te-docs-thd", "keys of their own, full", "GQA", "window"])
def test_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    case = CASES[name]
    layer, metas = case.layer(), case.metas()
    compiled = torch.compile(
        lambda q, k, v, meta, kv_meta: layer(q, k, v, meta, kv_meta),
        backend="aot_eager",
        fullgraph=True,
    )
    results = []
    for call in (layer, compiled):
        *leaves, grad = case.tensors(torch.float32)
        leaves = [t.requires_grad_() for t in leaves]
        out = call(*leaves, *metas)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)


def test_takes_the_surrounding_meta():
    case = CASES["te-docs-thd"]
    q, k, v, _ = case.tensors(torch.float32)
    layer, (meta, _) = case.layer(), case.metas()
    with seq_meta(meta):
        assert torch.equal(layer(q, k, v), layer(q, k, v, meta))


def test_autocast():
    case = CASES["te-docs-thd"]
    q, k, v, _ = case.tensors(torch.float32)
    layer, (meta, _) = case.layer(), case.metas()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(q, k.bfloat16(), v, meta)
    assert torch.equal(out, layer(q.bfloat16(), k.bfloat16(), v.bfloat16(), meta))


def test_full_name_of_the_causal_mask():
    case = CASES["keys of their own"]
    q, k, v, _ = case.tensors(torch.float32)
    named = case._replace(mask="causal_bottom_right").layer()
    assert torch.equal(named(q, k, v, *case.metas()), case.layer()(q, k, v, *case.metas()))


# --- the caller's mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 48}, r"got 32 and 48; the third argument counts KV heads, v_head_dim="),
        ({"num_heads": 30, "tp_size": 4}, "num_heads=30 does not divide over 4 ranks"),
        ({"num_kv_heads": 1, "tp_size": 2}, "num_kv_heads=1 .* 2 ranks; with fewer KV heads"),
        ({"tp_size": 0}, "does not divide over 0 ranks"),
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, got 0"),
        ({"mask": "padding_causal"}, "mask must be one of causal, .* got 'padding_causal'"),
        ({"window": (-2, 0)}, r"window must be .* got \(-2, 0\)"),
        ({"window": 5}, "window must be two integers .* got 5"),
        ({"window": (5,)}, r"window must be two integers .* got \(5,\)"),
        ({"window": (5, 0, 0)}, "window must be two integers"),
        ({"window": (5.0, 0)}, "window must be two integers"),
        ({"window": (True, 0)}, "window must be two integers"),
        ({"window": "ab"}, "window must be two integers .* got 'ab'"),
        ({"window": (3, 5)}, r"window=\(3, 5\) would see .*'causal' hides: give \(3, 0\)"),
        ({"window": (3, 5), "mask": "causal_bottom_right"}, "behind the query"),
        ({"dropout": 1.0}, "below 1, got 1.0"),
        ({"backend": "flash9"}, r"no backend 'flash9'; choose one of \['flash4', 'mixed', "),
        ({"softmax_type": "learnable"}, "attention sinks, which .* does not support"),
        ({"sinks": torch.ones(32)}, "attention sinks"),
        ({"softcap": 30.0}, "a soft cap"),
        ({"kv_cache": True}, "a KV cache"),
    ],
)
def test_constructor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(**{"num_heads": 32, "head_dim": 48, **arguments})


def test_arguments_that_ask_for_nothing_are_taken():
    DotProductAttention(4, 8, softmax_type="vanilla", softcap=0.0, inference_params=None)
    with pytest.raises(TypeError, match="unexpected argument 'attention_mask'"):
        DotProductAttention(4, 8, attention_mask=None)


def rows(count, heads=4, head_dim=8, dtype=torch.float32):
    return torch.zeros(count, heads, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": rows(16)}, "q has 16 rows, its meta has 13"),
        ({"k": rows(12)}, "k has 12 rows, its meta has 13"),
        ({"q": rows(13, heads=8)}, r"q must be \[rows, 4, 8\] .* got \(13, 8, 8\)"),
        ({"k": rows(13, heads=2)}, r"k must be \[rows, 4, 8\]"),
        ({"v": rows(13, head_dim=16)}, r"v must be \[rows, 4, 8\]"),
        ({"q": rows(13).flatten(1)}, r"got \(13, 32\)"),
        ({"k": rows(13, dtype=torch.bfloat16)}, "one floating dtype, got torch.float32 for q"),
        ({"q": rows(13, dtype=torch.int32)}, "one floating dtype"),
        ({"v": rows(13).to("meta")}, "v is on meta, its meta on cpu"),
        ({"kv_meta": PaddedSeqMeta.from_seq_lens([13])}, "kv_meta has 1 sequences, meta has 3"),
        ({"inference_params": {}}, "a KV cache"),
    ],
)
def test_forward_refuses(arguments, message):
    meta = CASES["te-docs-thd"].metas()[0]
    right = {"q": rows(13), "k": rows(13), "v": rows(13), "meta": meta}
    with pytest.raises(ValueError, match=message):
        DotProductAttention(4, 8)(**{**right, **arguments})


def test_no_meta_at_all():
    with pytest.raises(ValueError, match="no meta"):
        DotProductAttention(4, 8)(rows(13), rows(13), rows(13))


def group_comes_later(group):
    size = group_size(group)
    layer = DotProductAttention(12, 8, tp_size=size)
    layer.set_tensor_parallel_group(group)
    assert layer.tp_size == size
    with pytest.raises(ValueError, match=f"the group has {size} ranks"):
        DotProductAttention(60, 8, tp_size=size + 1).set_tensor_parallel_group(group)


def test_group_after_construction(ranks):
    ranks.run(group_comes_later)


@pytest.mark.parametrize(
    ("mask", "given", "right"),
    [
        ("causal", (3, 0), (3, 0)),
        ("causal", [3, -1], (3, 0)),
        ("causal", None, (-1, 0)),
        ("full", (3, 5), (3, 5)),
    ],
)
def test_windows_that_a_mask_takes(mask, given, right):
    assert DotProductAttention(4, 8, mask=mask, window=given).window == right


def copies_need_no_group(group):
    case = CASES["te-docs-thd"]
    device, size, rank = device_of(group), group_size(group), group_rank(group)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer, (meta, _) = case.layer(tp_group=group), case.metas(device)
    q, k, v, _ = case.tensors(dtype, device, size, rank)
    model = torch.nn.Sequential(layer)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].tp_size == size
        assert torch.equal(twin[0](q, k, v, meta), layer(q, k, v, meta))


def test_copies(ranks):
    ranks.run(copies_need_no_group)
