"""FlashAttention-4, and it beside our kernels in one pack: on a GPU where it is installed, else a
stand-in for it that reads the same rows and leaves the same ones unwritten."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from kernel_helpers import (
    DEVICE,
    HAS_GPU,
    SMALL,
    assert_close,
    drawn,
    exact,
    forget_the_copy,
    interpret,
    metas_of,
    run,
    with_blocks,
)

import padded_sp.backends
from padded_sp import PaddedSeqMeta
from padded_sp.backends import triton_attention
from padded_sp.backends.tiles import typical_length

# The real one compiles its kernels with what its libraries deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning") if HAS_GPU else []

# Real lengths, pads, and the same of keys where they differ. Short is up to 32 tokens here.
PACKS = {
    "both": ([33, 5, 70, 32, 1, 60], [15, 3, 10, 0, 7, 4], None, None),
    "no pads": ([33, 5, 40], [0, 0, 0], None, None),
    "few are short": ([130, 3, 100], [6, 13, 4], None, None),
    "all are short": ([3, 16, 1, 7], [0, 15, 0, 2], None, None),
    "all are long": ([33, 140, 60], [300, 4, 4], None, None),
    "nothing at the ends": ([0, 40, 0, 20], [8, 0, 8, 3], None, None),
    "other keys": ([20, 40, 9], [4, 0, 3], [45, 33, 12], [5, 20, 0]),
}
WINDOWS = [(-1, 0), (-1, -1), (20, 0), (8, 4)]
HEADS = (4, 2, 32, 16)
NAMES = ("flash4", "mixed")


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    return backend_named(request.param, monkeypatch)


def backend_named(name, monkeypatch):
    """The module, with an environment in which short is up to 32 tokens."""
    if HAS_GPU:
        if importlib.util.find_spec("flash_attn") is None:
            pytest.skip("FlashAttention-4 is not installed")
    else:
        for module in [m for m in sys.modules if m.partition(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, module)
        for module in NAMES:
            name_of = padded_sp.backends.ATTENTION[module]
            monkeypatch.delitem(sys.modules, name_of, raising=False)
            monkeypatch.delattr(padded_sp.backends, name_of.rpartition(".")[2], raising=False)
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_flash4"))
    interpret(monkeypatch)
    with_blocks(monkeypatch, SMALL[1])
    monkeypatch.setattr(triton_attention, "_FAST_UP_TO", {256: 32})
    module = importlib.import_module(padded_sp.backends.ATTENTION[name])
    if not HAS_GPU:
        flash4 = importlib.import_module(padded_sp.backends.ATTENTION["flash4"])
        monkeypatch.setattr(flash4, "reason_against", lambda *_, **__: "")
    return module


@pytest.fixture(scope="module", autouse=True)
def afterwards():
    yield
    forget_the_copy()
    for name in [m for m in sys.modules if m.partition(".")[0] == "flash_attn"]:
        if not HAS_GPU:
            del sys.modules[name]
    if not HAS_GPU:
        for module in NAMES:
            sys.modules.pop(padded_sp.backends.ATTENTION[module], None)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_equals_the_reference_whatever_pads_hold(backend, pack, window):
    metas = metas_of(*PACKS[pack])
    actual = run(*drawn(*metas, HEADS, poison=float("nan")), *metas, window, backend=backend)
    assert_close(actual, exact(*drawn(*metas, HEADS), *metas, window), 2e-3)
    meta, kv_meta = metas
    for x, rows in zip(actual, (meta, meta, kv_meta, kv_meta), strict=True):
        assert not x[rows.padding_mask].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
def test_pads_move_no_bit(backend, poison):
    metas = metas_of(*PACKS["both"])
    torch.use_deterministic_algorithms(True)
    try:
        clean, poisoned = (
            run(*drawn(*metas, HEADS, poison=x), *metas, (-1, 0), backend=backend)
            for x in (0.0, poison)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)


def test_each_sequence_is_computed_once(monkeypatch):
    """The short ones by our kernels, the others by FlashAttention-4."""
    mixed = backend_named("mixed", monkeypatch)
    tokens: dict[str, list[int]] = {"ours": [], "flash4": []}
    of_tiles = mixed.TritonPart.forward
    listed = mixed.flash4_attention._listed

    def ours(part, *tensors):
        tokens["ours"].append(int(part.tiles.queries[:, 1].sum() + part.tiles.packed[:, 1].sum()))
        return of_tiles(part, *tensors)

    def flash4(*pack):
        found = listed(*pack)
        tokens["flash4"].append(int(found[1][0].sum()))
        return found

    monkeypatch.setattr(mixed.TritonPart, "forward", ours)
    monkeypatch.setattr(mixed.flash4_attention, "_listed", flash4)
    for name, expected in (
        ("both", {"ours": [38], "flash4": [163]}),
        ("few are short", {"ours": [], "flash4": [233]}),
        ("all are short", {"ours": [27], "flash4": []}),
        ("other keys", {"ours": [9], "flash4": [60]}),
    ):
        metas = metas_of(*PACKS[name])
        for found in tokens.values():
            found.clear()
        for _ in range(2):  # lists are made once per meta
            run(*drawn(*metas, HEADS), *metas, (-1, 0), backend=mixed)
        assert tokens == {"ours": expected["ours"] * 2, "flash4": expected["flash4"]}, name


def test_reads_few_of_the_pads(monkeypatch):
    """Of long stretches of pads only what a tile can reach is written to."""
    flash4 = backend_named("flash4", monkeypatch)
    meta = PaddedSeqMeta.from_seq_lens([40, 5, 3], padded_lens=[1000, 8, 1000], device=DEVICE)
    q_pads, k_pads = flash4.Flash4Part(meta, meta, (-1, 0), 1.0).near_pads()
    assert q_pads is k_pads
    near = [*range(40, 40 + 256), *range(1005, 1008), *range(1011, 1011 + 256)]
    assert q_pads.tolist() == near
    # Those of the short sequences are none of its business, but where its own tiles reach them.
    meta = PaddedSeqMeta.from_seq_lens([40, 5, 3], padded_lens=[48, 300, 16], device=DEVICE)
    q_pads, _ = flash4.Flash4Part(meta, meta, (-1, 0), 1.0, longer_than=32).near_pads()
    assert q_pads.tolist() == [*range(40, 48), *range(53, 40 + 256)]


@pytest.mark.parametrize("inplace", [True, False])
def test_writes_to_its_input_where_it_may(inplace, monkeypatch):
    flash4 = backend_named("flash4", monkeypatch)
    metas = metas_of(*PACKS["both"])
    q, k, v, grad = drawn(*metas, HEADS, poison=7.0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    made = [x * 1 for x in leaves]
    for tensors, may_change in ((leaves, False), (made, inplace)):
        out = flash4.dot_product_attention(
            *tensors, *metas, window=(-1, 0), dropout=0.0, softmax_scale=0.3, inplace=inplace
        )
        given = grad.clone()
        torch.autograd.grad(out, tensors, given)
        for x, before in zip((*tensors, given), (q, k, v, grad), strict=True):
            changed = not torch.equal(x.detach(), before)
            assert changed == (inplace if x is given else may_change)


def test_an_expanded_gradient(backend):
    metas = metas_of(*PACKS["both"])
    q, k, v, grad = drawn(*metas, HEADS, poison=float("nan"))
    ones = torch.ones((), dtype=grad.dtype, device=DEVICE).expand(grad.shape)
    actual = run(q, k, v, ones, *metas, (-1, 0), backend=backend)
    dense = run(q, k, v, torch.ones_like(grad), *metas, (-1, 0), backend=backend)
    for a, b in zip(actual, dense, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("width", [32, 64, 128, 192, 256])
def test_proof_packs_take_every_way(width, monkeypatch):
    """What a proof did not run it does not prove: every size of tiles, and both parts of a pack."""
    configs = next(of for limit, of in triton_attention._CONFIGS.items() if width <= limit)
    fast_up_to = dict(triton_attention._FAST_UP_TO)
    mixed = backend_named("mixed", monkeypatch)
    monkeypatch.setattr(triton_attention, "_FAST_UP_TO", fast_up_to)
    q, k, v = (torch.empty(0, heads, width) for heads in (4, 2, 2))
    used, together = set(), set()
    for real, padded in triton_attention.PROOF_PACKS:
        for lengths in (real, padded):
            meta = PaddedSeqMeta.from_seq_lens(lengths, padded_lens=padded)
            typical = typical_length(meta)
            used.add(next(config for limit, config in configs if typical <= limit))
            parts = mixed._parts(q, k, v, meta, meta, (-1, 0), 1.0)
            together.add(tuple(type(part).__name__ for part in parts))
    assert used == {config for _, config in configs}
    assert together >= {("TritonPart",), ("Flash4Part", "TritonPart")}


@pytest.mark.parametrize("name", ["flash4", "triton"])
def test_log_sum_exp(name, monkeypatch):
    """What a part returns for its backward is what merging partial results needs: of real rows
    the logarithm of the sum of exponentials, of base 2 and packed by our kernels."""
    modules = {"flash4": backend_named("flash4", monkeypatch), "triton": triton_attention}
    metas = meta, _ = metas_of(*PACKS["both"])
    q, k, v, _ = drawn(*metas, HEADS)
    if name == "flash4":
        part = modules[name].Flash4Part(*metas, (-1, 0), 0.3)
    else:
        part = modules[name].TritonPart(q, k, v, *metas, (-1, 0), 0.3)
    lse = part.forward(q, k, v, torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=DEVICE))
    lse = lse[:, meta.real_rows].T if name == "flash4" else lse * math.log(2)
    expected = []
    for first, count in zip(meta.cu_seqlens_padded.tolist(), meta.seq_lens, strict=False):
        rows = slice(first, first + count)
        keys = k[rows].double().repeat_interleave(2, 1)
        scores = 0.3 * torch.einsum("qhd,khd->qhk", q[rows].double(), keys)
        hidden = torch.ones(count, count, device=DEVICE).triu(1).bool()[:, None]
        expected.append(torch.logsumexp(scores.masked_fill(hidden, -torch.inf), -1))
    torch.testing.assert_close(lse.double(), torch.cat(expected), rtol=0, atol=5e-3)
