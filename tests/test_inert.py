"""Inert pads next to operations that are not ours: before a layer, and in place behind it."""

import pytest
import torch
import torch.nn.functional as F

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
)

META = PaddedSeqMeta.from_seq_lens([5, 3, 0], padded_lens=[8, 4, 4])
FEATURES = 8

BEFORE = {
    "abs": torch.abs,
    "cos": torch.cos,
    "cumprod": lambda z: torch.cumprod(z, 1),
    "cumsum": lambda z: torch.cumsum(z, 1),
    "dropout": lambda z: F.dropout(z, 0.5),
    "elu": F.elu,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "foreach_sqrt": lambda z: torch._foreach_sqrt([z])[0],
    "gelu": F.gelu,
    "hypot": lambda z: torch.hypot(z, 2 * z),
    "layer_norm": lambda z: F.layer_norm(z, (FEATURES,)),
    "log": torch.log,
    "log_softmax": lambda z: F.log_softmax(z, 1),
    "logcumsumexp": lambda z: torch.logcumsumexp(z, 1),
    "logsumexp": lambda z: torch.logsumexp(100 * torch.stack([z, z + 1]), 0),
    "normalize": lambda z: F.normalize(z, dim=1),
    "pow": lambda z: z**1.5,
    "pow_tensor": lambda z: z**z,
    "reciprocal": torch.reciprocal,
    "relu": F.relu,
    "rms_norm": lambda z: F.rms_norm(z, (FEATURES,)),
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmax": lambda z: F.softmax(z, 1),
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "sqrt_viewed": lambda z: torch.sqrt(z).view(-1, 2, 4).flatten(1),
    "std": lambda z: torch.std(torch.stack([z, 2 * z]), 0),
    "tan": torch.tan,
    "tanh": torch.tanh,
    "vector_norm": lambda z: torch.linalg.vector_norm(torch.stack([z, 2 * z]), dim=0),
}


@pytest.mark.parametrize("name", BEFORE)
def test_overwritten_pads_harm_no_operation_before_the_layer(name):
    def gradients(inplace):
        torch.manual_seed(0)
        linear = ColumnParallelLinear(FEATURES, 6, inplace=inplace)
        upstream = torch.nn.Linear(FEATURES, FEATURES)
        z = upstream(torch.rand(META.num_rows, FEATURES)).abs() + 0.5  # nothing special in pads
        linear(BEFORE[name](z), META).square().sum().backward()
        return [p.grad for p in (*upstream.parameters(), *linear.parameters())]

    for ours, copied in zip(gradients(True), gradients(False), strict=True):
        assert torch.isfinite(copied).all()
        assert torch.equal(ours, copied)


IN_PLACE = {
    "add_": lambda y: y.add_(1),
    "mul_": lambda y: y.mul_(2),
    "dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "twice": lambda y: F.silu(y.mul_(2), inplace=True),
}
ROTARY = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))


def layers():
    heads = (META.num_rows, 2, 4)
    yield "column", ColumnParallelLinear(FEATURES, 6), [(META.num_rows, FEATURES)]
    yield "column, 3-D", ColumnParallelLinear(FEATURES, 6), [(META.num_rows, 1, FEATURES)]
    yield "row", RowParallelLinear(FEATURES, 6), [(META.num_rows, FEATURES)]
    yield "row, 3-D", RowParallelLinear(FEATURES, 6), [(META.num_rows, 2, FEATURES)]
    norm_column = LayerNormColumnParallelLinear(FEATURES, 6)
    yield "norm + column", norm_column, [(META.num_rows, FEATURES)]
    yield "rms norm", RMSNorm(FEATURES), [(META.num_rows, FEATURES)]
    yield "layer norm", LayerNorm(FEATURES), [(META.num_rows, FEATURES)]
    yield "attention", DotProductAttention(2, 4), [heads] * 3
    yield "rotary", lambda x, m: apply_rotary(x, ROTARY.cos(), ROTARY.sin(), m), [heads]
    embedding = VocabParallelEmbedding(10, FEATURES)
    ids = torch.arange(META.num_rows) % 10
    yield "embedding", lambda _, m: embedding(ids, m), [(1,)]


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradient_stays_inert_when_the_caller_goes_on_in_place(name):
    for layer_name, layer, shapes in layers():
        results = []
        for poison in (0.0, float("nan"), 1e4):
            torch.manual_seed(1)
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            y = layer(*inputs, META)
            # Attention's is a view of what the hook is on: see test_attend.py.
            assert y._base is None or layer_name == "attention", layer_name
            z = IN_PLACE[name](y)
            grad = torch.randn_like(z)
            grad[META.pad_rows] = poison
            parameters = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
            leaves = [t for t in (*inputs, *parameters) if t.numel() > 1]
            results.append(torch.autograd.grad(z, leaves, grad) if leaves else ())
        for clean, *poisoned in zip(*results, strict=True):
            assert torch.isfinite(clean).all(), layer_name
            for other in poisoned:
                assert torch.equal(clean, other), layer_name


def test_one_tensor_as_query_and_key_of_other_lengths():
    # Rows 5..8 are real queries and pad keys: zeroing the keys in place would zero the queries.
    queries, keys = (
        PaddedSeqMeta.from_seq_lens(lengths, padded_lens=[8, 8]) for lengths in ([8, 8], [4, 4])
    )
    attention = DotProductAttention(2, 4, mask="full")
    h = torch.randn(16, 2, 4, requires_grad=True) * 1
    expected = attention(h.clone(), h.clone(), h.clone(), queries, keys)
    before = h.detach().clone()
    assert torch.equal(attention(h, h, h, queries, keys), expected)
    assert torch.equal(h, before)
