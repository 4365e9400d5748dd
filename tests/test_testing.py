"""The public tools: they pass on layers that keep the promise, and name what breaks it."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from padded_sp import (
    ColumnParallelLinear,
    DotProductAttention,
    LayerNorm,
    LayerNormColumnParallelLinear,
    PaddedSeqMeta,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rotary,
    carry_meta,
    vocab_parallel_cross_entropy,
    zero_padding,
)
from padded_sp.context import resolve_meta
from padded_sp.testing import assert_packing_equivalent, assert_padding_inert

H = 8


@pytest.fixture
def meta() -> PaddedSeqMeta:
    return PaddedSeqMeta.from_seq_lens([3, 0, 5, 1], padded_lens=[4, 1, 5, 6])


def rows(meta: PaddedSeqMeta, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(meta.num_rows, *shape, generator=generator)


class Block(nn.Module):
    """Attention between our layers, which take their meta from the surroundings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = LayerNormColumnParallelLinear(H, 3 * H)
        self.attention = DotProductAttention(2, H // 2)
        self.out = RowParallelLinear(H, H)
        self.norm = RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (2, H // 2)) for t in self.qkv(x).chunk(3, dim=1))
        # The residual lets pads through, so the block ends with zeros in their place.
        return zero_padding(x + self.norm(self.out(self.attention(q, k, v))), resolve_meta(None))


# ---- what keeps the promise ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        lambda: ColumnParallelLinear(H, 12),
        lambda: RowParallelLinear(H, 6),
        lambda: RowParallelLinear(H, 6, return_bias=True),
        lambda: LayerNormColumnParallelLinear(H, 12, normalization="RMSNorm"),
        lambda: RMSNorm(H),
        lambda: LayerNorm(H),
    ],
)
def test_layers_keep_pads_inert_and_sequences_apart(layer, meta):
    layer = layer()
    assert_padding_inert(layer, rows(meta, H), meta)
    if not getattr(layer, "return_bias", False):
        assert_packing_equivalent(layer, rows(meta, H), meta)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_attention_keeps_pads_inert_and_sequences_apart(mask, meta):
    attention = DotProductAttention(2, H, num_kv_heads=1, mask=mask)
    inputs = {"q": rows(meta, 2, H), "k": rows(meta, 1, H), "v": rows(meta, 1, H)}
    assert_padding_inert(attention, inputs, meta)
    assert_packing_equivalent(attention, inputs, meta)


def test_dropout_draws_the_same_in_every_run(meta):
    attention = DotProductAttention(2, H, dropout=0.5)
    assert_padding_inert(attention, [rows(meta, 2, H)] * 3, meta)


