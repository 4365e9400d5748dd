"""Attention over Transformer Engine: numbers, masks, pads, refusals.

Without the real one it runs on the double in ``tests/fake_te``, which proves the adapter alone.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from rank_helpers import device_of, drawn
from te_helpers import IS_DOUBLE, on_te, only_the_real_one, recipe_of

from padded_sp import DotProductAttention, PaddedSeqMeta
from padded_sp.backends import reference

REAL = [100, 0, 150, 33, 1]
PADDED = [112, 16, 160, 48, 16]
KV_REAL = [120, 7, 150, 64, 2]
KV_PADDED = [128, 16, 160, 64, 16]
# heads, KV heads, head size, value size, mask, window
SHAPES = {
    "causal": (4, 4, 64, 64, "causal", None),
    "full": (4, 4, 64, 64, "full", None),
    "window": (4, 4, 64, 64, "causal", (32, 0)),
    "two-sided window": (4, 4, 64, 64, "full", (32, 16)),
    "gqa": (6, 2, 128, 128, "causal", None),
    "mla": (4, 4, 192, 128, "causal", None),
    "reported": (4, 4, 48, 48, "causal", None),
    "large": (2, 2, 256, 256, "causal", None),
}


def layer_of(group, shape, **arguments):
    heads, kv_heads, head_dim, v_head_dim, mask, window = SHAPES[shape]
    return DotProductAttention(
        heads * group.size(),
        head_dim,
        kv_heads * group.size(),
        v_head_dim,
        mask=mask,
        window=window,
        tp_group=group,
        backend="te",
        **arguments,
    )


def inputs_of(group, shape, meta, kv_meta):
    heads, kv_heads, head_dim, v_head_dim, *_ = SHAPES[shape]
    sizes = (
        (meta.num_rows, heads, head_dim),
        (kv_meta.num_rows, kv_heads, head_dim),
        (kv_meta.num_rows, kv_heads, v_head_dim),
        (meta.num_rows, heads * v_head_dim),
    )
    drawings = [drawn(group, *size, seed=i, dtype=torch.bfloat16) for i, size in enumerate(sizes)]
    return drawings[:3], drawings[3]


def run_layer(layer, inputs, grad, meta, kv_meta):
    inputs = [x.clone().requires_grad_() for x in inputs]
    # No leaves: of a leaf the layer makes a copy, whose own backward would zero pads.
    out = layer(*(x.clone() for x in inputs), meta, kv_meta)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.clone())]


def metas_of(group, padded, cross):
    device = device_of(group)

    def meta(real, layout):
        return PaddedSeqMeta.from_seq_lens(
            real if padded else layout, padded_lens=layout, device=device
        )

    q_meta = meta(REAL, PADDED)
    return q_meta, meta(KV_REAL, KV_PADDED) if cross else q_meta


def error(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


@on_te
def numbers_body(group, shape, padded, cross):
    *_, mask, window = SHAPES[shape]
    meta, kv_meta = metas_of(group, padded, cross)
    inputs, grad = inputs_of(group, shape, meta, kv_meta)
    got = run_layer(layer_of(group, shape), inputs, grad, meta, kv_meta)

    exact_inputs = [x.double().requires_grad_() for x in inputs]
    out = reference.dot_product_attention(*exact_inputs, meta, kv_meta, mask=mask, window=window)
    exact = [out.detach(), *torch.autograd.grad(out, exact_inputs, grad.double())]
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
        assert x.shape == y.shape
        # facts: 0.2 % to 0.25 % on sound kernels; wrong ones were 30 % off and more.
        assert error(x, y) < 1e-2, (name, error(x, y))


@pytest.mark.max_ranks(2)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("padded", [False, True], ids=["tight", "padded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(ranks, shape, padded, cross):
    if IS_DOUBLE and cross and shape == "two-sided window":
        pytest.skip("the double places such windows otherwise than the real one")
    ranks.run(numbers_body, shape=shape, padded=padded, cross=cross)


@on_te
def poison_body(group, shape, cross):
    meta, kv_meta = metas_of(group, True, cross)
    inputs, grad = inputs_of(group, shape, meta, kv_meta)
    layer = layer_of(group, shape)
    pads = meta.padding_mask, kv_meta.padding_mask, kv_meta.padding_mask, meta.padding_mask

    def run(fill):
        filled = [x.clone() for x in (*inputs, grad)]
        for x, rows in zip(filled, pads, strict=True):
            x[rows] = fill
        return run_layer(layer, filled[:3], filled[3], meta, kv_meta)

    clean = run(0.0)
    for fill in (0.0, float("nan"), float("inf"), 1e4):
        for x, y, rows in zip(run(fill), clean, (pads[3], *pads[:3]), strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16)), fill
            assert not x[rows].any()


@pytest.mark.max_ranks(2)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("shape", ["causal", "full", "gqa", "mla"])
def test_pads_reach_nothing(ranks, shape, cross):
    ranks.run(poison_body, shape=shape, cross=cross)


@on_te
def unwritten_pads_body(group):
    """Whatever the kernels leave in pad rows of O, dQ, dK and dV, ours are zero."""
    from transformer_engine.pytorch import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PAD_ROWS", float("nan"))
        poison_body(group, shape="gqa", cross=False)


@pytest.mark.skipif(not IS_DOUBLE, reason="kernels of the real one cannot be told to")
@pytest.mark.max_ranks(1)
def test_pads_that_the_kernel_left_unwritten(ranks):
    ranks.run(unwritten_pads_body)


@on_te
def like_plain_body(group, shape):
    """At most 1.1 times the error of te.DotProductAttention called by hand."""
    from padded_sp.backends.te import te

    heads, kv_heads, head_dim, v_head_dim, *_ = SHAPES[shape]
    meta, _ = metas_of(group, True, False)
    inputs, grad = inputs_of(group, shape, meta, meta)
    ours = run_layer(layer_of(group, shape), inputs, grad, meta, None)
    for x in (*inputs, grad):
        x[meta.padding_mask] = 0
    plain = te.DotProductAttention(
        heads, (head_dim, v_head_dim), num_gqa_groups=kv_heads, qkv_format="thd"
    )
    leaves = [x.clone().requires_grad_() for x in inputs]
    bounds = {f"cu_seqlens_{side}": meta.cu_seqlens for side in ("q", "kv")}
    bounds |= {f"cu_seqlens_{side}_padded": meta.cu_seqlens_padded for side in ("q", "kv")}
    bounds |= {f"max_seqlen_{side}": meta.max_seq_len for side in ("q", "kv")}
    out = plain(
        *leaves, qkv_format="thd", attn_mask_type="padding_causal", pad_between_seqs=True, **bounds
    )
    theirs = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    exact_inputs = [x.double().requires_grad_() for x in inputs]
    exact_out = reference.dot_product_attention(*exact_inputs, meta)
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, exact_inputs, grad.double())]
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert error(x, z) <= 1.1 * error(y.view_as(x), z)


@pytest.mark.max_ranks(1)
@pytest.mark.parametrize("shape", ["causal", "gqa", "mla", "reported"])
def test_as_accurate_as_plain_te(ranks, shape):
    ranks.run(like_plain_body, shape=shape)


@on_te
def capacity_body(group):
    meta, _ = metas_of(group, True, False)
    capacity = meta.with_capacity(8, meta.num_rows + 64, 256)
    inputs, grad = inputs_of(group, "causal", capacity, capacity)
    layer = layer_of(group, "causal")
    got = run_layer(layer, inputs, grad, capacity, None)
    rows = meta.num_rows
    expected = run_layer(layer, [x[:rows] for x in inputs], grad[:rows], meta, None)
    for x, y in zip(got, expected, strict=True):
        assert error(x[:rows], y.double()) < 1e-2
        assert not x[rows:].any()


@pytest.mark.max_ranks(1)
def test_capacity(ranks):
    ranks.run(capacity_body)


@on_te
def determinism_body(group):
    """Transformer Engine reads it when a module is built; one built before must not serve after."""
    from padded_sp.backends import te_attention

    meta, _ = metas_of(group, True, False)
    inputs, grad = inputs_of(group, "causal", meta, meta)
    te_attention._attention.cache_clear()
    built = []
    module = te_attention.te.DotProductAttention

    def build(*args, **kwargs):
        built.append(os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"])
        return module(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_attention.te, "DotProductAttention", build)
        for allowed in ("0", "1", "0", "1"):
            patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", allowed)
            run_layer(layer_of(group, "causal", verify=False), inputs, grad, meta, None)
    assert built == ["0", "1"]


@pytest.mark.max_ranks(1)
def test_determinism_is_what_it_is_now(ranks):
    ranks.run(determinism_body)


@on_te
def no_keys_body(group):
    """Queries without any key give zeros, whatever they hold, and gradients of zeros."""
    device = device_of(group)
    meta = PaddedSeqMeta.from_seq_lens([3, 2], device=device)
    none = PaddedSeqMeta.from_seq_lens([0, 0], device=device)
    inputs, grad = inputs_of(group, "causal", meta, none)
    inputs[0].fill_(float("inf"))
    for x in run_layer(layer_of(group, "causal", verify=False), inputs, grad, meta, none):
        assert not x.any()


@pytest.mark.max_ranks(1)
def test_no_keys_at_all(ranks):
    ranks.run(no_keys_body)


@on_te
def refusals_body(group):
    from padded_sp.backends.te import autocast, make_recipe

    meta, _ = metas_of(group, True, False)
    inputs, _ = inputs_of(group, "causal", meta, meta)
    for backend in ("te", "torch"):
        layer = layer_of(group, "causal")
        if backend == "torch":
            layer = DotProductAttention(4 * group.size(), 64, tp_group=group)
        for asked in ("fp8_dpa", "fp8_mha"):
            with (
                autocast(make_recipe("fp8_delayed", **{asked: True}), group),
                pytest.raises(ValueError, match="no backend can train on packed"),
            ):
                layer(*inputs, meta)
    single = [x.float() for x in inputs]
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        layer_of(group, "causal")(*single, meta)


@pytest.mark.max_ranks(2)
def test_refusals(ranks):
    ranks.run(refusals_body)


@on_te
def head_size_body(group, head_dim):
    device = device_of(group)
    meta, _ = metas_of(group, True, False)
    x = torch.randn(meta.num_rows, 2, head_dim, device=device, dtype=torch.bfloat16)
    layer = DotProductAttention(2 * group.size(), head_dim, tp_group=group, backend="te")
    with pytest.raises(ValueError, match=f"takes 2 heads of {head_dim}"):
        layer(x, x, x, meta)


@on_te
def recipes_body(group):
    """One shape of attention under one recipe after another: nothing is kept, or warned of."""
    from padded_sp.backends.te import autocast

    meta, _ = metas_of(group, True, False)
    inputs, grad = inputs_of(group, "causal", meta, meta)
    layer = layer_of(group, "causal")
    expected = run_layer(layer, inputs, grad, meta, None)
    for recipe in ("fp8_delayed", "fp8_current", "fp8_blockwise"):
        with autocast(recipe_of(recipe), group):
            got = run_layer(layer, inputs, grad, meta, None)
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.max_ranks(2)
def test_fp8_recipes_leave_attention_alone(ranks):
    ranks.run(recipes_body)


@on_te
def proof_body(group):
    from padded_sp import verdict, verify

    meta, _ = metas_of(group, True, False)
    inputs, _ = inputs_of(group, "causal", meta, meta)
    wrong = verify.Verdict("attention of te", False, {"grad_k": 0.3}, {"grad_k": 0.02})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "agreed", lambda check, key, group: wrong)
        with pytest.raises(ValueError, match=r"wrong on this machine.*grad_k 0\.3"):
            layer_of(group, "causal")(*inputs, meta)
        layer_of(group, "causal", verify=False)(*inputs, meta)
        patch.setenv("PADDED_SP_VERIFY", "0")
        layer_of(group, "causal")(*inputs, meta)
    layer = layer_of(group, "causal")
    layer.prepare(torch.bfloat16, device_of(group))
    copy.deepcopy(layer)(*inputs, meta)


@pytest.mark.max_ranks(2)
def test_wrong_numbers_are_refused(ranks):
    ranks.run(proof_body)


@only_the_real_one
@pytest.mark.parametrize("head_dim", [36, 288])
def test_head_sizes_without_a_kernel(ranks, head_dim):
    ranks.run(head_size_body, head_dim=head_dim)


@on_te
def state_body(group):
    from padded_sp.backends.te import te

    plain = te.DotProductAttention(4, 64, qkv_format="thd")
    ours = layer_of(group, "causal")
    holder, theirs = torch.nn.ModuleDict({"a": ours}), torch.nn.ModuleDict({"a": plain})
    holder.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(holder.state_dict())


@pytest.mark.max_ranks(1)
def test_state_dicts_pass_both_ways(ranks):
    ranks.run(state_body)
