"""RMSNorm and LayerNorm over rows that are divided over ranks."""

import pytest
import torch
from rank_helpers import comm_counts, device_of, drawn
from torch.distributed.tensor.debug import CommDebugMode

from padded_sp import PaddedSeqMeta
from padded_sp.backends import reference
from padded_sp.gradients import reduce_replicated_gradients
from padded_sp.normalization import LayerNorm, RMSNorm

H, T = 20, 24
REFERENCE = {RMSNorm: reference.rms_norm, LayerNorm: reference.layer_norm}


def meta_of(group):
    return PaddedSeqMeta.from_seq_lens(
        [5, 0, 1, 7], padded_lens=[6, 2, 4, 12], tp_size=group.size(), device=device_of(group)
    )


def part(tensor, group, sequence_parallel=True):
    return tensor.chunk(group.size())[group.rank()] if sequence_parallel else tensor


def build(kind, group, **arguments):
    layer = kind(H, tp_group=group, device=device_of(group), **arguments)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(group, H, seed=10 + seed))
    return layer


def matches_reference(group, kind, dtype, sequence_parallel, middle, zero_centered_gamma):
    meta = meta_of(group)
    layer = build(
        kind,
        group,
        params_dtype=dtype,
        sequence_parallel=sequence_parallel,
        zero_centered_gamma=zero_centered_gamma,
    )
    x_full, grad_full = (drawn(group, T, *middle, H, seed=s, dtype=dtype) for s in (1, 2))
    x = part(x_full, group, sequence_parallel).clone().requires_grad_()
    with CommDebugMode() as comms:
        y = layer(x, meta)
        y.backward(part(grad_full, group, sequence_parallel).clone())
    assert comm_counts(comms) == {}

    # What a rank computes needs no other rank, so it is compared exactly.
    rank, size = (group.rank(), group.size()) if sequence_parallel else (0, 1)
    x_full.requires_grad_()
    gammas = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    weight = gammas[0] + 1 if zero_centered_gamma else gammas[0]
    bias = gammas[1] if kind is LayerNorm else None
    expected = REFERENCE[kind](x_full.chunk(size), weight, bias, layer.eps, meta)
    expected[rank].backward(grad_full.chunk(size)[rank])
    assert y.dtype == dtype
    assert torch.equal(y, expected[rank])
    assert torch.equal(x.grad, x_full.grad.chunk(size)[rank])
    for parameter, gamma in zip(layer.parameters(), gammas, strict=True):
        assert torch.equal(parameter.grad, gamma.grad)
        assert getattr(parameter, "sequence_parallel", False) == sequence_parallel


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_matches_reference(ranks, kind, dtype, sequence_parallel, zero_centered_gamma):
    for middle in ((), (2,)):
        ranks.run(
            matches_reference,
            kind=kind,
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            middle=middle,
            zero_centered_gamma=zero_centered_gamma,
        )


def reduced_gradient_is_the_whole(group, kind):
    meta, layer = meta_of(group), build(kind, group)
    alone = kind(H, device=device_of(group))
    alone.load_state_dict(layer.state_dict())
    model = torch.nn.ModuleList([layer, torch.nn.Linear(1, 1, device=device_of(group))])
    x_full, grad_full = drawn(group, T, H), drawn(group, T, H, seed=2)
    layer(part(x_full, group), meta).backward(part(grad_full, group).clone())
    with CommDebugMode() as comms:
        reduce_replicated_gradients(model, group)
    # One all-reduce for weight and bias together.
    assert comm_counts(comms) == ({"all_reduce": 1} if group.size() > 1 else {})
    alone(x_full, meta).backward(grad_full)
    for mine, whole in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_reduce_replicated_gradients(ranks, kind):
    ranks.run(reduced_gradient_is_the_whole, kind=kind)


