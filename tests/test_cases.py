"""Packs that broke other software, one test each; ``data/packs.json`` says where and what is right.

Context-parallel cases are tested for their plans and positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from padded_sp import (
    AlignPolicy,
    ColumnParallelLinear,
    DotProductAttention,
    PaddedSeqMeta,
    pad,
    roll,
    unpad,
    vocab_parallel_cross_entropy,
)
from padded_sp.testing import assert_packing_equivalent, assert_padding_inert

CASES = {c["name"]: c for c in json.loads((Path(__file__).parent / "data/packs.json").read_text())}


def meta_of(case: dict[str, Any], **kwargs: Any) -> PaddedSeqMeta:
    if "seq_lens" in case:
        return PaddedSeqMeta.from_seq_lens(
            case["seq_lens"], padded_lens=case["padded_lens"], **kwargs
        )
    real, padded = (
        torch.tensor(case[name], dtype=torch.int32) for name in ("cu_seqlens", "cu_seqlens_padded")
    )
    return PaddedSeqMeta.from_cu_seqlens(real, padded, **kwargs)


def heads_of(meta: PaddedSeqMeta, heads: int = 2, head_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (meta.num_rows, heads, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "qkv"]


def per_sequence(q: Tensor, k: Tensor, v: Tensor, meta: PaddedSeqMeta) -> Tensor:
    """Causal attention of each sequence by itself, zero in pad rows."""
    out, start = torch.zeros_like(v), 0
    for real, padded in zip(meta.seq_lens, meta.padded_lens, strict=True):
        rows = slice(start, start + real)
        scores = torch.einsum("ihd,jhd->hij", q[rows], k[rows]) * q.shape[-1] ** -0.5
        unseen = torch.ones(real, real, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hij,jhd->ihd", weights, v[rows])
        start += padded
    return out.flatten(1)


def assert_attends_per_sequence(meta: PaddedSeqMeta, heads: int = 2, head_dim: int = 16) -> Tensor:
    """Output and gradients, against each sequence by itself in float64."""
    attention = DotProductAttention(heads, head_dim)
    inputs = [x.requires_grad_() for x in heads_of(meta, heads, head_dim)]
    out, expected = attention(*inputs, meta), per_sequence(*inputs, meta)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    incoming = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, inputs, incoming.clone())
    for actual, right in zip(
        gradients, torch.autograd.grad(expected, inputs, incoming), strict=True
    ):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-9)
    return out.detach()


def test_every_case_has_its_test():
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals()}
    assert CASES.keys() <= tested


def test_te_2892():
    case = CASES["te-2892"]
    meta = meta_of(case, tp_size=2)
    for recipe in ("bf16", "fp8_delayed", "fp8_current"):
        AlignPolicy(recipe, tp_size=2).check(meta)
    with pytest.raises(ValueError, match=r"272 rows per rank .* of 128.*fp8_wire=False takes"):
        AlignPolicy("fp8_blockwise", tp_size=2).check(meta)
    AlignPolicy("fp8_blockwise", tp_size=2, fp8_wire=False).check(meta)

    out = assert_attends_per_sequence(meta, case["heads"], case["head_dim"])
    assert out.shape == (544, 32 * 48)
    zero = (out == 0).all(1)
    assert zero.sum() == 44
    assert torch.equal(zero, meta.padding_mask)


def test_te_docs_thd():
    meta = meta_of(CASES["te-docs-thd"])
    assert meta.pad_rows.tolist() == [3, 6, 7, 12]
    assert_attends_per_sequence(meta)


def test_te_2911():
    case = CASES["te-2911"]
    lengths = [case["total_real"]]
    as_it_is = PaddedSeqMeta.from_seq_lens(lengths, padded_lens=lengths, tp_size=case["tp"])
    with pytest.raises(ValueError, match=r"5743 rows per rank .* no multiple of 8"):
        AlignPolicy(case["recipe"], case["tp"]).check(as_it_is)
    planned = {
        recipe: AlignPolicy(recipe, case["tp"]).plan(lengths).num_rows
        for recipe in ("fp8_delayed", "fp8_current", "fp8_blockwise", "bf16")
    }
    assert planned == {
        "fp8_delayed": 11488,
        "fp8_current": 11488,
        "fp8_blockwise": 11520,
        "bf16": 11486,
    }


def test_te_3331():
    case = CASES["te-3331"]
    meta = meta_of(case, cp_size=case["cp"])
    AlignPolicy(cp_size=case["cp"]).check(meta)
    assert AlignPolicy(cp_size=case["cp"]).plan(case["seq_lens"]).padded_lens == (704,)
    assert meta.has_padding
    attention, inputs = DotProductAttention(2, 16), heads_of(meta)
    out = attention(*inputs, meta)
    assert torch.equal((out == 0).all(1), meta.padding_mask)
    assert meta.pad_rows.tolist() == [698, 699, 700, 701, 702, 703]
    assert torch.equal(attention(*inputs, meta), out)


def test_te_2186():
    case = CASES["te-2186"]
    meta = meta_of(case, cp_size=case["cp"])
    plan = AlignPolicy(cp_size=case["cp"]).plan(case["seq_lens"])
    assert plan.padded_lens == tuple(case["padded_lens"])
    assert_attends_per_sequence(meta)


def test_sglang_15757():
    meta = meta_of(CASES["sglang-15757"])
    attention = DotProductAttention(2, 16)
    assert_padding_inert(attention, heads_of(meta), meta, poisons=[float("nan")])
    assert_packing_equivalent(attention, heads_of(meta), meta)


class CountCalls(TorchDispatchMode):
    """Counts what the host launches."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_te_2599():
    case = CASES["te-2599"]
    with_empty = meta_of(case)
    without = PaddedSeqMeta.from_seq_lens([40, 24])
    assert with_empty.num_sequences == 64
    assert not with_empty.has_padding
    attention, linear = DotProductAttention(2, 16), ColumnParallelLinear(32, 8).double()
    results, calls = [], []
    for meta in (with_empty, without):
        inputs = [x.requires_grad_() for x in heads_of(meta)]
        with CountCalls() as counted:
            out = linear(attention(*inputs, meta), meta)
            out.sum().backward()
        results.append([out.detach(), *[x.grad for x in inputs]])
        calls.append(counted.calls)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert calls[0] == calls[1]


