"""The mappings: values, gradients against their formulas, collectives of either pass, refusals."""

import pytest
import torch
import torch.distributed as dist
from rank_helpers import bits, comm_counts, device_of, extremes
from torch.distributed.tensor.debug import CommDebugMode

import padded_sp.mappings as mappings
from padded_sp import PaddedSeqMeta, seq_meta

GATHER, SUM_SCATTER = {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}
EXCHANGE, SUM = {"all_to_all_single": 1}, {"all_reduce": 1}
COLUMNS = 12  # divides over 1, 2, 3 and 4 ranks


def meta_on(group):
    """12 rows per rank, of which some are pads."""
    size = dist.get_world_size(group)
    seq_lens, padded_lens = [5, 0, 3], [7, 0, 12 * size - 7]
    return PaddedSeqMeta.from_seq_lens(
        seq_lens, padded_lens=padded_lens, tp_size=size, device=device_of(group)
    )


def random(shape, rank, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


# Each mapping over all ranks at once: every rank's input in, every rank's output and, from every
# rank's gradient, every rank's input gradient out. `whole` tensors are the same on every rank.


def rows(x, size):
    return list(x.chunk(size))


def columns(x, size):
    return list(x.chunk(size, dim=-1))


def total(terms):
    return torch.stack(terms).sum(0)


def same_on_all(x, size):
    return [x] * size


MAPPINGS = {
    # name: (mapping, input is, output's formula, gradient's formula, forward, backward)
    "gather": (
        mappings.gather_from_sequence_parallel_region,
        "rows",
        lambda xs, n: same_on_all(torch.cat(xs), n),
        lambda gs, n: rows(total(gs), n),
        GATHER,
        SUM_SCATTER,
    ),
    "gather, replicated gradient": (
        lambda x, meta, group: mappings.gather_from_sequence_parallel_region(
            x, meta, group, tensor_parallel_output_grad=False
        ),
        "rows",
        lambda xs, n: same_on_all(torch.cat(xs), n),
        lambda gs, n: [rows(g, n)[r] for r, g in enumerate(gs)],
        GATHER,
        {},
    ),
    "reduce_scatter": (
        mappings.reduce_scatter_to_sequence_parallel_region,
        "full",
        lambda xs, n: rows(total(xs), n),
        lambda gs, n: same_on_all(torch.cat(gs), n),
        SUM_SCATTER,
        GATHER,
    ),
    "scatter": (
        mappings.scatter_to_sequence_parallel_region,
        "full",
        lambda xs, n: [rows(x, n)[r] for r, x in enumerate(xs)],
        lambda gs, n: same_on_all(torch.cat(gs), n),
        {},
        GATHER,
    ),
    "copy": (
        lambda x, meta, group: mappings.copy_to_tensor_model_parallel_region(x, group),
        "full",
        lambda xs, n: xs,
        lambda gs, n: same_on_all(total(gs), n),
        {},
        SUM,
    ),
    "reduce": (
        lambda x, meta, group: mappings.reduce_from_tensor_model_parallel_region(x, group),
        "full",
        lambda xs, n: same_on_all(total(xs), n),
        lambda gs, n: gs,
        SUM,
        {},
    ),
    "scatter columns": (
        lambda x, meta, group: mappings.scatter_to_tensor_model_parallel_region(x, group),
        "full",
        lambda xs, n: [columns(x, n)[r] for r, x in enumerate(xs)],
        lambda gs, n: same_on_all(torch.cat(gs, -1), n),
        {},
        GATHER,
    ),
    "gather columns": (
        lambda x, meta, group: mappings.gather_from_tensor_model_parallel_region(x, group),
        "columns",
        lambda xs, n: same_on_all(torch.cat(xs, -1), n),
        lambda gs, n: [columns(g, n)[r] for r, g in enumerate(gs)],
        GATHER,
        {},
    ),
    "rows to columns": (
        mappings.all_to_all_sp2hp,
        "rows",
        lambda xs, n: columns(torch.cat(xs), n),
        lambda gs, n: rows(torch.cat(gs, -1), n),
        EXCHANGE,
        EXCHANGE,
    ),
    "columns to rows": (
        mappings.all_to_all_hp2sp,
        "columns",
        lambda xs, n: rows(torch.cat(xs, -1), n),
        lambda gs, n: columns(torch.cat(gs), n),
        EXCHANGE,
        EXCHANGE,
    ),
}
SUMS_FORWARD = ("reduce_scatter", "reduce")
SUMS_BACKWARD = ("gather", "copy")


def input_shape(layout, meta, size, middle=()):
    share = {"rows": (size, 1), "full": (1, 1), "columns": (1, size)}[layout]
    return (meta.num_rows // share[0], *middle, COLUMNS // share[1])


def sums_agree(actual, expected, magnitude, size):
    """Each of the size - 1 additions rounds by at most eps / 2 of the sum of absolute terms, here
    `magnitude`; twice that, for the sum that is compared with."""
    bound = size * torch.finfo(actual.dtype).eps * magnitude
    return bool(((actual.double() - expected.double()).abs() <= bound).all())


def agree(actual, formula, tensors, rank, sums):
    """Bit for bit, but where the formula sums over ranks."""
    size = len(tensors)
    expected = formula([t.double() for t in tensors], size)[rank]
    if size == 1 or not sums:
        return torch.equal(actual, expected.to(actual.dtype))
    magnitude = formula([t.double().abs() for t in tensors], size)[rank]
    return sums_agree(actual, expected, magnitude, size)


def maps_both_ways(group, which, dtype, middle):
    mapping, layout, forward, backward, forward_comms, backward_comms = MAPPINGS[which]
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    meta = meta_on(group)
    shape = input_shape(layout, meta, size, middle)
    xs = [random(shape, r, dtype, device) for r in range(size)]
    gradient_shape = forward(xs, size)[rank].shape
    gradients = [random(gradient_shape, r, dtype, device, seed=1) for r in range(size)]

    x = xs[rank].clone().requires_grad_()
    with CommDebugMode() as comms:
        y = mapping(x, meta, group)
        assert comm_counts(comms) == (forward_comms if size > 1 else {})
    with CommDebugMode() as comms:
        y.backward(gradients[rank])
        assert comm_counts(comms) == (backward_comms if size > 1 else {})

    assert y.dtype == x.grad.dtype == dtype
    assert y.shape == gradient_shape
    assert agree(y, forward, xs, rank, sums=which in SUMS_FORWARD)
    assert agree(x.grad, backward, gradients, rank, sums=which in SUMS_BACKWARD)
    if size > 1:
        y.detach().fill_(7)
        assert which == "copy" or torch.equal(x, xs[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", MAPPINGS)
def test_values_gradients_and_collectives(ranks, which, dtype):
    ranks.run(maps_both_ways, which=which, dtype=dtype, middle=())


@pytest.mark.parametrize("which", MAPPINGS)
def test_with_dims_in_the_middle(ranks, which):
    ranks.run(maps_both_ways, which=which, dtype=torch.float32, middle=(1, 2))


def maps_extremes(group, which, dtype):
    """The formulas are of bits: a sum has one rank's infinity there, and zeros of the others."""
    mapping, layout, forward, backward, *_ = MAPPINGS[which]
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    meta = meta_on(group)

    def drawn(shape, sums, seed):
        if not sums:
            return [extremes(*shape, dtype=dtype, seed=seed + r) for r in range(size)]
        owner = torch.arange(shape.numel()).reshape(shape) % (size + 1)
        infinity = torch.full((), float("-inf"), dtype=dtype)
        return [torch.where(owner == r, infinity, 0) for r in range(size)]

    xs = drawn(torch.Size(input_shape(layout, meta, size)), which in SUMS_FORWARD, 0)
    ys = forward([bits(x) for x in xs], size)
    gradients = drawn(ys[rank].shape, which in SUMS_BACKWARD, size)
    x = xs[rank].to(device).requires_grad_()
    y = mapping(x, meta, group)
    y.backward(gradients[rank].to(device))
    assert torch.equal(bits(y.detach().cpu()), ys[rank])
    expected = backward([bits(g) for g in gradients], size)[rank]
    assert torch.equal(bits(x.grad.cpu()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", MAPPINGS)
def test_infinities_and_nans_pass_unchanged(ranks, which, dtype):
    ranks.run(maps_extremes, which=which, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tolerance_can_fail(dtype):
    expected = torch.ones(3, dtype=torch.float64)
    off_by = torch.finfo(dtype).eps * torch.tensor([-8.0, 0.0, 8.0])
    assert sums_agree(expected.to(dtype), expected, magnitude=1, size=4)
    assert not sums_agree((expected + off_by).to(dtype), expected, magnitude=1, size=4)
    assert not agree((expected + off_by).to(dtype), lambda ts, n: ts, [expected] * 4, 0, sums=False)


def gradient_of_gradient(group, which):
    """Every mapping is linear: d/dg of sum(w * dL/dx) is the mapping of w."""
    mapping, layout, forward, *_ = MAPPINGS[which]
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    meta = meta_on(group)
    shape = input_shape(layout, meta, size)
    ws = [random(shape, r, torch.float64, device) for r in range(size)]
    x = torch.zeros(shape, dtype=torch.float64, device=device, requires_grad=True)
    y = mapping(x, meta, group)
    g = torch.zeros_like(y, requires_grad=True)
    (grad_x,) = torch.autograd.grad(y, x, g, create_graph=True)
    (mapped,) = torch.autograd.grad(grad_x, g, ws[rank])
    assert agree(mapped, forward, ws, rank, sums=which in SUMS_FORWARD)


@pytest.mark.parametrize("which", MAPPINGS)
def test_gradient_of_the_gradient_is_the_mapping(ranks, which):
    ranks.run(gradient_of_gradient, which=which)


def round_trips(group):
    size, device = dist.get_world_size(group), device_of(group)
    meta = meta_on(group)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.int64):
        shape = (meta.rows_per_rank, 2, COLUMNS)
        x = random(shape, dist.get_rank(group), torch.float32, device).to(dtype)
        as_bytes = x.view(torch.uint8)
        full = mappings.gather_from_sequence_parallel_region(x, meta, group)
        shard = mappings.scatter_to_sequence_parallel_region(full, meta, group)
        assert torch.equal(shard.view(torch.uint8), as_bytes)
        there = mappings.all_to_all_sp2hp(x, meta, group)
        assert there.shape == (meta.num_rows, 2, COLUMNS // size)
        back = mappings.all_to_all_hp2sp(there, meta, group)
        assert torch.equal(back.view(torch.uint8), as_bytes)


def test_round_trips_of_every_dtype_are_exact(ranks):
    ranks.run(round_trips)


def moves_pads_unchanged(group):
    """NaN and huge pads arrive as they were sent: inertness is the layers' part."""
    meta = meta_on(group)
    full = torch.ones(meta.num_rows, 2, device=device_of(group))
    full[meta.padding_mask] = torch.nan
    shard = meta.shard(full, dist.get_rank(group))
    gathered = mappings.gather_from_sequence_parallel_region(shard, meta, group)
    assert torch.equal(gathered.isnan(), full.isnan())


def test_pads_are_moved_unchanged(ranks):
    ranks.run(moves_pads_unchanged)


def takes_any_input(group, which):
    """Strided input, an expanded gradient, no rows, and the surrounding meta."""
    mapping, layout, *_ = MAPPINGS[which]
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    meta = meta_on(group)
    shape = input_shape(layout, meta, size)
    x = random(shape[::-1], rank, torch.float32, device).t().requires_grad_()
    with seq_meta(meta):
        y = mapping(x, None, group)
    assert torch.equal(y, mapping(x.detach().contiguous(), meta, group))
    y.sum().backward()

    x_again = x.detach().contiguous().requires_grad_()
    mapping(x_again, meta, group).backward(torch.ones_like(y))
    (grad,) = torch.autograd.grad(mapping(x, meta, group).sum(), x)
    assert torch.equal(grad, x_again.grad)

    empty = PaddedSeqMeta.from_seq_lens([0], padded_lens=[0], tp_size=size, device=device)
    nothing = torch.ones(input_shape(layout, empty, size), device=device, requires_grad=True)
    mapping(nothing, empty, group).sum().backward()
    assert nothing.grad.shape == nothing.shape


@pytest.mark.parametrize("which", MAPPINGS)
def test_strided_expanded_empty_and_surrounding_meta(ranks, which):
    ranks.run(takes_any_input, which=which)


def output_can_be_written_in_place(group, which):
    mapping, layout, *_ = MAPPINGS[which]
    size, device = dist.get_world_size(group), device_of(group)
    shape = input_shape(layout, meta_on(group), size)
    x = torch.ones(shape, device=device, requires_grad=True)
    y = mapping(x * 1, meta_on(group), group)
    if which == "copy" and size > 1:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            y.mul_(2)
        return
    y.mul_(2).sum().backward()
    assert x.grad.min() >= 2


@pytest.mark.parametrize("which", MAPPINGS)
def test_output_can_be_written_in_place_but_for_copy(ranks, which):
    ranks.run(output_can_be_written_in_place, which=which)


def compiles(group, which):
    mapping, layout, *_ = MAPPINGS[which]
    meta, device = meta_on(group), device_of(group)
    shape = input_shape(layout, meta, dist.get_world_size(group))
    x = random(shape, dist.get_rank(group), torch.float32, device)

    def step(x):
        return mapping(x * 2, meta, group).sin()

    eager_x, compiled_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()  # `step` is one function to Dynamo, whichever mapping it holds
    eager = step(eager_x)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_x)
    eager.sum().backward()
    compiled.sum().backward()
    assert torch.equal(eager, compiled)
    assert torch.equal(eager_x.grad, compiled_x.grad)


@pytest.mark.parametrize("which", MAPPINGS)
def test_compiles_into_one_graph(ranks, which):
    if ranks.world_size not in (1, 2) and ranks.backend == "gloo":
        pytest.skip("compiling is slow, and the graph the same for every size above one")
    ranks.run(compiles, which=which)


def refuses(group):
    size, device = dist.get_world_size(group), device_of(group)
    meta = meta_on(group)
    full, shard = meta.num_rows, meta.rows_per_rank
    uneven = PaddedSeqMeta.from_seq_lens([size + 1], device=device)

    def ones(*shape):
        return torch.ones(shape, device=device)

    with CommDebugMode() as comms:
        for mapping in (
            mappings.gather_from_sequence_parallel_region,
            mappings.all_to_all_sp2hp,
        ):
            with pytest.raises(ValueError, match=rf"x_shard has {shard + 1} rows.* {shard}\b"):
                mapping(ones(shard + 1, COLUMNS), meta, group)
        for mapping in (
            mappings.reduce_scatter_to_sequence_parallel_region,
            mappings.scatter_to_sequence_parallel_region,
            mappings.all_to_all_hp2sp,
        ):
            with pytest.raises(ValueError, match=rf"has {full + 1} rows.* {full}\b"):
                mapping(ones(full + 1, COLUMNS), meta, group)
        with pytest.raises(ValueError, match="meta"):
            mappings.gather_from_sequence_parallel_region(ones(shard, 2), None, group)
        with pytest.raises(ValueError, match=r"rows and columns.*got \(\d+,\)"):
            mappings.all_to_all_sp2hp(ones(shard), meta, group)
        with pytest.raises(ValueError, match=r"rows and columns.*got \(\d+,\)"):
            mappings.all_to_all_hp2sp(ones(full), meta, group)
        with pytest.raises(ValueError, match="split along its last dim"):
            mappings.gather_from_tensor_model_parallel_region(torch.ones((), device=device), group)
        if size > 1:
            for mapping in (
                mappings.reduce_scatter_to_sequence_parallel_region,
                mappings.scatter_to_sequence_parallel_region,
                mappings.all_to_all_hp2sp,
                mappings.gather_from_sequence_parallel_region,
                mappings.all_to_all_sp2hp,
            ):
                with pytest.raises(ValueError, match=rf"{size + 1} rows do not divide.* {size} "):
                    mapping(ones(size + 1, COLUMNS), uneven, group)
            for mapping, x in (
                (mappings.scatter_to_tensor_model_parallel_region, ones(3, size + 1)),
                (lambda x, g: mappings.all_to_all_sp2hp(x, meta, g), ones(shard, size + 1)),
            ):
                with pytest.raises(ValueError, match=f"over {size} ranks, so that must divide"):
                    mapping(x, group)
            fp8 = ones(full, 2).to(torch.float8_e4m3fn)
            with pytest.raises(ValueError, match=r"float8_e4m3fn; convert"):
                mappings.reduce_scatter_to_sequence_parallel_region(fp8, meta, group)
            with pytest.raises(ValueError, match=r"torch\.bool; convert"):
                mappings.reduce_from_tensor_model_parallel_region(ones(2).bool(), group)
    assert comms.get_total_counts() == 0


def test_refused_before_communication(ranks):
    ranks.run(refuses)


def test_without_a_group_the_input_is_returned():
    meta = PaddedSeqMeta.from_seq_lens([3, 2])
    x = torch.ones(5, 2)
    for name, (mapping, *_) in MAPPINGS.items():
        assert mapping(x, meta, None) is x, name