def reduces_marked_parameters_once(group):
    device = device_of(group)
    marked = torch.nn.Parameter(torch.zeros(3, device=device))
    low = torch.nn.Parameter(torch.zeros(2, 2, device=device, dtype=torch.bfloat16))
    plain = torch.nn.Parameter(torch.zeros(3, device=device))
    idle = torch.nn.Parameter(torch.zeros(3, device=device))
    marked.sequence_parallel = low.sequence_parallel = idle.sequence_parallel = True
    model = torch.nn.Module()
    model.tied = torch.nn.Module()
    model.a, model.b, model.c, model.d, model.tied.a = marked, low, plain, idle, marked
    for parameter in (marked, low, plain):
        parameter.grad = torch.full_like(parameter, group.rank() + 1.0)
    with CommDebugMode() as comms:
        reduce_replicated_gradients(model, group)
    total = sum(range(1, group.size() + 1))
    assert (marked.grad == total).all()
    assert (low.grad == total).all()
    assert (plain.grad == group.rank() + 1).all()
    assert idle.grad is None
    # One for each dtype.
    assert comm_counts(comms) == ({"all_reduce": 2} if group.size() > 1 else {})
    reduce_replicated_gradients(model, None)
    assert (marked.grad == total).all()


def test_reduces_marked_parameters_once(ranks):
    ranks.run(reduces_marked_parameters_once)


def poison_changes_nothing(group, kind, inplace, expanded):
    meta, outcomes = meta_of(group), []
    pads = meta.padding_mask[:, None]
    for poison in (0.0, float("nan"), 1e4):
        layer = build(kind, group, inplace=inplace)
        x_full = drawn(group, T, H).masked_fill(pads, poison)
        grad_full = drawn(group, T, 1 if expanded else H, seed=2).masked_fill(pads, poison)
        leaf = part(x_full, group).clone().requires_grad_()
        grad_y = part(grad_full.expand(T, H), group)
        y = layer(leaf * 1, meta)
        y.backward(grad_y if expanded else grad_y.clone())
        outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
        assert (y[part(pads, group)[:, 0]] == 0).all()
        assert (leaf.grad[part(pads, group)[:, 0]] == 0).all()
    for outcome in outcomes[1:]:
        for poisoned, clean in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(poisoned, clean)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_pads_are_inert(ranks, kind, inplace, expanded):
    ranks.run(poison_changes_nothing, kind=kind, inplace=inplace, expanded=expanded)


def autocast_keeps_the_wider_dtype(group, kind):
    meta, layer = meta_of(group), build(kind, group)
    x = part(drawn(group, T, H, dtype=torch.bfloat16), group)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = layer(x, meta)
    assert y.dtype == torch.float32
    assert torch.equal(y, layer(x.float(), meta))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_autocast(ranks, kind):
    ranks.run(autocast_keeps_the_wider_dtype, kind=kind)


def raises(group, kind):
    meta, layer = meta_of(group), build(kind, group)
    x = part(drawn(group, T, H), group)
    for message, bad in {
        "rows": x[1:],
        "takes x": x[:, 1:],
        "convert x": x.double(),
        "move them": x.to("meta"),
    }.items():
        with pytest.raises(ValueError, match=message):
            layer(bad, meta)
    with pytest.raises(ValueError, match="seq_meta"):
        layer(x)
    if group.size() > 1:
        with pytest.raises(ValueError, match="set_tensor_parallel_group"):
            kind(H, tp_size=group.size(), device=x.device)(x, meta)
    with pytest.raises(ValueError, match="ranks"):
        kind(H, tp_size=5).set_tensor_parallel_group(group)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_wrong_calls_raise(ranks, kind):
    ranks.run(raises, kind=kind)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_wrong_construction_raises(kind):
    for eps in (0, 0.0, -1e-5, 1e-30, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"eps must be finite and at least 1e-24, got"):
            kind(H, eps)
    for size in (0, -1, 20.0, True):
        with pytest.raises(ValueError, match="normalized_shape must be an integer of at least 1"):
            kind(size)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_least_eps_keeps_zero_rows_zero(kind):
    meta = PaddedSeqMeta.from_seq_lens([5], padded_lens=[8])
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer = kind(H, 1e-24)
    y = layer(x, meta)
    y.square().sum().backward()
    for t in (y, x.grad):
        assert not t[5:].any()
    for t in (y, x.grad, *(p.grad for p in layer.parameters())):
        assert t.isfinite().all()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_shapes_alone_on_the_meta_device(kind):
    meta = PaddedSeqMeta.from_seq_lens([5], padded_lens=[8], device="meta")
    assert kind(H, device="meta")(torch.empty(8, H, device="meta"), meta).shape == (8, H)