def test_rotary_with_tables_that_are_no_rows(meta):
    angles = torch.arange(9.0)[:, None] * torch.ones(H // 2)
    tables = [angles.cos(), angles.sin()]
    assert_padding_inert(apply_rotary, [rows(meta, 2, H), *tables], meta)
    assert_packing_equivalent(apply_rotary, [rows(meta, 2, H), *tables], meta)


def test_a_block_under_the_surrounding_meta(meta):
    block = Block()
    assert_padding_inert(block, rows(meta, H), meta)
    assert_packing_equivalent(block, rows(meta, H), meta)


def test_a_block_behind_a_lambda_or_a_method(meta):
    block = Block()
    for fn in (lambda x: block(x), block.forward):
        assert_padding_inert(fn, rows(meta, H), meta)
        assert_packing_equivalent(fn, rows(meta, H), meta)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks(use_reentrant, meta):
    block = Block()

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(carry_meta(block), x, use_reentrant=use_reentrant)

    assert_padding_inert(recomputed, rows(meta, H), meta, params=block)
    assert_packing_equivalent(recomputed, rows(meta, H), meta, params=block.parameters())


def test_from_ids_to_loss(meta):
    embedding, head = VocabParallelEmbedding(20, H), ColumnParallelLinear(H, 20, bias=False)

    def loss(ids: Tensor, labels: Tensor, meta: PaddedSeqMeta) -> dict[str, Tensor]:
        logits = head(embedding(ids, meta), meta)
        return {"loss": vocab_parallel_cross_entropy(logits, labels, meta), "logits": logits}

    ids = torch.arange(meta.num_rows)
    params = [*embedding.parameters(), *head.parameters()]
    assert_padding_inert(loss, [ids, ids.flip(0)], meta, params=params)


def test_capacity_metas(meta):
    capacity = meta.with_capacity(5, 16, 8)
    assert_padding_inert(ColumnParallelLinear(H, 12), rows(capacity, H), capacity)


# ---- what breaks it -----------------------------------------------------------------------------


class Masked(nn.Linear):
    """Zero pad rows outside; inside, 0 * NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return zero_padding(super().forward(x), resolve_meta(None))


def test_a_plain_linear_poisons_its_weight_gradient(meta):
    with pytest.raises(AssertionError, match=r"padding is not inert: output, row 3 .* must be 0"):
        assert_padding_inert(nn.Linear(H, 6), rows(meta, H), meta)

    with pytest.raises(
        AssertionError,
        match=r"gradient of parameter weight at \(0, 0\) is \S+ with 0 in pad rows, nan with nan",
    ):
        assert_padding_inert(Masked(H, 6, bias=False), rows(meta, H), meta)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda model: lambda x: model(x), r"\d of shape \(6, 8\)"),
        (lambda model: lambda x: (model(x), x.sum(1, keepdim=True)), r"\d of shape \(6, 8\)"),
        (lambda model: model.forward, "weight"),
        (lambda model: functools.wraps(model)(lambda x: model(x)), "weight"),
        (lambda model: functools.partial(model), r"\d of shape \(6, 8\)"),
    ],
    ids=["lambda", "several outputs", "bound method", "wrapper", "partial"],
)
def test_parameters_are_found_behind_a_function(call, name, meta):
    leaks = Masked(H, 6)
    message = rf"gradient of parameter {name} at \(0, 0\) is \S+ with 0 in pad rows, nan with nan"
    with pytest.raises(AssertionError, match=message):
        assert_padding_inert(call(leaks), rows(meta, H), meta)
    assert leaks.weight.grad is None


def test_pads_of_integer_inputs_are_poisoned_too(meta):
    class Count(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids.sum()

    ids = torch.arange(meta.num_rows)
    with pytest.raises(AssertionError, match=r"output at \(\) is 48 with 0 .*, 118 with nan"):
        assert_padding_inert(Count(), ids, meta)


def test_pads_that_are_attended(meta):
    def attend(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        same = meta.sequence_ids[:, None] == meta.sequence_ids
        keys = x.detach()  # else the gradient of zero pads is found first
        scores = (x @ keys.T).masked_fill(~same, float("-inf"))
        return zero_padding(scores.softmax(1) @ keys, meta)

    with pytest.raises(
        AssertionError, match=r"output, row 0 \(token, position 0 of sequence 0\), at \(0, 0\) is"
    ):
        assert_padding_inert(attend, rows(meta, H), meta)


def test_a_gradient_that_reaches_pad_rows(meta):
    class ForwardOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, meta):
            return zero_padding(x, meta)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    message = r"gradient of input 0, row 3 \(pad, position 3 of sequence 0\), at \(3, 0\) is nan"
    with pytest.raises(AssertionError, match=message):
        assert_padding_inert(lambda x, meta: ForwardOnly.apply(x, meta), rows(meta, H), meta)


def test_statistics_that_count_pads(meta):
    class Tracked(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.running_mean.copy_(x.detach().mean(0))
            return zero_padding(x, resolve_meta(None))

    module = Tracked(H, affine=False)
    with pytest.raises(AssertionError, match=r"buffer running_mean .* nan with nan in pad rows"):
        assert_padding_inert(module, rows(meta, H), meta)
    assert torch.equal(module.running_mean, torch.zeros(H))


def test_what_is_not_deterministic_cannot_be_proved(meta):
    calls = iter(range(9))
    with pytest.raises(AssertionError, match=r"not deterministic: .* output, row 0 .* in one run"):
        assert_padding_inert(
            lambda x, meta: zero_padding(x, meta) + next(calls), rows(meta, H), meta
        )


def test_an_output_of_another_shape(meta):
    def real(x: Tensor) -> Tensor:
        return x[~x.isnan().any(1)]

    with pytest.raises(AssertionError, match=r"output is \(16, 8\) with 0 .*, \(9, 8\) with nan"):
        assert_padding_inert(lambda x, meta: real(x) * 0, rows(meta, H), meta)


def test_a_gradient_that_comes_and_goes(meta):
    def sometimes(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        y = zero_padding(x, meta)
        return y.detach() if x.isnan().any() else y

    with pytest.raises(AssertionError, match="gradient of input 0 exists only with 0 in pad rows"):
        assert_padding_inert(sometimes, rows(meta, H), meta)


def test_attention_across_boundaries_is_not_equivalent(meta):
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]

    with pytest.raises(
        AssertionError, match=r"packing changes .* output, row 5 .* alone, \S+ packed"
    ):
        assert_packing_equivalent(attend, rows(meta, H), meta)


def test_parameter_gradients_must_add_up(meta):
    class MeanGradient(torch.autograd.Function):
        """x * scale, whose scale gets the mean over the rows of the pack, not the sum."""

        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale, (grad * x).sum() / x.shape[0]

    scale = torch.ones((), requires_grad=True)
    message = r"packing changes .* gradient of parameter 0 at \(\) is \S+ alone, \S+ packed"
    with pytest.raises(AssertionError, match=message):
        assert_packing_equivalent(
            lambda x: MeanGradient.apply(x, scale), rows(meta, H), meta, params=[scale]
        )

    with pytest.raises(AssertionError, match=message.replace("0 at", r"0 of shape \(\) at")):
        assert_packing_equivalent(lambda x: MeanGradient.apply(x, scale), rows(meta, H), meta)


def test_the_tolerance_can_fail_and_be_widened(meta):
    def off(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        return x * (1 + 1e-3 * (meta.num_sequences > 1))

    with pytest.raises(AssertionError, match="packing changes the result: output, row"):
        assert_packing_equivalent(off, rows(meta, H), meta)
    assert_packing_equivalent(off, rows(meta, H), meta, rtol=1e-2)


def test_a_hidden_parameter_must_be_named(meta):
    block = Block()
    hidden = lambda x: checkpoint(carry_meta(block), x, use_reentrant=True)  # noqa: E731
    with pytest.raises(ValueError, match="a reentrant checkpoint hides its parameters"):
        assert_padding_inert(hidden, rows(meta, H), meta)


# ---- what would prove nothing -------------------------------------------------------------------


@pytest.mark.parametrize("check", [assert_padding_inert, assert_packing_equivalent])
@pytest.mark.parametrize("returned", [None, (), [{}, (None, "text")]], ids=repr)
def test_nothing_to_compare(check, returned, meta):
    with pytest.raises(ValueError, match="the function returned no tensor to compare: return what"):
        check(lambda x: returned, rows(meta, H), meta)


def test_objects_that_hide_tensors(meta):
    class Output:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    with pytest.raises(ValueError, match=r"output\[1\] is a Output, whose tensors would go unseen"):
        assert_padding_inert(lambda x: (x, Output(x)), rows(meta, H), meta)


@pytest.mark.parametrize("poisons", [(), [0.0, 0]])
def test_no_poison(poisons, meta):
    with pytest.raises(ValueError, match="puts nothing but 0 into pad rows"):
        assert_padding_inert(RMSNorm(H), rows(meta, H), meta, poisons=poisons)


def count(ids: Tensor, meta: PaddedSeqMeta) -> int:
    return int(ids.masked_fill(meta.padding_mask, 0).sum())


def test_no_gradient_where_there_should_be_one(meta):
    norm = RMSNorm(H)

    def own_backward(x: Tensor) -> Tensor:
        y = norm(x)
        torch.autograd.grad(y.sum(), norm.weight)
        return y.detach()

    message = "no gradient came of output: nothing is known of backward. Return tensors before"
    for fn in (own_backward, lambda x: norm(x).argmax(1), lambda x: len(x)):
        with pytest.raises(ValueError, match=message):
            assert_padding_inert(fn, rows(meta, H), meta)
        assert_padding_inert(fn, rows(meta, H), meta, backward=False)
    with pytest.raises(ValueError, match=message):
        assert_packing_equivalent(own_backward, rows(meta, H), meta)
    assert_packing_equivalent(own_backward, rows(meta, H), meta, backward=False)
    assert_padding_inert(count, torch.arange(meta.num_rows), meta)  # integers have no gradient


def test_numbers_are_compared(meta):
    with pytest.raises(AssertionError, match=r"output\['sum'\] at \(\) is 48 with 0 .*, 118 with"):
        assert_padding_inert(lambda ids: {"sum": int(ids.sum())}, torch.arange(meta.num_rows), meta)
    with pytest.raises(AssertionError, match=r"output at \(\) is \S+ with 0 .*, nan with nan"):
        assert_padding_inert(lambda x: float(x.detach().sum()), rows(meta, H), meta)


# ---- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_rows(dtype, meta):
    x = rows(meta, H, 2).to(dtype.to_real())
    z = torch.view_as_complex(x)

    def turned(z: Tensor, meta: PaddedSeqMeta) -> Tensor:
        return zero_padding(z * 1j, meta)

    assert_padding_inert(turned, z, meta)
    assert_packing_equivalent(turned, z, meta)
    with pytest.raises(
        AssertionError, match=r"output, row 3 \(pad, .*\), at \(3, 0, 0\) is nan with nan in pad"
    ):
        assert_padding_inert(lambda z: z * 1j, z, meta)

    def imaginary(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        """Real rows take an imaginary part from the last row, a pad."""
        return zero_padding(torch.complex(x, x[-1].detach().expand_as(x)), meta)

    with pytest.raises(
        AssertionError, match=r"output, row 0 \(token, .*\), at \(0, 0, 1\) is 0 with 0 in pad rows"
    ):
        assert_padding_inert(imaginary, x[..., 0].contiguous(), meta, poisons=[1e4])
    with pytest.raises(AssertionError, match=r"output at \(\) is \S+ with 0 .*, \S+ with 10000"):
        assert_padding_inert(lambda z: z.detach().imag.sum(), z, meta, poisons=[1e4])


def test_integer_rows_of_several_columns(meta):
    ids = torch.arange(2 * meta.num_rows).view(-1, 2)
    assert_padding_inert(lambda ids, meta: zero_padding(ids, meta), ids, meta)
    with pytest.raises(AssertionError, match=r"output at \(\) is \S+ with 0 .*, \S+ with nan"):
        assert_padding_inert(lambda ids: ids.sum(), ids, meta)


# ---- manners ------------------------------------------------------------------------------------


def test_leaves_gradients_and_the_rng_state_alone(meta):
    layer, broken = ColumnParallelLinear(H, 6), nn.Linear(H, 6)
    layer.weight.grad = kept = torch.ones_like(layer.weight)
    state = torch.get_rng_state()

    def noisy(x: Tensor, meta: PaddedSeqMeta) -> Tensor:
        return layer(zero_padding(F.dropout(x), meta), meta)

    assert_padding_inert(noisy, rows(meta, H), meta, params=layer)
    with pytest.raises(AssertionError):
        assert_padding_inert(broken, rows(meta, H), meta)
    assert layer.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert layer.bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_leaves_the_inputs_alone(meta):
    x = rows(meta, H)
    kept = x.clone()
    assert_padding_inert(ColumnParallelLinear(H, 6), x, meta)
    assert torch.equal(x, kept)
    assert not x.requires_grad


def test_wrong_rows_raise(meta):
    with pytest.raises(ValueError, match=re.escape("no input has the 16 rows of its meta")):
        assert_padding_inert(RMSNorm(H), torch.ones(12, H), meta)
    with pytest.raises(ValueError, match=re.escape("output is (), without the 16 rows")):
        assert_packing_equivalent(lambda x: x.mean(), rows(meta, H), meta)