def test_te_3205():
    case = CASES["te-3205"]
    x = torch.zeros(case["rows"], 4)
    with pytest.raises(ValueError, match=r"16 rows, its meta has 12.*num_rows="):
        ColumnParallelLinear(4, 4)(x, meta_of(case))
    longer = meta_of(case, num_rows=16)
    assert (longer.seq_lens, longer.padded_lens) == ((3, 5, 0), (4, 8, 4))
    assert longer.cu_seqlens_padded[-1] == 16
    assert ColumnParallelLinear(4, 4)(x, longer).shape == (16, 4)
    with pytest.raises(ValueError, match="num_rows=8 is below the last padded boundary 12"):
        meta_of(case, num_rows=8)


def assert_planned_total(case: dict[str, Any], rows: int) -> None:
    lengths, policy = [case["total_real"]], AlignPolicy(case["recipe"], case["tp"])
    with pytest.raises(ValueError, match=f"{lengths[0] // case['tp']} rows per rank.*{rows} rows"):
        policy.check(PaddedSeqMeta.from_seq_lens(lengths, tp_size=case["tp"]))
    assert policy.plan(lengths).num_rows == rows


def test_nemo_rl_2744():
    assert_planned_total(CASES["nemo-rl-2744"], 4096)


def test_ms_swift_9722():
    assert_planned_total(CASES["ms-swift-9722"], 32000)


def test_bridge_gpt_sft():
    case = CASES["bridge-gpt-sft"]
    tokens, pad_id = torch.tensor(case["tokens"]), case["pad_token_id"]
    meta = PaddedSeqMeta.from_seq_lens([3], padded_lens=[5])
    ids = pad(tokens, meta, fill=pad_id)
    assert ids.tolist() == [5, 6, 2, 2, 2]
    assert unpad(ids, meta).tolist() == [5, 6, 2]
    labels = roll(ids, meta)
    assert labels.tolist() == [6, 2, -100, -100, -100]
    # The label 2 counts: the loss is the mean over two rows, not over one.
    logits = torch.zeros(5, 8)
    logits[1, 2] = 3.0
    right = torch.nn.functional.cross_entropy(logits[:2], labels[:2])
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, labels, meta), right)


def test_megatron_5243():
    case = CASES["megatron-5243"]
    meta = PaddedSeqMeta.from_cu_seqlens(case["cu_seqlens_padded"], cp_size=case["cp"])
    AlignPolicy(cp_size=case["cp"]).check(meta)
    assert meta.position_ids[[0, 3, 4, 7]].tolist() == [0, 3, 0, 3]
    assert meta.position_ids[[1, 2, 5, 6]].tolist() == [1, 2, 1, 2]


def test_verl_short():
    case = CASES["verl-short"]
    policy = AlignPolicy(case["recipe"], case["tp"])
    plan = policy.plan(case["seq_lens"])
    assert plan.num_rows == 256
    assert plan.note.startswith("48 rows would do with fp8_wire=False")
    cheaper = AlignPolicy(case["recipe"], case["tp"], fp8_wire=False)
    assert cheaper.plan(case["seq_lens"]).num_rows == 48
